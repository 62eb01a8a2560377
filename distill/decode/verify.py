"""Verification: which drafted tokens stay, and what the target says next.

``match`` (default) is lossless by construction: the token emitted at a position is the target's own choice
there, ``argmax(warp(logits) + G)``, a function of the prefix and the noise key alone; the tree only decides
how many positions one pass settles.
"""

import torch
from torch import Tensor

from distill.errors import UserError, did_you_mean
from distill.tree import geometry
from distill.types import Accepted, DraftTree

ALLOWED: dict[str, frozenset[str]] = {
    # Coupled candidates share the target's noise: safe here, because the emitted token does not depend on
    # what was proposed, and only here.
    "match": frozenset({"topk", "coupled"}),
}


def check_pair(verifier: str, candidates: str) -> None:
    """Refuse a verifier that does not exist or that these candidates would make wrong.

    Raises:
        UserError: naming the choices.
    """
    if verifier not in ALLOWED:
        raise UserError(
            f"verify must be one of {', '.join(ALLOWED)}, got {verifier!r}.{did_you_mean(verifier, ALLOWED)}"
        )
    if candidates not in ALLOWED[verifier]:
        raise UserError(
            f"verifier {verifier!r} needs {' or '.join(sorted(ALLOWED[verifier]))} candidates, got {candidates!r}"
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
    ok_BN[:, 0] = True
    depth_BN = geometry(parents, tree.max_depth)[1] if depths_BN is None else depths_BN
    for _ in range(tree.max_depth):
        ok_BN = ok_BN & ok_BN.gather(1, parents)
    best_B1 = ((depth_BN + 1) * ok_BN).argmax(-1, keepdim=True)
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
