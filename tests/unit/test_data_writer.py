"""Answers: the mix, the filters, the order, the budget; and that batching changes nothing."""

import functools
import itertools
import json

import data_tools as tools
import numpy as np
import pytest
import torch

from distill.data import ChatTemplate, DataConfig, prepare
from distill.data.sources import Candidate
from distill.data.writer import Budget, answered_outcomes, finished_outcomes, greedy_choice, is_degenerate
from distill.decode import Decoder
from distill.target.tiny import tiny_target

EOS = tools.tiny_tokenizer_cached().eos_token_id


def prompts(n, follow_ups=()):
    for i in range(n):
        yield Candidate(
            index=i, key=i + 1, messages=[{"role": "user", "content": f"p{i}"}], follow_ups=tuple(follow_ups)
        )


def run(config, answer=tools.babble, candidates=None, seed=0, clock=None):
    target = tools.target()
    budget = Budget(config, **({"clock": clock} if clock else {}))
    decoder = tools.FakeDecoder(target, config.answer_sampling(), answer, seed)
    source = prompts(10**6) if candidates is None else candidates
    return list(answered_outcomes(source, config, ChatTemplate(target), decoder, budget)), budget


def encode(text):
    return tools.tiny_tokenizer_cached().encode(text, add_special_tokens=False)


def contents(outcomes):
    return [(o.index, None if o.conversation is None else o.conversation.ids.tolist()) for o in outcomes]


def test_order_and_content_depend_on_neither_slots_nor_finishing_order():
    config = functools.partial(DataConfig, n_conversations=30, min_answer_tokens=12)
    reference, budget = run(config(slots=1))
    assert [o.index for o in reference] == list(range(len(reference)))
    assert budget.kept == 30 < len(reference), "some must be too short for this test to mean anything"
    assert reference[-1].conversation is not None, "nothing beyond the last one wanted is started"
    for slots, seed in ((3, 1), (8, 2), (64, 3)):
        outcomes, _ = run(config(slots=slots), seed=seed)
        assert contents(outcomes) == contents(reference)


def test_ids_are_the_prompt_and_exactly_what_was_written():
    template = ChatTemplate(tools.target())
    (outcome,), _ = run(DataConfig(n_conversations=1), lambda r, s: [*encode("the cat sat"), EOS])
    prompt = template.encode(template.render([{"role": "user", "content": "p0"}], add_generation_prompt=True))
    written = [*encode("the cat sat"), EOS]
    assert outcome.conversation.ids.tolist() == prompt + written
    assert outcome.conversation.loss_mask.tolist() == [False] * len(prompt) + [True] * len(written)


def test_an_answer_cut_at_the_limit_is_kept_without_an_end():
    config = DataConfig(n_conversations=1, max_answer_tokens=10)
    (outcome,), _ = run(config, lambda r, s: encode("the cat sat on a mat and asked why"))
    assert outcome.conversation.ids[-10:].tolist() == encode("the cat sa")
    assert outcome.conversation.loss_mask[-10:].all()


def test_the_share_of_greedy_answers_is_chosen_by_number_and_seed():
    seen = {}

    def answer(request, sampling):
        seen[request.request_id] = sampling
        return [*encode("the cat sat on a mat"), EOS]

    config = DataConfig(n_conversations=400, greedy_share=0.25, temperature=0.7, top_k=9, top_p=0.9, seed=3)
    outcomes, _ = run(config, answer)
    greedy = [o.index for o in outcomes if o.greedy]
    assert greedy == [i for i in range(400) if greedy_choice(config, i)]
    assert 70 < len(greedy) < 130
    sampled = next(s for s in seen.values() if not s.greedy)
    assert (sampled.temperature, sampled.top_k, sampled.top_p) == (0.7, 9, 0.9)
    assert {seen[i].temperature for i in greedy} == {0.0}
    assert greedy != [i for i in range(400) if greedy_choice(DataConfig(seed=4, greedy_share=0.25), i)]


