"""The draft vocabulary's maps, what it keeps, and its report."""

import pytest
import torch

from distill.errors import UserError
from distill.vocab import DraftVocab, choose_vocab


def brute_force(counts: list[int], size: int, always) -> list[int]:
    """Sorted ids: forced ones, then by count, the smaller id first."""
    forced = sorted(set(always))
    rest = sorted((i for i in range(len(counts)) if i not in forced), key=lambda i: (-counts[i], i))
    return sorted([*forced, *rest[: size - len(forced)]])


@pytest.mark.parametrize("seed", range(10))
def test_choice_equals_brute_force(seed):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 6, (40,), generator=generator)  # many ties, many zeros
    always = torch.randint(0, 40, (4,), generator=generator).tolist()
    for size in (4, 5, 11, 39, 40):
        vocab, report = choose_vocab(counts, size, always=always)
        want = brute_force(counts.tolist(), size, always)
        assert vocab.target_ids.tolist() == want
        assert vocab.size == report.size == size
        assert report.distinct == sum(c > 0 for c in counts.tolist())
        assert report.coverage == pytest.approx(sum(counts[i].item() for i in want) / counts.sum().item())
        assert report.padded == sum(counts[i].item() == 0 for i in want)


def test_d2t_holds_offsets_not_ids():
    """As in every EAGLE-3 checkpoint: target id = draft id + d2t[draft id], int64; t2d marks kept ids."""
    vocab = DraftVocab(torch.tensor([2, 3, 7, 11]), 13)
    assert vocab.d2t.tolist() == [2, 2, 5, 8]
    assert vocab.d2t.dtype == torch.int64
    assert vocab.t2d.dtype == torch.bool
    assert vocab.t2d.nonzero()[:, 0].tolist() == [2, 3, 7, 11]
    assert len(vocab.t2d) == 13
    assert vocab.target_ids.tolist() == [2, 3, 7, 11]
    assert set(vocab.state_dict()) == {"d2t", "t2d"}, "both travel in the checkpoint"


def test_round_trip():
    vocab, _ = choose_vocab(torch.rand(100), 37)
    draft = torch.arange(37).view(1, 37)
    assert torch.equal(vocab.from_target(vocab.to_target(draft)), draft)
    everything = torch.arange(100)
    back = vocab.from_target(everything)
    for target_id in range(100):
        kept = target_id in vocab.target_ids.tolist()
        assert (back[target_id] >= 0) == kept
        if kept:
            assert vocab.to_target(back[target_id]) == target_id
    assert vocab.from_target(everything.view(4, 25)).shape == (4, 25)


def test_fewer_distinct_tokens_than_the_vocabulary_holds():
    """Unused ids fill up; the report says how many (a known crash elsewhere)."""
    counts = torch.zeros(50, dtype=torch.long)
    counts[[7, 30, 41]] = torch.tensor([5, 1, 4])
    vocab, report = choose_vocab(counts, 10, always=[49])
    assert {7, 30, 41, 49} <= set(vocab.target_ids.tolist())
    assert (report.distinct, report.padded, report.coverage) == (3, 7, 1.0)


def test_nothing_counted():
    vocab, report = choose_vocab(torch.zeros(20, dtype=torch.long), 5)
    assert vocab.target_ids.tolist() == [0, 1, 2, 3, 4]
    assert (report.distinct, report.coverage) == (0, 0.0)


def test_whole_vocabulary():
    vocab, report = choose_vocab(torch.randint(0, 9, (20,)), 20)
    ids = torch.arange(20)
    assert torch.equal(vocab.to_target(ids), ids)
    assert torch.equal(vocab.from_target(ids), ids)
    assert not vocab.d2t.any()
    assert vocab.t2d.all()
    assert report.coverage == 1.0


def test_always_kept_even_when_rarest():
    counts = torch.arange(20, 0, -1)
    counts[15] = 0
    vocab, _ = choose_vocab(counts, 3, always=[15, 19, 15])
    assert vocab.target_ids.tolist() == [0, 15, 19]


def test_impossible_sizes():
    for size in (0, -1, 21):
        with pytest.raises(UserError, match="draft_vocab_size must be between 1 and the target's 20"):
            choose_vocab(torch.ones(20), size)
    with pytest.raises(UserError, match="between 3 and"):
        choose_vocab(torch.ones(20), 2, always=[1, 2, 3])


def test_moves_with_the_module():
    """The buffers follow a state dict, so a stale map cannot be used with new weights."""
    one, _ = choose_vocab(torch.rand(30), 10)
    other, _ = choose_vocab(torch.rand(30), 10)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.target_ids, other.target_ids)
    assert torch.equal(one.from_target(torch.arange(30)), other.from_target(torch.arange(30)))
