"""task=verify: it passes on a right decoder and turns red on wrong ones; the oracle itself is checked by stepping."""

import json
import math

import pytest
import torch

from distill.decode import Generation
from distill.errors import UserError
from distill.sampling import Sampling, choose, gumbel
from distill.target import TargetConfig
from distill.target.tiny import tiny_target
from distill.tree import Chain, PlanConfig
from serve_eval import verify
from serve_eval.arms import DecoderArm
from serve_eval.oracle import recompute
from serve_eval.replay import RANKS, ReplayDrafter

SETTINGS = [Sampling(), Sampling(temperature=0.7, seed=3), Sampling(temperature=1.0, top_k=10, top_p=0.8, seed=1)]


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float64, tokenizer=True)


def stepped(target, prompt, count, sampling, request_id):
    """One token after another, everything recomputed, no cache."""
    ids = list(prompt)
    for _ in range(count):
        logits_1V = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
        noise = None
        if not sampling.greedy:
            request, position = torch.tensor([request_id]), torch.tensor([[len(ids)]])
            noise = gumbel(seed=sampling.seed, request_B=request, position_BP=position, vocab=logits_1V.shape[-1])
        ids.append(int(choose(logits_1V[None], sampling, noise)[0, 0]))
    return ids[len(prompt) :]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_one_uncached_forward_judges_like_stepping(target, sampling):
    prompt = [5, 9, 33, 7]
    ids = stepped(target, prompt, 8, sampling, 3)
    choices = recompute(target, prompt, ids, sampling=sampling, request_id=3)
    assert choices.ids == ids
    assert choices.first_difference(ids) is None
    assert min(choices.gaps) > 0
    wrong = [*ids[:4], (ids[4] + 1) % 64, *ids[5:]]
    judged = recompute(target, prompt, wrong, sampling=sampling, request_id=3)
    assert judged.first_difference(wrong) == 4
    assert judged.ids[:5] == ids[:5]


def test_ties_are_measured_in_steps_of_the_models_precision(target):
    prompt = [5, 9, 33, 7]
    logits = target.model(input_ids=torch.tensor([prompt + [8]]), use_cache=False).logits[0, 3]
    exact = recompute(target, prompt, [8], sampling=Sampling(), request_id=0)
    assert exact.tie_gaps == [1e-4]
    coarse = recompute(tiny_target(dtype=torch.bfloat16), prompt, [8], sampling=Sampling(temperature=0.5), request_id=0)
    step = 2.0 ** math.floor(math.log2(float(logits.abs().max()))) * 2.0**-7
    assert coarse.tie_gaps == pytest.approx([4 * step / 0.5])


def test_oracle_of_nothing_is_nothing(target):
    assert recompute(target, [5], [], sampling=Sampling(), request_id=0).ids == []


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_replay_reaches_long_runs_branches_and_rejections(target, sampling):
    prompt = [5, 9, 33, 7]
    plain = DecoderArm(target, sampling=sampling).run(prompt, request_id=0, max_new_tokens=40, ignore_eos=True)
    replay = ReplayDrafter(target)
    replay.script = prompt + plain.ids
    run = DecoderArm(target, sampling=sampling, drafter=replay, plan=Chain(4)).run(
        prompt, request_id=0, max_new_tokens=40, ignore_eos=True
    )
    accepted = [step.accepted for step in run.steps]
    assert run.ids == plain.ids
    assert max(accepted) >= 3
    assert min(accepted) == 0


def test_replay_ranks_the_right_token_as_announced(target):
    replay = ReplayDrafter(target)
    replay.script = list(range(64))
    found = []
    for position in range(64):
        candidates = replay._candidates(position)
        found.append(candidates.index(position) if position in candidates else None)
    assert set(found) == set(RANKS)
    assert found.count(0) > 25


def small(tmp_path, **changes):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hi"}\n{"prompt": "why"}\n')
    fields = {
        "target": TargetConfig(name="tiny", dtype="float64", verify=False),
        "prompts": [str(prompts)],
        "trees": [PlanConfig(name="chain", length=3), PlanConfig(name="dynamic", top_k=2, depth=2, total=5)],
        "temperatures": [0.0, 1.0],
        "max_new_tokens": 8,
        "out": str(tmp_path / "out"),
    }
    return verify.Config(**(fields | changes))


def test_a_right_decoder_has_no_faults(tmp_path, capsys):
    result = verify.run(small(tmp_path))
    assert result.faults == 0
    assert len(result.checks) == 3 * (1 + 2 * 2)  # settings x (plain, two drafters with two plans)
    assert {c.drafter for c in result.checks} == {"none", "eagle3", "replay"}
    assert sum(c.accepted for c in result.checks if c.drafter == "replay") > 20
    stored = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert (stored["faults"], stored["tokens"]) == (0, sum(c.tokens for c in result.checks))
    assert "no faults" in capsys.readouterr().out


def test_a_verifier_that_accepts_too_much_is_a_fault_and_exit_code_1(tmp_path, monkeypatch, capsys):
    from distill.decode import loop

    def greedy_for_drafts(tree, chosen_BN, *_):
        broken = tree.tokens_BN.gather(
            1, (tree.parents_BN == 0).long().cumsum(1).clamp(max=tree.tokens_BN.shape[1] - 1)
        )
        return right(tree, torch.where(torch.arange(chosen_BN.shape[1]) == 0, broken, chosen_BN))

    right = loop.match
    monkeypatch.setattr(loop, "match", greedy_for_drafts)
    with pytest.raises(SystemExit) as caught:
        verify.run(small(tmp_path))
    assert caught.value.code == 1
    stored = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert stored["faults"] > 0
    assert "FAULTS" in capsys.readouterr().out


def judged(target, ids, limit):
    out = Generation(request_id=0, prompt_len=2, ids=ids)
    check = verify.Check.of("x", "chain-3", Sampling())
    verify.judge(check, target, [5, 9], out, sampling=Sampling(), limit=limit, where="p")
    return check


def test_differences_ties_and_lengths_are_told_apart(target, monkeypatch):
    ids = DecoderArm(target, sampling=Sampling()).run([5, 9], request_id=0, max_new_tokens=6, ignore_eos=True).ids
    ids = [token for token in ids if token not in target.info.eos_ids][:3]
    assert (judged(target, ids, 3).faults, judged(target, ids, 3).ties) == (0, 0)
    assert judged(target, ids, 4).faults == 1  # too short
    assert judged(target, ids, 2).faults == 1  # too long
    wrong = [(ids[0] + 1) % 60 + 3, *ids[1:]]
    assert judged(target, wrong, 3).faults >= 1
    monkeypatch.setattr(verify, "TIE_GAP", 1e9)
    tied = judged(target, wrong, 3)
    assert tied.faults == 0
    assert tied.ties >= 1
    assert tied.examples[0]["token"] == 0


def test_settings_cover_the_filters_once_and_refuse_none():
    config = verify.Config(temperatures=[0.0, 0.7])
    assert [(s.temperature, s.top_k, s.top_p) for s in config.settings()] == [(0, 0, 1), (0.7, 0, 1), (0.7, 50, 0.9)]
    with pytest.raises(UserError, match="temperatures"):
        verify.Config(temperatures=[]).settings()
    with pytest.raises(UserError, match="temperature must be"):
        verify.Config(temperatures=[-1.0]).settings()
