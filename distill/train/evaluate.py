"""Measuring a drafter during training: held-out loss and acceptance, and real decoding. No Trainer needed."""

from collections.abc import Iterable, Sequence

import torch

from distill.decode import Decoder, Generation
from distill.drafters.base import Drafter
from distill.losses import LossConfig
from distill.train.config import EvalConfig
from distill.train.module import Sums, chained, step_loss
from distill.tree import Chain
from distill.types import Batch


def validate(
    drafter: Drafter, batches: Iterable[Batch], config: LossConfig, *, depth: int = 5, world: int = 1
) -> dict[str, float]:
    """Return loss, accuracy and alpha per step, and simulated tau over held-out batches; {} without any.

    ``depth`` is how far a chain is simulated whose drafter was trained on one step.
    """
    sums, training = Sums(chained(drafter, depth)), drafter.training
    drafter.eval()
    with torch.no_grad():
        for batch in batches:
            batch = batch.to(drafter.target.device)
            result = step_loss(drafter, batch, config)
            sums.add(result, doc_BL=batch.doc_BL, tokens=batch.denominator / world, denominator=batch.denominator)
    drafter.train(training)
    return sums.means("val") if sums.vector is not None else {}


def decode(drafter: Drafter, prompts: Sequence[list[int]], config: EvalConfig) -> list[Generation]:
    """Decode prompts greedily with ``drafter`` as it is now, drafting a chain."""
    depth = min(config.depth, drafter.max_depth or config.depth)
    training = drafter.training
    drafter = drafter.decoding()
    decoder = Decoder(drafter.target, drafter.eval(), plan=Chain(depth))
    generations = decoder.generate(list(prompts), max_new_tokens=config.max_new_tokens)
    drafter.train(training)
    return generations
