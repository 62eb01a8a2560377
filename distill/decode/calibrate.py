"""Measuring a drafter's choices along the target's own text; see ``calibration.py``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from distill.calibration import Calibration, Choices
from distill.decode.coupling import RoundNoise, ranker
from distill.decode.loop import Decoder, Engine
from distill.drafters.base import Drafter
from distill.sampling import Sampling
from distill.types import Candidates, Frontier, TargetOutput

RANKS = 10
"""Choices that are told apart; the published trees have at most that many children."""

_SCALES = [2.0 ** (exponent / 4) for exponent in range(-12, 9)]
_SHALLOWEST = 3  # positions a text must have beyond its prompt to say anything


@torch.inference_mode()
def calibrate(
    drafter: Drafter,
    prompts: Sequence[list[int]],
    *,
    depth: int = 5,
    max_new_tokens: int = 48,
    seed: int = 0,
    engine: Engine = "eager",
) -> Calibration:
    """Let the target continue ``prompts``, greedily and at temperature 1, and note what the drafter would have drafted.

    Args:
        drafter: in evaluation mode.
        prompts: token ids.
        depth: depths to measure, at most what the drafter can propose.
        max_new_tokens: length of the continuations.
        seed: keys the noise.
        engine: of the target.

    Returns:
        What was counted; without any depth where every continuation was too short.
    """
    assert not drafter.training, "calibrate a drafter as it will be used"
    depth = max(1, min(depth, drafter.max_depth or depth, max_new_tokens - 1))
    found = [
        _choices(drafter, prompts, Sampling(temperature=t, seed=seed), depth, max_new_tokens, engine)
        for t in (0.0, 1.0)
    ]
    return Calibration(greedy=found[0], coupled=found[1])


def _choices(
    drafter: Drafter, prompts: Sequence[list[int]], sampling: Sampling, depth: int, new: int, engine: Engine
) -> Choices:
    target, device = drafter.target, drafter.target.device
    plain = Decoder(target, sampling=sampling, engine=engine)
    if engine == "fast":
        drafter.accelerate()
    texts = [g.ids for g in plain.generate(list(prompts), max_new_tokens=new)]
    rows = [row for row, text in enumerate(texts) if len(text) >= _SHALLOWEST]
    tally = _Tally(depth, min(RANKS, drafter.vocab.size if drafter.vocab else target.info.vocab_size))
    if not rows:
        return tally.choices()
    whole = [list(prompts[row]) + texts[row] for row in rows]
    longest = max(len(ids) for ids in whole)
    ids_BL = torch.tensor([ids + [0] * (longest - len(ids)) for ids in whole], device=device)
    length_B = torch.tensor([len(ids) for ids in whole], device=device)
    begin_B = torch.tensor([len(prompts[row]) for row in rows], device=device)
    request_B = torch.tensor(rows, device=device)
    output = target.forward(ids_BL, taps=drafter.taps(drafter.config, target.info))
    columns = None if drafter.vocab is None else drafter.vocab.target_ids
    candidates: Candidates = "topk" if sampling.greedy else "coupled"
    state = drafter.new_state(len(rows), longest + depth + 2)
    first = int(begin_B.max())
    _extend(drafter, state, ids_BL, output, torch.arange(first, device=device).expand(len(rows), -1), begin_B, first)
    for step in range(int((length_B - begin_B).max()) - 1):
        at_B = begin_B + step  # position of the root
        noise = RoundNoise.starting(sampling, request_B, at_B + 1, count=depth, vocab=target.info.vocab_size)
        score = ranker(candidates, sampling, noise.for_drafts(candidates, columns))
        for level in range(depth):
            frontier = Frontier(
                tokens_BF=_at(ids_BL, at_B + level)[:, None],
                depth=level,
                parent_BF=torch.zeros_like(at_B)[:, None],
                ancestors_BFM=torch.ones(len(rows), 1, level + 1, dtype=torch.bool, device=device),
            )
            scores_BW = score(drafter.step(state, frontier), level)[:, 0]
            token_B = _at(ids_BL, at_B + level + 1)
            wanted_B = token_B if drafter.vocab is None else drafter.vocab.from_target(token_B)
            tally.add(level, scores_BW, wanted_B, at_B + level + 1 < length_B)
        drafter.rollback(state)
        more_B = (at_B + 1 < length_B).long()
        _extend(
            drafter, state, ids_BL, output, at_B[:, None], more_B, int(torch.where(more_B > 0, at_B + 1, begin_B).max())
        )
    return tally.choices()


def _extend(
    drafter: Drafter, state: object, ids_BL: Tensor, output: TargetOutput, at_BP: Tensor, n_B: Tensor, longest: int
) -> None:
    """Take in the tokens at positions ``at_BP``, of which the first ``n_B`` count."""
    most = ids_BL.shape[1] - 1
    index_BP = at_BP.clamp(max=most)
    following_B = _at(ids_BL, at_BP[:, 0] + n_B)
    features = output.map(lambda x: x.gather(1, index_BP[:, :, None].expand(-1, -1, x.shape[2])))
    drafter.extend(state, ids_BL.gather(1, index_BP), following_B, features, n_B, longest=longest)


def _at(ids_BL: Tensor, at_B: Tensor) -> Tensor:
    return ids_BL.gather(1, at_B.clamp(max=ids_BL.shape[1] - 1)[:, None])[:, 0]


class _Tally:
    """Counts of ranks, and the likelihood of the target's tokens under every scale that is tried."""

    def __init__(self, depth: int, ranks: int):
        self.hits_DR = torch.zeros(depth, ranks, dtype=torch.long)
        self.count_D = torch.zeros(depth, dtype=torch.long)
        self.cost_DS = torch.zeros(depth, len(_SCALES), dtype=torch.double)

    def add(self, depth: int, scores_BW: Tensor, wanted_B: Tensor, valid_B: Tensor) -> None:
        """One position per row; ``wanted_B`` is -1 where the draft vocabulary lacks the target's token."""
        self.count_D[depth] += int(valid_B.sum())
        inside_B = valid_B & (wanted_B >= 0)
        scores_NW, wanted_N1 = scores_BW[inside_B].float(), wanted_B[inside_B][:, None]
        own_N1 = scores_NW.gather(1, wanted_N1)
        rank_N = (scores_NW > own_N1).sum(1)
        ranks = self.hits_DR.shape[1]
        self.hits_DR[depth] += torch.bincount(rank_N[rank_N < ranks], minlength=ranks).cpu()
        best_N1 = scores_NW.amax(1, keepdim=True) if len(scores_NW) else own_N1
        for index, scale in enumerate(_SCALES):
            cost_N = (scale * (scores_NW - best_N1)).logsumexp(1) - scale * (own_N1 - best_N1)[:, 0]
            self.cost_DS[depth, index] += float(cost_N.double().sum())

    def choices(self) -> Choices:
        """The counts, and for every depth the likeliest scale; depths that no text reached are left out."""
        seen = int((self.count_D > 0).sum())
        return Choices(
            hits_DR=self.hits_DR[:seen].tolist(),
            count_D=self.count_D[:seen].tolist(),
            scale_D=[_lowest(costs) for costs in self.cost_DS[:seen].tolist()],
        )


def _lowest(costs: list[float]) -> float:
    """Minimum over the scales, by a parabola through the lowest point and its neighbours (in the logarithm)."""
    best = min(range(len(costs)), key=costs.__getitem__)
    if max(costs) == 0:
        return 1.0
    if best in (0, len(costs) - 1):
        return _SCALES[best]
    left, middle, right = costs[best - 1 : best + 2]
    bend = left - 2 * middle + right
    shift = 0.0 if bend <= 0 else 0.5 * (left - right) / bend
    return _SCALES[best] * 2 ** (shift / 4)
