"""Verification: which drafted tokens stay, what the target says next, and which rule goes with which drafts.

``match`` (default) is lossless by construction: the token emitted at a position is the target's own choice
there, ``argmax(warp(logits) + G)``, a function of the prefix and the noise key alone; the tree only decides
how many positions one pass settles. ``rejection`` (``rejection.py``) is lossless in law. ``typical`` is not lossless.
At temperature 0 all three are the same comparison with the target's argmax.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from distill.errors import UserError, did_you_mean
from distill.sampling import Sampling, warp
from distill.tree import Dynamic, Plan, Static, geometry
from distill.types import Accepted, Candidates, DraftTree


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a verifier promises and what it goes with.

    Attributes:
        lossless: whether the output is the target's: its very ``tokens``, their ``law``, or None: it is not.
        candidates: how drafts may have been picked, the default first.
        plans: kinds of plans.
        soft: whether the drafter must give a distribution.
    """

    lossless: Literal["tokens", "law"] | None
    candidates: tuple[Candidates, ...]
    plans: tuple[type, ...]
    soft: bool = False


RULES: dict[str, Rule] = {
    # Coupled candidates share the target's noise: safe here, because the emitted token does not depend on
    # what was proposed, and only here.
    "match": Rule(lossless="tokens", candidates=("coupled", "topk"), plans=(Static, Dynamic)),
    "rejection": Rule(lossless="law", candidates=("sampled",), plans=(Static,), soft=True),
    "typical": Rule(lossless=None, candidates=("topk",), plans=(Static, Dynamic)),
}
"""The one table of what goes with what; everything else is refused (``resolve``)."""


def lossless(verifier: str, *, temperature: float) -> bool:
    """Whether the output follows the target's own law; at temperature 0 every verifier compares with the argmax."""
    return temperature == 0 or RULES[verifier].lossless is not None


def resolve(
    verifier: str, candidates: str = "auto", *, drafter: Any = None, plan: Plan | None = None, sampling: Sampling
) -> tuple[str, Candidates]:
    """Return (rule, candidates) that decoding will use: plain comparison at temperature 0 and without a drafter.

    Combinations are refused by name, whatever the temperature: what works greedily should work sampled.

    Args:
        verifier: match, rejection or typical.
        candidates: ``auto``, topk, coupled or sampled.
        drafter: None decodes autoregressively.
        plan: shape of its proposals.
        sampling: of the target.

    Raises:
        UserError: unknown names, or a combination that is wrong.
    """
    if verifier not in RULES:
        raise UserError(f"verifier must be one of {_listed(verifier, RULES)}")
    rule, known = RULES[verifier], ("auto", *get_args(Candidates))
    if candidates not in known:
        raise UserError(f"candidates must be one of {_listed(candidates, known)}")
    if candidates != "auto" and candidates not in rule.candidates:
        why = {
            "coupled": "; coupled candidates share the target's noise, which only match allows",
            "sampled": "; drawn candidates need the coins of rejection",
        }
        raise UserError(
            f"verifier {verifier!r} needs {' or '.join(rule.candidates)} candidates, got {candidates!r}"
            + why.get(candidates, "")
        )
    if drafter is None or plan is None:
        return "match", "topk"
    picked = next(c for c in rule.candidates if candidates in ("auto", c))
    if not drafter.soft and picked == "coupled":
        if candidates != "auto":
            raise UserError(
                f"candidates must be auto or topk for drafter {drafter.name!r}, got 'coupled': it gives no "
                "distribution to add noise to"
            )
        picked = "topk"
    _check(verifier, rule, drafter, plan)
    return ("match", "topk") if sampling.greedy else (verifier, picked)


def _listed(got: str, choices: Iterable[str]) -> str:
    return f"{', '.join(choices)}, got {got!r}.{did_you_mean(got, choices)}"


def _check(verifier: str, rule: Rule, drafter: Any, plan: Plan) -> None:
    """Refuse a drafter or plan that does not go with the rule, or with each other."""
    if drafter.max_depth is not None and plan.depth > drafter.max_depth:
        raise UserError(
            f"tree depth must be at most {drafter.max_depth} for drafter {drafter.name!r}, got {plan.depth}; lower "
            "tree.depth (chain: tree.length; static: leave out the deeper tree.paths)"
        )
    width = drafter.target.info.vocab_size if drafter.vocab is None else drafter.vocab.size
    if isinstance(plan, Static) and plan.lowest >= width:
        raise UserError(
            f"tree.paths must begin with a rank below the {width} tokens that drafter {drafter.name!r} chooses from, "
            f"got {plan.lowest}, so that nothing would be drafted"
        )
    if isinstance(plan, Dynamic) and not drafter.soft:
        raise UserError(
            f"drafter {drafter.name!r} needs a chain or a static tree, got {plan}: it gives no confidences to choose "
            "nodes by"
        )
    if rule.soft and not drafter.soft:
        raise UserError(
            f"verifier {verifier!r} needs a drafter that gives a distribution, got {drafter.name!r}, which is "
            "deterministic; use verify=match"
        )
    if not isinstance(plan, rule.plans):
        raise UserError(
            f"verifier {verifier!r} needs a chain or a static tree, got {plan}: choosing nodes by the scores of what "
            "was drawn would make q wrong; use another tree or verify=match"
        )
    if rule.candidates == ("sampled",) and isinstance(plan, Static) and not plan.prefixes:
        raise UserError(
            f"verifier {verifier!r} needs a static tree whose siblings have the ranks 0, 1, 2, ... without gaps, since "
            f"that is the order they are drawn in, got {plan}; fill the gaps in tree.paths or use verify=match"
        )


