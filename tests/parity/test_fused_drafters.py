"""The recurrent drafters' fused decode step says what their modules say, for chains, trees and uneven rows."""

import pytest
import torch
from drafter_tools import features, make, target_of
from oracles import random_prompts, stepped

from distill import kernels
from distill.decode import Decoder
from distill.drafters import fused_step
from distill.drafters.fused_step import Angles
from distill.sampling import Sampling
from distill.target.step_ops import KernelOps, choose_ops
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic, Static
from distill.types import Frontier

CASES = [
    ("eagle1", {}),
    ("eagle1", {"num_layers": 2, "fc_bias": True}),
    ("eagle3", {}),
    ("eagle3", {"norm_output": True, "fc_norm": True, "norm_before_residual": True}),
]
LARGEST = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.05}
"""Error relative to the largest logit; bf16 rounds after every operation, and not the same ones."""


def rounds(drafter, dtype, rows=(0, 1, 2)):
    """Logits of two proposals on three uneven rows, or some: a root, a pair of children, three grandchildren."""
    generator = torch.Generator().manual_seed(3)
    ids_BL = torch.randint(0, 40, (3, 9), generator=generator)
    output = features(drafter, ids_BL)  # of all rows: the target's own may depend on the rows beside
    rows, n = list(rows), len(rows)
    ids_BL, output = ids_BL[rows], output.map(lambda x: x[rows])
    state, found = drafter.new_state(n, 40), []
    done = torch.zeros(n, dtype=torch.long)
    for width, counts in ((6, [6, 4, 1]), (3, [2, 0, 3])):
        count_B = torch.tensor(counts)[rows]
        index_BP = (done[:, None] + torch.arange(width)).clamp(max=8)
        part = output.map(lambda x, i=index_BP: x.gather(1, i[:, :, None].expand(-1, -1, x.shape[2])))
        next_B = ids_BL.gather(1, (done + count_B).clamp(max=8)[:, None])[:, 0]
        done = done + count_B
        drafter.extend(state, ids_BL.gather(1, index_BP), next_B, part, count_B, longest=int(done.max()))
        ancestors = torch.ones(n, 1, 1, dtype=torch.bool)
        zeros = torch.zeros(n, 1, dtype=torch.long)
        frontiers = [
            Frontier(tokens_BF=next_B[:, None], depth=0, parent_BF=zeros, ancestors_BFM=ancestors),
            Frontier(
                tokens_BF=torch.tensor([[5, 6]] * n),
                depth=1,
                parent_BF=zeros.expand(-1, 2),
                ancestors_BFM=torch.tensor([[1, 1, 0], [1, 0, 1]]).bool().expand(n, -1, -1),
            ),
            Frontier(
                tokens_BF=torch.tensor([[7, 8, 9]] * n),
                depth=2,
                parent_BF=torch.tensor([[0, 1, 1]] * n),
                ancestors_BFM=torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 0], [1, 0, 1, 0, 0, 1]])
                .bool()
                .expand(n, -1, -1),
            ),
        ]
        found += [drafter.step(state, frontier) for frontier in frontiers]
        drafter.rollback(state)
    return found


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_fused_says_what_the_modules_say(case, dtype):
    name, options = case
    target = target_of(dtype=dtype)
    eager, fast = make(name, target=target, **options), make(name, target=target, **options)
    fast.accelerate()
    assert fast.fused is not None
    for ours, theirs in zip(rounds(fast, dtype), rounds(eager, dtype), strict=True):
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        assert error <= LARGEST[dtype]


