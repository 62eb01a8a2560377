"""What the decode loop promises beyond equal tokens: limits, ends, keys of the noise, streaming, records."""

from functools import lru_cache

import pytest
import torch
from oracles import Scripted, mixed, perfect, random_prompts, stepped

from distill.decode import Decoder, Request
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.errors import UserError
from distill.metrics import tau
from distill.sampling import Sampling
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic, Static
from distill.vocab import choose_vocab

V = 40
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0, top_k=12, seed=9)
BOTH = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
BUSHY = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)))


def make_target(**overrides):
    return tiny_target("llama", seed=5, vocab_size=V, hidden=16, layers=2, dtype=torch.float64, **overrides)


@lru_cache
def plain_target():
    return make_target()


@lru_cache
def prompts():
    return random_prompts(8, V, seed=1)


@lru_cache
def continuation(sampling: Sampling, n_new: int = 40):
    return stepped(plain_target(), prompts(), n_new, sampling, stop=())


def scripted(sampling: Sampling, skill):
    return Scripted(V, [p + g for p, g in zip(prompts(), continuation(sampling), strict=True)], skill)


def eagle(target):
    vocab, _ = choose_vocab(torch.rand(V), 25)
    return Eagle3(Eagle3Config(draft_vocab_size=25), target, vocab).double()


# -- where a generation ends


