"""The CPU kernels and the packed layers around them, against fp64; skipped where the machine cannot run them."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from oracles import Scripted, mixed
from torch import nn

from distill import kernels
from distill.decode import Decoder
from distill.packed import SKINNY_ROWS, PackedLinear, PackedNorm, Packing, joined
from distill.sampling import Sampling, gumbel
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic, Static

needs_kernels = pytest.mark.skipif(kernels.load() is None, reason=f"kernels not available: {kernels.why_not()}")
BF16_HALF = 2.0**-8  # half the distance of neighbouring bf16 numbers, relative, at most


def inputs(rows: int, n_in: int, n_out: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(rows * 7 + n_in)
    made = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((rows, n_in), (n_out, n_in), (n_out,), (rows, n_out))
    )
    return tuple(made)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("extra", ["plain", "bias", "add", "both"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 15, 16, 17, 31, SKINNY_ROWS + 1])
@pytest.mark.parametrize("shape", [(64, 48), (24, 16), (40, 24)])
def test_linear(rows, shape, extra, dtype):
    x, w, bias, add = inputs(rows, *shape, dtype)
    bias = bias if extra in ("bias", "both") else None
    add = add if extra in ("add", "both") else None
    got = PackedLinear(w, bias)(x, add)
    product = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    wanted = product if add is None else product + add.double()
    # In bf16 the product is rounded before the residual is added, then their sum: half a step each. Sums are in fp32.
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: BF16_HALF}[dtype]
    scale = product.abs() + wanted.abs() + 1e-3
    if dtype == torch.float32:
        scale = scale + x.double().abs() @ w.double().abs().T
    assert ((got.double() - wanted).abs() <= limit * scale).all()
    assert got.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_norm(rows, dtype):
    x, w, *_ = inputs(rows, 64, 64, dtype)
    got = PackedNorm(w[0], 1e-5)(x * 3)
    wide = (x * 3).double()
    wanted = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[0].double()
    limit = 1e-5 if dtype == torch.float32 else 2 * BF16_HALF
    assert ((got.double() - wanted).abs() <= limit * wanted.abs() + 1e-6).all()


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 1, 9, 3, 64), (2, 5, 8, 2, 128), (3, 4, 4, 4, 32), (1, 16, 6, 2, 96)])
def test_attention(shape):
    batch, n, heads, kv_heads, dim = shape
    capacity, view = 90, 77
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(batch, n, heads + kv_heads, dim, generator=generator).bfloat16()
    k, v = torch.randn(2, batch, kv_heads, capacity, dim, generator=generator).bfloat16()
    mask = torch.rand(batch, n, view, generator=generator) < 0.6
    mask[:, :, 3] = True
    for seen in (mask, None):
        out = torch.empty(batch, n, heads, dim, dtype=torch.bfloat16)
        sizes = (ctypes.c_int64 * 9)(batch, n, heads, kv_heads, dim, view, q.stride(1), k.stride(0), k.stride(1))
        pointer = None if seen is None else seen.data_ptr()
        kernels.load().draftsmith_attend(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), pointer, out.data_ptr(), sizes, dim**-0.5
        )
        wide = [x[:, :, :view].double().repeat_interleave(heads // kv_heads, 1) for x in (k, v)]
        queries = q[:, :, :heads].double().transpose(1, 2)
        wanted = F.scaled_dot_product_attention(queries, *wide, attn_mask=None if seen is None else seen[:, None])
        torch.testing.assert_close(out.double(), wanted.transpose(1, 2), rtol=BF16_HALF, atol=1e-4)


@needs_kernels
def test_large_scores_do_not_overflow():
    q = torch.full((1, 1, 2, 32), 30.0, dtype=torch.bfloat16)
    k = torch.full((1, 1, 20, 32), 30.0, dtype=torch.bfloat16)
    k[0, 0, 7] = -30.0
    v = torch.ones(1, 1, 20, 32, dtype=torch.bfloat16)
    out = torch.empty(1, 1, 1, 32, dtype=torch.bfloat16)
    sizes = (ctypes.c_int64 * 9)(1, 1, 1, 1, 32, 20, q.stride(1), k.stride(0), k.stride(1))
    kernels.load().draftsmith_attend(q.data_ptr(), k.data_ptr(), v.data_ptr(), None, out.data_ptr(), sizes, 1.0)
    assert torch.equal(out, torch.ones_like(out))


@needs_kernels
def test_a_row_does_not_depend_on_the_rows_beside_it():
    x, w, bias, add = inputs(SKINNY_ROWS, 96, 64, torch.bfloat16)
    linear, norm = PackedLinear(w, bias), PackedNorm(w[0], 1e-5)
    whole, normed = linear(x, add), norm(x)
    for size in (1, 2, 3, 4, 7, 16, 23):
        for begin in range(0, SKINNY_ROWS - size, 5):
            part = slice(begin, begin + size)
            assert torch.equal(linear(x[part], add[part]), whole[part])
            assert torch.equal(norm(x[part]), normed[part])


def bf16_target(family: str = "llama"):
    """A target whose sizes the kernels take."""
    return tiny_target(
        family, seed=4, vocab_size=96, hidden=128, layers=3, dtype=torch.bfloat16, head_dim=32, initializer_range=0.15
    )


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5)], ids=["greedy", "sampled"])
def test_half_precision_is_lossless_bit_for_bit(family, sampling):
    """In bf16 near ties flip when sums are ordered differently; here they are not."""
    target = bf16_target(family)
    assert target.fast.reason is None
    prompts = [[(7 * i + j * j) % 96 for j in range(5 + 3 * i)] for i in range(4)]
    plain = Decoder(target, sampling=sampling, engine="fast")
    wanted = [
        plain.generate([p], max_new_tokens=40, request_ids=[i], ignore_eos=True)[0] for i, p in enumerate(prompts)
    ]
    # Long prompts are read by other kernels, whose sums depend on the batch: batches are compared with batches.
    batch = plain.generate(prompts, max_new_tokens=40, request_ids=range(4), ignore_eos=True)
    accepted = 0
    for plan in (Chain(3), Dynamic(top_k=3, depth=3, total=10), Static(((0,), (1,), (2,), (0, 0), (1, 0), (1, 1)))):
        for i, prompt in enumerate(prompts):
            drafter = Scripted(96, [prompt + wanted[i].ids], mixed, check=False)
            decoder = Decoder(target, drafter, plan=plan, sampling=sampling, engine="fast")
            [got] = decoder.generate([prompt], max_new_tokens=40, request_ids=[i], ignore_eos=True)
            assert got.ids == wanted[i].ids
            accepted += sum(step.accepted for step in got.steps)
        drafter = Scripted(96, [p + w.ids for p, w in zip(prompts, batch, strict=True)], mixed, check=False)
        decoder = Decoder(target, drafter, plan=plan, sampling=sampling, engine="fast")
        together = decoder.generate(prompts, max_new_tokens=40, request_ids=range(4), ignore_eos=True)
        if len(prompts) * plan.n_nodes <= SKINNY_ROWS:
            assert [g.ids for g in together] == [g.ids for g in batch]
    assert accepted > 50  # otherwise only roots were compared


def test_packing_follows_changed_weights_and_leaves_gradients_alone():
    module = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16, bias=False))
    Packing(module)
    x = torch.randn(3, 32)
    with torch.no_grad():
        first = module(x)
        assert set(module.state_dict()) == {"0.weight", "0.bias", "1.weight"}
        module[1].weight.mul_(2)
        torch.testing.assert_close(module(x), 2 * first)
    module(x).sum().backward()
    assert module[0].weight.grad is not None


def test_joined_projections_share_memory():
    parts = [nn.Linear(16, 16, bias=True, dtype=torch.float64) for _ in range(3)]
    x = torch.randn(2, 16, dtype=torch.float64)
    wanted = torch.cat([part(x) for part in parts], -1)
    whole = joined(parts)
    torch.testing.assert_close(whole(x), wanted, rtol=1e-12, atol=1e-12)
    assert parts[1].weight.untyped_storage().data_ptr() == whole.weight_OI.untyped_storage().data_ptr()
    torch.testing.assert_close(torch.cat([part(x) for part in parts], -1), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["switch", "compiler"])
def test_everything_works_without_the_kernels(hidden, tmp_path):
    """Without g++, or switched off: oneDNN's products instead, and a reason."""
    code = (
        "import torch\nfrom distill import kernels\nfrom distill.packed import PackedLinear\n"
        "assert kernels.load() is None\nprint(kernels.why_not())\n"
        "w, x = torch.randn(32, 64).bfloat16(), torch.randn(3, 64).bfloat16()\n"
        "with torch.no_grad():\n    y = PackedLinear(w)(x)\n"
        "assert ((y.double() - x.double() @ w.double().T).abs() < 0.2).all()\n"
    )
    environment = dict(os.environ, XDG_CACHE_HOME=str(tmp_path))
    environment |= {"DRAFTSMITH_KERNELS": "0"} if hidden == "switch" else {"PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wanted = "switched off" if hidden == "switch" else "no g++"
    assert wanted in done.stdout or "AVX-512" in done.stdout


@needs_kernels
def test_the_noise_is_the_same_with_and_without_the_kernel(monkeypatch):
    request, position = torch.tensor([0, 7, -3, 2**62]), torch.tensor([[0, 1], [5, 2**31], [9, 10], [3, 4]])
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        keys = {"seed": seed, "request_B": request, "position_BP": position, "vocab": 1003}
        fast = gumbel(**keys)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "load", lambda: None)
            slow = gumbel(**keys)
        assert torch.equal(fast, slow)


