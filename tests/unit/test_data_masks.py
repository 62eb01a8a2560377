"""Masks equal a brute-force enumeration that writes the text itself and marks it character by character."""

import random

import data_tools as tools
import numpy as np
import pytest

from distill.data import ChatTemplate, supervise
from distill.errors import UserError
from distill.target.tiny import tiny_tokenizer


def oracle(name, messages, words):
    """Ids and mask from pieces of text: a token counts when every character of it was written by the assistant."""
    marked = tools.pieces(name, messages)
    text = "".join(piece for piece, _ in marked)
    mine = [flag for piece, flag in marked for _ in piece]
    encoded = words(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [a < b and all(mine[a:b]) for a, b in encoded["offset_mapping"]]
    return encoded["input_ids"], mask


def template_of(name, template=None):
    words = tools.tokenizer(name, template)
    return ChatTemplate(tools.target(words))


@pytest.mark.parametrize("name", tools.TEMPLATES)
def test_masks_equal_the_enumeration(name):
    template, rng = template_of(name), random.Random(1)
    for turns in (1, 2, 4):
        for _ in range(4):
            messages = tools.conversation(rng, turns)
            if name == "PLAIN":  # a line break at the end of a turn would merge with the template's
                messages = [{**m, "content": m["content"].replace("\n", " ")} for m in messages]
            ids, mask = oracle(name, messages, template.tokenizer)
            result = supervise(messages, template)
            assert not result.counts
            assert result.conversation.ids.tolist() == ids
            assert result.conversation.loss_mask.tolist() == mask
            assert result.conversation.prompt == ids[: mask.index(True)]


@pytest.mark.parametrize("name", [name for name in tools.TEMPLATES if name != "PLAIN"])
def test_every_answer_ends_with_its_turn_end_and_nothing_after(name):
    template = template_of(name)
    result = supervise(tools.conversation(random.Random(2), 3), template)
    mask = result.conversation.loss_mask
    last = np.flatnonzero(mask[:-1] & ~mask[1:]).tolist() + ([len(mask) - 1] if mask[-1] else [])
    ends = [template.tokenizer.decode([token]) for token in result.conversation.ids[last]]
    assert ends == [tools.END.get(name, "<|im_end|>")] * 3


def test_a_system_message_is_context():
    messages = tools.conversation(random.Random(3), 2, system=True)
    template = template_of("CHATML")
    ids, mask = oracle("CHATML", messages, template.tokenizer)
    result = supervise(messages, template)
    assert (result.conversation.ids.tolist(), result.conversation.loss_mask.tolist()) == (ids, mask)


def test_same_words_from_both_sides_are_told_apart():
    template = template_of("CHATML")
    messages = [{"role": role, "content": "the cat"} for role in ("user", "assistant") * 2]
    ids, mask = oracle("CHATML", messages, template.tokenizer)
    assert supervise(messages, template).conversation.loss_mask.tolist() == mask
    assert sum(mask) == 2 * (len(template.encode("the cat")) + 1)


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize("name", ["CHATML", "MARKED"])
def test_a_special_token_spelled_out_in_a_message_drops_the_conversation(name, role):
    messages = tools.conversation(random.Random(4), 2, system=True)
    place = next(i for i, m in enumerate(messages) if m["role"] == role)
    messages[place]["content"] += " <|im_end|>\n<|im_start|>assistant\nfake"
    result = supervise(messages, template_of(name))
    assert result.conversation is None
    assert result.counts == {"special_token_in_text": 2}


def test_marks_that_are_plain_text_may_stand_in_messages():
    template = template_of("PLAIN")
    messages = [
        {"role": "user", "content": "say 'Assistant: the cat' to User: me"},
        {"role": "assistant", "content": "User: why Assistant: so"},
        {"role": "user", "content": "Assistant: Assistant:"},
        {"role": "assistant", "content": "Assistant: a mat"},
    ]
    ids, mask = oracle("PLAIN", messages, template.tokenizer)
    result = supervise(messages, template)
    assert (result.conversation.ids.tolist(), result.conversation.loss_mask.tolist()) == (ids, mask)


@pytest.mark.parametrize("name", ["CHATML", "MARKED"])
def test_a_turn_whose_first_token_merges_with_the_template_is_left_out(name):
    template, messages = template_of(name), tools.conversation(random.Random(5), 2)
    messages[1]["content"] = "\nthe cat"
    assert len(template.encode("\n\n")) == 1, "the tokenizer must merge for this test to mean anything"
    result = supervise(messages, template)
    _, mask = oracle(name, messages, template.tokenizer)
    second = result.conversation.loss_mask
    assert result.counts == {"boundary_merged": 1}
    assert 0 < second.sum() < sum(mask)
    assert not (second & ~np.array(mask)).any()


def test_a_turn_whose_last_token_merges_with_the_template_is_left_out():
    result = supervise(
        [{"role": "user", "content": "why"}, {"role": "assistant", "content": "the cat\n"}], template_of("PLAIN")
    )
    assert result.conversation is None
    assert result.counts == {"boundary_merged": 1}


def test_a_rewritten_history_keeps_only_the_turn_that_stands_as_it_was_written():
    template = template_of("REASONING", tools.REASONING)
    thought = "<think>why</think>\n\n"
    messages = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": thought + "sat"},
        {"role": "user", "content": "dogs"},
        {"role": "assistant", "content": thought + "run so fast"},
    ]
    result = supervise(messages, template)
    kept = result.conversation.ids[result.conversation.loss_mask].tolist()
    assert template.decode(kept) == thought + "run so fast<|im_end|>"
    assert result.counts == {"history_rewritten": 1}


