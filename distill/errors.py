"""The one exception users are meant to see, and the helper that finds the name they meant."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can fix: one sentence that says what, got, expected and how to fix it.

    Entry points print the sentence and exit with code 2; nothing else is shown.
    """


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest choice, or an empty string."""
    nearest = difflib.get_close_matches(name, [str(c) for c in choices], n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
