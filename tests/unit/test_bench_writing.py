"""The writing bench: both arms do the same work, and what is idle is counted right."""

import math

import pytest
import torch
from endpoint_tools import answering_target

from bench import writing
from bench.record import Options
from bench.writing import Case
from distill.decode import Decoder
from distill.sampling import Sampling


@pytest.fixture(scope="module")
def target():
    return answering_target()


@pytest.fixture(scope="module")
def case(target):
    prompts = [
        writing._encode(target, text) for text in ("a", "why is it so", "b c", "who", "and then what", "x", "no")
    ]
    return Case(prompts=prompts, slots=3, max_new_tokens=14, sampling=Sampling())


def test_both_arms_write_the_same_greedy_answers(target, case):
    alone = [Decoder(target).generate([prompt], max_new_tokens=14)[0].ids for prompt in case.prompts]
    expected = [len(ids) for ids in alone]
    assert len(set(expected)) > 1, "answers must be uneven for this test to mean anything"
    assert writing.write(target, case, engine="eager").lengths == expected
    assert writing.generate(target, case).lengths == expected


def test_an_answer_ends_with_its_first_end_of_text():
    assert writing._length([5, 6, 2, 9, 2], [2, 3]) == 3
    assert writing._length([5, 6], [2]) == 2


def test_row_steps_count_a_batch_until_its_longest_answer():
    assert writing._row_steps([1, 4, 2, 5, 5], 2) == 2 * 4 + 2 * 5 + 5


def test_the_quick_run_gives_every_figure():
    threads = torch.get_num_threads()
    rows = writing.run(Options(quick=True, threads=1, engine="eager"))
    names = [row.name for row in rows]
    assert names == [
        "greedy tokens/s over transformers generate",
        "greedy tokens/s",
        "sampled tokens/s over transformers generate",
        "sampled tokens/s",
        "share of matrix products in a sampled step",
    ]
    assert all(math.isfinite(row.value) and row.value > 0 for row in rows)
    assert all(row.part == "writing" and row.bar is None for row in rows)
    assert torch.get_num_threads() == threads


def test_the_bar_stands_on_the_full_run_only(target, case):
    done = dict.fromkeys(("greedy", "sampled"))
    for name in done:
        done[name] = next(writing._compare(target, case, name, Options(engine="eager")))
    assert (done["greedy"].bar, done["greedy"].at_least) == (2.0, True)
    assert done["sampled"].bar is None
    assert 0 <= done["greedy"].detail["idle share of generate"] < 1
