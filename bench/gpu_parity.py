"""Checks of ``bench.gpu_check``: losses, training step and cache on the device, against oracles on the CPU.

The oracles are written out here, or run in fp64. Every function without an underscore is a check: it returns what it
saw and raises ``Fault``.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu_errors import BF16, FP32, Errors, no_tf32
from bench.gpu_parts import Fault
from bench.gpu_setup import Setting, random_eagle3
from distill.alignment import recurrent_mask
from distill.drafters.eagle3 import Eagle3
from distill.kv_cache import KVCache
from distill.losses import LossConfig, total
from distill.target.tiny import tiny_target
from distill.train.module import step_loss
from distill.types import Batch, StepPrediction, TargetOutput
from distill.vocab import DraftVocab

GRADIENT = 1e-4
"""Of a whole training step: a dozen chained products, each rounded in fp32."""
LOSSES = ("ce", "kl", "reverse_kl", "tv", "lk")


# -- loss and training step


class _Head:
    """A frozen head: all that a loss asks of a target."""

    def __init__(self, weight_VD: Tensor):
        self.weight_VD = weight_VD
        self.info = SimpleNamespace(vocab_size=len(weight_VD))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.weight_VD.dtype) @ self.weight_VD.T


def chunked_losses(setting: Setting) -> dict[str, Any]:
    """Every loss with and without a draft vocabulary, in small chunks: value and gradients against whole logits."""
    no_tf32()
    errors = Errors.none()
    batch = packed_batch(3, 2, 96, vocab=500)
    size, vocab, draft, steps = 48, 500, 170, 3
    generator = torch.Generator().manual_seed(1)
    teacher_VD, last = (torch.randn(*n, size, generator=generator) for n in ((vocab,), (2, 96)))
    kept_W = torch.randperm(vocab, generator=generator)[:draft].sort().values
    for name in LOSSES:
        for ids_W in (kept_W, torch.arange(vocab)):
            pruned = len(ids_W) < vocab
            head_WD = torch.randn(len(ids_W), size, generator=generator)
            hiddens = [torch.randn(2, 96, size, generator=generator) for _ in range(steps)]
            got = _chunked(setting.device, name, batch, teacher_VD, last, ids_W if pruned else None, head_WD, hiddens)
            want = _whole(name, batch, teacher_VD.double(), last.double(), ids_W, head_WD.double(), hiddens)
            where = f"({name}, {'draft' if pruned else 'full'} vocabulary)"
            for label, one, other in zip(
                ("loss", "head gradient", *["hidden gradient"] * steps), got, want, strict=True
            ):
                errors.add(label, one, other, FP32, where=where)
    return errors.result()


def _chunked(
    device: torch.device,
    name: str,
    batch: Batch,
    teacher_VD: Tensor,
    last: Tensor,
    ids_W: Tensor | None,
    head_WD: Tensor,
    hiddens: list[Tensor],
) -> list[Tensor]:
    head = nn.Linear(head_WD.shape[1], head_WD.shape[0], bias=False).to(device)
    head.weight.data.copy_(head_WD)
    leaves = [hidden.to(device).requires_grad_() for hidden in hiddens]
    there = batch.to(device)
    result = total(
        [
            StepPrediction(hidden_BLD=x, head=head, shift=2 + k, mask_BL=recurrent_mask(there, k), weight=0.7**k)
            for k, x in enumerate(leaves)
        ],
        there,
        TargetOutput(last_BLD=last.to(device), taps={}),
        target=_Head(teacher_VD.to(device)),  # type: ignore[arg-type]
        vocab=None if ids_W is None else DraftVocab(ids_W, len(teacher_VD)).to(device),
        config=LossConfig(name=name, chunk=13),  # type: ignore[arg-type]
    )
    return [result.loss, *torch.autograd.grad(result.loss, [head.weight, *leaves])]


def _whole(
    name: str, batch: Batch, teacher_VD: Tensor, last: Tensor, ids_W: Tensor, head_WD: Tensor, hiddens: list[Tensor]
) -> list[Tensor]:
    """All logits at once, step by step, as the formulas in ``distill/losses.py`` read; counted by hand."""
    head = head_WD.requires_grad_()
    leaves = [x.double().requires_grad_() for x in hiddens]
    p_BLV = (last @ teacher_VD.T).softmax(-1)
    loss, weights = torch.zeros((), dtype=torch.float64), 0.0
    kept = set(ids_W.tolist())
    for k, hidden in enumerate(leaves):
        weight, shift = 0.7**k, 2 + k
        weights += weight
        q_BLW = (hidden @ head.T).softmax(-1)
        for b, i in _supervised(batch, shift):
            p_V, q_W = p_BLV[b, i + shift - 1], q_BLW[b, i]
            if int(p_V.argmax()) in kept:
                loss = loss + weight * _divergence(name, p_V[ids_W], q_W)
    loss = loss / (weights * batch.denominator)
    return [loss, *torch.autograd.grad(loss, [head, *leaves])]


def _divergence(name: str, p_W: Tensor, q_W: Tensor) -> Tensor:
    renormalised_W = p_W / p_W.sum()
    alpha = torch.minimum(p_W, q_W).sum()
    return {
        "ce": lambda: -(renormalised_W * q_W.log()).sum(),
        "kl": lambda: (renormalised_W * (renormalised_W.log() - q_W.log())).sum(),
        "reverse_kl": lambda: (q_W * (q_W.log() - renormalised_W.log())).sum(),
        "tv": lambda: 1 - alpha,
        "lk": lambda: -alpha.log(),
    }[name]()


def _supervised(batch: Batch, shift: int) -> list[tuple[int, int]]:
    """Positions whose whole run up to the token spoken about was written by the target, in one document."""
    doc, mask = batch.doc_BL.tolist(), batch.loss_mask_BL.tolist()
    return [
        (b, i)
        for b in range(len(doc))
        for i in range(len(doc[b]) - shift)
        if doc[b][i] >= 0 and all(mask[b][j] and doc[b][j] == doc[b][i] for j in range(i + 1, i + shift + 1))
    ]


def packed_batch(seed: int, rows: int, length: int, *, vocab: int) -> Batch:
    """Documents of uneven length with alternating turns, padded at the end; on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    doc_BL = torch.full((rows, length), -1)
    positions_BL = torch.zeros(rows, length, dtype=torch.long)
    for row in range(rows):
        start, document = 0, 0
        while start < length - length // 10:
            end = min(start + int(torch.randint(2, max(length // 2, 3), (1,), generator=generator)), length)
            doc_BL[row, start:end] = document
            positions_BL[row, start:end] = torch.arange(end - start)
            start, document = end, document + 1
    mask_BL = (torch.rand(rows, length, generator=generator) < 0.85) & (doc_BL >= 0)
    ids_BL = torch.randint(vocab, (rows, length), generator=generator) * (doc_BL >= 0)
    return Batch(
        ids_BL=ids_BL,
        loss_mask_BL=mask_BL,
        positions_BL=positions_BL,
        doc_BL=doc_BL,
        denominator=float(mask_BL.sum()),
    )


def training_step(setting: Setting) -> dict[str, Any]:
    """One EAGLE-3 step: loss and every gradient in fp32 against fp64 on the CPU, bf16 beside it, and that it learns."""
    no_tf32()
    batch = packed_batch(5, 2, 120, vocab=90)
    want_loss, want = _gradients(_pair(torch.float64, torch.device("cpu")), batch)
    drafter = _pair(torch.float32, setting.device)
    loss, got = _gradients(drafter, batch)
    errors = Errors.none()
    errors.add("loss", loss, want_loss, FP32)
    for name, gradient in want.items():
        errors.add("gradient", got[name], gradient, GRADIENT, where=f"of {name}")
    with torch.autocast(setting.device.type, dtype=torch.bfloat16):
        half_loss, half = _gradients(drafter, batch)
    errors.add("bf16 loss", half_loss, want_loss, BF16)
    ours, theirs = (torch.cat([g[name].double().cpu().flatten() for name in want]) for g in (half, want))
    cosine = float(nn.functional.cosine_similarity(ours, theirs, dim=0))
    if not cosine > 0.99:
        raise Fault(f"bf16 gradient points elsewhere: cosine {cosine:.4f} with the fp64 one")
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(10):
        optimizer.zero_grad()
        step_loss(drafter, batch.to(setting.device), LossConfig()).loss.backward()
        optimizer.step()
    before = float(want_loss.detach())
    after = float(step_loss(drafter, batch.to(setting.device), LossConfig()).loss.detach())
    if not after < 0.9 * before:
        raise Fault(f"ten steps on one batch took the loss from {before:.4f} to {after:.4f} only")
    return {**errors.result(), "bf16 cosine": round(cosine, 5), "loss before": before, "after 10": after}


def _pair(dtype: torch.dtype, device: torch.device) -> Eagle3:
    cpu = tiny_target("llama", seed=4, vocab_size=90, hidden=32, layers=6)
    kept_W = torch.randperm(90, generator=torch.Generator().manual_seed(0))[:60].sort().values
    weights = random_eagle3(cpu, kept_W, ttt_steps=4).state_dict()
    target = tiny_target("llama", seed=4, vocab_size=90, hidden=32, layers=6, dtype=dtype, device=device)
    drafter = random_eagle3(target, kept_W, ttt_steps=4).to(dtype)
    drafter.load_state_dict(weights)
    return drafter


def _gradients(drafter: Eagle3, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    result = step_loss(drafter, batch.to(drafter.target.device), LossConfig())
    names, weights = zip(*drafter.named_parameters(), strict=True)
    made = torch.autograd.grad(result.loss, weights, allow_unused=True, materialize_grads=True)
    return result.loss, dict(zip(names, made, strict=True))


# -- cache


def cache_commits(setting: Setting) -> dict[str, Any]:
    """Writes, accepted paths, slot refills, dropped rows and growth of the cache, bit for bit against Python lists."""
    generator = torch.Generator().manual_seed(0)
    layers, groups, dim, batch, nodes = 2, 3, 8, 4, 6
    cache = KVCache(
        n_layers=layers,
        batch_size=batch,
        n_kv_heads=groups,
        capacity=40,
        head_dim=dim,
        dtype=torch.bfloat16,
        device=setting.device,
    )
    rows: list[list[Tensor]] = [[] for _ in range(batch)]  # what each row must hold, [layers, 2, groups, dim] a slot
    rounds = 12
    for index in range(rounds):
        fresh = torch.randn(batch, nodes, layers, 2, groups, dim, generator=generator).bfloat16()
        _write(cache, fresh)
        keep = [sorted(torch.randperm(nodes, generator=generator)[: (index + b) % 4].tolist()) for b in range(batch)]
        path = torch.tensor([kept + [-1] * (4 - len(kept)) for kept in keep])
        for b, kept in enumerate(keep):
            rows[b] += [fresh[b, node] for node in kept]
        longest = max(map(len, rows))
        counts = torch.tensor([len(kept) for kept in keep])
        cache.commit(path.to(setting.device), counts.to(setting.device), longest=longest)
        if index == rounds // 2:
            cache.reserve(80)
            other = KVCache(
                n_layers=layers,
                batch_size=1,
                n_kv_heads=groups,
                capacity=20,
                head_dim=dim,
                dtype=torch.bfloat16,
                device=setting.device,
            )
            fresh = torch.randn(1, 5, layers, 2, groups, dim, generator=generator).bfloat16()
            _write(other, fresh)
            other.advance(torch.tensor([5], device=setting.device), longest=5)
            cache.insert([2], other)
            rows[2] = list(fresh[0])
        _compare_cache(cache, rows, f"after round {index}")
    kept_rows = [3, 1]
    rows = [rows[b] for b in kept_rows]
    _compare_cache(cache.select(kept_rows, longest=max(map(len, rows))), rows, "after dropping rows")
    return {"rounds": rounds, "slots": sum(map(len, rows))}


def _write(cache: KVCache, fresh_BNLCGK: Tensor) -> None:
    cache.begin(fresh_BNLCGK.shape[1])
    for layer in range(fresh_BNLCGK.shape[2]):
        key, value = fresh_BNLCGK[:, :, layer].to(cache.kv.device).permute(2, 0, 3, 1, 4)
        cache.update(key, value, layer)


def _compare_cache(cache: KVCache, rows: list[list[Tensor]], when: str) -> None:
    if cache.lengths_B.tolist() != [len(row) for row in rows]:
        raise Fault(f"{when}: lengths {cache.lengths_B.tolist()}, expected {[len(row) for row in rows]}")
    for b, row in enumerate(rows):
        held = cache.kv[:, :, b, :, : len(row)].cpu()
        if row and not torch.equal(held, torch.stack(row, dim=3)):
            raise Fault(f"{when}: row {b} does not hold what was committed")
