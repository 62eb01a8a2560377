"""The protocol: same counting, rotating order, shared history, one row per arm and group, resumption."""

import gc
import json
from types import SimpleNamespace

import pytest
import torch

from distill.decode import StepRecord
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.errors import UserError
from distill.export import collect, save_drafter
from distill.sampling import Sampling
from distill.target import TargetConfig
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic, PlanConfig, Static
from distill.vocab import choose_vocab
from serve_eval import bench
from serve_eval.arms import ArmRun, DecoderArm, PeakMemory, TransformersArm, count_ids, plan_label, rotation
from serve_eval.command import repeat, typed
from serve_eval.measure import Conditions, measure_prompt
from serve_eval.prompts import Prompt
from serve_eval.replay import ReplayDrafter
from serve_eval.rows import read_records, read_rows

GREEDY = Sampling()


@pytest.fixture(scope="module")
def target():
    return tiny_target(tokenizer=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "export"
    target = tiny_target(tokenizer=True)
    vocab, _ = choose_vocab(torch.ones(target.info.vocab_size), 32)
    return save_drafter(Eagle3(Eagle3Config(draft_vocab_size=32), target, vocab), folder, provenance=collect())


# ---------------------------------------------------------------------------------------------------- counting
@pytest.mark.parametrize(
    "ids, limit, kept",
    [
        ([5, 6, 2, 7, 2], 9, [5, 6, 2]),
        ([5, 6, 7, 8], 3, [5, 6, 7]),
        ([5, 6, 7, 2], 3, [5, 6, 7]),
        ([2], 3, [2]),
        ([9, 5], 3, [9]),
        ([], 3, []),
    ],
)
def test_ids_count_up_to_the_first_end_token_and_the_limit(ids, limit, kept):
    assert count_ids(ids, (2, 9), limit) == kept


@pytest.mark.parametrize("limit", [1, 2, 7, 16])
def test_all_arms_count_alike_also_at_an_end_token(target, limit):
    prompt = target.encode_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    free = DecoderArm(target, sampling=GREEDY).run(prompt, request_id=0, max_new_tokens=16, ignore_eos=True)
    assert len(free.ids) == 16
    # Whatever comes fifth ends the text from here on; the model runs on as if nothing had happened.
    ending = SimpleNamespace(**vars(target))
    ending.info = SimpleNamespace(**{n: getattr(target.info, n) for n in target.info.__dataclass_fields__})
    ending.info.eos_ids = (free.ids[4],)
    for name in ("forward", "logits", "new_cache", "embed", "maskless"):
        setattr(ending, name, getattr(target, name))
    expected = count_ids(free.ids, ending.info.eos_ids, limit)
    replay = ReplayDrafter(target)
    replay.script = prompt + free.ids
    arms = [
        DecoderArm(ending, sampling=GREEDY),
        DecoderArm(ending, sampling=GREEDY, drafter=replay, plan=Chain(3)),
        TransformersArm(ending, sampling=GREEDY),
    ]
    for arm in arms:
        run = arm.run(prompt, request_id=0, max_new_tokens=limit)
        assert run.ids == expected, arm.name
        assert sum(len(step.tokens) for step in run.steps) == (len(expected) - 1 if arm.kind != "hf" else 0)
        assert run.ttft_s > 0
        assert run.decode_s >= 0


def test_transformers_ignores_the_generation_defaults_of_a_checkpoint(target):
    prompt = target.encode_chat([{"role": "user", "content": "why"}], add_generation_prompt=True)
    plain = TransformersArm(target, sampling=GREEDY).run(prompt, request_id=0, max_new_tokens=12)
    saved = target.model.generation_config
    try:
        target.model.generation_config = type(saved)(repetition_penalty=5.0, min_new_tokens=3)
        again = TransformersArm(target, sampling=GREEDY).run(prompt, request_id=0, max_new_tokens=12)
        assert target.model.generation_config.repetition_penalty == 5.0  # put back
    finally:
        target.model.generation_config = saved
    assert again.ids == plain.ids


def test_transformers_samples_by_request(target):
    arm = TransformersArm(target, sampling=Sampling(temperature=1.0))
    prompt = target.encode_chat([{"role": "user", "content": "why"}], add_generation_prompt=True)
    before = torch.random.get_rng_state()
    ids = [arm.run(prompt, request_id=r, max_new_tokens=12, ignore_eos=True).ids for r in (0, 0, 1)]
    assert ids[0] == ids[1] != ids[2]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_every_arm_comes_first_equally_often():
    orders = [rotation(["a", "b", "c"], turn) for turn in range(6)]
    assert orders[:4] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_plans_have_names_that_tell_them_apart():
    plans = [Chain(3), Chain(4), Dynamic(top_k=4, depth=4, total=12), Static(((0,), (1,), (0, 0)))]
    assert [plan_label(p) for p in plans] == ["chain-3", "chain-4", "dynamic-4x4-12", "static-4x2"]


# ---------------------------------------------------------------------------------------------------- protocol
class FakeTarget:
    """Encodes a conversation as its total length, so that the history an arm saw can be read off its prompt."""

    info = SimpleNamespace(name="fake", eos_ids=(2,), max_positions=1000)
    device = "cpu"

    def __init__(self):
        self.seen = []

    def encode_chat(self, messages, *, add_generation_prompt):
        assert add_generation_prompt
        self.seen.append([m["content"] for m in messages])
        return [len(messages)] * len(messages)

    def decode(self, ids, skip_special_tokens=True):
        return "-".join(map(str, ids))


class FakeArm:
    def __init__(self, name, log, ids):
        self.name, self.kind, self.tree = name, {"ar": "ar", "hf": "hf"}.get(name, "spec"), None
        self.log, self.ids = log, ids

    def run(self, prompt, *, request_id, max_new_tokens, ignore_eos=False):
        self.log.append((self.name, len(prompt), request_id))
        steps = [StepRecord(tokens=tuple(self.ids[1:]), accepted=1, offered=3)] if self.kind == "spec" else []
        return ArmRun(ids=list(self.ids), ttft_s=0.1, decode_s=float(len(self.log)), steps=steps)


def test_arms_are_interleaved_and_all_see_the_ar_arms_answer():
    log, target = [], FakeTarget()
    arms = [FakeArm("ar", log, [7, 8, 2]), FakeArm("chain-3", log, [7, 8, 2]), FakeArm("hf", log, [7, 8, 2])]
    prompt = Prompt(
        id="q", set="s", category="c", turns=("first", "second"), history=({"role": "system", "content": "x"},)
    )
    conditions = Conditions(sampling=GREEDY, max_new_tokens=8, repeats=2)
    records = measure_prompt(target, prompt, arms, conditions, index=3, memory=PeakMemory("cpu"), shown=True)
    assert [name for name, *_ in log] == [
        *("ar", "chain-3", "hf", "chain-3", "hf", "ar"),  # first turn: index 3, repeats 0 and 1
        *("chain-3", "hf", "ar", "hf", "ar", "chain-3"),
    ]
    assert {r for *_, r in log[:6]} == {3 * 64}
    assert {r for *_, r in log[6:]} == {3 * 64 + 1}
    assert target.seen == [["x", "first"], ["x", "first", "7-8", "second"]]  # the end token is not text
    assert [(r.arm, r.turn, r.prompt_tokens) for r in records[:4]] == [
        *(("ar", 0, 2), ("chain-3", 0, 2), ("hf", 0, 2)),
        ("ar", 1, 4),
    ]
    spec = records[1]
    assert (spec.emitted, spec.accepted, spec.offered) == ([2], [1], [3])
    assert spec.decode_s == [2.0, 4.0]
    assert spec.matches
    assert spec.pieces == ["7", "-8", "-2"]
    assert records[0].pieces is None


def test_a_differing_output_is_reported_with_the_targets_lead(target):
    log = []
    prompt = Prompt(id="q", set="s", category="c", turns=("hi",))
    ar = DecoderArm(target, sampling=GREEDY)
    ids = ar.run(
        target.encode_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True),
        request_id=0,
        max_new_tokens=6,
    ).ids
    wrong = [*ids[:3], (ids[3] + 1) % 50 + 4, *ids[4:]]
    arms = [ar, FakeArm("chain-3", log, wrong)]
    conditions = Conditions(sampling=GREEDY, max_new_tokens=6)
    records = measure_prompt(target, prompt, arms, conditions, index=0, memory=PeakMemory("cpu"))
    assert [r.matches for r in records] == [True, False]
    assert records[1].first_difference == 3
    assert records[1].difference_gap > 1e-4
    assert records[1].difference_tie is False


