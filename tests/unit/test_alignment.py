"""Mask, label and input of every training step against a brute-force reading of the definition.

A draft starts when the target has just written t_{i+1}; step k reads t_{i+1+k} and speaks about t_{i+2+k}. Position
i counts at step k iff t_{i+1}, ..., t_{i+2+k} were all written by the target, in i's document.
"""

import pytest
import torch
from oracles import pack, random_documents

from distill import alignment
from distill.attention import packed_mask
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.losses import LossConfig, total
from distill.target.tiny import tiny_target
from distill.vocab import choose_vocab


def enumerate_rows(rows, length, step):
    """For every row the set {i: (input token, label token)} that counts, document by document."""
    found = []
    for row in rows:
        start, counting = 0, {}
        for ids, written in row:
            for i in range(len(ids)):
                needed = range(i + 1, i + 2 + step + 1)
                if all(j < len(ids) and written[j] for j in needed):
                    counting[start + i] = (ids[i + 1 + step], ids[i + 2 + step])
            start += len(ids)
        found.append(counting)
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_every_step_equals_enumeration(seed, share):
    length, vocab, steps = 29, 50, 9
    rows = random_documents(3, length, vocab, seed=seed, share=share)
    batch = pack(rows, length)
    for step in range(steps):
        want = enumerate_rows(rows, length, step)
        mask = alignment.recurrent_mask(batch, step)
        assert mask.dtype == torch.bool
        assert mask.shape == batch.ids_BL.shape
        read = alignment.input_ids(batch, step)
        label = alignment.shift_left(batch.ids_BL, 2 + step)
        for b, counting in enumerate(want):
            assert set(mask[b].nonzero()[:, 0].tolist()) == set(counting)
            for i, (read_id, label_id) in counting.items():
                assert read[b, i] == read_id
                assert label[b, i] == label_id
                # The teacher's row is where the target reads the token before the label.
                row = i + alignment.teacher_row(2 + step)
                assert batch.ids_BL[b, row + 1] == label_id
                assert batch.doc_BL[b, row] == batch.doc_BL[b, i]


def test_a_worked_example():
    """Prompt p p, answer a b c <end>, next turn's prompt q q, answer d <end>; then another document."""
    first = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 6], [0, 0, 1, 1, 1, 1, 0, 0, 1, 1])
    second = ([11, 12, 13], [0, 1, 1])
    batch = pack([[first, second]], 15)

    def counting(step):
        return alignment.recurrent_mask(batch, step)[0].nonzero()[:, 0].tolist()

    # Step 0: the last prompt position (reads the first answer token, speaks about the second) trains; the position
    # before the end of turn is the last; the end of turn itself, and whatever follows it, does not.
    assert counting(0) == [1, 2, 3, 7, 10]
    assert counting(1) == [1, 2]
    assert counting(2) == [1]
    assert counting(3) == []


def test_shift_left():
    x = torch.arange(12).view(2, 6)
    assert alignment.shift_left(x, 2).tolist() == [[2, 3, 4, 5, 0, 0], [8, 9, 10, 11, 0, 0]]
    assert alignment.shift_left(x, 0).tolist() == x.tolist()
    for by in (6, 7, 50):
        assert not alignment.shift_left(x, by).any()
    deep = torch.randn(2, 6, 3)
    assert torch.equal(alignment.shift_left(deep, 1)[:, :-1], deep[:, 1:])


def test_more_steps_than_tokens():
    batch = pack([[([1, 2, 3], [1, 1, 1])]], 4)
    for step in range(10):
        assert int(alignment.recurrent_mask(batch, step).sum()) == (1 if step == 0 else 0)


# -- which positions a gradient reaches


@pytest.fixture(scope="module")
def trained():
    target = tiny_target("llama", vocab_size=30, hidden=16, layers=3, dtype=torch.float64)
    torch.manual_seed(0)
    vocab, _ = choose_vocab(torch.rand(30), 30)
    return target, vocab, Eagle3(Eagle3Config(draft_vocab_size=30, ttt_steps=3), target, vocab).double()


def test_gradients_reach_exactly_the_counting_positions(trained):
    """Through ``hidden_BLD`` of each step: start-of-answer positions are trained, ends and gaps are not."""
    target, vocab, drafter = trained
    first = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 6], [0, 0, 1, 1, 1, 1, 0, 0, 1, 1])
    second = ([11, 12, 13, 14], [0, 1, 1, 1])
    rows = [[first, second], [second, first]]
    batch = pack(rows, 16)
    mask = packed_mask(batch.doc_BL, batch.positions_BL)
    taps = drafter.taps(drafter.config, target.info)
    output = target.forward(batch.ids_BL, positions_BL=batch.positions_BL, mask=mask, taps=taps)
    predictions = drafter.training_steps(batch, output)
    for prediction in predictions:
        prediction.hidden_BLD.retain_grad()
    total(predictions, batch, output, target=target, vocab=vocab, config=LossConfig()).loss.backward()
    for step, prediction in enumerate(predictions):
        assert prediction.shift == 2 + step
        want = enumerate_rows(rows, 16, step)
        reached = prediction.hidden_BLD.grad.abs().sum(-1) > 0
        for b, counting in enumerate(want):
            assert set(reached[b].nonzero()[:, 0].tolist()) == set(counting), f"step {step}"


def test_features_after_the_last_draft_carry_no_gradient(trained):
    """The pair (end of turn, its feature) is never drafted from, so nothing may be learnt from its feature."""
    target, vocab, drafter = trained
    ids, written = [1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 1, 1, 1, 1, 0, 0]
    batch = pack([[(ids, written)]], 8)
    mask = packed_mask(batch.doc_BL, batch.positions_BL)
    taps = drafter.taps(drafter.config, target.info)
    output = target.forward(batch.ids_BL, positions_BL=batch.positions_BL, mask=mask, taps=taps)
    for tap in output.taps.values():
        tap.requires_grad_()
    predictions = drafter.training_steps(batch, output)
    total(predictions, batch, output, target=target, vocab=vocab, config=LossConfig()).loss.backward()
    reached = sum(tap.grad.abs().sum(-1)[0] for tap in output.taps.values()) > 0
    # Positions 0..3 are read (as prefix or start); 4 reads the end of turn, later ones lie behind it.
    assert reached.tolist() == [True, True, True, True, False, False, False, False]
