"""EAGLE-1 and its HASS steps against the published equations: values, loss, every gradient, and what is drafted.

The oracle (``plain_eagle1.py``) is dense and walks one document at a time, by the position of the query; the library
runs packed documents in one batch, by where a draft starts.
"""

import math

import pytest
import torch
from drafter_tools import V, draft_chain, extend_in_chunks, make, target_of
from oracles import pack, random_documents
from plain_eagle1 import PlainEagle1

from distill.drafters.eagle1 import Eagle1, Eagle1Config
from distill.errors import UserError
from distill.losses import LossConfig
from distill.target.tiny import tiny_target
from distill.train.module import step_loss, target_features
from distill.types import Frontier

SWITCHES = {
    "published": {},
    "bias": {"fc_bias": True, "intermediate_size": 24},
    "weights": {"feature_weight": 0.3, "token_weight": 2.0, "num_layers": 2},
    "token": {"feature_weight": 0.0, "steps": 2},
    "feature": {"token_weight": 0.0},
    "hass": {"steps": 4, "step_decay": 0.7},
    "hass-deep": {"steps": 3, "num_layers": 3},
}


def rows_of(seed: int):
    """Two random rows of several documents and turns, and one in which a long document comes second."""
    long = torch.randint(0, V, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        *random_documents(2, 16, V, seed=seed, share=0.8),
        [([9, 8, 7], [0, 1, 1]), (long, [0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1])],
    ]


def plain_features(target, ids):
    """Transformers' last hidden state (after the final norm) of the document alone."""
    with torch.no_grad():
        out = target.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return out.hidden_states[-1][0]


def oracle(target, drafter, rows, denominator):
    """The published loss, written out with all logits; returns it and the outputs, {(row, position, step): out}."""
    plain, config = PlainEagle1(drafter, target), drafter.config
    loss, outs, sides = 0, {}, set()
    for b, row in enumerate(rows):
        start = 0
        for ids, written in row:
            features = plain_features(target, ids)
            forwards = plain.forwards(ids, features, config.steps) if len(ids) > 1 else []
            for k, out_QD in enumerate(forwards):
                for i in range(len(ids) - 2 - k):
                    if not all(written[i + 1 : i + 3 + k]):  # t_{i+1} starts the draft, t_{i+2+k} is drafted
                        continue
                    out, wanted = out_QD[i + k], features[i + 1 + k]
                    outs[b, start + i, k] = out
                    error = (out - wanted).abs()
                    sides |= set((error.detach() < 1).tolist())
                    smooth = torch.where(error < 1, 0.5 * error**2, error - 0.5).mean()
                    p, log_q = (plain.head @ wanted).softmax(-1), (plain.head @ out).log_softmax(-1)
                    token = -(p * log_q).sum()
                    loss = loss + config.step_decay**k * (config.feature_weight * smooth + config.token_weight * token)
            start += len(ids)
    assert sides == {True, False}, "both branches of smooth-L1 must be met"
    weights = sum(config.step_decay**k for k in range(config.steps)) * (config.feature_weight + config.token_weight)
    return loss / (weights * denominator), outs