def test_sampled_transformers_output_is_not_expected_to_match(target):
    log = []
    arms = [FakeArm("ar", log, [7, 2]), FakeArm("hf", log, [8, 2])]
    prompt = Prompt(id="q", set="s", category="c", turns=("hi",))
    conditions = Conditions(sampling=Sampling(temperature=1.0), max_new_tokens=6)
    records = measure_prompt(FakeTarget(), prompt, arms, conditions, index=0, memory=PeakMemory("cpu"))
    assert [r.matches for r in records] == [True, None]


def sees_sixty_mebibytes(meter) -> bool:
    """Whether an allocation shows, or the system does not say."""
    meter.start()
    block = torch.ones(60 << 20, dtype=torch.uint8)
    peak = meter.stop()
    del block
    return peak is None or peak > 50 << 20


def test_peak_memory_sees_an_allocation_or_says_nothing():
    meter = PeakMemory("cpu")
    assert sees_sixty_mebibytes(meter)


def test_peak_memory_is_not_hidden_by_garbage_that_falls_later():
    cycle = [torch.ones(60 << 20, dtype=torch.uint8)]
    cycle.append(cycle)
    del cycle
    meter = PeakMemory("cpu")
    gc.collect()
    assert sees_sixty_mebibytes(meter)


def test_peak_memory_is_not_hidden_by_free_memory_that_is_used_again():
    del_me = torch.ones(30 << 20, dtype=torch.uint8)
    del del_me  # from now on the C library takes blocks up to this size from its heap
    blocks = [torch.ones(3 << 20, dtype=torch.uint8) for _ in range(60)]
    last = blocks.pop()  # keeps the heap from shrinking
    blocks.clear()
    meter = PeakMemory("cpu")
    assert sees_sixty_mebibytes(meter)
    del last