@pytest.mark.parametrize(
    "ids, expected",
    [
        ([7] * 20, True),
        ([1, 2, 3] * 8, True),
        (list(range(20)) + [5, 6] * 10, True),  # the loop is half of it
        (list(range(21)) + [5, 6] * 10, False),
        ([1, 2, 3, 4, 5] * 3, False),  # three times is a list, not a loop
        ([*[1, 2, 3, 4, 5] * 4, 9], False),  # it got out of it
        (list(range(64)) * 4, True),
        (list(range(65)) * 4, False),
        (list(range(40)), False),
        ([3], False),
        ([], False),
    ],
)
def test_degenerate_loops(ids, expected):
    assert is_degenerate(ids) is expected


def test_the_loop_rule_equals_its_definition():
    """Brute force over random short sequences of few symbols."""
    rng = np.random.default_rng(0)

    def brute(ids):
        for period in range(1, len(ids) // 4 + 1):
            length = period
            while length < len(ids) and ids[-1 - length] == ids[-1 - length + period]:
                length += 1
            if length > period and length >= 4 * period and 2 * length >= len(ids):
                return True
        return False

    cases = [rng.integers(0, 2, rng.integers(0, 14)).tolist() for _ in range(1500)]
    found = [is_degenerate(ids) for ids in cases]
    assert found == [brute(ids) for ids in cases]
    assert 50 < sum(found) < 1400


def test_short_and_looping_answers_are_dropped_and_counted():
    def answer(request, sampling):
        texts = {0: "a", 1: "so " * 30, 2: "the cat sat on a mat"}
        return [*encode(texts[request.request_id % 3]), EOS]

    outcomes, budget = run(DataConfig(n_conversations=4, min_answer_tokens=5, slots=2), answer)
    assert [dict(o.counts) for o in outcomes[:3]] == [{"too_short": 1}, {"degenerate": 1}, {}]
    assert budget.kept == 4
    assert budget.stopped == "n_conversations"


def test_prompts_without_room_for_an_answer_are_dropped():
    source = iter([Candidate(index=0, key=1, messages=[{"role": "user", "content": "x" * 100}])])
    config = DataConfig(n_conversations=1, max_len=100, max_answer_tokens=50)
    (outcome,), budget = run(config, candidates=source)
    assert outcome.counts == {"prompt_too_long": 1}
    assert budget.stopped == "source_exhausted"


def test_follow_ups_continue_the_exact_ids():
    template = ChatTemplate(tools.target())
    config = DataConfig(source="prompts", path="x", slots=3)
    outcomes, budget = run(config, candidates=prompts(7, ["and then?", "and now?"]))
    assert budget.stopped == "source_exhausted"
    for outcome in outcomes:
        if not outcome.counts:
            ids, mask = outcome.conversation.ids, outcome.conversation.loss_mask
            text = template.decode(ids.tolist())
            assert [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>user\n")[1:]] == [
                f"p{outcome.index}",
                "and then?",
                "and now?",
            ]
            assert template.decode(ids[mask].tolist()).count("<|im_end|>") == 3
            assert template.encode(text) == ids.tolist()
    assert sum(not o.counts for o in outcomes) >= 2


def test_a_bad_later_answer_keeps_the_earlier_ones():
    def answer(request, sampling):
        return [*encode("the cat sat on a mat" if len(request.prompt) < 30 else "no"), EOS]

    config = DataConfig(source="prompts", path="x")
    (outcome,), _ = run(config, answer, candidates=prompts(1, ["more", "even more"]))
    assert outcome.counts == {"too_short": 1}
    assert outcome.conversation.ids[-1] == EOS
    assert outcome.conversation.loss_mask.sum() == len(encode("the cat sat on a mat")) + 1


def test_follow_ups_that_do_not_fit_are_counted():
    config = DataConfig(source="prompts", path="x", max_len=120, max_answer_tokens=40)
    (outcome,), _ = run(config, lambda r, s: [*encode("the cat sat on"), EOS], prompts(1, ["b" * 40, "c"]))
    assert outcome.counts == {"follow_up_dropped": 2}


# ----------------------------------------------------------------------------------------------- budget
def test_the_token_budget_stops_new_ones_and_finishes_the_rest():
    config = DataConfig(max_tokens=300, slots=4)
    outcomes, budget = run(config)
    assert budget.stopped == "max_tokens"
    kept = [int(o.conversation.loss_mask.sum()) for o in outcomes if o.conversation is not None]
    assert sum(kept) == budget.tokens >= 300
    assert [o.index for o in outcomes] == list(range(len(outcomes)))
    assert sum(kept) - 300 < 5 * 80, "only what was under way is added"


def test_the_time_budget_leaves_room_for_what_is_under_way():
    now = itertools.count()
    config = DataConfig(max_minutes=5, slots=3)
    outcomes, budget = run(config, clock=lambda: float(next(now)))
    assert budget.stopped == "max_minutes"
    assert [o.index for o in outcomes] == list(range(len(outcomes)))
    assert 200 < next(now) < 330


def test_fraction_is_that_of_the_nearest_limit():
    budget = Budget(DataConfig(n_conversations=10, max_tokens=100, max_minutes=1), clock=lambda: 0.0)
    budget.kept, budget.tokens = 3, 50
    assert budget.fraction == 0.5


def test_finished_conversations_stop_at_the_limit_too():
    config = DataConfig(source="chat", path="x", n_conversations=2)
    made = [o.conversation for o in run(DataConfig(n_conversations=4))[0] if o.conversation is not None]
    source = (Candidate(index=i, key=i, conversation=c) for i, c in enumerate(made))
    budget = Budget(config)
    assert len(list(finished_outcomes(source, budget))) == 2
    assert budget.stopped == "n_conversations"


# --------------------------------------------------------------------------------- with the real decoder
def answering_target():
    return tiny_target("llama", dtype=torch.float64, tokenizer=True, max_position_embeddings=512)


@pytest.mark.parametrize("slots", [1, 4])
def test_conversations_equal_those_of_separate_decoding(tmp_path, slots):
    target = answering_target()
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"p {i}"}) + "\n" for i in range(6)))
    config = DataConfig(
        source="prompts",
        path=str(tmp_path / "p.jsonl"),
        slots=slots,
        max_answer_tokens=12,
        max_len=128,
        min_answer_tokens=1,
        temperature=1.0,
        top_k=0,
        validation=0.0,
    )
    data = prepare(config, target, tmp_path / "data", lambda _: None)
    template = ChatTemplate(target)
    expected = []
    for i in range(6):
        sampling = config.answer_sampling()
        prompt = template.encode(template.render([{"role": "user", "content": f"p {i}"}], add_generation_prompt=True))
        kind = {} if greedy_choice(config, i) else {"sampling": sampling}
        (alone,) = Decoder(target, **kind).generate([prompt], max_new_tokens=12, request_ids=[i])
        content = [t for t in alone.ids if t != EOS]
        if content and not is_degenerate(content):  # an answer without a token is too short
            expected.append(prompt + alone.ids)
    assert [c.ids.tolist() for c in data.conversations("train")] == expected
    assert len(expected) >= 4


def test_the_whole_of_self_with_a_real_decoder(tmp_path):
    """A random target's user turns are noise, but they end, and its own answers follow."""
    target = answering_target()
    eos_row = target.model.get_output_embeddings().weight
    with torch.no_grad():
        eos_row[EOS] = 0.3 * eos_row.sum(0)  # let turns end now and then
    config = DataConfig(
        n_conversations=5, slots=4, max_prompt_tokens=30, max_answer_tokens=10, min_answer_tokens=1, max_len=128
    )
    data = prepare(config, target, tmp_path, lambda _: None)
    again = prepare(config, target, tmp_path / "again", lambda _: None)
    assert len(data) == 5
    assert data.data_hash == again.data_hash
    slot, _ = ChatTemplate(target).user_slot(None)
    for conversation in (data[i] for i in range(5)):
        assert conversation.ids[: len(slot)].tolist() == slot
        assert not conversation.loss_mask[: len(slot)].any()
        assert conversation.loss_mask.any()
