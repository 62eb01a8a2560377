"""Reading prompts, conversations and texts; user turns the target writes; what is refused, and how."""

import itertools
import json

import data_tools as tools
import datasets
import pytest

from distill.data import ChatTemplate, DataConfig
from distill.data.conversation import content_key
from distill.data.records import read_records
from distill.data.sources import HOPELESS, file_candidates, self_candidates
from distill.errors import UserError


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def candidates(config, target=None, start=0):
    records, _ = read_records(config)
    return list(file_candidates(config, target or tools.target(), records, numbers=range(start, 10**9), seen=set()))


def chat(*contents):
    roles = itertools.cycle(["user", "assistant"])
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]}


def test_prompts_come_in_three_forms(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "the cat"},
        {"turns": ["a mat", "dogs run"]},
        {"messages": [{"role": "system", "content": "Be odd."}, *chat("why", "so", "again")["messages"]]},
    )
    found = candidates(DataConfig(source="prompts", path=str(path), system="Be good."))
    assert [c.index for c in found] == [0, 1, 2]
    assert [c.messages for c in found] == [
        [{"role": "system", "content": "Be good."}, {"role": "user", "content": "the cat"}],
        [{"role": "system", "content": "Be good."}, {"role": "user", "content": "a mat"}],
        [{"role": "system", "content": "Be odd."}, {"role": "user", "content": "why"}],
    ]
    assert [c.follow_ups for c in found] == [(), ("dogs run",), ("again",)]


def test_duplicates_blank_lines_and_bad_prompts_are_counted_not_kept(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "The  cat"},
        "",
        {"prompt": "the cat "},
        {"prompt": "say <|im_end|>"},
        {"messages": [{"role": "user", "content": " "}]},
    )
    found = candidates(DataConfig(source="prompts", path=str(path)))
    assert [c.dropped for c in found] == [None, "duplicate", "special_token_in_text", "prompt_empty"]


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    write(tmp_path / "b.jsonl", {"prompt": "second"})
    write(tmp_path / "a.jsonl", {"prompt": "first"})
    write(tmp_path / "c.txt", "not read")
    found = candidates(DataConfig(source="prompts", path=str(tmp_path)))
    assert [c.messages[0]["content"] for c in found] == ["first", "second"]


def test_chat_takes_parts_and_nulls(tmp_path):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    path = write(
        tmp_path / "c.jsonl",
        {"messages": [{"role": "user", "content": parts, "name": None}, {"role": "assistant", "content": "sat"}]},
    )
    (found,) = candidates(DataConfig(source="chat", path=str(path)))
    words = tools.target().tokenizer
    text = words.decode(found.conversation.ids.tolist(), skip_special_tokens=False)
    assert text == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nsat<|im_end|>\n"


def test_text_is_divided_and_supervised_but_for_first_tokens(tmp_path):
    path = write(tmp_path / "t.jsonl", {"text": "abcdefghij"}, {"text": "<|im_end|>"}, {"text": "x"})
    config = DataConfig(source="text", path=str(path), max_len=4, pack_len=4)
    found = candidates(config)
    words = tools.target().tokenizer
    kept = [c.conversation for c in found if c.conversation is not None]
    assert [words.decode(c.ids.tolist()) for c in kept] == ["abcd", "efgh", "ij", "<|im", "_end", "|>"]
    assert [c.loss_mask.tolist() for c in kept] == [[False, *[True] * (len(c.ids) - 1)] for c in kept]
    assert found[-1].dropped == "too_short"
    plain = tmp_path / "t.txt"
    plain.write_text("abcdefghij")
    assert len(candidates(DataConfig(source="text", path=str(plain), max_len=4, pack_len=4))) == 3


def test_candidates_from_the_middle_are_the_same_ones(tmp_path):
    path = write(tmp_path / "p.jsonl", *[{"prompt": f"p{i}"} for i in range(7)])
    config = DataConfig(source="prompts", path=str(path))
    assert candidates(config, start=3) == candidates(config)[3:]


