"""Masks against brute-force rules, and attention against a softmax written out."""

import math

import pytest
import torch
from oracles import pack, random_documents

from distill import attention
from distill.attention import attend, packed_mask, tree_mask


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("seed", range(4))
def test_packed_mask(seed, window):
    batch = pack(random_documents(3, 21, 10, seed=seed), 21)
    mask = packed_mask(batch.doc_BL, batch.positions_BL, window=window)
    assert (mask.sliding_B1QT is None) == (window is None)
    for b in range(3):
        doc, position = batch.doc_BL[b].tolist(), batch.positions_BL[b].tolist()
        for q in range(21):
            for k in range(21):
                sees = k <= q and doc[k] == doc[q] and doc[q] >= 0
                sees |= k == q  # padding sees itself, or its softmax would be empty
                assert bool(mask.full_B1QT[b, 0, q, k]) == sees
                if window is not None:
                    near = sees and position[k] > position[q] - window
                    assert bool(mask.sliding_B1QT[b, 0, q, k]) == near


@pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
@pytest.mark.parametrize("seed", range(4))
def test_tree_mask(seed, window):
    """Random trees whose queries are the last nodes fed, over rows of uneven length."""
    generator = torch.Generator().manual_seed(seed)
    batch, m, n = 3, 7, 4
    lengths = torch.randint(0, 9, (batch,), generator=generator)
    parents = [[-1] + [int(torch.randint(-1, i, (1,), generator=generator)) for i in range(1, m)] for _ in range(batch)]
    ancestors = torch.zeros(batch, m, m, dtype=torch.bool)
    depths = torch.zeros(batch, m, dtype=torch.long)
    for b in range(batch):
        for i in range(m):
            at = i
            while at >= 0:
                ancestors[b, i, at] = True
                at = parents[b][at]
            depths[b, i] = ancestors[b, i].sum() - 1
    view = int(lengths.max()) + m + 2
    mask = tree_mask(lengths_B=lengths, ancestors_BNM=ancestors[:, -n:], view=view, depths_BM=depths, window=window)
    assert mask.full_B1QT.shape == (batch, 1, n, view)
    for b in range(batch):
        length = int(lengths[b])
        for q in range(n):
            node = m - n + q
            own = length + int(depths[b, node])
            for slot in range(view):
                if slot < length:
                    sees, position = True, slot
                elif slot < length + m:
                    sees, position = bool(ancestors[b, node, slot - length]), length + int(depths[b, slot - length])
                else:
                    sees, position = False, 0
                assert bool(mask.full_B1QT[b, 0, q, slot]) == sees
                if window is not None:
                    assert bool(mask.sliding_B1QT[b, 0, q, slot]) == (sees and position > own - window)


def test_window_is_counted_in_positions_not_slots():
    """Siblings take slots without taking positions: a deep node still sees as far back as in plain decoding."""
    parents = [0, 0, 0, 0, 1, 4]  # three siblings, then a chain of two below the first
    ancestors = torch.zeros(1, 6, 6, dtype=torch.bool)
    for node in range(6):
        at = node
        while True:
            ancestors[0, node, at] = True
            if at == 0:
                break
            at = parents[at]
    depths = torch.tensor([[0, 1, 1, 1, 2, 3]])
    mask = tree_mask(
        lengths_B=torch.tensor([5]), ancestors_BNM=ancestors, view=11, depths_BM=depths, window=4
    ).sliding_B1QT
    # The deepest node sits at position 8 and sees positions 5..8: the root and its own path, no prefix.
    assert mask[0, 0, 5].nonzero()[:, 0].tolist() == [5, 6, 9, 10]
    # A node of depth 1 sits at position 6 and sees positions 3..6.
    assert mask[0, 0, 2].nonzero()[:, 0].tolist() == [3, 4, 5, 7]


def plain_attention(q, k, v, allowed):
    """One query, one head at a time."""
    batch, heads, n, dim = q.shape
    per_group = heads // k.shape[1]
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            g = h // per_group
            for i in range(n):
                keys = allowed[b, i].nonzero()[:, 0].tolist()
                scores = torch.stack([(q[b, h, i] * k[b, g, j]).sum() for j in keys]) / math.sqrt(dim)
                weights = (scores - scores.max()).exp()
                weights = weights / weights.sum()
                out[b, h, i] = sum(w * v[b, g, j] for w, j in zip(weights, keys, strict=True))
    return out


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (6, 1), (3, 3)])
def test_attend_groups_heads_as_llama_does(heads, groups):
    """Query head h reads key/value head h // (H / G)."""
    q = torch.randn(2, heads, 5, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, groups, 9, 8, dtype=torch.float64)
    allowed = torch.rand(2, 5, 9) < 0.5
    allowed[:, :, 0] = True
    got = attend(q, k, v, allowed[:, None])
    torch.testing.assert_close(got, plain_attention(q, k, v, allowed), rtol=1e-12, atol=1e-12)