def match(tree: DraftTree, chosen_BN: Tensor, depths_BN: Tensor | None = None) -> Accepted:
    """Walk down while a child carries the token the target chose at its parent.

    Args:
        tree: the proposal.
        chosen_BN: the target's own token at every node.
        depths_BN: depth of every node, where the caller has it.

    Returns:
        The kept path (root included) and the target's token after it.
    """
    parents = tree.parents_BN
    if tree.max_depth == 0:
        nothing_B1 = torch.zeros_like(chosen_BN)
        return Accepted(path_BN=nothing_B1, n_B=nothing_B1[:, 0] + 1, next_B=chosen_BN[:, 0])
    ok_BN = tree.tokens_BN == chosen_BN.gather(1, parents)
    return _longest(tree, ok_BN, chosen_BN, depths_BN=depths_BN)


@dataclass(frozen=True, kw_only=True)
class Typical:
    """Thresholds of typical acceptance.

    Raises:
        UserError: out of range.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"typical_{name} must be above 0 and at most 1, got {getattr(self, name)}")


def check_thresholds(thresholds: Typical, verifiers: Iterable[str | None]) -> None:
    """Refuse thresholds that no rule reads.

    Raises:
        UserError: they were changed, and nothing is verified by ``typical``.
    """
    if thresholds != Typical() and "typical" not in verifiers:
        raise UserError(
            "typical_epsilon and typical_delta must be left alone without verify=typical, got "
            f"{thresholds.epsilon} and {thresholds.delta}"
        )


def typical(tree: DraftTree, logits_BNV: Tensor, sampling: Sampling, thresholds: Typical) -> Accepted:
    """Medusa's typical acceptance (arXiv:2401.10774, section 3.3.1): not lossless.

    A token x is kept after a node with distribution p if p(x) > min(epsilon, delta exp(-H(p))), H in nats. Of the
    longest kept paths the most likely one wins; the token after it is the argmax.

    Args:
        tree: the proposal.
        logits_BNV: the target's logits at every node.
        sampling: whose temperature and filters make p.
        thresholds: epsilon and delta.
    """
    exact = logits_BNV if logits_BNV.dtype == torch.float64 else logits_BNV.float()
    chosen_BN = exact.argmax(-1)
    if tree.max_depth == 0:
        return match(tree, chosen_BN)
    log_p_BNV = warp(exact, sampling).log_softmax(-1)
    # What the filters drop has p = 0 and adds nothing, but 0 * -inf would be NaN.
    entropy_BN = -(log_p_BNV.exp() * log_p_BNV.clamp(min=torch.finfo(exact.dtype).min)).sum(-1)
    least_BN = (thresholds.delta * (-entropy_BN).exp()).clamp(max=thresholds.epsilon)
    parents = tree.parents_BN
    rows_B1 = torch.arange(len(parents), device=parents.device)[:, None]
    log_p_BN = log_p_BNV[rows_B1, parents, tree.tokens_BN.clamp(min=0)]
    log_p_BN[:, 0] = 0  # the root is committed, and its own parent in what follows
    ok_BN = (log_p_BN.exp() > least_BN.gather(1, parents)) & (tree.tokens_BN >= 0)
    total_BN, above_BN = log_p_BN, parents
    for _ in range(tree.max_depth - 1):
        total_BN = total_BN + log_p_BN.gather(1, above_BN)
        above_BN = parents.gather(1, above_BN)
    return _longest(tree, ok_BN, chosen_BN, prefer_BN=total_BN)


def _longest(
    tree: DraftTree,
    ok_BN: Tensor,
    chosen_BN: Tensor,
    *,
    depths_BN: Tensor | None = None,
    prefer_BN: Tensor | None = None,
) -> Accepted:
    """The deepest node all of whose ancestors are ok, with its path; among several the preferred, then the first."""
    parents = tree.parents_BN
    ok_BN[:, 0] = True
    depth_BN = geometry(parents, tree.max_depth)[1] if depths_BN is None else depths_BN
    for _ in range(tree.max_depth):
        ok_BN = ok_BN & ok_BN.gather(1, parents)
    rank_BN = (depth_BN + 1) * ok_BN
    if prefer_BN is not None:
        rank_BN = prefer_BN.masked_fill(rank_BN < rank_BN.amax(1, keepdim=True), float("-inf"))
    best_B1 = rank_BN.argmax(-1, keepdim=True)
    path = torch.full((len(parents), tree.max_depth + 1), -1, dtype=torch.long, device=parents.device)
    node = best_B1
    for _ in range(tree.max_depth + 1):
        path.scatter_(1, depth_BN.gather(1, node), node)
        node = parents.gather(1, node)
    return Accepted(
        path_BN=path,
        n_B=depth_BN.gather(1, best_B1)[:, 0] + 1,
        next_B=chosen_BN.gather(1, best_B1)[:, 0],
    )