def compare(dtype, tolerance, seed=0, **options):
    target = target_of(dtype=dtype)
    drafter = make("eagle1", target=target, **options)
    rows = rows_of(seed)
    batch = pack(rows, 16)
    want, outs = oracle(target, drafter, rows, batch.denominator)
    assert len(outs) > 12
    want_grads = torch.autograd.grad(want, list(drafter.parameters()))
    predictions = drafter.training_steps(batch, target_features(drafter, batch))
    said = [p for p in predictions if p.kind == "logits"]
    assert [p.shift for p in said] == [2 + k for k in range(drafter.config.steps)]
    counted = {(b, i, k) for k, p in enumerate(said) for b, i in p.mask_BL.nonzero().tolist()}
    assert counted == set(outs)
    for (b, i, k), out in outs.items():
        torch.testing.assert_close(said[k].hidden_BLD[b, i], out, rtol=tolerance, atol=tolerance)
    result = step_loss(drafter, batch, LossConfig(name="ce", chunk=5))
    torch.testing.assert_close(result.loss, want.detach(), rtol=tolerance, atol=tolerance)
    result.loss.backward()
    for (name, parameter), grad in zip(drafter.named_parameters(), want_grads, strict=True):
        assert float(grad.abs().max()) > 1e-6, f"{name} does not take part"
        torch.testing.assert_close(
            parameter.grad, grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("switch", SWITCHES)
def test_values_and_gradients(switch):
    compare(torch.float64, 1e-9, **SWITCHES[switch])


@pytest.mark.parametrize("switch", ["published", "hass"])
def test_other_packings_in_single_precision(switch):
    compare(torch.float32, 1e-5, seed=3, **SWITCHES[switch])


def test_masks_at_the_borders_of_answers_and_documents():
    """A start's token and the one spoken about must both be the target's, in one document."""
    written = [0, 0, 1, 1, 1, 1, 0, 1, 1]
    batch = pack([[([5] * 9, written), ([6] * 4, [1, 1, 1, 1])]], 15)
    drafter = make("eagle1", target=target_of(), steps=2)
    predictions = drafter.training_steps(batch, target_features(drafter, batch))
    by_step = {(p.kind, p.shift): p.mask_BL[0].nonzero()[:, 0].tolist() for p in predictions}
    # Position 1 is the last of the prompt: it drafts below the first token of the answer, as decoding does.
    first, second = [1, 2, 3, 6, 9, 10], [1, 2, 9]
    assert by_step == {("feature", 1): first, ("logits", 2): first, ("feature", 2): second, ("logits", 3): second}


# -- drafting


@pytest.mark.parametrize("switch", ["published", "bias", "weights"])
@torch.no_grad()
def test_drafting_equals_the_equations_at_any_depth(switch):
    """Far past the one step it was trained for: forward m of HASS is what is drafted at depth m."""
    target = target_of()
    drafter = make("eagle1", target=target, **SWITCHES[switch])
    ids = torch.randint(3, V, (18,)).tolist()
    features = plain_features(target, ids)
    forwards = PlainEagle1(drafter, target).forwards(ids, features, 9)
    output = target.forward(torch.tensor([ids]), taps=())
    assert drafter.max_depth is None
    for i in (0, 3, 7):
        state = drafter.new_state(1, 32)
        extend_in_chunks(drafter, state, ids[: i + 2], output, chunk=3)
        drafted = draft_chain(drafter, state, ids[i + 1 : i + 10])
        for depth, logits in enumerate(drafted):
            want = PlainEagle1(drafter, target).head @ forwards[depth][i + depth]
            torch.testing.assert_close(logits, want, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_every_path_of_a_tree_equals_the_equations():
    """Two rows with prefixes of their own, two layers; each node sees the prefix and its ancestors."""
    target = target_of()
    drafter = make("eagle1", target=target, num_layers=2, fc_bias=True)
    prefixes = [torch.randint(3, V, (n,)).tolist() for n in (9, 4)]
    width = len(prefixes[0]) - 1
    padded = torch.tensor([p[:-1] + [0] * (width + 1 - len(p)) for p in prefixes])
    roots = torch.tensor([p[-1] for p in prefixes])
    state = drafter.new_state(2, 32)
    drafter.extend(state, padded, roots, target.forward(padded, taps=()), torch.tensor([width, 3]), longest=width)
    #   root -> (0, 1, 2),  0 -> (3, 4),  2 -> (5),  4 -> (6, 7)
    levels = [[()], [(0,), (1,), (2,)], [(0, 3), (0, 4), (2, 5)], [(0, 4, 6), (0, 4, 7)]]
    fed = []
    for depth, level in enumerate(levels):
        fed += level
        above = levels[depth - 1] if depth else [()]
        frontier = Frontier(
            tokens_BF=torch.stack([roots if not path else (roots + path[-1]) % V for path in level], 1),
            depth=depth,
            parent_BF=torch.tensor([[above.index(path[:-1]) for path in level]] * 2),
            ancestors_BFM=torch.tensor([[[other == path[: len(other)] for other in fed] for path in level]] * 2),
        )
        logits = drafter.step(state, frontier)
        for b, prefix in enumerate(prefixes):
            for f, path in enumerate(level):
                ids = prefix + [(prefix[-1] + node) % V for node in path]
                plain = PlainEagle1(drafter, target)
                last = plain.forwards(ids + [0], plain_features(target, ids + [0]), depth + 1)[-1]
                want = plain.head @ last[len(ids) - 2]
                torch.testing.assert_close(logits[b, f], want, rtol=1e-9, atol=1e-9)


# -- noise


def noise_of(drafter, lengths, *, seed=0):
    """The noise training adds to the features of documents of these lengths in one row, and padding."""
    rows = [[([5] * n, [1] * n) for n in lengths]]
    batch = pack(rows, sum(lengths) + 7)
    features = torch.zeros(1, sum(lengths) + 7, 16, dtype=drafter.target.dtype)
    torch.manual_seed(seed)
    added = drafter.noisy(features, batch)
    return [part[0] for part in added.split([*lengths, 7], dim=1)]


def test_noise_is_uniform_with_the_published_width():
    """(U(0, 1) - 0.5) * 0.2 * 512 / L: half-width 0.1 at 512 tokens, less for longer texts, never more."""
    drafter = make("eagle1", target=target_of()).train()
    for length, got in zip((512, 1024, 2048, 100), noise_of(drafter, (512, 1024, 2048, 100)), strict=False):
        half = min(0.1 * 512 / length, 0.1)
        share = (got.flatten() / half + 1) / 2  # uniform on (0, 1)
        n = share.numel()
        assert float(share.min()) >= 0
        assert float(share.max()) <= 1
        # Kolmogorov-Smirnov: above 2 / sqrt(n) once in 1,500 times.
        ladder = torch.arange(1, n + 1) / n
        assert float((share.sort().values - ladder).abs().max()) < 2 / math.sqrt(n)
    twice = make("eagle1", target=target_of(), noise=0.2).train()
    for one, two in zip(noise_of(drafter, (40, 600)), noise_of(twice, (40, 600)), strict=True):
        torch.testing.assert_close(two, 2 * one, rtol=1e-9, atol=1e-12)


def test_noise_is_keyed_and_only_in_training():
    drafter = make("eagle1", target=target_of()).train()
    first, again, other = (noise_of(drafter, (30, 50), seed=seed)[1] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.unique()) == first.numel(), "every number has noise of its own"
    assert not any(part.any() for part in noise_of(drafter.eval(), (30, 50)))
    assert not any(part.any() for part in noise_of(make("eagle1", target=target_of(), noise=0.0).train(), (30, 50)))


def test_noise_is_on_the_input_alone():
    """What should come out is the target's own feature; in evaluation the same batch has no noise at all."""
    target = target_of()
    drafter = make("eagle1", target=target, steps=2)
    batch = pack(rows_of(0), 16)
    output = target_features(drafter, batch)
    clean, noisy = (drafter.train(mode).training_steps(batch, output) for mode in (False, True))
    for one, two in zip(clean, noisy, strict=True):
        assert not torch.equal(one.hidden_BLD, two.hidden_BLD)
        if one.kind == "feature":
            assert torch.equal(one.feature_target_BLD, two.feature_target_BLD)
            follows = one.feature_target_BLD[:, : -one.shift]
            assert torch.equal(follows, output.last_BLD[:, one.shift :])


# -- precision, memory, layout


@pytest.mark.parametrize("options", [{}, {"steps": 3, "num_layers": 2, "fc_bias": True}], ids=str)
def test_mixed_precision_training(options):
    """fp32 weights under bf16 autocast, as the trainer runs it: every gradient points where the exact one points.

    bf16 rounds each product to 8 bits; through two layers and three steps that leaves a few per cent.
    """
    found = []
    for autocast in (False, True):
        drafter = make("eagle1", target=target_of(dtype=torch.float32), **options)
        batch = pack(random_documents(4, 24, V, seed=4, share=0.9), 24)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = step_loss(drafter, batch, LossConfig()).loss
        loss.backward()
        found.append((float(loss.detach()), {name: p.grad for name, p in drafter.named_parameters()}))
    (exact, grads), (rounded, others) = found
    assert rounded == pytest.approx(exact, rel=0.02)
    for name, grad in grads.items():
        assert others[name].dtype == torch.float32
        assert float((others[name] - grad).norm()) < 0.05 * float(grad.norm()), name


@pytest.mark.parametrize("autocast", [False, True])
def test_activation_checkpointing_changes_nothing_but_memory(autocast):
    found = []
    for on in (False, True):
        drafter = make("eagle1", target=target_of(dtype=torch.float32), steps=3, num_layers=2).train()
        drafter.recompute_activations(on)
        batch = pack(random_documents(4, 24, V, seed=4, share=0.9), 24)
        kept = []
        torch.manual_seed(3)
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        ):
            predictions = drafter.training_steps(batch, target_features(drafter, batch))
        size = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}.values())
        sum((p.hidden_BLD * p.mask_BL[..., None]).square().sum() for p in predictions).backward()
        found.append(([p.grad for p in drafter.parameters()], size))
    (grads, size), (others, smaller) = found
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert smaller < 0.8 * size


