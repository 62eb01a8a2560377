"""What every drafter drafts along the target's own text is what it said there in training.

A draft starts at position i: the target has read tokens up to i, and token i + 1 is the root. At depth k it speaks
about token i + 2 + k, having read the true tokens before it.
"""

import pytest
import torch
from drafter_tools import CASES, V, case_id, draft_chain, extend_in_chunks, features, make, target_of
from oracles import pack

LENGTH = 18


def said_in_training(predictions, i, depth):
    """Training's logits at start ``i`` and ``depth``; None where it has none.

    A prediction about the next token (shift 1) has read tokens only, so one serves every start and depth.
    """
    for p in predictions:
        at = i + 1 + depth if p.shift == 1 else i
        if p.shift in (1, 2 + depth):
            return p.head(p.hidden_BLD[0, at])
    return None


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
@torch.no_grad()
def test_training_equals_drafting(case, family):
    name, options = case
    drafter = make(name, target=target_of(family), **options)
    ids = torch.randint(3, V, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    batch = pack([[(ids, [1] * LENGTH)]], LENGTH)
    output = features(drafter, batch.ids_BL)
    predictions = [p for p in drafter.training_steps(batch, output) if p.kind == "logits" and p.drafted]
    depths = min(drafter.max_depth or 4, 4)
    # A draft model of this family attends as transformers does it, with a softmax in fp32.
    tolerance = 1e-5 if family == "gemma2" and hasattr(drafter, "backbone") else 1e-9
    compared = set()
    for i in (0, 1, 4, 9):
        state = drafter.new_state(1, LENGTH + 8)
        extend_in_chunks(drafter, state, ids[: i + 2], output, chunk=1 + i % 3)
        drafted = draft_chain(drafter, state, ids[i + 1 : i + 1 + depths])
        # A second proposal from the same place: nothing of the first one is left.
        again = draft_chain(drafter, state, ids[i + 1 : i + 1 + depths])
        for depth in range(depths):
            torch.testing.assert_close(again[depth], drafted[depth], rtol=tolerance, atol=tolerance)
            if (said := said_in_training(predictions, i, depth)) is not None:
                torch.testing.assert_close(drafted[depth], said, rtol=tolerance, atol=tolerance)
                compared.add(depth)
    trained = depths if predictions[0].shift == 1 else min(depths, len(predictions))
    assert compared == set(range(trained)), "a step of training that is not drafted"


@pytest.mark.parametrize("case", CASES, ids=case_id)
@torch.no_grad()
def test_the_comparison_tells_steps_and_places_apart(case):
    """What is said elsewhere, or at another depth, differs: the test above could fail."""
    name, options = case
    drafter = make(name, target=target_of(), **options)
    ids = torch.randint(3, V, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    batch = pack([[(ids, [1] * LENGTH)]], LENGTH)
    predictions = [
        p for p in drafter.training_steps(batch, features(drafter, batch.ids_BL)) if p.kind == "logits" and p.drafted
    ]
    here = said_in_training(predictions, 4, 0)
    others = [said_in_training(predictions, i, depth) for i, depth in ((5, 0), (3, 0), (4, 1))]
    assert all(float((here - other).abs().max()) > 1e-3 for other in others if other is not None)