@pytest.mark.skipif(kernels.load() is None, reason=f"kernels: {kernels.why_not()}")
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_the_kernels_say_what_the_modules_say_whoever_stands_beside(case):
    """Heads as wide as the attention kernel takes: the same up to rounding, and bit for bit the same alone."""
    name, options = case
    dtype = torch.bfloat16
    target = tiny_target(seed=4, vocab_size=64, hidden=128, layers=6, dtype=dtype)
    eager, fast = make(name, target=target, **options), make(name, target=target, **options)
    for drafter in (eager, fast):
        # Noise for an eighth of this width would amplify rounding; attention stays as peaked as it was.
        for key, parameter in drafter.named_parameters():
            if parameter.ndim == 2 and "q_proj" not in key and "k_proj" not in key:
                parameter.mul_(8**-0.5)
    fast.accelerate()
    seen: set[type] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_step, "choose_ops", lambda x, heads: seen.add(found := choose_ops(x, heads)) or found)
        together = rounds(fast, dtype)
        for ours, theirs in zip(together, rounds(eager, dtype), strict=True):
            assert float((ours - theirs).abs().max() / theirs.abs().max()) <= LARGEST[dtype]
        for row in range(3):
            for alone, beside in zip(rounds(fast, dtype, rows=[row]), together, strict=True):
                assert torch.equal(alone[0], beside[row])
    assert seen == {KernelOps}, "nothing was tested"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "plan",
    [Chain(3), Static(((0,), (1,), (0, 0))), Dynamic(top_k=3, depth=3, total=8)],
    ids=["chain", "static", "dynamic"],
)
@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_fast_decoding_is_the_targets(case, plan, temperature):
    name, options = case
    target = target_of()
    drafter, sampling = make(name, target=target, **options), Sampling(temperature=temperature, seed=1)
    prompts = random_prompts(8, 40, seed=2)
    decoders = [Decoder(target, make(name, target=target, **options), plan=plan, sampling=sampling, engine="eager")]
    decoders.append(Decoder(target, drafter, plan=plan, sampling=sampling, engine="fast"))
    slow, fast = ([g for g in decoder.generate(prompts, max_new_tokens=12)] for decoder in decoders)
    assert [g.ids for g in fast] == stepped(target, prompts, 12, sampling)
    assert [[s.accepted for s in g.steps] for g in fast] == [[s.accepted for s in g.steps] for g in slow]


def test_one_row_chains_need_no_mask_and_stay_right():
    target = target_of()
    for name in ("eagle1", "eagle3"):
        prompts = random_prompts(3, 40, seed=5)
        drafter = make(name, target=target)
        decoder = Decoder(target, drafter, plan=Chain(4), engine="fast")
        eager = Decoder(target, make(name, target=target), plan=Chain(4))
        for row, prompt in enumerate(prompts):
            (got,) = decoder.generate([prompt], max_new_tokens=16, request_ids=[row], ignore_eos=True)
            (want,) = eager.generate([prompt], max_new_tokens=16, request_ids=[row], ignore_eos=True)
            assert (got.ids, got.steps) == (want.ids, want.steps)


def trained(drafter):
    """One step of an optimiser; nobody calls ``train`` or ``eval``."""
    generator = torch.Generator().manual_seed(7)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    torch.optim.SGD(drafter.parameters(), lr=0.5).step()
    drafter.zero_grad()


def loaded(drafter):
    """The weights of another drafter."""
    other = make(drafter.name, target=drafter.target, seed=9)
    drafter.load_state_dict(other.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
@pytest.mark.parametrize("change", [trained, loaded])
def test_weights_that_change_are_packed_again(change, name, dtype):
    """Decoding never reads weights as they were, however they changed; a decode packs in inference mode."""
    target = target_of(dtype=dtype)
    drafter, changed = make(name, target=target), make(name, target=target)
    drafter.accelerate()
    with torch.inference_mode():
        before = rounds(drafter, dtype)
    change(drafter)
    change(changed)
    with torch.inference_mode():
        after, wanted = rounds(drafter, dtype), rounds(changed, dtype)
    for old, ours, theirs in zip(before, after, wanted, strict=True):
        size = float(theirs.abs().max())
        assert float((ours - theirs).abs().max()) <= LARGEST[dtype] * size
        assert float((ours - old).abs().max()) > 2 * LARGEST[dtype] * size, "the change must show"
    assert not any(parameter.is_inference() for parameter in drafter.parameters()), "they can still be trained"


def test_unchanged_weights_are_packed_once():
    drafter = make("eagle3", target=target_of())
    drafter.accelerate()
    packed = drafter.fused
    drafter.train().eval().accelerate()
    drafter.new_state(2, 8)
    assert drafter.fused is packed


def test_angles_of_any_position():
    rotary = make("eagle3", target=target_of()).rotary
    angles, positions_BN = Angles(rotary, torch.float64, torch.device("cpu")), torch.tensor([[0, 3], [7, 1023]])
    found = [angles(positions_BN, longest=1024), angles(positions_BN + 4000, longest=5024)]
    for got, positions in zip(found, (positions_BN, positions_BN + 4000), strict=True):
        for ours, theirs in zip(got, rotary(positions, torch.float64), strict=True):
            torch.testing.assert_close(ours, theirs[:, 0], rtol=0, atol=0)
    assert [len(cos) for cos, _ in angles._tables] == [1024, 8192], "a recorded graph still reads the first"
