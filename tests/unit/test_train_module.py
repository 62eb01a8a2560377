"""The Trainer adds nothing to the mathematics: a plain loop gives the same weights, any split the same gradient."""

import lightning.pytorch as pl
import pytest
import torch
import train_tools as tools
from torch import nn

from distill.attention import packed_mask
from distill.data import Batches
from distill.data.datamodule import DataModule
from distill.drafters.medusa import Medusa, MedusaConfig
from distill.errors import UserError
from distill.losses import LossConfig
from distill.train.callbacks import AfterStep
from distill.train.evaluate import validate
from distill.train.module import DraftModule, Sums, chained, step_loss
from distill.train.schedule import OptimConfig, build_optimizer
from distill.types import Batch

OPTIM = OptimConfig(lr=1e-2, warmup=2, clip=0.0)
SIZES = {"pack_len": 32, "max_len": 16, "seed": 0}


def fit(drafter, *, steps=1, batch_size=4, accumulate=1, optim=OPTIM, data=None, callbacks=()):
    module = DraftModule(drafter, loss=LossConfig(), optim=optim, max_steps=steps)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=list(callbacks),
    )
    sizes = {**SIZES, "batch_size": batch_size, "accumulate": accumulate}
    trainer.fit(module, datamodule=DataModule(data or tools.data(), **sizes))
    return module


