"""Hit rates by brute force, the best tree by exhaustive search, and files that are refused."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from oracles import Scripted, random_prompts, stepped

from distill.calibration import Calibration, Choices, best_paths, expected_length
from distill.decode import Decoder
from distill.decode.calibrate import calibrate
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.drafters.medusa import Medusa, MedusaConfig
from distill.errors import UserError
from distill.export import load_drafter, save_calibration, save_drafter
from distill.sampling import Sampling
from distill.target.tiny import tiny_target
from distill.tree import PlanConfig, Static, make_plan
from distill.vocab import choose_vocab
from serve_eval import calibrate as task_calibrate

V, NEW = 40, 10


def closed(paths) -> bool:
    return all(p[:-1] == () or p[:-1] in paths for p in paths) and all(
        p[-1] == 0 or (*p[:-1], p[-1] - 1) in paths for p in paths
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_growth_finds_the_best_tree(nodes, seed):
    generator = torch.Generator().manual_seed(seed)
    rates = [sorted(torch.rand(3, generator=generator).div(3).tolist(), reverse=True) for _ in range(3)]
    everything = [p for n in (1, 2, 3) for p in itertools.product(range(3), repeat=n)]
    best = max(expected_length(t, rates) for t in itertools.combinations(everything, nodes) if closed(set(t)))
    paths = best_paths(rates, nodes=nodes)
    assert len(paths) == nodes
    assert closed(set(paths))
    assert math.isclose(expected_length(paths, rates), best)
    Static(paths)


def test_growth_keeps_to_its_limits():
    rates = [[0.5, 0.2, 0.1]] * 4
    paths = best_paths(rates, nodes=50, depth=2, children=2)
    assert max(map(len, paths)) == 2
    assert max(r for p in paths for r in p) == 1
    assert len(paths) == 6


def target():
    return tiny_target(vocab_size=V, hidden=16, layers=2, dtype=torch.float64)


def scripted_rank(row: int, position: int) -> float:
    """Score of the right token: first of all, or below what noise in (0, 1) gives."""
    return (1000.0, -1000.0, 1000.0)[(row + position) % 3]


class Measurable(Scripted):
    """A scripted drafter with what ``calibrate`` asks of one."""

    training = False

    def __init__(self, target, *args, **options):
        super().__init__(*args, **options)
        self.target = target


@pytest.mark.parametrize("kind", ["greedy", "coupled"])
def test_hit_rates_of_a_scripted_drafter(kind):
    """The script puts the right token first or last; the tally must find exactly how often."""
    pair, prompts, depth = target(), random_prompts(5, V, seed=1), 3
    pair.info = replace(pair.info, eos_ids=())  # every text as long as the others
    sampling = Sampling(temperature=0.0 if kind == "greedy" else 1.0)
    texts = stepped(pair, prompts, NEW, sampling)
    truth = [p + t for p, t in zip(prompts, texts, strict=True)]
    # It knows one of the two texts that are measured, and is asked about both.
    drafter = Measurable(pair, V, truth, lambda row, at: scripted_rank(row, at) * 100, check=False)
    choices = calibrate(drafter, prompts, depth=depth, max_new_tokens=NEW).choices(greedy=kind == "greedy")
    for d in range(depth):
        spots = [(row, len(prompt) + j) for row, prompt in enumerate(prompts) for j in range(d + 1, NEW)]
        assert choices.count_D[d] == len(spots)
        assert choices.hits_DR[d][0] == sum(scripted_rank(row, at) > 0 for row, at in spots)


def test_the_likeliest_scale_is_found():
    """Targets drawn from softmax(s * scores) are best explained by s."""
    from distill.decode.calibrate import _Tally

    generator = torch.Generator().manual_seed(0)
    tally = _Tally(1, 5)
    scores = 3 * torch.randn(20000, 12, generator=generator)
    wanted = (0.4 * scores).softmax(-1).multinomial(1, generator=generator)[:, 0]
    tally.add(0, scores, wanted, torch.ones(len(scores), dtype=torch.bool))
    assert abs(tally.choices().scale_D[0] - 0.4) < 0.02
    best = scores.argsort(-1, descending=True)
    by_hand = [(best[:, r] == wanted).sum().item() for r in range(5)]
    assert tally.choices().hits_DR[0] == by_hand


def pair_of(seed: int = 0):
    it = target()
    torch.manual_seed(seed)
    vocab, _ = choose_vocab(torch.rand(V), 25)
    return it, Eagle3(Eagle3Config(draft_vocab_size=25), it, vocab).double().requires_grad_(False).eval()


def some_calibration() -> Calibration:
    choices = Choices(hits_DR=[[5, 3, 1], [4, 1, 0]], count_D=[10, 8], scale_D=[0.5, 2.0])
    return Calibration(greedy=choices, coupled=replace(choices, hits_DR=[[6, 1, 1], [1, 1, 1]]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["calibrated", "dynamic"])
def test_calibration_changes_the_tree_and_not_the_text(name, temperature):
    it, drafter = pair_of()
    prompts, sampling = random_prompts(20, V, seed=4), Sampling(temperature=temperature, seed=2)
    drafter.calibration = some_calibration()
    plan = make_plan(
        PlanConfig(name=name, depth=2, top_k=3, total=6), calibration=drafter.calibration, greedy=temperature == 0
    )
    got = Decoder(it, drafter, plan=plan, sampling=sampling).generate(prompts, max_new_tokens=NEW)
    assert [g.ids for g in got] == stepped(it, prompts, NEW, sampling)


def test_a_real_drafter_through_the_protocol():
    _, drafter = pair_of()
    found = calibrate(drafter, random_prompts(6, V, seed=2), depth=4, max_new_tokens=NEW)
    assert len(found.greedy.hits_DR) == len(found.coupled.scale_D) == 4
    assert all(count > 0 for count in found.greedy.count_D)
    assert all(sum(hits) <= count for hits, count in zip(found.coupled.hits_DR, found.coupled.count_D, strict=True))


def test_plans_by_sampling():
    given = some_calibration()
    config = PlanConfig(name="calibrated", depth=2, top_k=2, total=3)
    greedy = make_plan(config, calibration=given, greedy=True)
    assert (greedy.paths, greedy.name) == (((0,), (1,)), "calibrated")
    deeper = replace(given, coupled=replace(given.coupled, hits_DR=[[6, 1, 1], [6, 1, 1]]))
    assert make_plan(config, calibration=deeper, greedy=False).paths == ((0,), (0, 0))


def test_refusals(tmp_path):
    config = PlanConfig(name="calibrated", depth=3, top_k=2, total=4)
    with pytest.raises(UserError, match="task=calibrate"):
        make_plan(config)
    assert make_plan(config, calibration=some_calibration()).depth == 2, "no deeper than was measured"
    it, drafter = pair_of()
    first = save_drafter(drafter, tmp_path / "first", provenance={})
    second = save_drafter(pair_of(1)[1], tmp_path / "second", provenance={})
    path = save_calibration(first, some_calibration())
    loaded = load_drafter(first, it).calibration
    assert replace(loaded, weights_sha256="") == some_calibration()
    (second / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match="must have been measured of this checkpoint"):
        load_drafter(second, it)


GOOD = {"hits_DR": [[5, 3], [4, 1]], "count_D": [10, 8], "scale_D": [0.5, 2.0]}


@pytest.mark.parametrize(
    "damage",
    [
        {"schema_version": 9},
        {"greedy": {}},
        {"greedy": {"hits_DR": [], "count_D": [1], "scale_D": []}},
        {"greedy": {"hits_DR": [], "count_D": [], "scale_D": []}},
        {"greedy": {**GOOD, "hits_DR": [[], []]}},
        {"greedy": {**GOOD, "hits_DR": [[5, 3], [4]]}},
        {"greedy": {**GOOD, "hits_DR": [5, 4]}},
        {"greedy": {**GOOD, "count_D": ["10", "8"]}},
        {"coupled": {**GOOD, "count_D": [10, -8]}},
        {"greedy": {**GOOD, "hits_DR": [[10**9, 3], [4, 1]]}},
        {"greedy": {**GOOD, "count_D": [0, 0], "hits_DR": [[0, 0], [0, 0]]}},
        {"greedy": {**GOOD, "count_D": [8, 10]}},
        {"coupled": {**GOOD, "scale_D": [1e300, 1.0]}},
        {"coupled": {**GOOD, "scale_D": [0.5, math.inf]}},
        {"coupled": {**GOOD, "scale_D": [0.5, math.nan]}},
    ],
    ids=str,
)
def test_damage_is_refused_in_one_sentence(damage, tmp_path):
    it, drafter = pair_of()
    folder = save_drafter(drafter, tmp_path / "export", provenance={})
    path = save_calibration(folder, some_calibration())
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.raises(UserError) as caught:
        load_drafter(folder, it)
    assert str(caught.value).count("calibrate again") == 1


def test_measuring_again_repairs_what_is_refused(tmp_path):
    """The advice of the refusal must work: a damaged or foreign file must not stop the task that replaces it."""
    it = tiny_target(tokenizer=True)
    folder = save_drafter(Medusa(MedusaConfig(heads=2), it), tmp_path / "export", provenance={})
    path = save_calibration(folder, some_calibration())
    record = json.loads(path.read_text())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "one two"}) + "\n")
    options = {"checkpoint": str(folder), "prompts": [str(prompts)], "chat": False, "max_new_tokens": 6, "depth": 2}
    for wrong in ("{", json.dumps({**record, "weights_sha256": "0" * 64}), json.dumps({**record, "greedy": {}})):
        path.write_text(wrong)
        with pytest.raises(UserError):
            load_drafter(folder, it)
        task_calibrate.run(task_calibrate.Config(**options))
        assert load_drafter(folder, it).calibration is not None


def test_texts_too_short_to_count_are_no_calibration():
    _, drafter = pair_of()
    found = calibrate(drafter, random_prompts(3, V, seed=2), depth=4, max_new_tokens=1)
    assert (found.greedy.count_D, found.coupled.count_D) == ([], [])
    deep = calibrate(drafter, random_prompts(3, V, seed=2), depth=1000, max_new_tokens=4)
    assert 0 < len(deep.greedy.count_D) <= 3
    assert min(deep.greedy.count_D) > 0