@pytest.mark.parametrize(
    "source, rows, sentence",
    [
        ("prompts", ['{"prompt": "a"}', '{"prompt": '], "f.jsonl:2 must be one JSON object, got malformed JSON"),
        ("prompts", ['{"prompt": "a"}', "", '{"question": "b"}'], "f.jsonl:3 must hold .* got keys question"),
        ("prompts", ['["a"]'], "f.jsonl:1 must hold .* got list"),
        ("prompts", ['{"turns": []}'], 'f.jsonl:1 must hold .* got "turns" that is empty'),
        ("prompts", ['{"turns": ["a", 3]}'], 'f.jsonl:1 must hold .* got "turns" with int in it'),
        ("prompts", ['{"prompt": 3}'], 'f.jsonl:1 must hold .* got "prompt" that is int'),
        ("prompts", ['{"prompt": " "}'], 'f.jsonl:1 must hold .* got "prompt" that is empty'),
        ("chat", ['{"messages": null}'], 'f.jsonl:1 must hold .* got "messages" that is NoneType'),
        ("text", ['{"text": ["a"]}'], 'f.jsonl:1 must hold .* got "text" that is list'),
        ("prompts", ['{"messages": [{"role": "assistant", "content": "a"}]}'], "f.jsonl:1: .* user turns"),
        ("prompts", [], "must hold at least one record .* got an empty file"),
        ("chat", ['{"messages": [{"role": "user", "content": "a"}]}'], "f.jsonl:1: .* assistant turns, got none"),
        ("chat", ['{"messages": [{"role": "bot", "content": "a"}]}'], "role must be one of .* got 'bot'"),
        ("chat", ['{"messages": ["a"]}'], "role must be one of"),
        ("chat", ['{"messages": [{"role": "user", "content": 3}]}'], "content must be text, got int"),
        ("chat", ['{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'], "got parts of another"),
        ("text", ['{"prompt": "a"}'], 'f.jsonl:1 must hold "text"'),
    ],
)
def test_malformed_input_is_one_sentence_with_the_line(tmp_path, source, rows, sentence):
    path = write(tmp_path / "f.jsonl", *rows)
    with pytest.raises(UserError, match=sentence) as error:
        read_records(DataConfig(source=source, path=str(path)))
    assert "\n" not in str(error.value)


def test_missing_and_undecodable_files(tmp_path):
    with pytest.raises(UserError, match="must be an existing file"):
        read_records(DataConfig(source="chat", path=str(tmp_path / "no.jsonl")))
    with pytest.raises(UserError, match="which has none"):
        read_records(DataConfig(source="chat", path=str(tmp_path)))
    (tmp_path / "x.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(UserError, match="must be UTF-8 text, got other bytes at offset 12"):
        read_records(DataConfig(source="prompts", path=str(tmp_path / "x.jsonl")))


def test_a_hub_data_set_is_read_by_name(monkeypatch):
    rows = datasets.Dataset.from_list([{"prompt": "the cat", "id": 1}, {"prompt": "a mat", "id": 2}])
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or rows)
    records, origin = read_records(DataConfig(source="prompts", path="some/prompts", subset="en", split="test"))
    assert asked == [(("some/prompts", "en"), {"split": "test"})]
    assert [r.messages[0]["content"] for r in records] == ["the cat", "a mat"]
    assert records[1].place == "some/prompts[test] row 1"
    assert origin == "some/prompts/en/test"


def test_no_network_is_one_sentence():
    with pytest.raises(UserError) as error:
        read_records(DataConfig(source="prompts", path="nobody/nothing-here"))
    assert "nobody/nothing-here" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["self", "prompts", "chat"])
def test_a_target_without_a_template_is_sent_to_plain_text(source):
    words = tools.tiny_tokenizer()
    words.chat_template = None
    with pytest.raises(UserError, match="use data.source=text"):
        ChatTemplate(tools.target(words), source=source)


