"""A server as the writer: exact ids, patience with failures, nothing lost, nothing of another model."""

import json
import threading
import time
from email.utils import formatdate

import pytest
from endpoint_tools import answering_target, serving

from distill.data import ChatTemplate, DataConfig, client, prepare
from distill.data.config import EndpointConfig
from distill.data.endpoint import Endpoint
from distill.data.store import read_manifest
from distill.decode import Request
from distill.errors import UserError

N = 8


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.005)


@pytest.fixture(scope="module")
def target():
    return answering_target()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"p {i}", "and then?"][: 1 + i % 2]}) + "\n" for i in range(N)))
    return path


def settings(path, url=None, *, source="prompts", greedy_share=1.0, endpoint=(), **options):
    usual = {
        "source": source,
        "path": None if source == "self" else str(path),
        "greedy_share": greedy_share,
        "max_answer_tokens": 12,
        "max_prompt_tokens": 30,
        "max_len": 128,
        "min_answer_tokens": 1,
        "shard_size": 2,
        "validation": 0.0,
        "temperature": 1.0,
        "top_k": 20,
    }
    if url is not None:
        more = {"retries": 3, "timeout_s": 20.0, "concurrency": 3, **dict(endpoint)}
        usual |= {"writer": "endpoint", "endpoint": EndpointConfig(url=url, **more)}
    return DataConfig(**{**usual, **options})


def written(config, target, folder):
    return prepare(config, target, folder, lambda _: None)


@pytest.fixture(scope="module")
def own(target, prompts, tmp_path_factory):
    """What the target writes itself, greedily."""
    return written(settings(prompts), target, tmp_path_factory.mktemp("own"))


def spans(data):
    """(prompt, written ids) of every supervised run of tokens."""
    found = set()
    for i in range(len(data)):
        ids, mask, begin = data[i].ids.tolist(), data[i].loss_mask.tolist(), None
        for place, supervised in enumerate([*mask, False]):
            if supervised and begin is None:
                begin = place
            elif not supervised and begin is not None:
                found.add((tuple(ids[:begin]), tuple(ids[begin:place])))
                begin = None
    return found


# ---------------------------------------------------------------------------------------------- right output
@pytest.mark.parametrize("dialect", ["vllm", "old-vllm", "llama.cpp", "pieces", "text"])
def test_greedy_answers_are_the_targets_own_to_the_last_id(target, prompts, own, tmp_path, dialect):
    with serving(target, dialect=dialect) as server:
        data = written(settings(prompts, server.url), target, tmp_path)
    assert len(own) >= 6
    assert data.data_hash == own.data_hash
    assert spans(data) <= server.generated


def test_sampled_answers_are_exactly_what_the_server_generated(target, prompts, tmp_path):
    config = settings(prompts, greedy_share=0.0, top_p=0.9)
    with serving(target) as server:
        data = written(
            settings(prompts, server.url, greedy_share=0.0, top_p=0.9, endpoint={"check": False}), target, tmp_path
        )
        bodies = [body for body in server.bodies if body["temperature"] > 0]
    assert spans(data) <= server.generated
    assert len(spans(data)) >= N
    eos = target.tokenizer.eos_token_id
    assert any(ids[-1] == eos for _, ids in spans(data)), "the end of the turn is supervised"
    for body in bodies:
        assert (body["temperature"], body["top_k"], body["top_p"]) == (1.0, 20, 0.9)
        assert (body["min_p"], body["repetition_penalty"], body["max_tokens"]) == (0.0, 1.0, config.max_answer_tokens)
        assert body["stop_token_ids"] == sorted(target.info.eos_ids)
    assert len({body["seed"] for body in bodies}) == len(bodies)