def test_packing_takes_our_norm_in_half_precision_only():
    from distill.drafters.blocks import RMSNorm

    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        norm = RMSNorm(64, 1e-5).to(dtype)
        norm.weight.data.uniform_(0.5, 2)
        x = torch.randn(3, 64, dtype=dtype) * 4
        wanted = norm(x)
        Packing(norm)
        with torch.no_grad():
            torch.testing.assert_close(norm(x), wanted, rtol=2 * BF16_HALF if dtype == torch.bfloat16 else 0, atol=0)
        norm(x).sum().backward()
        assert norm.weight.grad is not None


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 5000, -300], ids=["empty", "torn", "nearly whole"])
def test_a_torn_library_is_built_again(size, tmp_path):
    """Loading half a library does not fail, it kills the process when the missing page is touched."""
    code = (
        "import torch\nfrom distill import kernels\nfrom distill.packed import PackedLinear\n"
        "assert kernels.load() is not None, kernels.why_not()\n"
        "w, x = torch.randn(32, 64).bfloat16(), torch.randn(3, 64).bfloat16()\n"
        "assert ((PackedLinear(w)(x).double() - x.double() @ w.double().T).abs() < 0.2).all()\n"
    )
    environment = dict(os.environ, XDG_CACHE_HOME=str(tmp_path))
    run = [sys.executable, "-c", code]
    subprocess.run(run, env=environment, check=True)
    [built] = (tmp_path / "draftsmith" / "kernels").glob("*.so")
    whole = built.read_bytes()
    built.write_bytes(whole[:size])
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(built.read_bytes()) >= len(whole) - 300
    assert sorted(path.suffix for path in built.parent.iterdir()) == [".sha256", ".so"]
