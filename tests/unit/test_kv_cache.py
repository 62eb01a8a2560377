"""The cache against a dictionary: per row a list of committed entries, and nothing else may show."""

import pytest
import torch

from distill.kv_cache import KVCache

LAYERS, HEADS, DIM = 2, 3, 4


def make(batch: int, capacity: int, dtype=torch.float64) -> KVCache:
    return KVCache(
        n_layers=LAYERS,
        batch_size=batch,
        n_kv_heads=HEADS,
        capacity=capacity,
        head_dim=DIM,
        dtype=dtype,
        device="cpu",
    )


def write(cache: KVCache, n_new: int, *, behind: int = 0):
    """Write random entries through the transformers interface; returns them as [layers, 2, B, H, N, K]."""
    view = cache.begin(n_new, behind=behind)
    new = torch.randn(LAYERS, 2, len(cache.lengths_B), HEADS, n_new, DIM, dtype=cache.kv.dtype)
    for layer in range(LAYERS):
        keys, values = cache.update(new[layer, 0], new[layer, 1], layer)
        assert keys.shape == values.shape == (len(cache.lengths_B), HEADS, view, DIM)
        for b, length in enumerate(cache.lengths_B.tolist()):
            span = slice(length + behind, length + behind + n_new)
            assert torch.equal(keys[b, :, span], new[layer, 0, b])
            assert torch.equal(values[b, :, span], new[layer, 1, b])
    return new


class Model:
    """What the cache should hold: for every row the committed entries [layers, 2, H, n, K]."""

    def __init__(self, batch: int):
        self.rows = [torch.empty(LAYERS, 2, HEADS, 0, DIM, dtype=torch.float64) for _ in range(batch)]

    def keep(self, new, picks):
        for b, pick in enumerate(picks):
            self.rows[b] = torch.cat([self.rows[b], new[:, :, b][:, :, :, pick]], 3)

    def check(self, cache: KVCache):
        assert cache.lengths_B.tolist() == [r.shape[3] for r in self.rows]
        assert cache.longest == cache.get_seq_length() == max(r.shape[3] for r in self.rows)
        for b, row in enumerate(self.rows):
            assert torch.equal(cache.kv[:, :, b, :, : row.shape[3]], row)


@pytest.mark.parametrize("seed", range(5))
def test_a_hundred_rounds(seed):
    """Prefill, trees with uneven acceptance, drafted entries that are dropped, rows that stand still."""
    generator = torch.Generator().manual_seed(seed)

    def pick(high):
        return int(torch.randint(0, high, (1,), generator=generator))

    batch = 4
    cache, model = make(batch, 20), Model(batch)
    for _ in range(100):
        n_new = 1 + pick(6)
        cache.reserve(cache.longest + n_new + 6)
        behind = 0
        if pick(3) == 0:  # entries drafted depth by depth, then dropped
            for width in (1, 2, 3):
                write(cache, width, behind=behind)
                behind += width
        new = write(cache, n_new)
        if pick(2):
            counts = [pick(n_new + 1) for _ in range(batch)]
            longest = max(r.shape[3] + n for r, n in zip(model.rows, counts, strict=True))
            cache.advance(torch.tensor(counts), longest=longest)
            picks = [list(range(n)) for n in counts]
        else:
            picks = [
                sorted(torch.randperm(n_new, generator=generator)[: pick(n_new + 1)].tolist()) for _ in range(batch)
            ]
            width = max(1, *map(len, picks))
            path = torch.tensor([p + [-1] * (width - len(p)) for p in picks])
            longest = max(r.shape[3] + len(p) for r, p in zip(model.rows, picks, strict=True))
            cache.commit(path, torch.tensor([len(p) for p in picks]), longest=longest)
        model.keep(new, picks)
        model.check(cache)


def test_entries_written_behind_scratch_keep_what_lies_before():
    cache = make(2, 30)
    cache.advance(torch.tensor([3, 5]), longest=5)
    first = write(cache, 2)
    second = write(cache, 3, behind=2)
    for b, length in enumerate((3, 5)):
        assert torch.equal(cache.kv[:, :, b, :, length : length + 2], first[:, :, b])
        assert torch.equal(cache.kv[:, :, b, :, length + 2 : length + 5], second[:, :, b])


def test_a_new_cache_is_clean():
    """Slots never written take part in masked attention as 0 times a value: they must be finite."""
    cache = make(2, 5)
    assert bool((cache.kv == 0).all())
    assert cache.get_seq_length() == 0
    cache.reserve(50)
    assert cache.capacity == 50
    assert bool((cache.kv == 0).all())


def test_reserve_keeps_what_is_committed_and_never_shrinks():
    cache, model = make(3, 8), Model(3)
    new = write(cache, 5)
    cache.advance(torch.tensor([5, 2, 0]), longest=5)
    model.keep(new, [range(5), range(2), []])
    cache.reserve(4)
    assert cache.capacity == 8
    cache.reserve(9)
    assert cache.capacity == 9
    model.check(cache)


def test_insert_overwrites_rows_alone():
    cache, model = make(4, 12), Model(4)
    new = write(cache, 6)
    cache.advance(torch.tensor([6, 3, 1, 4]), longest=6)
    model.keep(new, [range(6), range(3), range(1), range(4)])
    other, two = make(2, 9), Model(2)
    new = write(other, 8)
    other.advance(torch.tensor([8, 2]), longest=8)
    two.keep(new, [range(8), range(2)])
    cache.insert([3, 1], other)
    model.rows[3], model.rows[1] = two.rows
    model.check(cache)


def test_select_copies_rows_in_the_order_asked():
    cache, model = make(4, 12), Model(4)
    new = write(cache, 6)
    cache.advance(torch.tensor([6, 3, 1, 4]), longest=6)
    model.keep(new, [range(6), range(3), range(1), range(4)])
    kept = cache.select([3, 1], longest=4)
    assert kept.capacity == cache.capacity
    model.rows = [model.rows[3], model.rows[1]]
    model.check(kept)
    cache.kv.fill_(7)
    model.check(kept)


def test_too_much_is_refused():
    cache = make(1, 4)
    with pytest.raises(AssertionError, match="4 slots a row, 5 needed"):
        cache.begin(5)
    cache.begin(4)
    cache.advance(torch.tensor([3]), longest=3)
    with pytest.raises(AssertionError, match="begin"):
        cache.update(torch.zeros(1, HEADS, 1, DIM), torch.zeros(1, HEADS, 1, DIM), 0)
    with pytest.raises(AssertionError):
        cache.begin(1, behind=1)