def test_user_turns_go_through_the_same_server(target, tmp_path):
    config = {"source": "self", "n_conversations": 5, "greedy_share": 0.5}
    with serving(target) as server:
        data = written(settings(None, server.url, **config), target, tmp_path)
        again = written(settings(None, server.url, **config), target, tmp_path / "again")
    slot, _ = ChatTemplate(target).user_slot(None)
    assert len(data) == 5
    assert data.data_hash == again.data_hash, "seeds follow the numbers of the conversations"
    assert spans(data) <= server.generated
    asked = [body for body in server.bodies if body["prompt"] == slot]
    assert len(asked) >= 10
    assert {body["max_tokens"] for body in asked} == {30}
    for i in range(5):
        assert data[i].ids[: len(slot)].tolist() == slot
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("endpoint")]


def test_the_key_is_sent_and_asked_for(target, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("WRITER_KEY", "s3cret")
    with serving(target) as server:
        written(settings(prompts, server.url, endpoint={"api_key_env": "WRITER_KEY"}), target, tmp_path)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer s3cret"}
    monkeypatch.delenv("WRITER_KEY")
    with pytest.raises(UserError, match="got WRITER_KEY, which is not set"):
        written(
            settings(prompts, "http://127.0.0.1:9/v1", endpoint={"api_key_env": "WRITER_KEY"}), target, tmp_path / "b"
        )


# -------------------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize("fault", [500, 503, (429, "0.05"), "drop", "short", "torn", "aborted"])
def test_what_passes_is_tried_again_and_changes_nothing(target, prompts, own, tmp_path, fault):
    with serving(target, faults=lambda n: fault if n % 3 == 0 else None) as server:
        data = written(settings(prompts, server.url, endpoint={"retries": 12}), target, tmp_path)
        assert len(server.bodies) > 1.3 * N
    assert data.data_hash == own.data_hash


def test_a_silent_server_is_asked_again(target, prompts, own, tmp_path):
    config = {"timeout_s": 0.7, "retries": 8}
    with serving(target, faults=lambda n: "hang" if n == 7 else None) as server:
        data = written(settings(prompts, server.url, endpoint=config), target, tmp_path)
    assert data.data_hash == own.data_hash


def test_retry_after_is_honoured(target, prompts, tmp_path):
    with serving(target, faults=lambda n: (429, "0.6") if n == 1 else None) as server:
        begin = time.monotonic()
        written(settings(prompts, server.url, endpoint={"check": False}), target, tmp_path)
    assert time.monotonic() - begin >= 0.6


@pytest.mark.parametrize(
    "header, low, high",
    [
        ("7", 7, 7),
        ("0.5", 0.5, 0.5),
        (None, 0, 0),
        ("soon", 0, 0),
        ("nan", 0, 0),
        ("-3", 0, 0),
        ("1e9", 600, 600),
        (formatdate(time.time() + 3600, usegmt=True), 600, 600),
        (formatdate(time.time() - 60, usegmt=True), 0, 0),
    ],
)
def test_the_forms_of_retry_after(header, low, high):
    assert low <= client._seconds(header) <= high


@pytest.mark.parametrize("death", [500, "drop"])
def test_an_endpoint_that_dies_half_way_loses_nothing_that_was_written(target, prompts, own, tmp_path, death):
    with serving(target, faults=lambda n: death if n > 11 else None) as server:
        config = settings(prompts, server.url, endpoint={"concurrency": 2})
        with pytest.raises(UserError, match=r"must answer, got .* after 4 tries; what was written so far is kept"):
            written(config, target, tmp_path)
    kept = read_manifest(tmp_path)
    assert 0 < kept.conversations < len(own)
    assert kept.stopped is None
    with serving(target) as server:
        data = written(settings(prompts, server.url), target, tmp_path)
        assert len(server.bodies) < 11 + 5
    assert data.data_hash == own.data_hash


def test_nobody_there_is_one_sentence(target, prompts, tmp_path):
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/v1 must answer, got a refused connection after 4 tries"):
        written(settings(prompts, "http://127.0.0.1:9/v1"), target, tmp_path)
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_is_not_repeated(target, prompts, tmp_path, status):
    with serving(target, faults=lambda n: status) as server:
        with pytest.raises(UserError, match=rf"must take the request, got status {status} \(on purpose\)"):
            written(settings(prompts, server.url), target, tmp_path)
        assert len(server.bodies) == 1


def test_the_end_does_not_wait_for_answers_nobody_needs(target, tmp_path):
    """Writing user turns runs ahead; when there are enough conversations, what hangs is broken off."""
    slot, _ = ChatTemplate(target).user_slot(None)
    turns = []

    def faults(n):
        turns.extend([n] if server.bodies[-1]["prompt"] == slot else [])
        return "hang" if len(turns) > 5 and turns[-1] == n else None

    with serving(target, faults=faults) as server:
        config = settings(None, server.url, source="self", n_conversations=2, endpoint={"concurrency": 12})
        begin = time.monotonic()
        assert len(written(config, target, tmp_path)) == 2
        assert time.monotonic() - begin < 2.5
        assert len(turns) > 5, "some must hang for this test to mean anything"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("endpoint")]


