"""Choosing the number of CPU threads."""

import time

import pytest
import torch

from serve_eval.threads import choose_threads


@pytest.mark.parametrize(
    "costs, best",
    [
        ({1: 0.004, 2: 0.001, 4: 0.003}, 2),
        ({1: 0.001, 2: 0.004, 4: 0.004}, 1),
        ({1: 0.006, 2: 0.004, 4: 0.001}, 4),
        ({1: 0.004, 2: 0.004, 4: 0.004}, 1),  # no gain, so the fewest
    ],
)
def test_the_fastest_wins_and_ties_go_to_fewer(costs, best):
    before = torch.get_num_threads()
    # An idle wait depends on the number alone, so the answer does not depend on the machine.
    assert choose_threads(lambda: time.sleep(costs[torch.get_num_threads()]), candidates=[1, 2, 4]) == best
    assert torch.get_num_threads() == before


def test_the_setting_comes_back_after_a_failure():
    before = torch.get_num_threads()

    def broken():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        choose_threads(broken)
    assert torch.get_num_threads() == before