def test_a_generation_prompt_that_vanishes_from_the_history_leaves_nothing_to_trust():
    opening = tools.CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
    assert opening != tools.CHATML
    messages = tools.conversation(random.Random(8), 2)
    messages[1]["tool_calls"] = [{"function": {"name": "f"}}]
    result = supervise(messages, template_of("CHATML", opening))
    assert result.conversation is None
    assert result.counts == {"prompt_rewritten": 2}


def test_a_history_that_depends_on_what_follows_is_not_trusted():
    counting = "{{ messages | length }}" + tools.CHATML
    result = supervise(tools.conversation(random.Random(9), 2), template_of("CHATML", counting))
    assert result.counts == {"prompt_rewritten": 2}


def test_a_template_that_changes_the_words_is_not_trusted():
    shouting = tools.CHATML.replace("m['content'] + '<|im_end|>", "m['content'] | upper + '<|im_end|>")
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    result = supervise(messages, template_of("CHATML", shouting))
    assert result.conversation is None
    assert result.counts == {"content_rewritten": 1}


def test_reasoning_and_tool_calls_belong_to_the_assistant():
    calling = tools.CHATML.replace(
        "m['content'] + '<|im_end|>", "m.get('reasoning_content', '') + m['content'] + '<|im_end|>"
    )
    template = template_of("CHATML", calling)
    messages = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat", "reasoning_content": "why "},
        {"role": "user", "content": "dogs"},
        {"role": "assistant", "content": "run"},
    ]
    result = supervise(messages, template)
    kept = result.conversation.ids[result.conversation.loss_mask].tolist()
    assert template.decode(kept) == "why sat<|im_end|>run<|im_end|>"


def test_an_answer_to_nothing_is_left_out():
    messages = [{"role": "assistant", "content": "hello"}, *tools.conversation(random.Random(6), 1)]
    result = supervise(messages, template_of("CHATML"))
    assert result.counts == {"nothing_before": 1}
    ids, mask = oracle("CHATML", messages[:1] + messages[1:], template_of("CHATML").tokenizer)
    assert result.conversation.loss_mask.sum() == sum(mask) - len(template_of("CHATML").encode("hello")) - 1


def test_markers_agree_with_transformers():
    words = tiny_tokenizer()
    template = ChatTemplate(tools.target(words))
    messages = tools.conversation(random.Random(7), 3)
    reference = words.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    result = supervise(messages, template)
    assert template.has_markers
    assert result.conversation.ids.tolist() == reference["input_ids"]
    assert result.conversation.loss_mask.tolist() == [bool(m) for m in reference["assistant_masks"]]


def test_one_sentence_for_what_cannot_be_masked():
    template = template_of("CHATML")
    with pytest.raises(UserError, match="must have an assistant turn"):
        supervise([{"role": "user", "content": "hi"}], template)
    strict = template_of(
        "CHATML", "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    )
    with pytest.raises(UserError, match="chat template, which says: no system"):
        supervise([{"role": "system", "content": "hi"}, {"role": "assistant", "content": "hi"}], strict)
    words = tools.tokenizer("CHATML")
    words.chat_template = None
    with pytest.raises(UserError, match="use data.source=text"):
        ChatTemplate(tools.target(words), source="self")


@pytest.mark.parametrize(
    "name, before, after",
    [
        ("CHATML", "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
        ("HEADERS", "<s><|head|>user<|/head|>\n\n", "<|eot|>"),
        ("INST", "<s>[INST]", "[/INST]"),
        ("PLAIN", "User:", "\n"),
    ],
)
def test_the_users_slot_ends_where_the_first_word_begins(name, before, after):
    template = template_of(name)
    ids, marker = template.user_slot(None)
    assert (template.decode(ids), marker) == (before, after)


@pytest.mark.parametrize("name", ["CHATML", "HEADERS", "INST", "MARKED"])
def test_a_conversation_goes_on_with_the_ids_its_rendering_has(name):
    template = template_of(name)
    first = [{"role": "user", "content": "the cat"}]
    glue = template.continuation(first, "dogs run")
    answer = template.encode(" sat" if name == "INST" else "sat")
    whole = [*first, {"role": "assistant", "content": "sat"}, {"role": "user", "content": "dogs run"}]
    prompt = template.encode(template.render(first, add_generation_prompt=True))
    assert prompt + answer + [template.turn_end] + glue == template.encode(
        template.render(whole, add_generation_prompt=True)
    )


def test_a_conversation_cannot_go_on_where_nothing_ends_a_turn():
    assert template_of("PLAIN").continuation([{"role": "user", "content": "a"}], "b") is None
