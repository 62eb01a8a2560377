"""The arm of ``speculators``: ``python -m bench.peers.speculators_loop FOLDER``, inside its own environment.

Its own draft model, packing, loss and ``Trainer.train_epoch``, on the job in FOLDER. ``train_epoch`` is given a loader
that hands out the row whenever the bench asks for a step. What its CLI does differently is only where data and model
come from, and what has to be replaced on a machine without an accelerator (``on_cpu``).
"""

import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.models.eagle3.rotary_partial import install_partial_neox_rotary
from speculators.train import trainer as training
from speculators.train.data import CollateFn
from torch import Tensor
from transformers import LlamaConfig

from bench.peers.protocol import Link


def main(folder: Path) -> None:
    """Serve steps until the bench closes the pipe."""
    link = Link()
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(job["threads"])
    tensors = load_file(folder / "tensors.safetensors")
    install_partial_neox_rotary()  # as its CLI does
    model, batch, losses = make_model(job, tensors), make_batch(job, tensors), []
    model.register_forward_hook(lambda _module, _args, out: losses.append(float(out[1].detach())))
    mask = batch["loss_mask"]
    about = {
        "torch": torch.__version__,
        "speculators": importlib.metadata.version("speculators"),
        "trained_parameters": sum(w.numel() for w in model.parameters() if w.requires_grad),
        "counted_positions": [int(mask[:, k:].sum()) for k in range(job["steps"])],
    }
    settings = {"ttt_steps": job["steps"], "ttt_step_loss_decay": job["decay"]}
    call, _ = Eagle3DraftModel.get_trainer_kwargs(loss_fn="kl_div", loss_implementation="eager", **settings)
    with tempfile.TemporaryDirectory() as save_path:
        config = training.TrainerConfig(
            lr=job["lr"],
            num_epochs=1,
            save_path=save_path,
            train_call_kwargs=call,
            hidden_states_dtype=getattr(torch, job["dtype"]),
            log_freq=sys.maxsize,
            max_steps=sys.maxsize,
            scheduler_total_steps=100,
        )
        loader = Loader(lambda: link.turns(about), batch)
        trainer = on_cpu(lambda: training.Trainer(model, config, loader))
        weights = sum(job["decay"] ** k for k in range(job["steps"]))  # it adds the steps up

        def answer() -> None:
            link.answer(seconds=time.perf_counter() - loader.begin, loss=losses.pop() / weights)

        trainer.train_epoch(0, step_callback=answer)


class Loader:
    """What ``train_epoch`` reads from: the same batch for every turn, with the time it was handed out."""

    batch_sampler = None

    def __init__(self, turns: Callable[[], Iterator[None]], batch: dict[str, Any]):
        self.turns, self.batch, self.begin = turns, batch, 0.0

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in self.turns():
            batch = dict(self.batch)
            self.begin = time.perf_counter()
            yield batch


def on_cpu(make: Callable[[], training.Trainer]) -> training.Trainer:
    """Make a trainer that uses the CPU: it moves model and batches to device number 0, which would be a GPU."""
    training.get_local_rank = lambda: "cpu"
    trainer = make()
    trainer.device_type = "cpu"  # of the autocast; without an accelerator it takes "cuda"
    trainer.rank = 1  # no progress bar
    trainer.global_step = 1  # step 0 is always logged, with timers that wait for an accelerator
    return trainer


def make_model(job: dict[str, Any], tensors: dict[str, Tensor]) -> Eagle3DraftModel:
    """Its draft model with our first weights, one Llama layer with full attention."""
    layer = LlamaConfig(num_hidden_layers=1, attention_bias=False, mlp_bias=False, **job["shape"])
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=job["draft_vocab"],
        eagle_aux_hidden_state_layer_ids=job["taps"],
    )
    model = Eagle3DraftModel(config)
    state = {name.removeprefix("drafter."): x for name, x in tensors.items() if name.startswith("drafter.")}
    if model.t2d is None:  # the whole vocabulary
        state = {name: x for name, x in state.items() if not name.startswith("vocab.")}
    state = {name.removeprefix("vocab."): x for name, x in state.items()}
    state["embed_tokens.weight"] = tensors["embed"]
    state["verifier_lm_head.weight"], state["verifier_norm.weight"] = tensors["head"], tensors["norm"]
    model.load_state_dict(state)
    model.lm_head.weight.requires_grad_(job["head"] == "trained")
    return model


def make_batch(job: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The documents of the row, packed by its own collator; each loses one position to the shift."""
    items = []
    for document in range(int(tensors["documents"].max()) + 1):
        at = tensors["documents"] == document
        items.append(
            {
                "hidden_states": tensors["taps"][:, at].transpose(0, 1).flatten(1),
                "input_ids": tensors["ids"][at],
                "verifier_last_hidden_states": tensors["tap_out"][at],
                "loss_mask": tensors["loss_mask"][at],
                "lengths": torch.tensor([int(at.sum())]),
                "position_ids": tensors["positions"][at],
            }
        )
    collate = CollateFn(
        job["length"],
        job["shape"]["hidden_size"],
        num_target_layers=len(job["taps"]),
        dtype=getattr(torch, job["dtype"]),
        preprocess=shift_batch,
    )
    batch: dict[str, Any] = collate(items)
    return batch


if __name__ == "__main__":
    main(Path(sys.argv[1]))