class Gradients(pl.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.seen = [p.grad.clone() for p in module.drafter.parameters()]


@pytest.fixture(autouse=True)
def _quiet():
    import logging
    import warnings

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no `validation_step`.*")
        yield


def plain_loop(drafter, batches, *, steps, optim=OPTIM):
    optimizer, schedule = build_optimizer(drafter, optim, max_steps=steps)
    for number in range(steps):
        for batch in batches.step(number):
            step_loss(drafter, batch, LossConfig()).loss.backward()
        if optim.clip:
            nn.utils.clip_grad_norm_(drafter.parameters(), optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_a_plain_loop_gives_the_trainers_weights(clip):
    optim = OptimConfig(lr=1e-2, warmup=2, clip=clip)
    ours, theirs = tools.drafter(), tools.drafter()
    batches = Batches(tools.data(), **SIZES, batch_size=2, accumulate=2)
    plain_loop(ours, batches, steps=5, optim=optim)
    fit(theirs, steps=5, batch_size=2, accumulate=2, optim=optim)
    assert not torch.equal(ours.fc.weight, tools.drafter().fc.weight)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_the_gradient_does_not_depend_on_accumulation(accumulate):
    whole, split = Gradients(), Gradients()
    fit(tools.drafter(torch.float64), batch_size=4, callbacks=[whole])
    fit(tools.drafter(torch.float64), batch_size=4 // accumulate, accumulate=accumulate, callbacks=[split])
    for a, b in zip(whole.seen, split.seen, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_the_gradient_is_the_mean_over_supervised_tokens():
    """Written out by hand: the sum over all micro batches, divided once by their supervised tokens."""
    drafter = tools.drafter(torch.float64)
    batches = Batches(tools.data(), **SIZES, batch_size=1, accumulate=3).step(0)
    tokens = sum(int(b.loss_mask_BL.sum()) for b in batches)
    weights = [0.8**k for k in range(2)]
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        mask = packed_mask(batch.doc_BL, batch.positions_BL)
        output = tools.target(torch.float64).forward(
            batch.ids_BL,
            positions_BL=batch.positions_BL,
            mask=mask,
            taps=drafter.taps(drafter.config, drafter.target.info),
        )
        p = drafter.target.logits(output.last_BLD)
        for step, weight in zip(drafter.training_steps(batch, output), weights, strict=True):
            log_q = step.head(step.hidden_BLD).log_softmax(-1)
            for row, i in step.mask_BL.nonzero().tolist():
                teacher = p[row, i + step.shift - 1]
                if drafter.vocab.t2d[teacher.argmax()]:
                    kept = teacher[drafter.vocab.target_ids].softmax(-1)
                    total = total - weight * (kept * log_q[row, i]).sum()
    expected = torch.autograd.grad(total / (sum(weights) * tokens), list(drafter.parameters()))
    seen = Gradients()
    fit(tools.drafter(torch.float64), batch_size=1, accumulate=3, callbacks=[seen])
    for a, b in zip(expected, seen.seen, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_denser_mask_leaves_the_size_of_the_gradient():
    """Twice as many supervised tokens must not mean twice the gradient (nor the learning rate)."""
    sparse, dense = Gradients(), Gradients()
    fit(tools.drafter(), data=tools.data(density=0.5), callbacks=[sparse])
    fit(tools.drafter(), data=tools.data(density=1.0), callbacks=[dense])
    norms = [torch.cat([g.flatten() for g in seen.seen]).norm() for seen in (sparse, dense)]
    assert 0.6 < norms[1] / norms[0] < 1.4


def test_repeating_every_row_leaves_the_gradient():
    batch = Batches(tools.data(), **SIZES, batch_size=2).step(0)[0]
    twice = Batch(
        ids_BL=batch.ids_BL.repeat(2, 1),
        loss_mask_BL=batch.loss_mask_BL.repeat(2, 1),
        positions_BL=batch.positions_BL.repeat(2, 1),
        doc_BL=batch.doc_BL.repeat(2, 1),
        denominator=2 * batch.denominator,
    )
    drafter = tools.drafter(torch.float64)
    grads = [
        torch.autograd.grad(step_loss(drafter, b, LossConfig()).loss, list(drafter.parameters()))
        for b in (batch, twice)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_the_target_is_no_part_of_the_module_and_stays_as_it_was():
    target = tools.target()
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    module = fit(tools.drafter(), steps=3)
    assert not [name for name in module.state_dict() if not name.startswith("drafter.")]
    assert len(module.state_dict()) == len(tools.drafter().state_dict())
    assert not any(m is target.model for m in module.modules())
    assert not target.model.training
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert not value.requires_grad


class Poison(AfterStep):
    """After step 2 one weight is NaN: step 3's loss is."""

    def after_step(self, trainer, module, step):
        if step == 2:
            with torch.no_grad():
                module.drafter.fc.weight[0, 0] = float("nan")


def test_nan_stops_before_the_step_and_names_the_rows():
    drafter = tools.drafter()
    saved = {}

    class Save(pl.Callback):
        def on_before_optimizer_step(self, *_):
            saved.update({n: p.clone() for n, p in drafter.named_parameters()})

    sentence = r"finite, got nan at step 3, row 8 \(documents 0-\d\), row 9 .*checkpoints written before stay"
    with pytest.raises(UserError, match=sentence):
        fit(drafter, steps=5, batch_size=2, accumulate=2, callbacks=[Poison(), Save()])
    for name, value in drafter.named_parameters():
        assert torch.equal(value.nan_to_num(), saved[name].nan_to_num()), f"{name} was stepped"


def test_an_infinite_gradient_stops_too(monkeypatch):
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(float("inf")))
    with pytest.raises(UserError, match=r"got a gradient norm of inf at step 1, row 0 "):
        fit(tools.drafter(), batch_size=1)


def test_sums_are_weighted_by_tokens_and_start_anew():
    drafter = tools.drafter()
    batches = Batches(tools.data(), **SIZES, batch_size=1)
    one, two = (batches.step(i)[0] for i in range(2))
    results = [step_loss(drafter, b, LossConfig()) for b in (one, two)]
    sums = Sums()
    for batch, result in zip((one, two), results, strict=True):
        sums.add(result, doc_BL=batch.doc_BL, tokens=batch.denominator, denominator=batch.denominator)
    means = sums.means("x")
    tokens = one.denominator + two.denominator
    expected = (results[0].loss.item() * one.denominator + results[1].loss.item() * two.denominator) / tokens
    assert means["x/loss"] == pytest.approx(expected)
    assert means["x/supervised_tokens"] == tokens
    hits = sum(int(r.hits_K[1]) for r in results)
    assert means["x/acc_1"] == pytest.approx(hits / sum(int(r.count_K[1]) for r in results))
    accepted = sum(int((r.hits_KBL & r.valid_KBL).long().cumprod(0).sum()) for r in results)
    assert means["x/tau"] == pytest.approx(1 + accepted / sum(int(r.valid_KBL[0].sum()) for r in results))
    assert sums.vector is None


def test_a_drafter_of_one_step_is_simulated_as_deep_as_it_drafts():
    """Its later drafts are the same step at later positions: runs of hits, inside a document."""
    drafter, depth = tools.drafter(ttt_steps=1), 3
    batches = list(Batches(tools.data(), **SIZES, batch_size=2).validation())
    accepted = starts = 0
    for batch in batches:
        with torch.no_grad():
            result = step_loss(drafter.eval(), batch, LossConfig())
        result.hits_KBL[:] = torch.rand(result.hits_KBL.shape, generator=torch.Generator().manual_seed(0)) < 0.8
        hits, valid = (result.hits_KBL & result.valid_KBL)[0], result.valid_KBL[0]
        sums = Sums(chained(drafter, depth))
        sums.add(result, doc_BL=batch.doc_BL, tokens=1.0, denominator=1.0)
        starts = int(valid.sum())
        accepted = 0
        for row, doc in zip(hits.tolist(), batch.doc_BL.tolist(), strict=True):
            for i in range(len(row)):
                for at in range(i, min(i + depth, len(row))):
                    if not row[at] or doc[at] != doc[i]:
                        break
                    accepted += 1
        assert sums.means("x")["x/tau"] == pytest.approx(1 + accepted / starts)
    assert accepted / starts > 1, "more than one draft a pass has to be possible here"


def test_only_a_repeated_step_is_simulated_deeper():
    assert chained(tools.drafter(ttt_steps=1), 5) == 5
    assert chained(tools.drafter(ttt_steps=2), 5) == 1
    assert chained(Medusa(MedusaConfig(heads=1), tools.target()), 5) == 1


def test_validation_neither_trains_nor_changes_mode():
    drafter = tools.drafter()
    before = {n: p.clone() for n, p in drafter.named_parameters()}
    batches = Batches(tools.data(), **SIZES, batch_size=2).validation()
    first, second = (validate(drafter, batches, LossConfig()) for _ in range(2))
    assert first == second
    assert set(first) >= {"val/loss", "val/tau", "val/acc_0", "val/alpha_1"}
    assert drafter.training
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in drafter.named_parameters())
    assert validate(drafter, [], LossConfig()) == {}


def test_randomness_is_a_function_of_the_step(monkeypatch):
    """Dropout and noise draw the same numbers wherever a run begins."""
    drawn = []

    def noisy(drafter, batch, config):
        drawn.append(float(torch.rand(())))
        return step_loss(drafter, batch, config)

    monkeypatch.setattr("distill.train.module.step_loss", noisy)
    runs = []
    for seed in (0, 77):
        drafter = tools.drafter()
        torch.manual_seed(seed)
        fit(drafter, steps=3, batch_size=1, accumulate=2)
        runs.append(list(drawn))
        drawn.clear()
    first, second = runs
    assert first == second
    assert len(set(first)) == 6
