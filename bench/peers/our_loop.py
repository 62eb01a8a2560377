"""Our arm: ``python -m bench.peers.our_loop FOLDER`` trains on the job in FOLDER, a step whenever it is asked to."""

import contextlib
import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from bench.peers.job import JOB, TENSORS
from bench.peers.protocol import Link
from distill.alignment import recurrent_mask
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.losses import LossConfig
from distill.target import TargetConfig, load_target
from distill.train.module import step_loss
from distill.train.schedule import OptimConfig, build_optimizer
from distill.types import Batch, TargetOutput
from distill.vocab import DraftVocab


def main(folder: Path) -> None:
    """Serve steps until the bench closes the pipe."""
    link = Link()
    job = json.loads((folder / JOB).read_text())
    torch.set_num_threads(job["threads"])
    tensors = load_file(folder / TENSORS)
    target = load_target(TargetConfig(name=job["target"], dtype=job["dtype"], device="cpu", verify=False))
    state = {name.removeprefix("drafter."): x for name, x in tensors.items() if name.startswith("drafter.")}
    vocab = DraftVocab(state["vocab.t2d"].nonzero()[:, 0], target.info.vocab_size)
    config = Eagle3Config(ttt_steps=job["steps"], draft_vocab_size=vocab.size, step_decay=job["decay"])
    drafter = Eagle3(config, target, vocab)
    drafter.load_state_dict(state)
    drafter.lm_head.requires_grad_(job["head"] == "trained")
    batch = Batch(
        ids_BL=tensors["ids"][None],
        loss_mask_BL=tensors["loss_mask"][None],
        positions_BL=tensors["positions"][None],
        doc_BL=tensors["documents"][None],
        denominator=job["denominator"],
        features=TargetOutput(
            last_BLD=tensors["last"][None],
            taps={k: x[None] for k, x in zip(job["taps"], tensors["taps"], strict=True)},
        ),
    )
    optim = OptimConfig(lr=job["lr"], clip=1.0)
    optimizer, schedule = build_optimizer(drafter, optim, max_steps=100)
    weights = list(drafter.parameters())
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if job["dtype"] == "bfloat16" else contextlib.nullcontext()
    about = {
        "torch": torch.__version__,
        "trained_parameters": sum(w.numel() for w in weights if w.requires_grad),
        "counted_positions": [int(recurrent_mask(batch, k).sum()) for k in range(job["steps"])],
    }
    weights_K = torch.tensor([job["decay"] ** k for k in range(job["steps"])])
    for _ in link.turns(about):
        begin = time.perf_counter()
        with autocast:
            # The same loss as the peer's default; "ce" has the same gradient and is cheaper.
            result = step_loss(drafter, batch, LossConfig(name="kl"))
        optimizer.zero_grad()
        result.loss.backward()
        nn.utils.clip_grad_norm_(weights, optim.clip)
        optimizer.step()
        schedule.step()
        seconds = time.perf_counter() - begin
        mean_K = result.loss_K / result.count_K
        link.answer(seconds=seconds, loss=float((mean_K * weights_K).sum() / weights_K.sum()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
