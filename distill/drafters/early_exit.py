"""Early exit: the target's own first layers, final norm and head as a drafter, without a weight of its own.

    q(t+1 | ..t) = head(norm(h_k)),   h_k the hidden state that leaves the target's layer k

Nothing is trained, so it is a baseline: what a draft model of this shape gives away for nothing. (Trained exits, as in
LayerSkip, arXiv:2404.16710, change the target, which is frozen here.) Its cache is its own: the target's keys of these
layers would be the same numbers, but exist only for tokens the target has seen.
"""

from dataclasses import dataclass

from distill.config import opt
from distill.drafters.cached import CachedDrafter
from distill.errors import UserError
from distill.target import Target
from distill.target.backbone import Backbone
from distill.vocab import DraftVocab


@dataclass(kw_only=True)
class EarlyExitConfig:
    """How early."""

    name: str = opt("early_exit", "drafter name")
    layers: int | None = opt(None, "layers of the target before the exit; null: a quarter of them")

    def __post_init__(self) -> None:
        if self.layers is not None and self.layers < 1:
            raise UserError(f"drafter.layers must be >= 1, got {self.layers}")


class EarlyExit(CachedDrafter):
    """The target cut short; the modules are the target's own."""

    name = "early_exit"
    Config = EarlyExitConfig
    config: EarlyExitConfig
    trainable = False

    def __init__(self, config: EarlyExitConfig, target: Target, vocab: DraftVocab | None = None):
        super().__init__(config, target, vocab)
        n = target.info.n_layers
        layers = config.layers or max(1, n // 4)
        if layers > n:
            raise UserError(f"drafter.layers must be at most the target's {n}, got {layers}")
        self.backbone = Backbone(target.model, name=target.info.name, n_layers=layers)

    def accelerate(self) -> None:
        """The first layers of the target's fast engine."""
        self._fast = self.target.fast.first(self.backbone)
        self._fast.graphs = None  # proposals are recorded whole