# ----------------------------------------------------------------------------------------------- wrong model
def test_another_models_tokens_are_refused(target, prompts, own, tmp_path):
    with serving(answering_target(seed=1)) as server:
        with pytest.raises(UserError, match=r"must serve the target 'tiny-llama', got 'tiny-llama', .* of \d+ greedy"):
            written(settings(prompts, server.url), target, tmp_path)
        assert read_manifest(tmp_path) is None
        data = written(settings(prompts, server.url, endpoint={"check": False}), target, tmp_path)
    assert data.data_hash != own.data_hash


def test_the_right_model_is_reported(target, prompts, tmp_path, capsys):
    with serving(target) as server:
        written(settings(prompts, server.url), target, tmp_path)
    line = next(line for line in capsys.readouterr().err.splitlines() if "greedy" in line)
    said, total = line.split("; ")[1].split(" greedy")[0].split(" of ")
    assert said == total
    assert "returns token ids" in line


@pytest.mark.parametrize(
    "models, wanted, chosen",
    [
        (("tiny-llama", "b"), None, "tiny-llama"),
        (("some/path",), None, "some/path"),
        (("a", "b"), "b", "b"),
        (("a", "b"), None, "must be one of a, b, .* got None"),
        (("a", "tiny-lama"), "tiny-llama", "got tiny-llama. Did you mean 'tiny-lama'"),
        ((), None, r"must be one of \(none\)"),
    ],
)
def test_the_model_is_chosen_by_name(target, models, wanted, chosen):
    with serving(target, models=models) as server:
        config = EndpointConfig(url=server.url, model=wanted)
        if " " in chosen or "\\" in chosen:
            with pytest.raises(UserError, match=chosen):
                Endpoint(config, target, ChatTemplate(target))
        else:
            assert Endpoint(config, target, ChatTemplate(target)).model == chosen
            assert {body["model"] for body in server.bodies} == {chosen}


def test_a_server_that_changes_the_prompt_is_refused(target, prompts, tmp_path):
    with serving(target) as server:
        server.extra_prompt_tokens = 1
        with pytest.raises(UserError, match="must continue the prompt's own token ids"):
            written(settings(prompts, server.url), target, tmp_path)


# ------------------------------------------------------------------------------------------ reading answers
@pytest.fixture(scope="module")
def endpoint(target):
    with serving(target, dialect="text") as server:
        yield Endpoint(EndpointConfig(url=server.url), target, ChatTemplate(target))


def read(endpoint, choice, **usage):
    return endpoint._read({"choices": [choice], "usage": usage}, Request(prompt=[5, 6], max_new_tokens=9))


