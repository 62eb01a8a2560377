"""Arms that differ in more than their plan, transformers' own speculative decoding, and joining benchmarks."""

import json
import shutil

import pytest
import torch

from distill.drafters.draft_model import DraftModel, DraftModelConfig
from distill.errors import UserError
from distill.export import collect, save_drafter
from distill.sampling import Sampling
from distill.target import TargetConfig
from distill.target.tiny import tiny_target
from distill.tree import PlanConfig
from serve_eval import bench, compare
from serve_eval.arms import DecoderArm, PeerArm
from serve_eval.rows import read_rows

GREEDY = Sampling()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "two.jsonl"
    lines = [{"prompt": "ab ab ab ab ab ab"}, {"prompt": "what is it?"}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    target = tiny_target(tokenizer=True)
    drafter = DraftModel(DraftModelConfig(n_layers=2), target)
    return save_drafter(
        drafter, tmp_path_factory.mktemp("run") / "export", provenance=collect(), card={"train/tokens": 7.0}
    )


def settings(prompts, out, **changes):
    quick = {
        "limit": 2,
        "max_new_tokens": 8,
        "repeats": 1,
        "warmup": 0,
        "cost": False,
        "report": False,
        "engine": "eager",
    }
    given = {"prompts": [prompts], "out": str(out), "tree": PlanConfig(name="chain", length=2), "threads": 1}
    return bench.Config(**{**quick, **given, **changes})


def test_arms_of_every_kind(checkpoint, prompts, tmp_path):
    config = settings(
        prompts,
        tmp_path,
        checkpoint=str(checkpoint),
        temperature=1.0,
        hf_assisted=True,
        hf_lookup=True,
        trees=[
            bench.ArmConfig(name="chain", length=2, verifier="rejection"),
            bench.ArmConfig(name="chain", length=2, candidates="topk"),
            bench.ArmConfig(name="chain", length=3, drafter={"name": "prompt_lookup"}),
            bench.ArmConfig(name="chain", length=1, drafter={"name": "early_exit", "layers": 2}),
            bench.ArmConfig(name="dynamic", top_k=2, depth=2, total=4, verifier="typical"),
        ],
    )
    rows = {row.arm: row for row in bench.run(config, quiet=True).rows if row.category == "all"}
    assert list(rows) == [
        *("ar", "chain-2", "chain-2 rejection", "chain-2 topk", "prompt_lookup chain-3", "early_exit chain-1"),
        *("dynamic-2x2-4 typical", "hf", "hf-assisted-2", "hf-lookup-2"),
    ]
    assert (rows["chain-2"].verifier, rows["chain-2"].candidates) == ("match", "coupled")
    assert (rows["chain-2 rejection"].candidates, rows["chain-2 topk"].candidates) == ("sampled", "topk")
    assert [arm for arm, row in rows.items() if not row.lossless] == ["dynamic-2x2-4 typical"]
    assert rows["prompt_lookup chain-3"].drafter == "prompt_lookup"
    for arm in ("chain-2", "chain-2 topk", "prompt_lookup chain-3", "early_exit chain-1"):
        assert rows[arm].match_rate == 1, "coupled to the target's own noise, or ranked without it"
    assert rows["chain-2 rejection"].match_rate is None
    assert rows["chain-2"].settings["training"] == {"tokens": 7.0}


def test_a_baseline_needs_no_checkpoint(prompts, tmp_path):
    config = settings(prompts, tmp_path, drafter={"name": "prompt_lookup"}, target=TargetConfig(name="tiny"), hf=False)
    rows = bench.run(config, quiet=True).rows
    assert {row.drafter for row in rows} == {None, "prompt_lookup"}


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({}, "either checkpoint .* or drafter .* must be given, got none"),
        ({"drafter": {"name": "eagle3"}}, "must be one without weights .early_exit, prompt_lookup., got eagle3"),
        (
            {"drafter": {"name": "prompt_lookup"}, "hf_assisted": True},
            "hf_assisted must be false without a draft model",
        ),
        ({"drafter": {"name": "prompt_lookup", "ngram": 3}}, "ngram"),
        ({"drafter": {"max_ngram": 3}}, "must have a name"),
    ],
)
def test_refusals(prompts, tmp_path, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        bench.run(settings(prompts, tmp_path / "out", target=TargetConfig(name="tiny"), **changes), quiet=True)
    assert not (tmp_path / "out" / "results.jsonl").exists()


@pytest.mark.parametrize("length", [1, 3])
def test_assisted_generation_counts_as_our_chain_does(length):
    """Greedy: the same text, and the passes after the first accept what our chain accepts from there on."""
    target = tiny_target(tokenizer=True, dtype=torch.float64)
    drafter = DraftModel(DraftModelConfig(n_layers=3), target).double().eval()
    prompt = target.encode_chat([{"role": "user", "content": "tell me"}], add_generation_prompt=True)
    peer = PeerArm.assisted(target, drafter.backbone.model, sampling=GREEDY, length=length)
    theirs = peer.run(prompt, request_id=0, max_new_tokens=24, ignore_eos=True)
    plain = DecoderArm(target, sampling=GREEDY).run(prompt, request_id=0, max_new_tokens=24, ignore_eos=True)
    assert theirs.ids == plain.ids
    first = len(theirs.ids) - sum(len(step.tokens) for step in theirs.steps)
    assert 1 <= first <= length + 1
    from distill.decode import Decoder
    from distill.tree import Chain

    (ours,) = Decoder(target, drafter, plan=Chain(length)).generate(
        [prompt + theirs.ids[: first - 1]], max_new_tokens=24 - first + 1, ignore_eos=True
    )
    assert [len(s.tokens) for s in ours.steps] == [len(s.tokens) for s in theirs.steps]


def test_joining(checkpoint, prompts, tmp_path):
    chain = bench.ArmConfig(name="chain", length=1)
    for name, t in (("a", 0.0), ("b", 1.0)):
        extra = {"trees": [chain], "checkpoint": str(checkpoint), "temperature": t}
        bench.run(settings(prompts, tmp_path / name, **extra), quiet=True)
    lines = compare.run(compare.Config(results=[str(tmp_path / n) for n in "ab"], out=str(tmp_path / "both")))
    keys = [(line.temperature, line.method) for line in lines]
    assert sorted(keys) == [
        (t, m) for t in (0.0, 1.0) for m in ("draft_model", "plain decoding", "transformers generate")
    ]
    rows = [row for row in read_rows(tmp_path / "a" / "results.jsonl") if row.kind == "spec" and row.category == "all"]
    best = max(rows, key=lambda row: row.speedup_total)
    (line,) = [line for line in lines if line.method == "draft_model" and line.temperature == 0]
    assert (line.arm, line.speedup, line.tokens) == (best.arm, best.speedup_total, 7.0)
    text = (tmp_path / "both" / "comparison.md").read_text()
    assert text.count("| plain decoding |") == 2
    bench.run(settings(prompts, tmp_path / "c", checkpoint=str(checkpoint), max_new_tokens=9), quiet=True)
    with pytest.raises(UserError, match="same settings .max_new_tokens 8., got .* with max_new_tokens 9"):
        compare.run(compare.Config(results=[str(tmp_path / n) for n in "ac"], out=str(tmp_path / "no")))
    with pytest.raises(UserError, match="got none"):
        compare.run(compare.Config())
    for name, top_p in (("b", 1.0), ("d", 0.5)):
        source = (tmp_path / "b" / "results.jsonl").read_text().splitlines()
        shutil.copytree(tmp_path / "b", tmp_path / f"{name}2")
        changed = "\n".join(json.dumps({**json.loads(line), "top_p": top_p}) for line in source)
        (tmp_path / f"{name}2" / "results.jsonl").write_text(changed)
    with pytest.raises(UserError, match=r"same filters .top_k 0, top_p 1., got .*d2 with top_k 0, top_p 0\.5"):
        compare.run(compare.Config(results=[str(tmp_path / n) for n in ("b2", "d2")], out=str(tmp_path / "no")))
    with pytest.raises(UserError, match=r"out must be a folder that can be written, got .*results\.jsonl"):
        compare.run(compare.Config(results=[str(tmp_path / "a")], out=str(tmp_path / "a" / "results.jsonl")))
    (tmp_path / "d2" / "results.jsonl").write_text("")
    with pytest.raises(UserError, match="must hold the rows of a benchmark, got none"):
        compare.run(compare.Config(results=[str(tmp_path / "d2")], out=str(tmp_path / "no")))
    bench.run(settings(prompts, tmp_path / "e", checkpoint=str(checkpoint), max_minutes=1e-9), quiet=True)
    with pytest.raises(UserError, match="same prompts .2 turns of two., got .* with 1, 1 of them the same"):
        compare.run(compare.Config(results=[str(tmp_path / n) for n in "ae"], out=str(tmp_path / "no")))
    assert not (tmp_path / "no").exists()


def test_lines_tell_checkpoints_rules_and_candidates_apart(checkpoint, prompts, tmp_path):
    other = shutil.copytree(checkpoint, tmp_path / "other")
    arms = [bench.ArmConfig(name="chain", length=2, candidates="topk")]
    arms += [bench.ArmConfig(name="chain", length=2, verifier=rule) for rule in ("rejection", "typical")]
    for name, which in (("a", checkpoint), ("b", other)):
        extra = {"trees": arms, "checkpoint": str(which), "temperature": 1.0, "baselines": ["prompt_lookup"]}
        bench.run(settings(prompts, tmp_path / name, **extra, hf=False), quiet=True)
    lines = compare.run(compare.Config(results=[str(tmp_path / n) for n in "ab"], out=str(tmp_path / "both")))
    ours = ["draft_model", "draft_model, rejection", "draft_model, typical", "draft_model, uncoupled"]
    assert sorted(line.method for line in lines) == sorted([*ours, *ours, "plain decoding", "prompt_lookup"])
    assert {line.method for line in lines if not line.lossless} == {"draft_model, typical"}
    text = (tmp_path / "both" / "comparison.md").read_text()
    assert f"| draft_model, typical ({other}) (not lossless) |" in text
    assert "| prompt_lookup | prompt_lookup chain-2 |" in text
