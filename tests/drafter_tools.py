"""Every registered drafter on tiny targets, for the tests that all of them must pass."""

from functools import cache
from typing import Any

import torch

from distill.drafters.base import Drafter
from distill.registry import DRAFTERS, drafter_class
from distill.target import Target
from distill.target.tiny import tiny_target
from distill.types import Frontier, TargetOutput
from distill.vocab import choose_vocab

V, W = 40, 27
TRAINABLE = [name for name in DRAFTERS if drafter_class(name).trainable]
CHANGES: dict[str, list[dict[str, Any]]] = {
    "draft_model": [{"source": "config", "n_layers": 2, "hidden_size": 16, "n_heads": 2, "n_kv_heads": 1}],
    "eagle1": [{"steps": 3, "num_layers": 2, "fc_bias": True}],
    "eagle3": [{"norm_output": True, "fc_norm": True, "norm_before_residual": True}],
    "hydra": [{"head": "pruned", "draft_vocab_size": W, "heads": 3, "blocks": 2}],
    "medusa": [{"head": "own", "heads": 3, "blocks": 2}, {"head": "pruned", "draft_vocab_size": W}],
}
"""Options worth a test of their own, beside the defaults. A new drafter may do without."""
CASES = [(name, change) for name in TRAINABLE for change in ({}, *CHANGES.get(name, []))]


def case_id(case: Any) -> str:
    """``eagle1-steps=3``."""
    name, change = case
    return "-".join([name, *(f"{key}={value}" for key, value in change.items())])


@cache
def target_of(family: str = "llama", dtype: torch.dtype = torch.float64) -> Target:
    """A target of six layers."""
    return tiny_target(family, seed=4, vocab_size=V, hidden=16, layers=6, dtype=dtype)


def make(name: str, *, target: Target, seed: int = 1, **options: Any) -> Drafter:
    """A drafter in evaluation mode whose weights are no longer those it started with (some start at zero)."""
    torch.manual_seed(seed)
    cls: Any = drafter_class(name)
    config, vocab = cls.Config(**options), None
    if getattr(config, "draft_vocab_size", None) is not None:
        size = config.draft_vocab_size = options.get("draft_vocab_size", W)
        vocab, _ = choose_vocab(torch.rand(target.info.vocab_size), size)
    drafter = cls(config, target, vocab).to(target.dtype).eval()
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return drafter


def features(drafter: Drafter, ids_BL: torch.Tensor) -> TargetOutput:
    """The target's own, of whole rows."""
    return drafter.target.forward(ids_BL, taps=drafter.taps(drafter.config, drafter.target.info))


def extend_in_chunks(drafter: Drafter, state: Any, ids: list[int], output: TargetOutput, chunk: int) -> None:
    """Feed positions 0..n-1 of one row; ids[n] is the root."""
    n = len(ids) - 1
    for begin in range(0, n, chunk):
        end = min(begin + chunk, n)
        drafter.extend(
            state,
            torch.tensor([ids[begin:end]]),
            torch.tensor([ids[end]]),
            output.map(lambda x, part=slice(begin, end): x[:, part]),
            torch.tensor([end - begin]),
            longest=end,
        )


def draft_chain(drafter: Drafter, state: Any, path: list[int]) -> list[torch.Tensor]:
    """Draft logits [W] below each token of ``path``, whose first one is the root."""
    found = []
    for depth, token in enumerate(path):
        frontier = Frontier(
            tokens_BF=torch.tensor([[token]]),
            depth=depth,
            parent_BF=torch.tensor([[0]]),
            ancestors_BFM=torch.ones(1, 1, depth + 1, dtype=torch.bool),
        )
        found.append(drafter.step(state, frontier)[0, 0])
    drafter.rollback(state)
    return found
