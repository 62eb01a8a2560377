"""What building a tree costs by itself: plans grown over a drafter whose logits cost nothing, in plain decode steps."""

import statistics
import time
from types import SimpleNamespace

import torch
from torch import Tensor

from bench.record import Measurement, Options
from distill.decode import Decoder
from distill.decode.coupling import ranker
from distill.growing import grow
from distill.sampling import Sampling
from distill.target import TargetConfig, load_target
from distill.tree import Dynamic, Plan, Static, geometry
from distill.types import Frontier

PART = "trees"
PLANS: dict[str, Plan] = {
    "static, 16 nodes": Static(
        (
            (0,),
            (1,),
            (2,),
            (3,),
            (0, 0),
            (0, 1),
            (0, 2),
            (1, 0),
            (1, 1),
            (2, 0),
            (0, 0, 0),
            (0, 0, 1),
            (0, 1, 0),
            (1, 0, 0),
        )
        + ((0, 0, 0, 0),)
    ),
    "dynamic 4x4, 16 nodes": Dynamic(top_k=4, depth=4, total=16),
}


class Free:
    """A drafter that has its logits ready."""

    def __init__(self, vocab: int, widest: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        logits_1FW = 3 * torch.randn(1, widest, vocab, generator=generator)
        self.logits = [logits_1FW[:, :nodes] for nodes in range(widest + 1)]

    def step(self, state: object, frontier: Frontier) -> Tensor:
        """Logits of as many nodes as are asked about."""
        return self.logits[frontier.tokens_BF.shape[1]]

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """The same vocabulary."""
        return ids


def run(options: Options) -> list[Measurement]:
    """Measure a small random target and the real one, draft vocabularies of 8,192 and all tokens."""
    names = ["tiny"] if options.quick else ["tiny", options.target]
    found = []
    for name in names:
        target = load_target(TargetConfig(name=name, dtype="bfloat16", device="cpu", verify=False))
        step = plain_step(target, options)
        sizes = sorted({min(8192, target.info.vocab_size), target.info.vocab_size})
        for vocab in sizes:
            drafter = Free(vocab, widest=16, seed=options.seed)
            for label, plan in PLANS.items():
                seconds = median_growth(drafter, plan, repeats=5 if options.quick else 200)
                found.append(
                    Measurement(
                        part=PART,
                        name=f"{label}, {name}, {vocab} tokens",
                        value=100 * seconds / step,
                        unit="%",
                        bar=5.0,
                        at_least=False,
                        note=f"{1e3 * seconds:.2f} ms of a plain step of {1e3 * step:.2f} ms",
                        detail={"seconds": seconds, "step": step, "nodes": plan.n_nodes},
                    )
                )
    return found


def plain_step(target: object, options: Options) -> float:
    """Median seconds of one step of plain decoding at a context of 64 tokens and more."""
    decoder = Decoder(target, plan=None, engine=options.engine)  # type: ignore[arg-type]
    times: list[float] = []

    def on_step(*_: object) -> None:
        times.append(time.perf_counter())

    decoder.generate([list(range(3, 35))], max_new_tokens=8 if options.quick else 96, ignore_eos=True, on_step=on_step)
    return statistics.median(b - a for a, b in zip(times[2:], times[3:], strict=False))


def median_growth(drafter: Free, plan: Plan, *, repeats: int) -> float:
    """Median seconds of growing one tree greedily and working out its geometry."""
    ranks, root_B = ranker("topk", Sampling(), None), torch.tensor([5])
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 3):
            start = time.perf_counter()
            tree = grow(drafter, SimpleNamespace(), plan, root_B, ranks)
            geometry(tree.parents_BN, tree.max_depth)
            times.append(time.perf_counter() - start)
    return statistics.median(times[3:])
