"""Name -> "module:Class", resolved lazily; the only registry in the project, and it holds drafters.

A new drafter is one file in ``distill/drafters/``, one in ``configs/drafter/`` and one line here.
"""

import importlib

from distill.errors import UserError, did_you_mean

DRAFTERS: dict[str, str] = {
    "eagle3": "distill.drafters.eagle3:Eagle3",
    "eagle1": "distill.drafters.eagle1:Eagle1",
    "medusa": "distill.drafters.medusa:Medusa",
    "hydra": "distill.drafters.hydra:Hydra",
    "draft_model": "distill.drafters.draft_model:DraftModel",
    "prompt_lookup": "distill.drafters.prompt_lookup:PromptLookup",
    "early_exit": "distill.drafters.early_exit:EarlyExit",
}


def drafter_class(name: str) -> type:
    """Return the drafter class registered under ``name``.

    Raises:
        UserError: unknown name; the message lists the choices.
    """
    if not isinstance(name, str) or name not in DRAFTERS:
        raise UserError(
            f"drafter must be one of {', '.join(sorted(DRAFTERS))}, got {name!r}.{did_you_mean(str(name), DRAFTERS)}"
        )
    module, _, cls = DRAFTERS[name].partition(":")
    return getattr(importlib.import_module(module), cls)
