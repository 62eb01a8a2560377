"""Warping against transformers' processors, the keyed noise against integers, and the law of the samples."""

import math

import numpy as np
import pytest
import torch
from oracles import finalise32, gumbel_of_bits, hash_bits, key64, noise, second_constant
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from distill.errors import UserError
from distill.sampling import Sampling, _mix32, choose, choose_among_top, gumbel, warp

PUBLISHED = (0xD35A2D97, 0x735A2D97)  # second multipliers of the two published variants with 0x21F0AAAD
SECOND = second_constant()


def draw(seed, request, positions, vocab):
    return gumbel(seed=seed, request_B=torch.tensor([request]), position_BP=torch.tensor([positions]), vocab=vocab)[0]


# -- warp


def reference(logits, temperature, top_k, top_p):
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.05, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 2, 7, 49, 50, 51, 1000])
def test_warp_equals_transformers(top_k, top_p):
    for temperature, spread in ((1.0, 1.0), (0.7, 3.0), (0.1, 1.0), (2.5, 10.0)):
        logits = spread * torch.randn(200, 50, dtype=torch.float64)
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        got, want = warp(logits, sampling), reference(logits, temperature, top_k, top_p)
        assert torch.equal(got.isinf(), want.isinf())
        torch.testing.assert_close(got, want, rtol=1e-14, atol=0)
        assert (~got.isinf()).any(-1).all(), "something must survive"


def test_warp_any_leading_shape():
    logits = torch.randn(3, 4, 5, 20)
    sampling = Sampling(temperature=0.8, top_k=6, top_p=0.7)
    whole = warp(logits, sampling)
    assert whole.shape == logits.shape
    torch.testing.assert_close(whole[2, 1, 3], reference(logits[2, 1, 3][None], 0.8, 6, 0.7)[0])


def test_warp_is_the_identity_when_greedy_and_leaves_its_input_alone():
    logits = torch.randn(4, 9)
    assert torch.equal(warp(logits, Sampling(top_k=2, top_p=0.1)), logits)
    before = logits.clone()
    warp(logits, Sampling(temperature=0.5, top_k=3, top_p=0.6))
    assert torch.equal(logits, before)


def test_ties_with_the_last_survivor_all_stay():
    """Transformers' top-k keeps ties too; its top-p keeps whichever a sort happens to put first, ours all."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    by_k = warp(logits, Sampling(temperature=1.0, top_k=2))
    assert by_k.isinf().tolist() == [[False, False, False, False, True]]
    assert torch.equal(by_k, TopKLogitsWarper(2)(None, logits))
    # Mass before the second token is 0.45, before the third 0.62: without ties top-p 0.5 keeps two.
    by_p = warp(logits, Sampling(temperature=1.0, top_p=0.5))
    assert by_p.isinf().tolist() == [[False, False, False, False, True]]
    assert int(TopPLogitsWarper(0.5)(None, logits).isfinite().sum()) == 2
    equal = torch.zeros(1, 6)
    assert torch.equal(warp(equal, Sampling(temperature=1.0, top_k=2, top_p=0.3)), equal)


def test_ties_do_not_depend_on_the_order_of_the_vocabulary():
    logits = torch.randint(0, 4, (100, 30)).float()
    order = torch.randperm(30)
    sampling = Sampling(temperature=0.9, top_k=8, top_p=0.8)
    assert torch.equal(warp(logits, sampling)[:, order], warp(logits[:, order], sampling))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_choose_in_every_precision(dtype):
    """Half precision is widened before temperature and noise; what comes out is the choice over those values."""
    logits = (2 * torch.randn(40, 3, 64)).to(dtype)
    g = torch.stack([draw(0, r, [5, 6, 7], 64) for r in range(40)])
    sampling = Sampling(temperature=0.7, top_k=20, top_p=0.9)
    wide = logits if dtype == torch.float64 else logits.float()
    want = (warp(wide, sampling).double() + g.double()).argmax(-1)
    got = choose(logits, sampling, g)
    assert got.dtype == torch.long
    assert (got == want).double().mean() > 0.99  # fp32 sums may round two near-equal scores differently
    assert torch.equal(choose(logits, Sampling()), logits.argmax(-1))


def test_temperature_near_zero_is_greedy():
    logits = torch.randn(50, 1, 100)
    g = torch.stack([draw(0, r, [5], 100) for r in range(50)])
    assert torch.equal(choose(logits, Sampling(temperature=1e-6), g), logits.argmax(-1))


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
        {"top_p": -0.5},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
    ],
)
def test_impossible_settings(bad):
    with pytest.raises(UserError, match=f"{next(iter(bad))} must be"):
        Sampling(**bad)


# -- the keyed noise


def test_hash_is_a_published_one():
    """The finaliser is documented as Chris Wellons's; its second multiplier must be one he published."""
    got = int(_mix32(torch.tensor([1], dtype=torch.int32))) & 0xFFFFFFFF
    assert got in [finalise32(1, second) for second in PUBLISHED]


