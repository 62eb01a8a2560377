"""The bench parts for methods other than EAGLE-3, in their quick form: they run, and their arms do equal work."""

import pytest
import torch

from bench import draft_chain, methods, trees
from bench.dense_methods import eagle1_loss, medusa_loss
from bench.record import Options
from bench.training import make_batch, our_loss
from distill.drafters.eagle1 import Eagle1, Eagle1Config
from distill.drafters.medusa import Medusa, MedusaConfig
from distill.target.tiny import tiny_target

QUICK = Options(target="tiny", quick=True, engine="eager")


@pytest.mark.parametrize("part", [trees, methods, draft_chain], ids=lambda part: part.PART)
def test_part_runs(part):
    found = part.run(QUICK)
    assert found
    assert all(measurement.part == part.PART and measurement.value > 0 for measurement in found)
    assert len({measurement.name for measurement in found}) == len(found)


@pytest.mark.parametrize("kind", ["medusa", "eagle1"])
def test_both_implementations_have_the_same_loss_and_gradients(kind):
    target = tiny_target(dtype=torch.float64)
    torch.manual_seed(0)
    if kind == "medusa":
        drafter, plain = Medusa(MedusaConfig(heads=3, blocks=2), target).double(), medusa_loss
    else:
        drafter, plain = Eagle1(Eagle1Config(noise=0.0), target).double(), eagle1_loss
    for parameter in drafter.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    batch = make_batch(target.info.vocab_size, 60, seed=1, longest=20)
    gradients = []
    for loss in (our_loss(drafter, batch), plain(drafter, batch)):
        drafter.zero_grad()
        loss.backward()
        gradients.append([loss.detach(), *(p.grad.clone() for p in drafter.parameters())])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