def test_text_that_tokenises_otherwise_is_dropped(endpoint):
    assert read(endpoint, {"text": "a\u00e9b", "finish_reason": "length"}).fault == "ids_unknown"
    assert read(endpoint, {"text": "ab", "finish_reason": "length"}, completion_tokens=3).fault == "ids_unknown"
    for pieces in (["ab"], ["a", "b", "c"], ["a"], ["b", "a"]):
        choice = {"text": "ab", "finish_reason": "length", "logprobs": {"tokens": pieces}}
        assert read(endpoint, choice).fault == "ids_unknown"


def test_the_end_of_the_turn_is_added_only_where_it_is_certain(endpoint, target, monkeypatch):
    eos, (a, b) = target.tokenizer.eos_token_id, target.tokenizer.encode("ab", add_special_tokens=False)
    choice = {"text": "ab", "finish_reason": "stop"}
    assert read(endpoint, choice, completion_tokens=3).ids == [a, b, eos]
    assert read(endpoint, choice, completion_tokens=2).ids == [a, b, eos]
    assert read(endpoint, {**choice, "token_ids": [a, b]}, completion_tokens=3).ids == [a, b, eos]
    assert read(endpoint, {**choice, "token_ids": [a, b]}, completion_tokens=2).fault == "end_unknown"
    assert read(endpoint, {**choice, "text": "ab<|im_end|>"}).ids == [a, b, eos]
    monkeypatch.setattr(endpoint, "_eos", [0, eos])
    assert read(endpoint, choice).fault == "end_unknown"
    assert read(endpoint, {**choice, "stop_reason": eos}).ids == [a, b, eos]
    assert read(endpoint, {**choice, "stop_reason": "stop string"}).fault == "end_unknown"
    assert read(endpoint, {**choice, "token_ids": [a, b, 7]}).fault == "end_unknown"


def test_ids_behind_the_end_of_the_turn_are_cut(endpoint, target):
    eos = target.tokenizer.eos_token_id
    answer = read(endpoint, {"text": "", "finish_reason": "length", "token_ids": [9, eos, 8]})
    assert (answer.ids, answer.ended) == ([9, eos], True)


def test_ids_outside_the_vocabulary_are_refused(endpoint, target):
    with pytest.raises(UserError, match="must have token ids below"):
        read(endpoint, {"text": "", "finish_reason": "length", "token_ids": [target.info.vocab_size]})


def test_answers_without_ids_are_counted(target, prompts, tmp_path, monkeypatch):
    with serving(target, dialect="text") as server:
        real = server.answer

        def odd(body):
            answer = real(body)
            if "p 3" in target.tokenizer.decode(body["prompt"]):
                answer["choices"][0]["text"] += "\u00e9"
            return answer

        monkeypatch.setattr(server, "answer", odd)
        data = written(settings(prompts, server.url), target, tmp_path)
    assert data.stats["left_out"]["ids_unknown"] == 1


# --------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"writer": "endpoint"}, "data.writer=endpoint and data.endpoint.url go together"),
        ({"endpoint": EndpointConfig(url="http://a/v1")}, "data.writer=endpoint and data.endpoint.url go together"),
        ({"source": "text", "path": "x", "writer": "endpoint"}, "data.writer must be target for data.source=text"),
    ],
)
def test_options_that_do_not_go_together(options, sentence):
    with pytest.raises(UserError, match=sentence):
        DataConfig(**options)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"url": "localhost:8000"}, "data.endpoint.url must look like http://host:8000/v1, got 'localhost:8000'"),
        ({"url": "http:///v1"}, "must look like"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"retries": -1}, "retries must be at least 0"),
        ({"timeout_s": 0.0}, "timeout_s must be above 0"),
    ],
)
def test_options_out_of_range(options, sentence):
    with pytest.raises(UserError, match=sentence):
        EndpointConfig(**options)


@pytest.mark.parametrize("url", ["http://[::1/v1", "http://127.0.0.1:port/v1"])
def test_an_address_that_is_none_is_refused_at_once(url):
    from distill.data.client import Client

    with pytest.raises(UserError, match="data.endpoint.url must be an address"):
        Client(url, timeout_s=1, retries=5)