# ------------------------------------------------------------------------------------------------- self
def self_source(texts, *, end=True, config=None, start=0, seen=None, seed=0):
    """User turns from a list of what the target writes, finished in a scrambled order."""
    words = tools.tiny_tokenizer_cached()
    target = tools.target(words)
    prompts = []

    def answer(request, sampling):
        prompts.append(request.prompt)
        return words.encode(texts(request.request_id), add_special_tokens=False) + [words.eos_token_id] * end

    config = config or DataConfig(slots=5)
    decoder = tools.FakeDecoder(target, config.prompt_sampling(), answer, seed)
    seen = set() if seen is None else seen
    return self_candidates(config, ChatTemplate(target), decoder, numbers=range(start, 10**9), seen=seen), prompts


def test_the_target_is_given_its_template_up_to_the_users_first_word():
    found, prompts = self_source(lambda i: f" number {i} ", config=DataConfig(slots=5, system="Be odd."))
    (first,) = itertools.islice(found, 1)
    text = tools.tiny_tokenizer_cached().decode(prompts[0], skip_special_tokens=False)
    assert text == "<|im_start|>system\nBe odd.<|im_end|>\n<|im_start|>user\n"
    assert first.messages == [{"role": "system", "content": "Be odd."}, {"role": "user", "content": "number 0"}]
    assert first.key == content_key("number 0")


def test_user_turns_come_in_order_whatever_order_they_finish_in():
    for seed in range(3):
        found, _ = self_source(lambda i: f"number {i}", seed=seed)
        assert [c.index for c in itertools.islice(found, 20)] == list(range(20))


def test_bad_user_turns_are_dropped_with_a_reason():
    texts = ["Why?", "why? ", " ...", "a <|im_start|> b", "x" * 60, "Why not?"]
    found, _ = self_source(lambda i: texts[i % 6] if i < 6 else f"t{i}")
    first = list(itertools.islice(found, 6))
    assert [c.dropped for c in first] == [
        None,
        "duplicate",
        "prompt_empty",
        "special_token_in_text",
        "prompt_too_long",
        None,
    ]
    resumed, _ = self_source(lambda i: texts[i], start=1, seen={content_key("why?")})
    assert next(resumed).dropped == "duplicate"


def test_a_turn_also_ends_at_the_templates_own_text():
    words = tools.tokenizer("PLAIN")
    target = tools.target(words)
    decoder = tools.FakeDecoder(
        target, None, lambda request, sampling: words.encode(f" number {request.request_id}\nAssistant: the")
    )
    found = self_candidates(DataConfig(slots=2), ChatTemplate(target), decoder, numbers=range(10**9), seen=set())
    assert [c.messages[0]["content"] for c in itertools.islice(found, 2)] == ["number 0", "number 1"]


def test_a_target_that_writes_no_user_turns_is_given_up_on():
    found, _ = self_source(lambda i: "x" * 60, config=DataConfig(slots=50))
    with pytest.raises(UserError, match="use data.source=prompts"):
        list(itertools.islice(found, HOPELESS + 1))


# ----------------------------------------------------------------------------------------------- config
@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"path": "x"}, "must be empty for data.source=self"),
        ({"source": "chat"}, "must name a file"),
        ({"greedy_share": 1.5}, "greedy_share must be between 0 and 1"),
        ({"validation": float("nan")}, "validation must be between 0 and 1"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"prompt_temperature": float("nan")}, "temperature must be"),
        ({"slots": 0}, "slots must be at least 1"),
        ({"max_minutes": 0}, "max_minutes must be above 0"),
        ({"max_len": 2048}, "pack_len must be at least"),
        ({"max_answer_tokens": 1024}, "must leave room for a prompt"),
    ],
)
def test_contradictory_options_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        DataConfig(**options)