@BOTH
@pytest.mark.parametrize("offset", range(14))
def test_end_of_text_at_every_offset_of_an_accepted_block(offset, sampling):
    """Cut right after the first end-of-text, wherever inside a block of 1 + 5 tokens it falls."""
    ids = continuation(sampling)
    row = next((b for b, g in enumerate(ids) if g[offset] not in g[:offset]), None)
    assert row is not None, "no prompt has a token that is new at this offset"
    target = make_target(eos_token_id=ids[row][offset])
    assert target.info.eos_ids == (ids[row][offset],)
    decoder = Decoder(target, scripted(sampling, perfect), plan=Chain(5), sampling=sampling)
    got = decoder.generate(prompts(), max_new_tokens=20)
    assert [g.ids for g in got] == stepped(target, prompts(), 20, sampling)
    assert got[row].ids == ids[row][: offset + 1]
    assert got[row].finished == "eos"
    first, *later = got[row].ids
    assert [t for s in got[row].steps for t in s.tokens] == later, "records are cut too"
    assert len(got[row].steps) == -(-offset // 6)
    whole = decoder.generate(prompts(), max_new_tokens=20, ignore_eos=True)
    assert [g.ids for g in whole] == [g[:20] for g in ids]
    assert {g.finished for g in whole} == {"length"}


def test_several_ends_of_text():
    """Any of several end ids ends the text, the first one in the text wins."""
    ids = continuation(GREEDY)[2]
    target = make_target(eos_token_id=[ids[9], ids[4]])
    got = Decoder(target, scripted(GREEDY, perfect), plan=Chain(5)).generate(prompts(), max_new_tokens=20)
    assert got[2].ids == ids[: 1 + min(ids.index(ids[9]), ids.index(ids[4]))]
    assert [g.ids for g in got] == stepped(target, prompts(), 20, GREEDY)


@BOTH
@pytest.mark.parametrize("plan", [Chain(4), BUSHY, Dynamic(top_k=2, depth=4, total=9)], ids=str)
def test_exact_max_new_tokens(plan, sampling):
    for n_new in range(1, plan.depth + 3):
        for skill in (perfect, mixed):
            decoder = Decoder(plain_target(), scripted(sampling, skill), plan=plan, sampling=sampling)
            got = decoder.generate(prompts(), max_new_tokens=n_new, ignore_eos=True)
            assert [g.ids for g in got] == [g[:n_new] for g in continuation(sampling)]
            assert {g.finished for g in got} == {"length"}
            for g in got:
                assert sum(len(s.tokens) for s in g.steps) == n_new - 1


@BOTH
def test_every_prefill_chunk(sampling):
    longest = max(len(p) for p in prompts())
    target = plain_target()
    torch.manual_seed(3)
    drafter = eagle(target)
    taus = set()
    for chunk in range(1, longest + 2):
        decoder = Decoder(target, drafter, plan=BUSHY, sampling=sampling, prefill_chunk=chunk)
        got = decoder.generate(prompts(), max_new_tokens=10, ignore_eos=True)
        assert [g.ids for g in got] == [g[:10] for g in continuation(sampling)]
        taus.add(tuple(s.accepted for g in got for s in g.steps))
    assert len(taus) == 1, "the drafter's view of the prompt depends on the chunk size"


@BOTH
def test_batch_equals_alone(sampling):
    """Each row of an uneven batch decodes as it would alone: same ids, same records."""
    target = plain_target()
    drafter = eagle(target)
    decoder = Decoder(target, drafter, plan=Dynamic(top_k=3, depth=3, total=9), sampling=sampling)
    together = decoder.generate(prompts(), max_new_tokens=12)
    for b, prompt in enumerate(prompts()):
        (alone,) = decoder.generate([prompt], max_new_tokens=12, request_ids=[b])
        assert alone.ids == together[b].ids
        assert alone.steps == together[b].steps
        assert (alone.finished, alone.prompt_len) == (together[b].finished, len(prompt))


# -- keys of the noise


def test_equal_prompts_in_one_batch():
    target = plain_target()
    drafter = eagle(target)
    prompt = prompts()[3]
    for plan, who in ((None, None), (BUSHY, drafter)):
        sampled = Decoder(target, who, plan=plan, sampling=Sampling(temperature=1.0, seed=2))
        got = sampled.generate([prompt] * 6, max_new_tokens=12, ignore_eos=True)
        assert len({tuple(g.ids) for g in got}) == 6
        greedy = Decoder(target, who, plan=plan).generate([prompt] * 6, max_new_tokens=12, ignore_eos=True)
        assert len({tuple(g.ids) for g in greedy}) == 1
        same_key = sampled.generate([prompt] * 3, max_new_tokens=12, request_ids=[7, 7, 8], ignore_eos=True)
        assert same_key[0].ids == same_key[1].ids != same_key[2].ids


def test_requests_decide_the_noise_not_rows():
    target = plain_target()
    drafter = eagle(target)
    keys = [11, 3, 1 << 40, 0, 5, -2, 77, 8]
    order = [3, 7, 0, 2, 6, 1, 5, 4]
    for plan, who in ((None, None), (BUSHY, drafter), (Dynamic(top_k=2, depth=3, total=6), drafter)):
        decoder = Decoder(target, who, plan=plan, sampling=SAMPLED)
        straight = decoder.generate(prompts(), max_new_tokens=10, request_ids=keys)
        assert [g.ids for g in straight] == stepped(target, prompts(), 10, SAMPLED, request_ids=keys)
        assert [g.request_id for g in straight] == keys
        permuted = decoder.generate(
            [prompts()[b] for b in order], max_new_tokens=10, request_ids=[keys[b] for b in order]
        )
        assert [g.ids for g in permuted] == [straight[b].ids for b in order]


def test_same_call_twice_gives_the_same():
    decoder = Decoder(plain_target(), eagle(plain_target()), plan=BUSHY, sampling=SAMPLED)
    one, two = (decoder.generate(prompts(), max_new_tokens=10) for _ in range(2))
    assert [(g.ids, g.steps) for g in one] == [(g.ids, g.steps) for g in two]


# -- streaming


def requests(n: int, sampled: Sampling):
    generator = torch.Generator().manual_seed(8)
    out = []
    for r in range(n):
        length, budget = torch.randint(1, 14, (2,), generator=generator).tolist()
        prompt = torch.randint(3, V, (length,), generator=generator).tolist()
        sampling = (None, Sampling(), sampled)[r % 3]
        out.append(Request(request_id=100 + r, prompt=prompt, max_new_tokens=budget, sampling=sampling, tag=("t", r)))
    return out


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 16, 23, 64])
def test_stream_equals_generate_per_request(slots):
    """Whatever the number of slots; uneven prompts and budgets, greedy and sampled rows in one batch."""
    target = make_target(eos_token_id=[2, 17, 30])
    todo = requests(23, SAMPLED)
    got = list(Decoder(target, sampling=SAMPLED, prefill_chunk=4).stream(iter(todo), slots=slots))
    assert sorted(g.request_id for g in got) == [r.request_id for r in todo]
    by_id = {g.request_id: g for g in got}
    ends = set()
    for request in todo:
        sampling = request.sampling or SAMPLED
        want = stepped(target, [request.prompt], request.max_new_tokens, sampling, request_ids=[request.request_id])
        generation = by_id[request.request_id]
        assert generation.ids == want[0]
        assert generation.tag == request.tag
        assert generation.prompt_len == len(request.prompt)
        assert len(generation.steps) == len(generation.ids) - 1
        assert generation.finished == ("eos" if generation.ids[-1] in target.info.eos_ids else "length")
        ends.add(generation.finished)
    assert ends == {"eos", "length"}


