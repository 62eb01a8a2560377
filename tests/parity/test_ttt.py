"""Training-time test of EAGLE-3 against the published equations: values, loss and every gradient.

The oracle (``oracles.PlainEagle3``) walks one document at a time, position by position and step by step; the
library runs packed documents in one batch.
"""

import pytest
import torch
from oracles import PlainEagle3, pack, random_documents

from distill.attention import packed_mask
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.losses import LossConfig, total
from distill.target.tiny import tiny_target
from distill.vocab import choose_vocab

V, W, K = 40, 27, 4
SWITCHES = {
    "plain": {},
    "residual": {"norm_before_residual": True},
    "fc_norm": {"fc_norm": True},
    "output": {"norm_output": True},
    "all": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "taps": {"taps": [0, 1, 3, 6]},
    "one-tap": {"taps": [5], "fc_norm": True},
    "random-head": {"head_init": "random", "intermediate_size": 24},
}


def make(dtype=torch.float64, *, layers: int = 6, **flags):
    target = tiny_target("llama", seed=4, vocab_size=V, hidden=16, layers=layers, dtype=dtype)
    torch.manual_seed(1)
    vocab, _ = choose_vocab(torch.rand(V), W)
    drafter = Eagle3(Eagle3Config(draft_vocab_size=W, ttt_steps=K, **flags), target, vocab).to(dtype)
    generator = torch.Generator().manual_seed(2)
    for parameter in drafter.parameters():  # norms too must differ from 1, or leaving one out would not show
        noise = torch.randn(parameter.shape, generator=generator).to(dtype)
        parameter.data.add_(0.3 * noise if parameter.ndim == 1 else 0.1 * noise)
    return target, vocab, drafter


def features(target, drafter, batch):
    mask = packed_mask(batch.doc_BL, batch.positions_BL)
    taps = drafter.taps(drafter.config, target.info)
    return target.forward(batch.ids_BL, positions_BL=batch.positions_BL, mask=mask, taps=taps)


def documents(rows):
    """(row, start, ids, written) of every document."""
    for b, row in enumerate(rows):
        start = 0
        for ids, written in row:
            yield b, start, ids, written
            start += len(ids)


def plain_taps(target, drafter, ids):
    """Transformers' hidden states of the document alone; the last index is the residual before the final norm."""
    wanted = drafter.taps(drafter.config, target.info)
    with torch.no_grad():
        states = target.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        out = target.forward(torch.tensor([ids]), taps=(target.info.n_layers,)).taps[target.info.n_layers]
    return [(out if k == target.info.n_layers else states[k])[0] for k in wanted]


def oracle_loss(target, vocab, drafter, rows, denominator):
    """Soft cross entropy, written out; returns it and the logits it saw, {(row, position, step): logits}."""
    plain = PlainEagle3(drafter, target)
    columns = vocab.target_ids
    loss, seen, counted = 0, {}, 0
    for b, start, ids, written in documents(rows):
        found = plain.train(ids, plain_taps(target, drafter, ids), K)
        with torch.no_grad():
            teacher = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        for (k, i), (_, logits) in found.items():
            seen[b, start + i, k] = logits
            if i + 2 + k < len(ids) and all(written[i + 1 : i + 3 + k]):
                row = teacher[i + 1 + k]  # after reading t_{i+1+k} the target speaks about t_{i+2+k}
                counted += 1
                if int(row.argmax()) in columns.tolist():
                    p = row[columns].softmax(-1)
                    loss = loss - 0.8**k * (p * logits.log_softmax(-1)).sum()
    assert counted > 8
    return loss / (sum(0.8**k for k in range(K)) * denominator), seen


