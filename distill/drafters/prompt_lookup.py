"""Prompt lookup: what followed the last few tokens the last time they occurred (Saxena, 2023). Nothing is trained.

The longest suffix of the text, of ``max_ngram`` down to ``min_ngram`` tokens, that occurs earlier is looked up; the
tokens after its latest occurrence are drafted, and those after earlier ones are the lower ranks of a tree. Summaries,
code and answers that quote their question repeat themselves; other text does not, and then nothing is proposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distill.config import opt
from distill.drafters.base import Drafter, DrafterState
from distill.errors import UserError
from distill.target import Target, TargetInfo
from distill.types import Batch, Frontier, StepPrediction, TargetOutput
from distill.vocab import DraftVocab

LONGEST = 64
"""Longest suffix: every length is indexed."""
RANKS = 8
"""Different continuations that are told apart."""


@dataclass(kw_only=True)
class PromptLookupConfig:
    """How much of the text must repeat."""

    name: str = opt("prompt_lookup", "drafter name")
    max_ngram: int = opt(3, "longest suffix that is looked up, in tokens")
    min_ngram: int = opt(1, "shortest one")

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram <= LONGEST:
            raise UserError(
                f"drafter.min_ngram and max_ngram must satisfy 1 <= min <= max <= {LONGEST}, got {self.min_ngram} and "
                f"{self.max_ngram}"
            )


class Text:
    """A growing text with an index of its n-grams, so that a look-up takes as long in a long text as in a short one."""

    def __init__(self, config: PromptLookupConfig):
        self._lengths = range(config.min_ngram, config.max_ngram + 1)
        self.ids: list[int] = []
        self._followers: dict[tuple[int, ...], list[int]] = {}
        """N-gram -> the different tokens that followed it, the latest last; RANKS of them at most."""

    def append(self, ids: list[int]) -> None:
        """Add tokens at the end."""
        for token in ids:
            for gram in self._ends(()):
                followers = self._followers.setdefault(gram, [])
                if token in followers:
                    followers.remove(token)
                followers.append(token)
                del followers[:-RANKS]
            self.ids.append(token)

    def continuations(self, path: list[int]) -> list[int]:
        """Tokens that followed earlier occurrences of the end of text + path: longest end first, then the latest."""
        found: list[int] = []
        tail = self.ids[-self._lengths.stop :]
        recent = tail + path
        for gram in reversed(self._ends(path)):
            # The index ends with the text; what the path repeats within itself is later still.
            n = len(gram)
            inside = range(len(recent) - n - 1, len(tail) - n - 1, -1)
            latest = [recent[at + n] for at in inside if at >= 0 and tuple(recent[at : at + n]) == gram]
            found += [*latest, *reversed(self._followers.get(gram, ()))]
        return list(dict.fromkeys(found))[:RANKS]

    def _ends(self, path: Sequence[int]) -> list[tuple[int, ...]]:
        """The last n-grams of text + path, short ones first."""
        recent = (*self.ids[-self._lengths.stop :], *path)
        return [tuple(recent[-n:]) for n in self._lengths if n <= len(recent)]


Node = tuple[list[int], list[int]]


@dataclass(kw_only=True)
class PromptLookupState(DrafterState):
    """Decoding state, on the host.

    Attributes:
        texts: what the target has processed, per row.
        nodes: for each node of the frontier before, per row, the tokens from the root to it and what was found after
            them; None for a node that is no draft.
    """

    texts: list["Text"]
    nodes: list[list["Node | None"]] = field(default_factory=list)


class PromptLookup(Drafter):
    """Looks up n-grams; ranks, but gives no distribution."""

    name = "prompt_lookup"
    Config = PromptLookupConfig
    config: PromptLookupConfig
    soft = False
    trainable = False

    def __init__(self, config: PromptLookupConfig, target: Target, vocab: DraftVocab | None = None):
        super().__init__(config, target, None)

    @classmethod
    def taps(cls, config: PromptLookupConfig, info: TargetInfo) -> tuple[int, ...]:
        """None."""
        return ()

    def accelerate(self) -> None:
        """Nothing to pack."""

    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """Nothing to train."""
        raise UserError("drafter must be one with weights to train, got prompt_lookup; it is used without training")

    def new_state(self, batch_size: int, capacity: int) -> PromptLookupState:
        """Empty state."""
        return PromptLookupState(cache=None, texts=[Text(self.config) for _ in range(batch_size)])

    def extend(
        self,
        state: PromptLookupState,
        ids_BL: Tensor,
        next_B: Tensor,
        output: TargetOutput,
        n_B: Tensor,
        *,
        longest: int,
    ) -> None:
        """Append to the texts."""
        for text, ids, n in zip(state.texts, ids_BL.tolist(), n_B.tolist(), strict=True):
            text.append(ids[:n])

    def step(self, state: PromptLookupState, frontier: Frontier) -> Tensor:
        """Scores_BFW: RANKS - r for the r-th continuation found, -inf for all other tokens."""
        tokens, parents = frontier.tokens_BF.tolist(), frontier.parent_BF.tolist()
        scores = torch.full((*frontier.tokens_BF.shape, self.target.info.vocab_size), float("-inf"))
        above, state.nodes = state.nodes, []
        for row, text in enumerate(state.texts):
            found: list[Node | None] = []
            for token, parent in zip(tokens[row], parents[row], strict=True):
                upper = ([], [token]) if frontier.depth == 0 else above[row][parent]
                # Below a node where nothing was found there is a place in the tree, and no draft.
                if upper is None or token not in upper[1]:
                    found.append(None)
                    continue
                path = [*upper[0], token]
                found.append((path, text.continuations(path)))
            state.nodes.append(found)
            for node, known in enumerate(found):
                for rank, token in enumerate(known[1] if known else ()):
                    scores[row, node, token] = RANKS - rank
        return scores.to(frontier.tokens_BF.device)

    def rollback(self, state: PromptLookupState) -> None:
        """Forget the proposal."""
        state.nodes = []