def test_stream_takes_requests_as_slots_free_up():
    """A generator of requests is not drained ahead of time, and nothing is yielded twice."""
    taken = []

    def source():
        for request in requests(12, SAMPLED):
            taken.append(request.request_id)
            yield request

    seen = []
    for generation in Decoder(plain_target(), sampling=SAMPLED).stream(source(), slots=3):
        seen.append(generation.request_id)
        assert len(taken) <= len(seen) + 2 * 3
    assert sorted(seen) == sorted(taken)


def test_stream_of_nothing():
    assert list(Decoder(plain_target()).stream([], slots=4)) == []


# -- records


@BOTH
@pytest.mark.parametrize("plan", [None, Chain(1), Chain(4), BUSHY, Dynamic(top_k=3, depth=4, total=9)], ids=str)
def test_records_add_up(plan, sampling):
    target = make_target(eos_token_id=[2, 17])
    calls = []
    truth = [p + g for p, g in zip(prompts(), continuation(sampling), strict=True)]
    for skill in (mixed, perfect):
        drafter = None if plan is None else Scripted(V, truth, skill)
        decoder = Decoder(target, drafter, plan=plan, sampling=sampling)
        calls.clear()
        got = decoder.generate(
            prompts(), max_new_tokens=15, on_step=lambda row, record, new: calls.append((row, record, list(new)))
        )
        depth = 0 if plan is None else plan.depth
        for b, g in enumerate(got):
            emitted = [t for s in g.steps for t in s.tokens]
            assert [g.ids[0], *emitted] == g.ids
            assert g.finished == ("eos" if g.ids[-1] in (2, 17) else "length")
            for i, s in enumerate(g.steps):
                assert s.tokens, "a pass emits at least the target's own token"
                assert 0 <= s.accepted <= s.offered <= depth
                # The target's own token ends every pass that was not cut short.
                assert len(s.tokens) == s.accepted + 1 or (i == len(g.steps) - 1 and len(s.tokens) == s.accepted)
                assert len(s.tokens) <= s.accepted + 1 <= depth + 1
                if plan is not None:
                    assert len(s.rejected) + s.accepted <= plan.n_nodes - 1
            mine = [(record, new) for row, record, new in calls if row == b]
            assert mine[0] == (None, [g.ids[0]])
            assert [record for record, _ in mine[1:]] == g.steps
            assert [t for _, new in mine for t in new] == g.ids
            if g.steps:
                assert tau(g.steps) == len(emitted) / len(g.steps)
            assert g.ttft_s > 0
            assert g.decode_s >= 0


def test_truncated_pass_counts_only_what_it_could_have_offered():
    """Three tokens left of a chain of five that is all right: three emitted, three accepted, three offered."""
    decoder = Decoder(plain_target(), scripted(GREEDY, perfect), plan=Chain(5))
    for g in decoder.generate(prompts(), max_new_tokens=1 + 6 + 3, ignore_eos=True):
        assert [(len(s.tokens), s.accepted, s.offered) for s in g.steps] == [(6, 5, 5), (3, 3, 3)]


def test_rejected_ids_are_the_rest_of_the_tree():
    """Root children 0.., of which one is right: the others are reported, in node order."""
    plan = Static(((0,), (1,), (2,), (0, 0)))
    decoder = Decoder(plain_target(), scripted(GREEDY, perfect), plan=plan)
    for g in decoder.generate(prompts(), max_new_tokens=7, ignore_eos=True):
        for s in g.steps:
            assert s.accepted == 2
            assert len(s.rejected) == 2
            assert not set(s.rejected) & {s.tokens[0]}


# -- how drafts are picked