def compare(dtype, tolerance, seed=0, **flags):
    target, vocab, drafter = make(dtype, **flags)
    rows = random_documents(2, 16, V, seed=seed, share=0.8)
    long = torch.randint(0, V, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    rows.append([([9, 8, 7], [0, 1, 1]), (long, [0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1])])
    batch = pack(rows, 16)
    want, seen = oracle_loss(target, vocab, drafter, rows, batch.denominator)
    want_grads = torch.autograd.grad(want, list(drafter.parameters()))
    predictions = drafter.training_steps(batch, features(target, drafter, batch))
    assert [p.shift for p in predictions] == [2 + k for k in range(K)]
    assert [p.weight for p in predictions] == pytest.approx([0.8**k for k in range(K)])
    for (b, position, k), logits in seen.items():
        if k and not predictions[1].mask_BL[b, position]:
            continue  # computed only where it counts, or a later step does
        got = predictions[k].head(predictions[k].hidden_BLD[b, position])
        torch.testing.assert_close(got, logits, rtol=tolerance, atol=tolerance)
    result = total(
        predictions,
        batch,
        features(target, drafter, batch),
        target=target,
        vocab=vocab,
        config=LossConfig(name="ce", chunk=5),
    )
    torch.testing.assert_close(result.loss, want.detach(), rtol=tolerance, atol=tolerance)
    result.loss.backward()
    for (name, parameter), grad in zip(drafter.named_parameters(), want_grads, strict=True):
        assert float(grad.abs().max()) > 1e-5, f"{name} does not take part"
        torch.testing.assert_close(
            parameter.grad, grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("switch", SWITCHES)
def test_values_and_gradients(switch):
    compare(torch.float64, 1e-9, **SWITCHES[switch])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_packings(seed):
    compare(torch.float64, 1e-9, seed=seed, norm_output=bool(seed % 2))


@pytest.mark.parametrize("switch", ["plain", "all"])
def test_values_and_gradients_in_single_precision(switch):
    compare(torch.float32, 1e-5, **SWITCHES[switch])


@pytest.mark.parametrize("layers", range(1, 9))
def test_shallow_targets(layers):
    """The three published taps where they are distinct, else distinct ones the target has; training works."""
    target, _, drafter = make(layers=layers)
    taps = drafter.taps(drafter.config, target.info)
    assert len(set(taps)) == len(taps) == min(3, layers)
    assert list(taps) == sorted(taps)
    assert all(0 <= k <= layers for k in taps)
    published = (2, layers // 2, layers - 3)
    if len(set(published)) == 3 and min(published) >= 0 and list(published) == sorted(published):
        assert taps == published
    compare(torch.float64, 1e-9, layers=layers)


def test_published_taps_of_deeper_targets():
    class Info:
        def __init__(self, n):
            self.n_layers = n

    for n, want in ((7, (2, 3, 4)), (8, (2, 4, 5)), (30, (2, 15, 27)), (32, (2, 16, 29)), (80, (2, 40, 77))):
        assert Eagle3.taps(Eagle3Config(), Info(n)) == want


def test_packing_changes_nothing():
    """A document's predictions are the same in a pack, in another place of a pack, and alone."""
    target, _, drafter = make()
    a = ([5, 6, 7, 8, 9, 10], [1] * 6)
    b = ([11, 12, 13, 14], [1] * 4)
    packs = [pack([[a, b]], 12), pack([[b, a]], 12), pack([[a]], 6), pack([[b]], 4)]
    outs = []
    for batch in packs:
        predictions = drafter.training_steps(batch, features(target, drafter, batch))
        outs.append([p.hidden_BLD[0] for p in predictions])
    for k in range(K):
        valid = slice(0, 6 - 2 - k) if k < 4 else slice(0, 0)
        torch.testing.assert_close(outs[0][k][valid], outs[2][k][valid], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(outs[1][k][4:][valid], outs[2][k][valid], rtol=1e-10, atol=1e-12)
        valid = slice(0, max(0, 4 - 2 - k))
        torch.testing.assert_close(outs[0][k][6:][valid], outs[3][k][valid], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(outs[1][k][valid], outs[3][k][valid], rtol=1e-10, atol=1e-12)


def test_no_step_sees_the_future():
    """Changing token j leaves every prediction alone that reads tokens before j only (i + 1 + k < j).

    A known fault elsewhere: the mask of the later steps opened the whole row.
    """
    target, _, drafter = make()
    ids = torch.randint(3, V, (12,)).tolist()
    batches = []
    for j in range(1, 12):
        changed = list(ids)
        changed[j] = (changed[j] + 1) % V
        batches.append((j, pack([[(changed, [1] * 12)]], 12)))
    base = pack([[(ids, [1] * 12)]], 12)
    reference = [p.hidden_BLD[0] for p in drafter.training_steps(base, features(target, drafter, base))]
    for j, batch in batches:
        other = [p.hidden_BLD[0] for p in drafter.training_steps(batch, features(target, drafter, batch))]
        for k in range(K):
            same = (reference[k] - other[k]).abs().amax(-1) < 1e-12
            for i in range(12 - 2 - k):
                assert bool(same[i]) == (i + 1 + k < j), (j, k, i)


def test_gradients_never_reach_the_target():
    target, vocab, drafter = make()
    batch = pack(random_documents(2, 14, V, seed=1), 14)
    output = features(target, drafter, batch)
    predictions = drafter.training_steps(batch, output)
    total(predictions, batch, output, target=target, vocab=vocab, config=LossConfig()).loss.backward()
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize("flags", [{}, SWITCHES["all"]], ids=["plain", "all"])
def test_mixed_precision_training(flags):
    """fp32 weights under bf16 autocast, as the trainer runs it: every gradient points where the exact one points.

    bf16 rounds each product to 8 bits; through one layer and four steps that leaves a few per cent.
    """
    found = []
    for autocast in (False, True):
        target, vocab, drafter = make(torch.float32, **flags)
        batch = pack(random_documents(4, 24, V, seed=4, share=0.9), 24)
        output = features(target, drafter, batch)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            predictions = drafter.training_steps(batch, output)
            loss = total(predictions, batch, output, target=target, vocab=vocab, config=LossConfig()).loss
        loss.backward()
        found.append((float(loss.detach()), {name: p.grad for name, p in drafter.named_parameters()}))
    (exact, grads), (rounded, others) = found
    assert rounded == pytest.approx(exact, rel=0.02)
    for name, grad in grads.items():
        assert others[name].dtype == torch.float32
        assert float((others[name] - grad).norm()) < 0.05 * float(grad.norm()), name


@pytest.mark.parametrize("flags", [{}, SWITCHES["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("autocast", [False, True])
def test_activation_checkpointing_changes_nothing_but_memory(flags, autocast):
    """Bit for bit the same loss and gradients, from fewer tensors kept for the backward pass."""
    found = []
    for on in (False, True):
        target, vocab, drafter = make(torch.float32, **flags)
        drafter.recompute_activations(on)
        batch = pack(random_documents(4, 24, V, seed=4, share=0.9), 24)
        output = features(target, drafter, batch)
        kept = []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        ):
            predictions = drafter.training_steps(batch, output)
        size = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}.values())
        loss = total(predictions, batch, output, target=target, vocab=vocab, config=LossConfig()).loss
        loss.backward()
        found.append((loss.detach(), [p.grad for p in drafter.parameters()], size))
    (loss, grads, size), (again, others, smaller) = found
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert smaller < 0.8 * size


def test_later_steps_are_computed_only_where_they_count():
    """Nobody reads them elsewhere; the first step's keys are read by all that follow."""
    target, _, drafter = make()
    rows = [[([5, 6, 7, 8, 9, 10, 3, 4], [0, 0, 0, 1, 1, 1, 1, 1])], [([11, 12, 13], [0, 0, 0])]]
    batch = pack(rows, 10)
    first, *later = drafter.training_steps(batch, features(target, drafter, batch))
    assert bool((first.hidden_BLD[batch.doc_BL >= 0].abs().sum(-1) > 0).all())
    for prediction in later:
        computed = prediction.hidden_BLD.abs().sum(-1) > 0
        assert torch.equal(computed, later[0].mask_BL)
        assert bool((computed | ~prediction.mask_BL).all())


def test_a_batch_without_supervision():
    """Another micro batch of the step may have some; every weight still takes part, with a gradient of zero."""
    target, vocab, drafter = make()
    batch = pack([[([5, 6, 7, 8], [0, 0, 0, 0])]], 6)
    output = features(target, drafter, batch)
    predictions = drafter.training_steps(batch, output)
    total(predictions, batch, output, target=target, vocab=vocab, config=LossConfig()).loss.backward()
    assert all(p.grad is not None and not bool(p.grad.any()) for p in drafter.parameters())
