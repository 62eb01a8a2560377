"""EAGLE-3 whose acceptance is an input, for the speedups of ``bench.gpu_check``."""

import copy

import torch
from torch import Tensor

from distill.drafters.eagle3 import Eagle3
from distill.drafters.recurrent import RecurrentState
from distill.types import Frontier


class ForcedEagle3(Eagle3):
    """The real drafter at its real cost, whose first choice is overruled by a recording.

    ``bench.forced.Forced`` drafts for nothing and shows what the loop costs; this one shows what a round costs.
    """

    name = "forced-eagle3"

    def force(self, recorded: list[int], *, accepted: int) -> None:
        """Propose ``recorded`` (prompt and continuation, batch 1) so that ``accepted`` drafted tokens stay a round.

        Called again it changes both in place, which passes recorded on the device before then follow.
        """
        device = self.fc.weight.device
        if not hasattr(self, "_recorded_T"):
            self._recorded_T = torch.tensor(recorded, device=device)
            self._accepted = torch.tensor(accepted, device=device)
        self._recorded_T.copy_(torch.tensor(recorded))
        self._accepted.fill_(accepted)

    def step(self, state: RecurrentState, frontier: Frontier) -> Tensor:
        """The drafter's logits with the recorded token put first, or, below the accepted depth, its neighbour."""
        logits_BFW = super().step(state, frontier)
        # The cache ends before the root, so its length is the root's position.
        at_B = (state.cache.lengths_B + 1 + frontier.depth).clamp(max=len(self._recorded_T) - 1)
        known_B = self.vocab.from_target(self._recorded_T[at_B])
        known_B = torch.where(self._accepted > frontier.depth, known_B, (known_B + 1) % self.vocab.size)
        index_BF1 = known_B[:, None, None].expand(-1, logits_BFW.shape[1], 1)
        return logits_BFW.scatter(2, index_BF1, 1e4)


def forced_eagle3(drafter: Eagle3) -> ForcedEagle3:
    """Share the weights of ``drafter``."""
    forced = copy.copy(drafter)
    forced.__class__ = ForcedEagle3
    assert isinstance(forced, ForcedEagle3)
    return forced
