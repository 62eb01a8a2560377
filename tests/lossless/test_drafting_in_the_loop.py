"""What the loop makes a drafter propose: the right features, the right noise, the right depth.

None of this shows in the output (which is lossless whatever is proposed), only in how much is accepted. So it is
checked token by token: every pass's proposal against one worked out from scratch.
"""

from types import SimpleNamespace

import pytest
import torch
from oracles import SECOND, PlainEagle3, Scripted, noise, perfect, pick, random_prompts, stepped

from distill.decode import Decoder
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.metrics import accept_by_depth
from distill.sampling import Sampling
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic, Static
from distill.vocab import choose_vocab

V, W = 40, 25
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.9, seed=12)
FILTERED = Sampling(temperature=0.9, top_k=8, top_p=0.9, seed=12)
SETTINGS = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])


def make_target():
    return tiny_target("llama", seed=8, vocab_size=V, hidden=16, layers=3, dtype=torch.float64)


# -- EAGLE-3's proposals, recomputed from the prompt on in every pass


def best(logits_W, rank, sampling, vocab, request, position):
    """The drafted token of a rank: draft logits, warped and perturbed by the noise of the position it would take."""
    if sampling.greedy:
        scores = logits_W
    else:
        g = noise(sampling.seed, request, [position], V, second=SECOND)[0, vocab.target_ids]
        scores = logits_W / sampling.temperature + g
    return int(vocab.target_ids[scores.argsort(descending=True)[rank]])


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("flags", [{}, {"norm_output": True, "fc_norm": True}], ids=str)
@pytest.mark.parametrize("plan", [Chain(3), Static(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)))], ids=str)
def test_every_proposal_equals_the_equations(plan, flags, sampling):
    target = make_target()
    torch.manual_seed(3)
    vocab, _ = choose_vocab(torch.rand(V), W)
    drafter = Eagle3(Eagle3Config(draft_vocab_size=W, **flags), target, vocab).double().requires_grad_(False)
    prompts = [p for p in random_prompts(6, V, seed=2) if 1 < len(p) < 9][:2]
    requests = [4, 9]
    decoder = Decoder(target, drafter, plan=plan, sampling=sampling, prefill_chunk=3)
    got = decoder.generate(prompts, max_new_tokens=9, ignore_eos=True, request_ids=requests)
    plain = PlainEagle3(drafter, target)
    accepted = 0
    order = sorted(plan.paths, key=lambda p: (len(p), p))
    for prompt, request, generation in zip(prompts, requests, got, strict=True):
        ids = [*prompt, generation.ids[0]]
        for step in generation.steps:
            with torch.no_grad():
                hidden = target.model(
                    input_ids=torch.tensor([ids[:-1]]), output_hidden_states=True, use_cache=False
                ).hidden_states
            taps = [hidden[k][0] for k in drafter.taps(drafter.config, target.info)]
            tokens: dict[tuple[int, ...], list[int]] = {(): []}
            for ranks in order:
                above = tokens[ranks[:-1]]
                logits = plain.draft(ids, taps, above)[-1]
                # The root sits at len(ids) - 1; its children would be token len(ids).
                token = best(logits, ranks[-1], sampling, vocab, request, len(ids) + len(above))
                tokens[ranks] = [*above, token]
            proposed = [tokens[ranks][-1] for ranks in order]
            kept = list(step.tokens[: step.accepted])
            path = next((r for r in order if tokens[r] == kept), ())
            on_path = {path[:n] for n in range(1, len(path) + 1)}
            assert list(step.rejected) == [
                token for ranks, token in zip(order, proposed, strict=True) if ranks not in on_path
            ]
            accepted += step.accepted
            ids += step.tokens
    assert accepted > 0 or sampling.greedy, "nothing was ever accepted: choose another seed"


# -- a drafter that is the target itself


class Itself:
    """Drafts with the target's own logits over a part of the vocabulary, computed without a cache."""

    name, max_depth, config, soft = "itself", None, None, True

    def __init__(self, target, ids=None):
        self.target = target
        self.vocab = None if ids is None else SimpleNamespace(target_ids=torch.tensor(ids), size=len(ids))

    def taps(self, _config, _info):
        return ()

    def to_target_ids(self, ids):
        return ids if self.vocab is None else self.vocab.target_ids[ids]

    def new_state(self, batch_size, _capacity):
        return SimpleNamespace(rows=[[] for _ in range(batch_size)], root=[0] * batch_size, paths=None)

    def extend(self, state, ids_BL, next_B, output, n_B, *, longest):
        for b, n in enumerate(n_B.tolist()):
            if n:
                state.rows[b] += ids_BL[b, :n].tolist()
                state.root[b] = int(next_B[b])

    def step(self, state, frontier):
        batch, width = frontier.tokens_BF.shape
        tokens, parents = frontier.tokens_BF.tolist(), frontier.parent_BF.tolist()
        if frontier.depth == 0:
            state.paths = [[[*state.rows[b], state.root[b]]] for b in range(batch)]
        else:
            state.paths = [[state.paths[b][parents[b][f]] + [tokens[b][f]] for f in range(width)] for b in range(batch)]
        flat = [p for row in state.paths for p in row]
        longest = max(map(len, flat))
        padded = torch.tensor([p + [0] * (longest - len(p)) for p in flat])
        logits = self.target.model(input_ids=padded, use_cache=False).logits
        last = logits[torch.arange(len(flat)), torch.tensor([len(p) - 1 for p in flat])].view(batch, width, -1)
        return last if self.vocab is None else last[..., self.vocab.target_ids]

    def rollback(self, state):
        state.paths = None


