"""The example drafter of docs/add-a-drafter.md is run as it is printed."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distill.attention import packed_mask
from distill.decode import Decoder
from distill.losses import LossConfig, total
from distill.metrics import tau
from distill.sampling import Sampling
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic
from distill.types import Batch

DOC = Path(__file__).parents[2] / "docs" / "add-a-drafter.md"


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    code = re.search(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert code is not None
    names: dict = {"__name__": "example"}
    exec(compile(code.group(1), str(DOC), "exec"), names)
    return SimpleNamespace(**names)


def test_the_documented_drafter_learns_and_decodes_losslessly(example) -> None:
    target = tiny_target("llama", dtype=torch.float64)
    torch.manual_seed(0)
    drafter = example.Bigram(example.BigramConfig(), target).double()
    prompts = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6]]
    plain = Decoder(target).generate(prompts, max_new_tokens=40, ignore_eos=True)
    ids_BL = torch.tensor([g.ids for g in plain])
    batch = Batch(
        ids_BL=ids_BL,
        loss_mask_BL=torch.ones_like(ids_BL, dtype=torch.bool),
        positions_BL=torch.arange(40).expand_as(ids_BL),
        doc_BL=torch.zeros_like(ids_BL),
        denominator=float(ids_BL.numel()),
    )
    output = target.forward(ids_BL, mask=packed_mask(batch.doc_BL, batch.positions_BL))

    def greedy_tau(plan) -> float:
        generations = Decoder(target, drafter, plan=plan).generate(prompts, max_new_tokens=40, ignore_eos=True)
        return tau([step for g in generations for step in g.steps])

    untrained = greedy_tau(Chain(3))
    optimiser = torch.optim.Adam(drafter.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        steps = drafter.training_steps(batch, output)
        loss = total(steps, batch, output, target=target, vocab=None, config=LossConfig(name="kl")).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    for plan in (Chain(3), Dynamic(top_k=3, depth=3, total=8)):
        for sampling in (Sampling(), Sampling(temperature=1.0, seed=4)):
            want = Decoder(target, sampling=sampling).generate(prompts, max_new_tokens=40, ignore_eos=True)
            got = Decoder(target, drafter, plan=plan, sampling=sampling).generate(
                prompts, max_new_tokens=40, ignore_eos=True
            )
            assert [g.ids for g in got] == [g.ids for g in want]
    assert greedy_tau(Chain(3)) > untrained
