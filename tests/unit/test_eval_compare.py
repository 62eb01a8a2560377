"""Arms that differ in more than their plan, transformers' own speculative decoding, and joining benchmarks."""

import json

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
        ({"drafter": {"name": "eagle3"}}, "must be one without weights .prompt_lookup, early_exit., got eagle3"),
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
