"""The keyed noise of one round, and how candidates are ranked: with the target's noise, with the draft's, or without.

``coupled`` ranks by ``warp(q) + G`` with the G the target will use. The emitted tokens do not depend on what was
drafted (see ``verify.match``), so sharing the noise is safe there, and it makes draft and target agree far more often
than independent draws would. ``sampled`` ranks with noise of its own, which makes the candidates draws from q.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from distill import kernels
from distill.calibration import Calibration, Choices
from distill.candidates import Best, best
from distill.sampling import Sampling, choose, choose_among_top, gumbel, stream_seed, uniform, warp
from distill.types import Candidates


@dataclass(frozen=True, kw_only=True)
class RoundNoise:
    """Keys of the noise for the tokens one round may produce; index p is the token at position ``first + p``."""

    sampling: Sampling
    request_B: Tensor
    position_BP: Tensor
    vocab: int

    @classmethod
    def starting(
        cls, sampling: Sampling, request_B: Tensor, first_B: Tensor, *, count: int, vocab: int
    ) -> "RoundNoise":
        """Keys for ``count`` positions from ``first_B`` on."""
        position_BP = first_B[:, None] + torch.arange(count, device=first_B.device)
        return cls(sampling=sampling, request_B=request_B, position_BP=position_BP, vocab=vocab)

    @cached_property
    def full(self) -> Tensor | None:
        """Noise for the whole vocabulary, [B, P, V], made when first asked for; None when greedy."""
        if self.sampling.greedy:
            return None
        return gumbel(seed=self.sampling.seed, request_B=self.request_B, position_BP=self.position_BP, vocab=self.vocab)

    def of_stream(self, stream: str, *, vocab: int, place_B: Tensor | None = None) -> Tensor:
        """Noise of another stream for ``vocab`` ids, [B, P, vocab], or [B, 1, vocab] at one place p of each row."""
        position_BP = self.position_BP if place_B is None else self.position_BP.gather(1, place_B[:, None])
        return gumbel(
            seed=stream_seed(self.sampling.seed, stream),
            request_B=self.request_B,
            position_BP=position_BP,
            vocab=vocab,
        )

    def coins(self, count: int) -> Tensor:
        """Uniform numbers in (0, 1), [B, P, count]: one per position and place among the children offered for it."""
        return uniform(
            seed=stream_seed(self.sampling.seed, "coins"),
            request_B=self.request_B,
            position_BP=self.position_BP,
            ids_BPk=torch.arange(count, device=self.position_BP.device),
        )

    def for_drafts(self, candidates: Candidates, columns_W: Tensor | None) -> Tensor | None:
        """What candidates are ranked with, [B, P, W]: the target's own noise, the draft's, or none.

        Args:
            candidates: how drafts are picked.
            columns_W: target ids of the draft vocabulary, None where it is the target's.
        """
        if candidates == "sampled":
            return self.of_stream("draft", vocab=self.vocab if columns_W is None else len(columns_W))
        noise_BPV = self.full if candidates == "coupled" else None
        return noise_BPV if noise_BPV is None or columns_W is None else noise_BPV[:, :, columns_W]

    def choose(self, logits_BNV: Tensor, depths_BN: Tensor) -> Tensor:
        """The target's own token after nodes of these depths; all nodes of one depth share their noise."""
        # On a CPU with top-k the survivors' noise is enough; elsewhere looking for ties would cost a read.
        if self.sampling.top_k > 0 and not self.sampling.greedy and logits_BNV.device.type == "cpu":
            position_BN = self.position_BP.gather(1, depths_BN)
            # With few positions hashing everything by the kernel beats the many small operations that pick.
            few = self.position_BP.numel() <= 4 and kernels.load() is not None
            whole = self.full if few or "full" in self.__dict__ else None

            def noise_at(ids_BNk: Tensor) -> Tensor:
                if whole is not None:
                    return self._at(whole, depths_BN).gather(2, ids_BNk)
                return gumbel(
                    seed=self.sampling.seed,
                    request_B=self.request_B,
                    position_BP=position_BN,
                    vocab=self.vocab,
                    ids_BPk=ids_BNk,
                )

            chosen_BN = choose_among_top(logits_BNV, self.sampling, noise_at)
            if chosen_BN is not None:
                return chosen_BN
        noise_BPV = self.full
        if noise_BPV is None:
            return choose(logits_BNV, self.sampling)
        return choose(logits_BNV, self.sampling, self._at(noise_BPV, depths_BN))

    def _at(self, noise_BPV: Tensor, depths_BN: Tensor) -> Tensor:
        """Noise of each node's position, [B, N, V]; whole rows are copied, which a gather over V would not do."""
        if noise_BPV.shape[1] == 1:
            return noise_BPV.expand(-1, depths_BN.shape[1], -1)
        rows_B1 = torch.arange(len(noise_BPV), device=noise_BPV.device)[:, None]
        return noise_BPV[rows_B1, depths_BN]