def own_key_case(steps: int, dtype=torch.float64):
    """Documents of uneven length (single tokens among them), padding, and keys of later steps."""
    doc = torch.tensor(
        [[0, 0, 0, 0, 0, 1, 2, 2, -1], [0, 1, 1, 1, 1, 1, 1, 1, 2], [0] * 9, [0, 0, 0, -1, -1, -1, -1, -1, -1]]
    )
    leaves = [torch.randn(4, 2, 9, 4, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3 + 2 * steps)]
    mask = (doc[:, :, None] == doc[:, None, :]) & (doc >= 0)[:, None] & torch.ones(9, 9).bool().tril()
    i = torch.arange(9)
    own = (torch.arange(9 * steps) - i[:, None]) % 9 == 0
    return doc, leaves, torch.cat([mask, own.expand(4, -1, -1)], 2)


def dense_own(leaves, allowed, real):
    """One softmax over [L x L | diagonal | ... | diagonal]; zero where a query sees nothing."""
    q, k, v, *later = (x.double() for x in leaves)
    keys, values = torch.cat([k, *later[::2]], 2), torch.cat([v, *later[1::2]], 2)
    some = allowed.clone()
    some[:, :, 0] |= ~allowed.any(-1)
    out = plain_attention(q, keys, values, some)
    return out * real[:, None, :, None]


@pytest.fixture(params=["cpu", "blocks"])
def kernel(request, monkeypatch):
    """The CPU's own kernel, and what devices without a fused one run."""
    monkeypatch.setattr(attention, "_kernel", lambda _: request.param)
    monkeypatch.setattr(attention, "_BLOCK", 4)
    return request.param


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_own_keys_equal_one_softmax(steps):
    """Values and gradients; the published mask is (kv < L & kv <= q) | (kv >= L & (kv - q) % L == 0)."""
    doc, leaves, allowed = own_key_case(steps)
    q, k, v, *later = leaves
    got = attention.attend_with_own(q, k, v, list(zip(later[::2], later[1::2], strict=True)), attention.segments(doc))
    want = dense_own(leaves, allowed, allowed.any(-1))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    # Padding is never read by anyone, so it gets no gradient in training either.
    weight = torch.randn_like(got) * (doc >= 0)[:, None, :, None]
    ours = torch.autograd.grad((got * weight).sum(), leaves)
    theirs = torch.autograd.grad((want * weight).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_own_keys_in_lower_precision(dtype, tolerance):
    """Against fp64 on the same rounded inputs; bf16 keeps 8 bits, of which a softmax of 9 terms loses two or so."""
    doc, leaves, allowed = own_key_case(2, dtype)
    q, k, v, *later = leaves
    got = attention.attend_with_own(q, k, v, list(zip(later[::2], later[1::2], strict=True)), attention.segments(doc))
    assert got.dtype == dtype
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = dense_own(wide, allowed, allowed.any(-1))
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    weight = (torch.randn_like(want) * (doc >= 0)[:, None, :, None]).to(dtype)
    ours = torch.autograd.grad((got * weight).sum(), leaves)
    theirs = torch.autograd.grad((want * weight.double()).sum(), wide)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=3 * tolerance, atol=3 * tolerance)


@pytest.mark.usefixtures("kernel")
def test_own_keys_shared_by_query_heads(monkeypatch):
    """Query head h reads key/value head h // (H / G); the gradients of the heads that share one add up."""
    doc = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, -1]])
    q = torch.randn(1, 6, 9, 4, dtype=torch.float64, requires_grad=True)
    shared = [torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(6)]
    allowed = own_key_case(2)[2][2:3] & True
    allowed[0, :, :9] = (doc[0][:, None] == doc[0]) & (doc[0] >= 0) & torch.ones(9, 9).bool().tril()
    k, v, *later = shared
    got = attention.attend_with_own(q, k, v, list(zip(later[::2], later[1::2], strict=True)), attention.segments(doc))
    want = dense_own([q, *(x.repeat_interleave(3, 1) for x in shared)], allowed, allowed.any(-1))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(got) * (doc >= 0)[:, None, :, None]
    ours = torch.autograd.grad((got * weight).sum(), [q, *shared])
    theirs = torch.autograd.grad((want * weight).sum(), [q, *shared])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("kernel")