def test_finaliser_against_integers():
    values = [
        0,
        1,
        2,
        0x7FFFFFFF,
        0x80000000,
        0xFFFFFFFF,
        0xDEADBEEF,
        *np.random.default_rng(0).integers(0, 2**32, 500),
    ]
    signed = torch.tensor([int(v) - (1 << 32) if v >= 1 << 31 else int(v) for v in values], dtype=torch.int32)
    got = [int(x) & 0xFFFFFFFF for x in _mix32(signed)]
    assert got == [finalise32(int(v), SECOND) for v in values]
    assert len(set(got)) == len(set(map(int, values))), "a finaliser is a bijection"


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**62, -1, -(2**40)])
@pytest.mark.parametrize("request_id", [0, 1, 7, 2**31, 2**50 + 1, -3])
def test_noise_against_integers(seed, request_id):
    positions = [0, 1, 5, 1000, 2**31 - 1]
    got = draw(seed, request_id, positions, 11)
    want = [[gumbel_of_bits(hash_bits(seed, request_id, p, t, second=SECOND)) for t in range(11)] for p in positions]
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=3e-6, atol=3e-6)
    assert torch.equal(got, noise(seed, request_id, positions, 11, second=SECOND))


def test_noise_at_large_token_ids():
    vocab = 200_003
    got = draw(3, 4, [9], vocab)[0]
    for token in (0, 1, 65_535, 65_536, 131_071, 200_002):
        assert got[token].item() == pytest.approx(
            gumbel_of_bits(hash_bits(3, 4, 9, token, second=SECOND)), rel=3e-6, abs=3e-6
        )


@pytest.mark.parametrize("vocab", [1, 7, 8, 33, 64, 1000])
def test_noise_depends_on_its_key_alone(vocab):
    """Bit for bit the same in any batch, any block of positions, any vocabulary that holds the id."""
    requests = torch.tensor([5, 9, 2])
    positions = torch.tensor([[10, 11, 12], [3, 4, 5], [100, 7, 10]])
    whole = gumbel(seed=3, request_B=requests, position_BP=positions, vocab=vocab)
    assert whole.dtype == torch.float32
    assert whole.shape == (3, 3, vocab)
    wider = gumbel(seed=3, request_B=requests, position_BP=positions, vocab=vocab + 13)
    assert torch.equal(wider[..., :vocab], whole)
    for b in range(3):
        for p in range(3):
            assert torch.equal(whole[b, p], draw(3, int(requests[b]), [int(positions[b, p])], vocab)[0])


def test_noise_differs_with_each_part_of_the_key():
    base = draw(3, 4, [9], 50)[0]
    for other in (
        draw(4, 4, [9], 50),
        draw(3, 5, [9], 50),
        draw(3, 4, [10], 50),
        draw(4, 3, [9], 50),
        draw(3, 9, [4], 50),
    ):
        assert float((other[0] == base).double().mean()) < 0.05


def test_keys_do_not_collide():
    keys = {key64(s, r, p) for s in range(12) for r in range(40) for p in range(200)}
    assert len(keys) == 12 * 40 * 200


def test_extremes_are_finite():
    """The smallest and the largest 31-bit numbers, and every number the noise of a million ids is made of."""
    assert gumbel_of_bits(0) == pytest.approx(-math.log(0.5 / 2**31), rel=1e-6)
    assert math.isfinite(gumbel_of_bits(0x7FFFFFFF))
    g = draw(1, 1, [0], 1_000_000)
    assert bool(g.isfinite().all())
    assert float(g.max()) <= 22.2
    assert float(g.min()) >= -2.82


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Standardised chi-square: about 0 +- 1 when the law is right."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    free = len(expected) - 1
    return (statistic - free) / math.sqrt(2 * free)


def uniforms(seed=0, requests=20, positions=50, vocab=1000) -> np.ndarray:
    """exp(-exp(-G)): uniform when G is standard Gumbel."""
    g = gumbel(
        seed=seed,
        request_B=torch.arange(requests),
        position_BP=torch.arange(positions).expand(requests, -1),
        vocab=vocab,
    )
    return torch.exp(-torch.exp(-g.double())).numpy()


