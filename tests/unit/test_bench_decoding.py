"""The bench's measurements: forced acceptance is what it says, limits follow from sizes, the quick run works."""

import math

import pytest
import torch

from bench import decoding, machine
from bench.forced import Forced
from bench.machine import Machine
from bench.record import Options
from distill.decode import Decoder
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic

PROMPTS = [[5, 9, 11, 7], [6, 6, 12], [3, 30, 31, 32, 33, 34], [8]]
FAST = Machine(read=2e9, copy=1e9, weights=3e9, flops={"float32": {(1, 1, 1): 5e9, (2, 2, 2): 4e9}})


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def forced(target, prompts, pattern, plan, new_tokens):
    """Decode with forced acceptance; the plain continuation is the oracle."""
    plain = Decoder(target).generate(prompts, max_new_tokens=new_tokens + plan.depth + 1, ignore_eos=True)
    recorded = [[*prompt, *out.ids] for prompt, out in zip(prompts, plain, strict=True)]
    decoder = Decoder(target, Forced(target, pattern=pattern, recorded=recorded), plan=plan)
    found = decoder.generate(prompts, max_new_tokens=new_tokens, ignore_eos=True)
    assert [out.ids for out in found] == [out.ids[:new_tokens] for out in plain]
    return [[step.accepted for step in out.steps] for out in found]


@pytest.mark.parametrize("accepted", range(6))
@pytest.mark.parametrize("plan", [Chain(5), Dynamic(top_k=3, depth=5, total=12)], ids=str)
def test_exactly_so_many_are_accepted(target, accepted, plan):
    rounds = 60 // (accepted + 1)
    assert forced(target, PROMPTS[:1], (accepted,), plan, 61) == [[accepted] * rounds]


def test_rows_of_a_batch_accept_unevenly(target):
    found = forced(target, PROMPTS, (0, 1, 2, 3), Chain(3), 41)
    cycle = [0, 1, 2, 3] * 5
    assert found == [cycle[b : b + 16] for b in range(4)]  # four rounds, ten tokens


def test_what_a_step_must_read(target):
    bench = decoding._Bench(target=target, options=Options(), machine=FAST)
    parameters = sum(p.numel() for p in target.model.parameters())
    embedding = target.model.get_input_embeddings().weight.numel()
    info = target.info
    cached = 2 * info.n_layers * info.n_kv_heads * info.head_dim * 4
    assert bench.bytes_per_step(0) == 4 * (parameters - embedding)
    assert bench.bytes_per_step(10, 3) == 4 * (parameters - embedding) + 30 * cached


def test_a_tied_embedding_is_read_once():
    tied = tiny_target("qwen3")
    bench = decoding._Bench(target=tied, options=Options(), machine=FAST)
    names = {name: p.numel() for name, p in tied.model.named_parameters()}  # a shared one appears once
    assert bench.bytes_per_step(0) == 4 * sum(names.values())


def test_the_roofline_is_the_slower_of_reading_and_multiplying(target):
    bench = decoding._Bench(target=target, options=Options(), machine=FAST)
    size = bench.bytes_per_step(0)
    assert FAST.bandwidth == 3e9
    assert FAST.matrix_rate(torch.float32) == 5e9
    assert bench.least_step_s(tokens=1, context=0) == pytest.approx(size / 3e9)
    assert bench.least_step_s(tokens=100, context=0) == pytest.approx(100 * 2 * size / 4 / 5e9)


def test_arms_take_turns_after_a_warm_up():
    order = []

    def arm(name):
        return lambda: order.append(name) or float(len(order))

    found = decoding._in_turns({name: arm(name) for name in "abc"}, 3)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert found == {"a": [6.0, 8.0, 10.0], "b": [4.0, 9.0, 11.0], "c": [5.0, 7.0, 12.0]}


def test_ratios_are_taken_within_a_turn():
    assert decoding._ratio([2.0, 40.0, 3.0], [1.0, 10.0, 1.0]) == 3.0


@pytest.mark.slow
def test_the_machine_has_sane_rates():
    torch.set_num_threads(1)
    found = machine.measure(Options(quick=True, threads=1))
    assert 1e8 < found.read <= found.bandwidth < 1e13
    assert 1e8 < found.copy <= found.bandwidth
    assert all(1e8 < found.matrix_rate(dtype) < 1e16 for dtype in (torch.float32, torch.bfloat16))


@pytest.mark.slow
def test_everything_is_measured_on_a_tiny_target():
    found = {m.name: m for m in decoding.run(Options(target="tiny", quick=True, threads=1))}
    assert all(math.isfinite(m.value) and m.part == "decoding" for m in found.values())
    assert {name: (m.bar, m.at_least) for name, m in found.items() if m.bar is not None} == {
        "plain over transformers": (1.8, True),
        "v(8)": (1.3, False),
        "v(16)": (1.6, False),
        **{f"loop, chain-5, {a} accepted": (95.0, True) for a in (0, 2, 5)},
        "loop, dynamic-4x4-16, 2 accepted": (95.0, True),
        "keyed noise, sampled": (2.0, False),
        "keyed noise, top-k 50": (2.0, False),
    }
    taus = {name: m.detail["tau"] for name, m in found.items() if name.startswith("loop")}
    assert list(taus.values()) == [1.0, 3.0, 6.0, 3.0]
    assert [f"batch {b}, {what}" in found for b in (1, 2, 4) for what in ("plain", "forced over plain")] == [True] * 6
    assert 0 < found["plain"].value < found["plain"].limit
