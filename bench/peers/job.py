"""What both arms are given: one folder with the setting, a packed row, the target's features and the first weights."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.peers import Setting
from bench.record import Options
from bench.training import make_batch
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.target import TargetConfig, load_target
from distill.vocab import choose_vocab

JOB, TENSORS = "job.json", "tensors.safetensors"
DECAY = 0.8
"""Weight of a step over that of the step before; both arms are told."""
LR = 1e-4


def write_job(folder: Path, setting: Setting, options: Options) -> None:
    """Run the target once and write everything, with the rows of its head and its final norm for the peer.

    The draft vocabulary holds every choice of the target on the row, as far as it has room: we would leave out the
    positions whose choice is outside, the peer would not.
    """
    config = TargetConfig(name=options.target, dtype=setting.dtype, device="cpu", verify=False)
    target = load_target(config)
    info = target.info
    batch = make_batch(info.vocab_size, setting.length, seed=options.seed)
    size = min(setting.draft_vocab, info.vocab_size)
    drafter_config = Eagle3Config(draft_vocab_size=size, ttt_steps=setting.steps, step_decay=DECAY)
    taps = Eagle3.taps(drafter_config, info)
    seen = target.forward(
        batch.ids_BL, positions_BL=batch.positions_BL, doc_BL=batch.doc_BL, taps=(*taps, info.tap_out)
    )
    choices_L = target.logits(seen.last_BLD[0]).argmax(-1)
    vocab, _ = choose_vocab(choices_L.bincount(minlength=info.vocab_size), size)
    torch.manual_seed(options.seed)
    drafter = Eagle3(drafter_config, target, vocab)
    norm = target.model.get_decoder().norm.weight  # of the families whose norm is x * w
    ids = torch.arange(info.vocab_size)
    tensors = {
        "ids": batch.ids_BL[0],
        "loss_mask": batch.loss_mask_BL[0],
        "positions": batch.positions_BL[0],
        "documents": batch.doc_BL[0],
        "taps": torch.stack([seen.taps[k][0] for k in taps]),
        "tap_out": seen.taps[info.tap_out][0],
        "last": seen.last_BLD[0],
        "embed": target.embed(ids).float(),
        "head": target.head_rows(drafter.vocab.target_ids).float(),
        "norm": norm.detach().float(),
        **{f"drafter.{name}": x.detach() for name, x in drafter.state_dict().items()},
    }
    save_file({name: x.contiguous().clone() for name, x in tensors.items()}, folder / TENSORS)
    shape = {
        "hidden_size": info.hidden_size,
        "intermediate_size": info.intermediate_size,
        "num_attention_heads": info.n_heads,
        "num_key_value_heads": info.n_kv_heads,
        "head_dim": info.head_dim,
        "rms_norm_eps": info.rms_norm_eps,
        "rope_parameters": info.rope_parameters,
        "max_position_embeddings": info.max_positions,
        "vocab_size": info.vocab_size,
    }
    job = {
        **asdict(setting),
        "draft_vocab": drafter.vocab.size,
        "target": options.target,
        "threads": options.threads,
        "taps": list(taps),
        "shape": shape,
        "denominator": batch.denominator,
        "decay": DECAY,
        "lr": LR,
    }
    (folder / JOB).write_text(json.dumps(job, indent=2))
