"""Drafters without a checkpoint in every task, and texts that are not the target's own: both must be said plainly."""

import io
import json

import pytest
from rich.console import Console

from distill.errors import UserError
from distill.target import TargetConfig
from distill.tree import PlanConfig
from serve_eval import bench, generate, verify
from serve_eval.__main__ import main
from serve_eval.summary import print_summary

TINY = TargetConfig(name="tiny", dtype="float32")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "two.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("ab ab ab ab ab", "what is it?")))
    return str(path)


def answer(**changes):
    out = io.StringIO()
    config = {"prompt": "ab ab ab ab", "target": TINY, "max_new_tokens": 12, "engine": "eager", **changes}
    done = generate.run(generate.Config(**config), console=Console(file=out, soft_wrap=True, color_system=None))
    return done.ids, out.getvalue().splitlines()[-1]


@pytest.mark.parametrize("drafter", [{"name": "prompt_lookup"}, {"name": "early_exit", "layers": 2}])
def test_generate_with_a_drafter_without_weights(drafter):
    chain = PlanConfig(name="chain", length=2)
    drafted, closing = answer(drafter=drafter, tree=chain, temperature=0.7, seed=5)
    plain, _ = answer(temperature=0.7, seed=5)
    assert drafted == plain
    assert closing.startswith(f"{drafter['name']} chain-2: ")
    _, closing = answer(drafter=drafter, tree=chain, temperature=0.7, verifier="typical")
    assert closing.startswith(f"{drafter['name']} chain-2 (not lossless: typical acceptance): ")
    _, closing = answer(drafter=drafter, tree=chain, verifier="typical")
    assert closing.startswith(f"{drafter['name']} chain-2: "), "greedy: the same comparison as match"


@pytest.mark.parametrize(
    "drafter, plans",
    [
        ({"name": "prompt_lookup"}, ["chain-4", "static-9x3"]),
        ({"name": "early_exit", "layers": 2}, ["chain-4", "static-9x3", "dynamic-3x4-10"]),
    ],
)
def test_verify_checks_what_the_drafter_can_propose(drafter, plans, prompts, tmp_path):
    settings = {"temperatures": [0.0, 1.0], "top_k": 0, "top_p": 1.0, "max_new_tokens": 8, "engine": "eager"}
    result = verify.run(
        verify.Config(drafter=drafter, target=TINY, prompts=[prompts], out=str(tmp_path), limit=1, **settings)
    )
    assert result.faults == 0
    checked = [(check.drafter, check.tree) for check in result.checks if check.temperature == 0]
    assert [tree for name, tree in checked if name == drafter["name"]] == plans
    assert len([tree for name, tree in checked if name == "replay"]) == 3


def test_default_plans_are_cut_to_the_drafters_depth():
    class Shallow:
        max_depth, soft = 2, True

    chain, static, dynamic = (verify._within(Shallow(), tree) for tree in verify.PLANS)
    assert chain.length == 2
    assert max(map(len, static.paths)) == 2
    assert (dynamic.depth, dynamic.total) == (2, 10)
    Shallow.max_depth = 1
    assert verify._within(Shallow(), verify.PLANS[2]).total == 4


def bench_config(prompts, out, **changes):
    quick = {"limit": 2, "max_new_tokens": 8, "repeats": 1, "warmup": 0, "engine": "eager", "hf": False, "threads": 1}
    main_arm = {"drafter": {"name": "early_exit", "layers": 2}, "tree": PlanConfig(name="chain", length=2)}
    return bench.Config(**{**quick, **main_arm, "prompts": [prompts], "out": str(out), "target": TINY, **changes})


def test_baselines_have_the_longest_chain_of_the_main_drafter(prompts, tmp_path):
    trees = [
        bench.ArmConfig(name="chain", length=1),
        bench.ArmConfig(name="chain", length=4, drafter={"name": "prompt_lookup"}),
    ]
    changes = {"baselines": ["prompt_lookup"], "trees": trees, "cost": False, "report": False, "hf_lookup": True}
    rows = bench.run(bench_config(prompts, tmp_path, **changes), quiet=True).rows
    arms = ["ar", "chain-2", "chain-1", "prompt_lookup chain-4", "prompt_lookup chain-2", "hf-lookup-2"]
    assert list(dict.fromkeys(row.arm for row in rows)) == arms


def test_what_is_not_lossless_says_so_everywhere_and_is_no_headline(prompts, tmp_path):
    """Typical acceptance is the main rule, so the headline would be a lossy arm if that were the fastest."""
    changes = {"verifier": "typical", "temperature": 1.0, "baselines": ["prompt_lookup"]}
    result = bench.run(bench_config(prompts, tmp_path, **changes), quiet=True)
    rows = {row.arm: row for row in result.rows if row.category == "all"}
    assert {arm: row.lossless for arm, row in rows.items()} == {
        "ar": True,
        "chain-2": False,
        "prompt_lookup chain-2 match": True,
    }
    rows["chain-2"].speedup_total, rows["prompt_lookup chain-2 match"].speedup_total = 9.0, 0.5
    out = io.StringIO()
    print_summary(result.rows, result.costs, where=tmp_path, console=Console(file=out, width=160, force_terminal=True))
    # With its interval behind it: measured figures of other columns may happen to be the same.
    (lossy,) = [line for line in out.getvalue().splitlines() if "9.00 [" in line]
    assert "chain-2 (not lossless)" in lossy
    (best,) = [line for line in out.getvalue().splitlines() if "0.50 [" in line]
    assert "\x1b[1m" in best, "bold: the fastest lossless arm"
    assert "\x1b[1m" not in lossy
    page = (tmp_path / "report.html").read_text()
    assert "decode speed of prompt_lookup chain-2 match over" in page
    assert page.count("chain-2 (not lossless)") >= 4  # results, legends, costs, decoded texts
    assert "Not lossless" in page
    assert "prompt_lookup chain-2 match (not lossless)" not in page


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (
            ["task=bench", "drafter=eagle3", "target=tiny"],
            "must be one without weights (early_exit, prompt_lookup), got eagle3",
        ),
        (["task=generate", "drafter=medusa", "target=tiny", "prompt=hi"], "train.py drafter=medusa"),
        (["task=verify", "drafter=prompt_lookup", "checkpoint=there"], "must be left out beside checkpoint=there"),
        (["task=generate", "drafter=prompt_lookup", "prompt=hi"], "target must be named for drafter prompt_lookup"),
        (
            ["task=bench", "drafter=prompt_lookup", "target=tiny", "tree=chain", "baselines=[lookup]"],
            "drafter must be one of",
        ),
    ],
)
def test_refusals_on_the_command_line(arguments, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.rglob("results.jsonl"))


def test_same_drafter_twice_is_refused(prompts, tmp_path):
    twice = bench_config(prompts, tmp_path, baselines=["prompt_lookup", "prompt_lookup"])
    with pytest.raises(UserError, match="prompt_lookup chain-2 twice"):
        bench.run(twice, quiet=True)


@pytest.mark.parametrize(
    "changes", [{"verifier": "rejection"}, {"tree": PlanConfig(name="chain", length=2)}, {"candidates": "topk"}]
)
def test_what_is_about_drafts_is_refused_without_a_drafter(changes):
    with pytest.raises(UserError, match="tree, verify and candidates must be left alone without a drafter"):
        answer(**changes)