def test_noise_is_standard_gumbel():
    u = uniforms()
    count, _ = np.histogram(u, bins=1000, range=(0, 1))
    assert abs(chi_square(count, np.full(1000, u.size / 1000))) < 4
    assert abs(u.mean() - 0.5) < 4 * math.sqrt(1 / 12 / u.size)
    # The upper tail decides what is sampled: as many as a Gumbel has beyond 10 (each tail is Poisson).
    for level in (6, 8, 10):
        expected = u.size * (1 - math.exp(-math.exp(-level)))
        got = int((u > math.exp(-math.exp(-level))).sum())
        assert abs(got - expected) < 4 * math.sqrt(expected) + 1


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["request", "position", "token"])
def test_neighbours_are_independent(axis):
    """Joint uniformity of neighbours along one axis of the key, at distances that are powers of two."""
    u = uniforms(seed=5, requests=17, positions=65, vocab=300)
    for lag in (1, 2, 4, 8, 16):
        first = np.take(u, range(u.shape[axis] - lag), axis)
        second = np.take(u, range(lag, u.shape[axis]), axis)
        joint, _, _ = np.histogram2d(first.ravel(), second.ravel(), bins=16, range=[[0, 1], [0, 1]])
        assert abs(chi_square(joint.ravel(), np.full(256, first.size / 256))) < 5
        correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(first.size)


def test_seeds_are_independent():
    one, two = uniforms(seed=1).ravel(), uniforms(seed=2).ravel()
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / math.sqrt(one.size)


# -- the law of the samples


def counts(p_logits: torch.Tensor, sampling: Sampling, draws: int, *, along: str) -> np.ndarray:
    vocab = len(p_logits)
    many = torch.arange(draws)
    if along == "request":
        g = gumbel(seed=11, request_B=many, position_BP=torch.full((draws, 1), 40), vocab=vocab)
    else:
        g = gumbel(seed=11, request_B=torch.tensor([3]), position_BP=many[None], vocab=vocab).transpose(0, 1)
    tokens = choose(p_logits.expand(draws, 1, vocab), sampling, g)[:, 0]
    return np.bincount(tokens.numpy(), minlength=vocab)


@pytest.mark.parametrize("along", ["request", "position"])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.0), Sampling(temperature=0.7), Sampling(temperature=1.3, top_k=8, top_p=0.9)],
    ids=["T1", "T0.7", "filtered"],
)
def test_samples_follow_the_softmax(sampling, along):
    torch.manual_seed(2)
    logits = 1.5 * torch.randn(24)
    got = counts(logits, sampling, 60_000, along=along)
    warped = reference(logits[None].double(), sampling.temperature, sampling.top_k, sampling.top_p)[0]
    p = warped.softmax(-1).numpy()
    assert got[p == 0].sum() == 0
    expected = 60_000 * p[p > 0]
    assert expected.min() > 5
    assert abs(chi_square(got[p > 0], expected)) < 4
    # Negative control: the law of a slightly different temperature is refused by the same test.
    off = reference(logits[None].double(), sampling.temperature * 1.25, sampling.top_k, sampling.top_p)[0]
    q = off.softmax(-1).numpy()
    same = (p > 0) & (q > 0)
    assert chi_square(got[same], 60_000 * q[same] / q[same].sum()) > 8


def test_uncoupled_law_is_refused():
    """Negative control: argmax without noise, and noise shared by all draws, are not samples."""
    torch.manual_seed(2)
    logits = 1.5 * torch.randn(24)
    p = logits.double().softmax(-1).numpy()
    always = np.bincount(np.full(60_000, int(logits.argmax())), minlength=24)
    assert chi_square(always, 60_000 * p) > 100
    shared = draw(11, 3, [40], 24).expand(60_000, 1, 24)
    same = choose(logits.expand(60_000, 1, 24), Sampling(temperature=1.0), shared)[:, 0]
    assert chi_square(np.bincount(same.numpy(), minlength=24), 60_000 * p) > 100


@pytest.mark.parametrize("setting", [{"top_k": 5}, {"top_k": 40, "top_p": 0.8}, {"top_k": 400}])
def test_choosing_among_the_top_equals_choosing_among_all(setting):
    """Noise for the survivors only gives the same tokens; half-precision logits bring ties at the k-th place."""
    sampling = Sampling(temperature=0.9, seed=7, **setting)
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits = (torch.randn(6, 4, 300, generator=generator) * 2).to(dtype)
        keys = {"seed": 7, "request_B": torch.arange(6), "position_BP": torch.arange(24).view(6, 4), "vocab": 300}
        noise = gumbel(**keys)
        chosen = choose_among_top(logits, sampling, lambda ids, keys=keys: gumbel(**keys, ids_BPk=ids))
        assert chosen is not None
        assert torch.equal(chosen, choose(logits, sampling, noise))


def test_too_many_ties_are_left_to_the_full_noise():
    flat = torch.zeros(1, 1, 100)
    assert choose_among_top(flat, Sampling(temperature=1.0, top_k=3), lambda ids: torch.zeros(ids.shape)) is None