# -------------------------------------------------------------------------------------------------- whole task
def config_for(exported, folder, /, **changes):
    prompts = folder / "p.jsonl"
    lines = [{"turns": [f"ask {i}"] * (1 + i % 2), "category": "ab"[i % 2]} for i in range(3)]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    fields = {
        "checkpoint": str(exported.parent),
        "target": TargetConfig(name="auto", dtype="float32", verify=False),
        "prompts": [str(prompts)],
        "max_new_tokens": 6,
        "repeats": 1,
        "warmup": 1,
        "cost": False,
        "report": False,
        "tree": PlanConfig(name="chain", length=2),
        "out": str(folder / "out"),
    }
    return bench.Config(**(fields | changes))


def test_bench_writes_rows_for_every_arm_set_and_category(checkpoint, tmp_path, capsys):
    config = config_for(checkpoint, tmp_path, trees=[PlanConfig(name="dynamic", top_k=2, depth=2, total=5)])
    result = bench.run(config)
    rows = read_rows(tmp_path / "out" / "results.jsonl")
    assert rows == result.rows
    assert [(r.arm, r.category) for r in rows[:5]] == [
        *(("ar", "all"), ("chain-2", "all"), ("dynamic-2x2-5", "all"), ("hf", "all")),
        ("ar", "a"),
    ]
    assert len(rows) == 4 * 3
    ar, chain = rows[0], rows[1]
    assert (ar.tau, ar.speedup_total, ar.match_rate, ar.drafter, ar.tree) == (1.0, 1.0, 1.0, None, None)
    assert (chain.drafter, chain.tree, chain.verifier, chain.match_rate) == ("eagle3", "chain-2", "match", 1.0)
    assert (chain.n_prompts, chain.n_turns, chain.target) == (3, 4, "tiny-llama")
    assert chain.settings["checkpoint"] == config.checkpoint
    assert chain.provenance["versions"]["torch"] == torch.__version__
    assert len(read_records(tmp_path / "out" / "records.jsonl")) == 4 * 4
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["records.jsonl", "results.jsonl"]
    assert "chain-2" in capsys.readouterr().out


