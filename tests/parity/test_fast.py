"""The fast engine against the model's own forward: features, logits, whole decodes, in every family."""

from functools import lru_cache

import pytest
import torch
from oracles import Scripted, mixed, random_prompts, stepped

from distill.attention import tree_mask
from distill.decode import Decoder
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.errors import UserError
from distill.sampling import Sampling
from distill.target.fast import FastTarget
from distill.target.tiny import FAMILIES, tiny_target
from distill.tree import Chain, Dynamic, geometry
from distill.vocab import choose_vocab

FUSED = ("llama", "mistral", "qwen2", "qwen3")
EXACT = {torch.float64: 1e-9, torch.float32: 1e-5}
PARENTS = [0, 0, 0, 1, 1, 3, 2]


def through_cache(model, target, *, batch: int = 2, prefix: int = 11):
    """Features and logits of a tree of 7 nodes behind a prefix longer than the windows."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, target.info.vocab_size, (batch, prefix + len(PARENTS)), generator=generator)
    cache = model.new_cache(batch, prefix + len(PARENTS) + 3)
    taps = (0, 1, target.info.n_layers)
    causal = torch.ones(batch, prefix, prefix, dtype=torch.bool).tril()
    ancestors, depths = geometry(torch.tensor([PARENTS]).expand(batch, -1), 3)
    outputs = []
    steps = [
        (ids[:, :prefix], causal, torch.arange(prefix).expand(batch, -1)),
        (ids[:, prefix:], ancestors, depths),
    ]
    for part, who, depth in steps:
        mask = tree_mask(
            lengths_B=cache.lengths_B,
            ancestors_BNM=who,
            view=cache.begin(part.shape[1]),
            depths_BM=depth,
            window=target.info.sliding_window,
        )
        positions = cache.lengths_B[:, None] + depth
        outputs.append(model.forward(part, positions_BL=positions, mask=mask, cache=cache, taps=taps))
        cache.advance(torch.full((batch,), prefix), longest=prefix)
    return [x for o in outputs for x in (o.last_BLD, *o.taps.values(), model.logits(o.last_BLD))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_equal_the_models_own(family, dtype):
    target = tiny_target(family, dtype=dtype)
    theirs = through_cache(target, target)
    fast = target.fast
    assert (fast.reason is None) == (family in FUSED), fast.reason
    with torch.inference_mode():
        ours = through_cache(fast, target)
    for mine, other in zip(ours, theirs, strict=True):
        scale = other.abs().max()
        torch.testing.assert_close(mine / scale, other / scale, rtol=0, atol=EXACT[dtype])


def test_the_models_own_forward_keeps_its_weights():
    """Joining projections moves weights, and nothing that transformers computes may change."""
    before, after = tiny_target("qwen2"), tiny_target("qwen2")
    assert after.fast.reason is None
    ids = torch.arange(1, 9)[None]
    assert torch.equal(before.model(ids).logits, after.model(ids).logits)
    same = {k: torch.equal(v, after.model.state_dict()[k]) for k, v in before.model.state_dict().items()}
    assert all(same.values())


def test_a_step_that_differs_is_not_used():
    target = tiny_target("llama")
    target.model.model.layers[1].mlp.act_fn = torch.nn.SiLU()  # the same function, so still fused
    assert FastTarget.checked(target).reason is None
    target.model.model.layers[1].input_layernorm.variance_epsilon = 1e-6
    forward = target.model.model.layers[1].forward
    target.model.model.layers[1].forward = lambda x, *args, **kwargs: forward(x, *args, **kwargs) * 1.5
    assert "differed" in FastTarget.checked(target).reason


@lru_cache
def pair(family: str):
    target = tiny_target(family, seed=3, vocab_size=40, hidden=16, layers=2, dtype=torch.float64)
    torch.manual_seed(0)
    vocab, _ = choose_vocab(torch.rand(40), 25)
    return target, Eagle3(Eagle3Config(draft_vocab_size=25), target, vocab).double().requires_grad_(False)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=2)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_decodes_what_the_uncached_oracle_decodes(family, sampling):
    target, _ = pair(family)
    prompts = random_prompts(6, 40, seed=8, longest=20)
    longer = stepped(target, prompts, 15, sampling, stop=())
    truth = [p + g for p, g in zip(prompts, longer, strict=True)]
    for drafter, plan in ((None, None), (Scripted(40, truth, mixed), Dynamic(top_k=3, depth=3, total=8))):
        decoder = Decoder(target, drafter, plan=plan, sampling=sampling, engine="fast", prefill_chunk=7)
        found = decoder.generate(prompts, max_new_tokens=10, ignore_eos=True)
        assert [g.ids for g in found] == [g[:10] for g in longer]


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "phi3", "mistral"])
def test_a_context_within_the_window_needs_no_mask(family):
    """One row, one token, nothing to hide: the fused step takes no mask, the others must still get one."""
    target = tiny_target(family, seed=3, vocab_size=40, hidden=16, layers=2, dtype=torch.float64, sliding_window=64)
    for prompt in ([7], list(range(5, 25))):
        found = Decoder(target, engine="fast").generate([prompt], max_new_tokens=8, ignore_eos=True)
        assert [g.ids for g in found] == stepped(target, [prompt], 8, Sampling(), stop=())


def test_an_eagle_drafter_decodes_the_same_on_both_engines():
    target, drafter = pair("llama")
    prompts = random_prompts(5, 40, seed=9)
    for plan in (Chain(4), Dynamic(top_k=3, depth=3, total=9)):
        runs = [
            Decoder(target, drafter, plan=plan, engine=e).generate(prompts, max_new_tokens=12)
            for e in ("eager", "fast")
        ]
        assert [g.ids for g in runs[0]] == [g.ids for g in runs[1]]
        assert [g.steps for g in runs[0]] == [g.steps for g in runs[1]]


def test_unknown_engine():
    with pytest.raises(UserError, match="engine must be one of eager, fast, got 'turbo'"):
        Decoder(pair("llama")[0], engine="turbo")