class PlainRanker:
    """Scores for candidates at one depth: the draft's log-odds, without noise.

    Args:
        sampling: the target's; its temperature scales the scores, so that they say how likely a candidate is.
    """

    candidates: Candidates = "topk"
    choices: Choices | None = None
    """How far the scores can be trusted, where that was measured for them (``calibration.py``)."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling

    def __call__(self, logits_BFW: Tensor, depth: int) -> Tensor:
        """Return scores_BFW in fp32 (fp64 stays)."""
        logits = logits_BFW if logits_BFW.dtype == torch.float64 else logits_BFW.float()
        return logits if self.sampling.greedy else logits / self.sampling.temperature

    def best(
        self, logits_BFW: Tensor, depth: int, k: int, *, chances: bool = False, out: Best | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k best candidates, best first: their scores, or their log-softmax scaled as calibrated; and their ids."""
        scale = None if not chances else 1.0 if self.choices is None else self.choices.scale(depth)
        x_BFW, temperature, noise_BPW = self._parts(logits_BFW, depth)
        return best(x_BFW, k, temperature=temperature, noise_BPW=noise_BPW, depth=depth, scale=scale, out=out)

    def _parts(self, logits_BFW: Tensor, depth: int) -> tuple[Tensor, float, Tensor | None]:
        """What the scores are made of: x_BFW / temperature + noise_BPW."""
        return logits_BFW, self.sampling.temperature or 1.0, None

    def distribution(self, logits_BFW: Tensor) -> Tensor | None:
        """Nothing is drawn."""
        return None


class CoupledRanker(PlainRanker):
    """Draft logits warped as the target's, plus the noise the target will use.

    Args:
        sampling: temperature and filters; not greedy.
        noise_BPW: the target's noise for the draft vocabulary, by depth.
    """

    candidates: Candidates = "coupled"

    def __init__(self, sampling: Sampling, noise_BPW: Tensor):
        assert not sampling.greedy, "there is no noise to couple to"
        super().__init__(sampling)
        self.noise_BPW = noise_BPW

    def __call__(self, logits_BFW: Tensor, depth: int) -> Tensor:
        """Return scores_BFW in fp32 (fp64 stays)."""
        logits = logits_BFW if logits_BFW.dtype == torch.float64 else logits_BFW.float()
        warped = warp(logits, self.sampling)
        # What the filters drop ranks last, in its own order: better than arbitrary ids when k exceeds them.
        scores = torch.where(torch.isinf(warped), logits - 1e4, warped)
        return scores + self.noise_BPW[:, depth, None]

    def _parts(self, logits_BFW: Tensor, depth: int) -> tuple[Tensor, float, Tensor | None]:
        if self.sampling.top_k or self.sampling.top_p < 1:
            return self(logits_BFW, depth), 1.0, None
        return logits_BFW, self.sampling.temperature, self.noise_BPW


class SampledRanker(PlainRanker):
    """Children drawn from q without replacement: the k best of log q + Gumbel noise, in that order.

    The first is a draw from q, the next one from q without the first, renormalised, and so on (Kool et al.,
    arXiv:1903.06059).

    Args:
        sampling: temperature and filters that the draft takes over from the target; not greedy.
        noise_BPW: noise the target never sees, by depth.
    """

    candidates: Candidates = "sampled"

    def __init__(self, sampling: Sampling, noise_BPW: Tensor):
        assert not sampling.greedy, "nothing is drawn at temperature 0"
        super().__init__(sampling)
        self.noise_BPW = noise_BPW
        self._warped: tuple[Tensor | None, Tensor | None] = None, None

    def _warp(self, logits_BFW: Tensor) -> Tensor:
        """Warped logits; ``grow`` asks for scores and distribution of the same logits in turn."""
        if self._warped[0] is not logits_BFW:
            exact = logits_BFW if logits_BFW.dtype == torch.float64 else logits_BFW.float()
            self._warped = logits_BFW, warp(exact, self.sampling)
        warped = self._warped[1]
        assert warped is not None
        return warped

    def __call__(self, logits_BFW: Tensor, depth: int) -> Tensor:
        """Return scores_BFW; what the filters drop stays at -inf and is no draw."""
        return self._warp(logits_BFW) + self.noise_BPW[:, depth, None]

    def _parts(self, logits_BFW: Tensor, depth: int) -> tuple[Tensor, float, Tensor | None]:
        return self(logits_BFW, depth), 1.0, None

    def distribution(self, logits_BFW: Tensor) -> Tensor:
        """q_BFW, warped."""
        return self._warp(logits_BFW).softmax(-1)


def ranker(
    candidates: Candidates, sampling: Sampling, noise_BPW: Tensor | None, calibration: Calibration | None = None
) -> PlainRanker:
    """The ranker for ``candidates``, with the noise of ``RoundNoise.for_drafts``."""
    if noise_BPW is None:
        made = PlainRanker(sampling)
    else:
        made = (SampledRanker if candidates == "sampled" else CoupledRanker)(sampling, noise_BPW)
    # Uncoupled scores of a sampling target were not measured.
    if calibration is not None and sampling.greedy == (candidates == "topk"):
        made.choices = calibration.choices(greedy=sampling.greedy)
    return made