def test_an_interrupted_bench_goes_on_where_it_stopped(checkpoint, tmp_path, monkeypatch):
    measured = []

    def counting(target, prompt, *args, **kwargs):
        measured.append(prompt.id)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure_prompt(target, prompt, *args, **kwargs)

    monkeypatch.setattr(bench, "measure_prompt", counting)
    config = config_for(checkpoint, tmp_path, hf=False)
    with pytest.raises(KeyboardInterrupt):
        bench.run(config, quiet=True)
    assert not (tmp_path / "out" / "results.jsonl").exists()
    result = bench.run(config, quiet=True)
    assert measured == ["1", "2", "2", "3"]  # categories take turns: a, b, a
    assert {r.id for r in result.records} == {"1", "2", "3"}


def test_the_time_limit_stops_after_the_prompt_it_passes(checkpoint, tmp_path):
    result = bench.run(config_for(checkpoint, tmp_path, hf=False, max_minutes=1e-9), quiet=True)
    assert {r.id for r in result.records} == {"1"}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"checkpoint": None}, "either checkpoint .* must be given, got none"),
        ({"checkpoint": "nowhere"}, "nowhere, which does not exist"),
        ({"limit": 0}, "limit must be"),
        (
            {"max_new_tokens": 4000},
            r"prompt '1' of p must fit the model's 2048 positions, got \d+ tokens plus 4000 for",
        ),
        ({"trees": [PlanConfig(name="chain", length=2)]}, "got chain-2 twice"),
        ({"verifier": "metch"}, "Did you mean 'match'"),
        ({"typical_delta": 0.5}, "left alone without verify=typical"),
        ({"tree": PlanConfig(name="static", paths=[[99]])}, "a rank below the 32 tokens"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(checkpoint, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        bench.run(config_for(checkpoint, tmp_path, **changes), quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"repeats": 0}, {"top_p": 0.0}, {"max_minutes": 0}],
)
def test_impossible_options_are_refused_when_the_config_is_made(changes):
    with pytest.raises(UserError):
        bench.Config(**changes)


def test_the_repeat_command_names_what_was_changed():
    config = bench.Config(
        checkpoint="runs/demo",
        target=TargetConfig(name="auto", dtype="float32"),
        prompts=["mtbench", "my set.jsonl"],
        limit=4,
        tree=PlanConfig(name="chain", length=2),
        trees=[PlanConfig(top_k=2)],
        report=False,
    )
    assert repeat("bench", config) == (
        "python -m serve_eval task=bench checkpoint=runs/demo target.dtype=float32 "
        "'prompts=[mtbench,my set.jsonl]' limit=4 tree.name=chain tree.length=2 'trees=[{top_k:2}]' report=false"
    )
    assert typed(["/x/serve_eval/__main__.py", "task=bench"]) == "python -m serve_eval task=bench"
    assert typed(["/bin/draftsmith", "eval"]) == "draftsmith eval"