def test_drafter_of_another_precision_than_the_target():
    target = tiny_target("llama", vocab_size=V, hidden=16, layers=3, dtype=torch.bfloat16)
    drafter = Eagle1(Eagle1Config(steps=2), target)
    batch = pack(rows_of(0), 16)
    for prediction in drafter.training_steps(batch, target_features(drafter, batch)):
        assert prediction.hidden_BLD.dtype == torch.float32


def test_state_dict_is_that_of_the_reference():
    """Names the published checkpoints have, no norm at the input of the first layer and none at the end."""
    layer = [
        "post_attention_layernorm",
        *(f"self_attn.{n}_proj" for n in "qkvo"),
        *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
    ]
    names = {"fc.weight", *(f"layers.0.{n}.weight" for n in layer)}
    assert set(make("eagle1", target=target_of()).state_dict()) == names
    more = names | {"fc.bias", "layers.1.input_layernorm.weight", *(f"layers.1.{n}.weight" for n in layer)}
    assert set(make("eagle1", target=target_of(), fc_bias=True, num_layers=2).state_dict()) == more


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"steps": 0}, "drafter.steps must be >= 1, got 0"),
        ({"num_layers": 0}, "drafter.num_layers must be >= 1, got 0"),
        ({"noise": -0.1}, "drafter.noise must be a finite number >= 0, got -0.1"),
        ({"noise": float("inf")}, "drafter.noise must be a finite number >= 0, got inf"),
        ({"feature_weight": float("inf")}, "drafter.feature_weight must be a finite number >= 0, got inf"),
        ({"token_weight": float("nan")}, "drafter.token_weight must be a finite number >= 0, got nan"),
        ({"feature_weight": 0.0, "token_weight": 0.0}, "must be above 0, got 0 for both"),
        ({"step_decay": 0.0}, r"drafter.step_decay must be in \(0, 1\], got 0.0"),
        ({"intermediate_size": 0}, "null takes the target's"),
    ],
)
def test_impossible_configs(bad, message):
    with pytest.raises(UserError, match=message):
        Eagle1Config(**bad)