@SETTINGS
@pytest.mark.parametrize("plan", [Chain(4), Dynamic(top_k=2, depth=4, total=7)], ids=str)
def test_the_target_as_its_own_drafter_is_always_right(plan, sampling):
    """With shared noise the first candidate is the target's token at every depth, at every temperature."""
    target = make_target()
    prompts = random_prompts(8, V, seed=3)
    decoder = Decoder(target, Itself(target), plan=plan, sampling=sampling)
    got = decoder.generate(prompts, max_new_tokens=1 + 2 * (plan.depth + 1), ignore_eos=True)
    assert [g.ids for g in got] == stepped(target, prompts, 1 + 2 * (plan.depth + 1), sampling, stop=())
    accepted = [s.accepted for g in got for s in g.steps]
    if isinstance(plan, Dynamic):  # the best four of seven nodes need not be the deepest
        assert min(accepted) >= 1
        assert sum(accepted) / len(accepted) > 2
    else:
        assert set(accepted) == {plan.depth}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_pruned_vocabulary_takes_its_own_entries_of_the_noise(sampling):
    """Then a draft fails exactly where the target's token is not in the draft vocabulary."""
    target = make_target()
    kept = [i for i in range(V) if i % 4 != 1]
    prompts = random_prompts(16, V, seed=3)
    decoder = Decoder(target, Itself(target, kept), plan=Chain(3), sampling=sampling)
    got = decoder.generate(prompts, max_new_tokens=13, ignore_eos=True)
    assert [g.ids for g in got] == stepped(target, prompts, 13, sampling, stop=())
    failures = 0
    for g in got:
        for s in g.steps:
            assert all(t in kept for t in s.tokens[: s.accepted])
            if s.accepted < s.offered:
                assert s.tokens[s.accepted] not in kept
                failures += 1
    assert failures > 5


def test_uncoupled_noise_would_accept_less():
    """Control for the two tests above: other noise in the drafter, same output, fewer acceptances."""
    target = make_target()
    prompts = random_prompts(8, V, seed=3)
    sampling = Sampling(temperature=1.5, seed=12)

    class Uncoupled(Itself):
        def step(self, state, frontier):
            return super().step(state, frontier) + 3 * torch.randn(1)[0] * torch.randn(V)

    rates = []
    for drafter in (Itself(target), Uncoupled(target)):
        got = Decoder(target, drafter, plan=Chain(3), sampling=sampling).generate(
            prompts, max_new_tokens=9, ignore_eos=True
        )
        assert [g.ids for g in got] == stepped(target, prompts, 9, sampling, stop=())
        rates.append(sum(s.accepted for g in got for s in g.steps) / sum(len(g.steps) for g in got))
    assert rates[1] < 0.7 * rates[0]


# -- depth offered


def test_offered_depth_is_the_trees_not_the_plans():
    """A dynamic tree of three nodes is at most two deep, however deep the plan may grow: deeper was not offered."""
    target = make_target()
    prompts = random_prompts(6, V, seed=5)
    truth = [p + g for p, g in zip(prompts, stepped(target, prompts, 20, GREEDY, stop=()), strict=True)]
    decoder = Decoder(target, Scripted(V, truth, perfect), plan=Dynamic(top_k=3, depth=5, total=3))
    got = decoder.generate(prompts, max_new_tokens=10, ignore_eos=True)
    steps = [s for g in got for s in g.steps]
    assert {s.accepted for s in steps} == {2}
    assert accept_by_depth(steps) == [1.0, 1.0], "nothing offered at depth 3 was ever refused"


# -- single precision


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@SETTINGS
def test_single_precision(family, sampling):
    """In fp32 a difference is a fault unless the oracle's two best scores there are within 1e-4."""
    target = tiny_target(family, seed=8, vocab_size=V, hidden=16, layers=2)
    prompts = random_prompts(24, V, seed=6)
    want = stepped(target, prompts, 16, sampling, stop=())
    truth = [p + g for p, g in zip(prompts, want, strict=True)]
    plan = Static(((0,), (1,), (0, 0), (0, 0, 0)))
    decoder = Decoder(target, Scripted(V, truth, perfect, check=False), plan=plan, sampling=sampling)
    got = decoder.generate(prompts, max_new_tokens=16, ignore_eos=True)
    ties = 0
    for b, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.ids == w:
            continue
        at = next(i for i in range(16) if g.ids[i] != w[i])
        ids = prompts[b] + w[:at]
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        scores = logits
        if not sampling.greedy:
            g_V = noise(sampling.seed, b, [len(ids)], V, second=SECOND)[0]
            assert int(pick(logits[None], sampling, g_V[None])[0]) == w[at]
            scores = logits / sampling.temperature + g_V
        first, second = scores.topk(2).values.tolist()
        assert first - second < 1e-4
        ties += 1
    assert ties <= 1