@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize("plan", [Chain(4), BUSHY, Dynamic(top_k=2, depth=4, total=9)], ids=str)
def test_match_does_not_depend_on_how_drafts_are_picked(plan, engine):
    for sampling in (SAMPLED, Sampling(temperature=0.7, seed=9)):
        steps = {}
        for candidates in ("auto", "coupled", "topk"):
            torch.manual_seed(3)
            target = plain_target()
            decoder = Decoder(target, eagle(target), plan=plan, sampling=sampling, candidates=candidates, engine=engine)
            got = decoder.generate(prompts(), max_new_tokens=12, ignore_eos=True)
            assert [g.ids for g in got] == [g[:12] for g in continuation(sampling)]
            steps[candidates] = [g.steps for g in got]
        assert steps["auto"] == steps["coupled"] != steps["topk"], "what was drafted does depend on it"


class Silent(Scripted):
    """Finds nothing at some positions, as a lookup does: id -1 among the candidates, and nothing below it."""

    soft = False

    def to_target_ids(self, ids):
        return torch.where(ids >= self.vocab_size, -1, ids)

    def step(self, state, frontier):
        logits = super().step(state, frontier)
        nothing = torch.full((*logits.shape[:2], 4), -1e6, dtype=logits.dtype)
        for b, row in enumerate(state.rows):
            kind = (3 * b + len(row)) % 4
            if kind == 0 or (kind == 2 and frontier.depth):  # nothing at all; nothing below the root's children
                logits[b], nothing[b] = -float("inf"), 0.0
            elif kind == 1:  # a gap where the first child would be
                nothing[b, :, 0] = 2000.0
        return torch.cat([logits, nothing], -1)


@BOTH
@pytest.mark.parametrize("plan", [Chain(4), Static(((0,), (1,), (0, 0), (1, 0))), BUSHY], ids=str)
def test_a_drafter_with_nothing_to_say_costs_no_wider_pass(plan, sampling, monkeypatch):
    widths = []
    true = Decoder._forward

    def watched(self, cache, ids_BN, *rest):
        widths.append(ids_BN.shape[1])
        return true(self, cache, ids_BN, *rest)

    truth = [p + g for p, g in zip(prompts(), continuation(sampling), strict=True)]
    monkeypatch.setattr(Decoder, "_forward", watched)
    together = Decoder(plain_target(), Silent(V, truth, mixed), plan=plan, sampling=sampling)
    got = together.generate(prompts(), max_new_tokens=20, ignore_eos=True)
    assert [g.ids for g in got] == [g[:20] for g in continuation(sampling)]
    widths.clear()
    accepted = 0
    for b, prompt in enumerate(prompts()):
        alone = Decoder(plain_target(), Silent(V, [truth[b]], mixed), plan=plan, sampling=sampling, prefill_chunk=1)
        (found,) = alone.generate([prompt], max_new_tokens=20, ignore_eos=True, request_ids=[b])
        assert found.ids == continuation(sampling)[b][:20]
        accepted += sum(s.accepted for s in found.steps)
    assert accepted > 5
    used = sum(w > 1 for w in widths)
    assert widths.count(plan.n_nodes) < used, "some rounds are narrower than the plan"
    level = 1 + plan.children[0]
    assert {1, level, plan.n_nodes} <= set(widths), "nothing, the root's children alone, and everything"


# -- bad input


def test_bad_requests_are_refused():
    decoder = Decoder(make_target(max_position_embeddings=20))
    with pytest.raises(UserError, match="at least one token"):
        decoder.generate([[5], []], max_new_tokens=3)
    with pytest.raises(UserError, match="max_new_tokens"):
        decoder.generate([[5]], max_new_tokens=0)
    with pytest.raises(UserError, match="20 positions"):
        decoder.generate([[5] * 15], max_new_tokens=6)
    assert len(decoder.generate([[5] * 15], max_new_tokens=5, ignore_eos=True)[0].ids) == 5
    assert decoder.generate([], max_new_tokens=5) == []
    with pytest.raises(UserError, match="one sampled setting"):
        list(decoder.stream([Request(prompt=[4], max_new_tokens=2, sampling=SAMPLED)], slots=1))
    with pytest.raises(UserError, match="match"):
        Decoder(plain_target(), verifier="matching")


def test_a_tree_deeper_than_the_drafter_is_refused():
    drafter = scripted(GREEDY, perfect)
    drafter.max_depth = 3
    with pytest.raises(UserError, match="at most 3"):
        Decoder(plain_target(), drafter, plan=Chain(4))
    Decoder(plain_target(), drafter, plan=Chain(3))
