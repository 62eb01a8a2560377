"""The start-up check: a target is used only if we reproduce its logits and its attention obeys our masks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from distill.attention import AttentionMask, packed_mask, tree_mask
from distill.errors import UserError
from distill.target.fast import TOLERANCE
from distill.target.model import Target

# What foreign model code raises when it is given something it was not written for.
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
_WINDOW = 6
_PREFIX = 10
_BRANCH = 2


def verify(target: Target) -> None:
    """Run the check on a few dozen random tokens.

    The window of sliding layers is narrowed to a few positions meanwhile, so that it matters on a short text.

    Raises:
        UserError: the model cannot be driven through ``Target``; the sentence says what it does instead.
    """
    generator = torch.Generator().manual_seed(0)
    ids_1L = torch.randint(target.info.vocab_size, (1, _PREFIX + 2 * _BRANCH), generator=generator)
    ids_1L = ids_1L.to(target.device)
    with _narrow_window(target) as window, torch.no_grad():
        try:
            reference = target.model(input_ids=ids_1L, use_cache=False).logits
        except FAILURES as error:
            raise UserError(_refusal(target, "run on token ids alone", f"a failure ({first_line(error)})")) from error
        try:
            for good, needed, found in _questions(target, ids_1L, reference, window):
                if not good():
                    raise UserError(_refusal(target, needed, found))
        except UserError:
            raise
        except FAILURES as error:
            reason = f"a failure ({first_line(error)})"
            raise UserError(_refusal(target, "take a 4-D attention mask and a cache", reason)) from error


def _questions(
    target: Target, ids_1L: Tensor, reference: Tensor, window: int | None
) -> Iterator[tuple[Callable[[], bool], str, str]]:
    """Yield (test, what the target must do, what it does when the test fails), in order."""
    device = ids_1L.device
    positions_1L = torch.arange(ids_1L.shape[1], device=device)[None]
    whole = packed_mask(torch.zeros_like(ids_1L), positions_1L, window=window)
    output = target.forward(ids_1L, mask=whole, taps=(0,))
    yield (
        lambda: _close(target, output.taps[0], target.embed(ids_1L)),
        "feed its layers plain token embeddings",
        "one that adds something to them, such as learned positions",
    )
    yield (
        lambda: _close(target, target.logits(output.last_BLD), reference),
        "give the logits of its backbone, head, soft-capping and logit scale",
        "different ones: it changes them in a way that is not known here",
    )
    tree_ids, paths, mask, depths = _tree(ids_1L, window)
    in_tree = target.forward(tree_ids, positions_BL=depths, mask=mask)
    alone = [target.forward(tree_ids[:, path], mask=_causal(len(path), window, device)) for path in paths]
    yield (
        lambda: all(
            _close(target, in_tree.last_BLD[:, path], one.last_BLD) for path, one in zip(paths, alone, strict=True)
        ),
        "attend only where a 4-D mask allows it",
        "one that ignores the mask or the positions",
    )
    cached = _through_cache(target, tree_ids, depths, mask, window)
    yield (
        lambda: _close(target, cached, in_tree.last_BLD[:, _PREFIX:]),
        "read keys and values from a cache of one shape for all layers",
        "different features with the cache than without",
    )


def _tree(ids_1L: Tensor, window: int | None) -> tuple[Tensor, list[list[int]], AttentionMask, Tensor]:
    """Lay two branches of equal positions behind a prefix; neither may see the other."""
    device = ids_1L.device
    prefix = list(range(_PREFIX))
    branches = [[_PREFIX + b * _BRANCH + i for i in range(_BRANCH)] for b in range(2)]
    paths = [prefix + branch for branch in branches]
    length = ids_1L.shape[1]
    positions = torch.tensor([*prefix, *(2 * [_PREFIX + i for i in range(_BRANCH)])], device=device)
    full = torch.zeros(length, length, dtype=torch.bool, device=device)
    for path in paths:
        for i, query in enumerate(path):
            full[query, path[: i + 1]] = True
    sliding = None
    if window is not None:
        sliding = (full & (positions[None, :] > positions[:, None] - window))[None, None]
    mask = AttentionMask(full_B1QT=full[None, None], sliding_B1QT=sliding)
    return ids_1L, paths, mask, positions[None]


def _causal(length: int, window: int | None, device: torch.device) -> AttentionMask:
    ids_1L = torch.zeros(1, length, dtype=torch.long, device=device)
    return packed_mask(ids_1L, torch.arange(length, device=device)[None], window=window)


def _through_cache(
    target: Target, ids_1L: Tensor, positions_1L: Tensor, mask: AttentionMask, window: int | None
) -> Tensor:
    """Return the features of the two branches when the prefix comes out of a cache."""
    cache = target.new_cache(1, ids_1L.shape[1])
    cache.begin(_PREFIX)
    prefix = _causal(_PREFIX, window, ids_1L.device)
    target.forward(ids_1L[:, :_PREFIX], positions_BL=positions_1L[:, :_PREFIX], mask=prefix, cache=cache)
    cache.advance(torch.tensor([_PREFIX], device=ids_1L.device), longest=_PREFIX)
    view = cache.begin(2 * _BRANCH)
    masks = tree_mask(
        lengths_B=cache.lengths_B,
        ancestors_BNM=mask.full_B1QT[:, 0, _PREFIX:, _PREFIX:],
        depths_BM=positions_1L[:, _PREFIX:] - _PREFIX,
        view=view,
        window=window,
    )
    branches = target.forward(ids_1L[:, _PREFIX:], positions_BL=positions_1L[:, _PREFIX:], mask=masks, cache=cache)
    return branches.last_BLD


@contextmanager
def _narrow_window(target: Target) -> Iterator[int | None]:
    """Give the model itself a window of a few positions; yields it, or None where no layer has one."""
    before = target.info.sliding_window
    if before is None:
        yield None
        return
    target.config_hf.sliding_window = min(before, _WINDOW)
    try:
        yield target.config_hf.sliding_window
    finally:
        target.config_hf.sliding_window = before


def _close(target: Target, ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    ours, theirs = ours.double(), theirs.double()
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-30)
    return bool((error <= TOLERANCE[target.dtype]).all())


def first_line(error: BaseException) -> str:
    """Return an exception's first line, for use inside a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _refusal(target: Target, needed: str, found: str) -> str:
    info = target.info
    return f"target {info.name} ({info.model_type}) must {needed}, got {found}; choose another target"