def test_own_keys_across_kernel_blocks(monkeypatch):
    """Documents longer than any block the kernels work in."""
    monkeypatch.setattr(attention, "_BLOCK", 96)
    length = 700
    doc = torch.tensor([[0] * 650 + [1] * 50])
    leaves = [torch.randn(1, 1, length, 4, dtype=torch.float64, requires_grad=True) for _ in range(5)]
    q, k, v, k1, v1 = leaves
    got = attention.attend_with_own(q, k, v, [(k1, v1)], attention.segments(doc))
    mask = (doc[:, :, None] == doc[:, None, :]) & torch.ones(length, length).bool().tril()
    scores = torch.cat([(q @ k.mT / 2).masked_fill(~mask[:, None], -torch.inf), (q * k1).sum(-1, keepdim=True) / 2], -1)
    weights = scores.softmax(-1)
    want = weights[..., :-1] @ v + weights[..., -1:] * v1
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    weight = torch.randn_like(got)
    ours = torch.autograd.grad((got * weight).sum(), leaves)
    theirs = torch.autograd.grad((want * weight).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_the_arguments_of_the_gpu_kernels():
    """Shapes alone, on no device: the operators exist and take what is given to them."""
    q = torch.empty(1, 6, 100, 64, device="meta", dtype=torch.bfloat16)
    k = torch.empty(1, 2, 100, 64, device="meta", dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_kernel", lambda _: "flash")
        out, lse = attention._causal_forward(q, k, k)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
        grads = attention._causal_backward(out, q, k, k, out, lse)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [6, 2])
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.03), (torch.float32, 1e-5)])
def test_own_keys_on_a_gpu(dtype, tolerance, groups):
    """Values and gradients of flash (bf16) and blocks (fp32) against fp64 on a CPU, on the same rounded inputs."""
    length, steps = 300, 3
    doc = torch.tensor([[0] * 130 + [1] * 160 + [-1] * 10])
    shapes = [(1, 6, length, 64)] + [(1, groups, length, 64)] * (2 + 2 * steps)
    leaves = [torch.randn(shape).to(dtype).cuda().requires_grad_() for shape in shapes]
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    weight = torch.randn(shapes[0]) * (doc >= 0)[:, None, :, None]
    found = []
    for q, k, v, *later in (leaves, exact):
        own = list(zip(later[::2], later[1::2], strict=True))
        out = attention.attend_with_own(q, k, v, own, attention.segments(doc))
        grads = torch.autograd.grad((out * weight.to(out)).sum(), [q, k, v, *later])
        found.append([out, *grads])
    for ours, theirs in zip(*found, strict=True):
        error = (ours.cpu().double() - theirs)[:, :, :290].norm() / theirs[:, :, :290].norm()
        assert float(error) < tolerance


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("groups", [4, 2])
def test_documents_without_a_mask(window, groups, monkeypatch):
    """The same as attention under the packed mask, in blocks shorter than a document."""
    monkeypatch.setattr(attention, "_BLOCK", 4)
    batch = pack(random_documents(3, 21, 10, seed=1), 21)
    q = torch.randn(3, 4, 21, 8, dtype=torch.float64)
    k, v = torch.randn(2, 3, groups, 21, 8, dtype=torch.float64)
    mask = packed_mask(batch.doc_BL, batch.positions_BL, window=window)
    want = attend(q, k, v, mask.full_B1QT if window is None else mask.sliding_B1QT)
    got = attention.attend_documents(q, k, v, attention.segments(batch.doc_BL), window=window)
    real = (batch.doc_BL >= 0)[:, None, :, None]
    torch.testing.assert_close(got, want * real, rtol=1e-12, atol=1e-12)


def test_own_keys_with_extreme_scores():
    """Log-sum-exp, not exp: scores of several hundred stay finite, and gradients with them."""
    doc, leaves, _ = own_key_case(2)
    q, k, v, *later = leaves
    out = attention.attend_with_own(
        q * 300, k * 10, v, list(zip(later[::2], later[1::2], strict=True)), attention.segments(doc)
    )
    out.sum().backward()
    assert bool(out.isfinite().all())
    assert all(bool(x.grad.isfinite().all()) for x in leaves)


def test_segments():
    doc = torch.tensor([[0, 0, 1, 2, 2, -1], [-1] * 6, [0] * 6, [0, 1, 2, 3, 4, 5], [3, 3, 3, 0, 0, -1]])
    assert attention.segments(doc) == [
        *[(0, 0, 2), (0, 2, 3), (0, 3, 5)],
        (2, 0, 6),
        *[(3, i, i + 1) for i in range(6)],
        *[(4, 0, 3), (4, 3, 5)],
    ]


def test_masked_keys_do_not_matter_however_large():
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    before = attend(q, k, v, mask)
    spoiled_k, spoiled_v = k.clone(), v.clone()
    spoiled_k[:, :, 5], spoiled_v[:, :, 5] = 1e30, -1e30
    after = attend(q, spoiled_k, spoiled_v, mask)
    assert torch.equal(before[:, :, :5], after[:, :, :5])
