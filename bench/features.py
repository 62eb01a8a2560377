"""What the offline feature store saves, what it costs, and whether loading ever keeps a step waiting.

Both arms do whole training steps on the same rows in turns: batch from the prefetching loader, loss, gradient, AdamW.
One runs the target in every step, the other reads what the target left once.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch

from bench.machine import interleaved
from bench.record import Measurement, Options
from distill.data import Batches, Conversation, DataConfig, PreparedData
from distill.data.feature_store import FeatureStore
from distill.data.features import bytes_per_token, prepare_features
from distill.data.packing import WINDOW, pack
from distill.data.prefetch import prefetched
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.losses import LossConfig
from distill.target import Target, TargetConfig, load_target
from distill.train.module import step_loss, target_features
from distill.train.schedule import OptimConfig, build_optimizer
from distill.types import Batch
from distill.vocab import choose_vocab

PART = "features"
TTT_STEPS, ROWS, DRAFT_VOCAB = 3, 2, 8192
SIZE_BAR, WAIT_BAR, FILL_BAR = 1.01, 2.0, 97.0


def run(options: Options) -> list[Measurement]:
    """Measure everything; about a minute of processor time with SmolLM2."""
    target = load_target(TargetConfig(name=options.target, device="cpu", verify=False))
    pack_len, turns = (32, 2) if options.quick else (512, 5)
    data = conversations(target.info.vocab_size, rows=ROWS * (turns + 1), pack_len=pack_len, seed=options.seed)
    drafter = _drafter(target, data)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "features"
        store, writing_s = _write(drafter, data, folder, pack_len=pack_len)
        size = sum(path.stat().st_size for path in folder.iterdir())
        arms = {
            "online": _Arm(drafter, _batches(data, pack_len)),
            "store": _Arm(drafter, _batches(data, pack_len, store)),
        }
        seconds = interleaved({name: arm.step for name, arm in arms.items()}, turns)
        for arm in arms.values():
            arm.close()
        batch = arms["store"].batches.step(0)[0]
        alone = interleaved(
            {
                "forward": lambda: target_features(drafter, batch),
                "online": lambda: arms["online"].batches.step(0),
                "store": lambda: arms["store"].batches.step(0),
            },
            turns,
        )
    tokens = median(arms["store"].tokens)
    ratio = median(a / b for a, b in zip(seconds["online"], seconds["store"], strict=True))
    step, forward = {name: median(s) for name, s in seconds.items()}, median(alone["forward"])
    per_token, estimate = size / len(data.ids), bytes_per_token(store.manifest)
    saved = (step["online"] - step["store"]) / tokens
    shape = f"{TTT_STEPS} steps, {ROWS} x {pack_len} tokens"
    return [
        Measurement(
            part=PART,
            name="training tokens/s with the store over online",
            value=ratio,
            unit="x",
            limit=step["online"] / (step["online"] - forward),
            limit_name="a step without the target's forward",
            note=shape,
            detail={"seconds": seconds, "forward_s": alone["forward"], "dtype": str(target.dtype)},
        ),
        Measurement(
            part=PART, name="training with the store", value=tokens / step["store"], unit="tokens/s", note=shape
        ),
        Measurement(
            part=PART,
            name="writing the store",
            value=len(data.ids) / writing_s,
            unit="tokens/s",
            note=f"pays after {writing_s / len(data.ids) / saved:.2g} passes over the data"
            if saved > 0
            else "never pays",
        ),
        Measurement(
            part=PART,
            name="store size over the estimate",
            value=per_token / estimate,
            unit="x",
            bar=SIZE_BAR,
            at_least=False,
            note=f"{per_token:.0f} bytes a token ({store.manifest.dtype}, taps {store.manifest.taps} and the last)",
        ),
        *(
            Measurement(
                part=PART,
                name=f"waiting for the loader, {name}",
                value=100 * median(arm.waited[1:]) / step[name],
                unit="%",
                bar=WAIT_BAR,
                at_least=False,
                note=f"of a step; making one takes {1000 * median(alone[name]):.2g} ms, {_share(alone, step, name)}",
                detail={"waited_s": arm.waited, "making_s": alone[name]},
            )
            for name, arm in arms.items()
        ),
        _fill(options.seed),
    ]


def conversations(vocab_size: int, *, rows: int, pack_len: int, seed: int) -> PreparedData:
    """Random conversations of log-normal lengths, enough for so many rows; three quarters of each are supervised."""
    rng = np.random.default_rng(seed)
    made: list[Conversation] = []
    while sum(len(c.ids) for c in made) < rows * pack_len:
        length = int(_lengths(rng, 1, pack_len)[0])
        ids = rng.integers(4, vocab_size, length).astype(np.int32)
        made.append(Conversation(ids=ids, loss_mask=np.arange(length) >= length // 4, key=len(made)))
    return PreparedData.from_conversations(made, vocab_size=vocab_size, validation=0)


def _lengths(rng: np.random.Generator, n: int, pack_len: int) -> np.ndarray:
    """Half of them below a quarter of a row, a tenth above 0.7 of one, cut at the row."""
    return np.clip(rng.lognormal(np.log(pack_len / 4), 0.8, n).astype(int), 4, pack_len)


def _drafter(target: Target, data: PreparedData) -> Eagle3:
    size = min(DRAFT_VOCAB, target.info.vocab_size // 2)
    vocab, _ = choose_vocab(torch.from_numpy(data.counts()), size, always=target.info.eos_ids)
    torch.manual_seed(0)
    return Eagle3(Eagle3Config(ttt_steps=TTT_STEPS, draft_vocab_size=size), target, vocab)


def _write(drafter: Eagle3, data: PreparedData, folder: Path, *, pack_len: int) -> tuple[FeatureStore, float]:
    config = DataConfig(
        source="text", path="-", max_len=pack_len, pack_len=pack_len, features="store", features_confirm=True
    )
    taps = drafter.taps(drafter.config, drafter.target.info)
    begin = time.perf_counter()
    store = prepare_features(config, data, drafter.target, folder, taps=taps, say=lambda _: None)
    return store, time.perf_counter() - begin


def _batches(data: PreparedData, pack_len: int, features: FeatureStore | None = None) -> Batches:
    return Batches(data, pack_len=pack_len, max_len=pack_len, batch_size=ROWS, features=features)


@dataclass
class _Arm:
    """Trains step by step and notes how long each waited for its batch."""

    drafter: Eagle3
    batches: Batches
    waited: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loader = prefetched(self._endless())
        self.optimizer, _ = build_optimizer(self.drafter, OptimConfig(), max_steps=1000)

    def _endless(self) -> Iterator[Batch]:
        for micro_batches in self.batches.steps():
            yield from micro_batches

    def step(self) -> None:
        """One optimiser step, in bf16 as on a GPU or with ``trainer.precision=bf16``."""
        begin = time.perf_counter()
        batch = next(self.loader)
        self.waited.append(time.perf_counter() - begin)
        self.tokens.append(int((batch.doc_BL >= 0).sum()))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = step_loss(self.drafter, batch, LossConfig())
        result.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.loader.close()


def _share(alone: dict[str, list[float]], step: dict[str, float], name: str) -> str:
    return f"{100 * median(alone[name]) / step[name]:.2g} % of it"


def _fill(seed: int) -> Measurement:
    """How full packed rows are."""
    lengths = _lengths(np.random.default_rng(seed), WINDOW, 1024)
    rows = pack(lengths, np.arange(WINDOW), pack_len=1024)
    return Measurement(
        part=PART,
        name="tokens that are not padding in packed rows",
        value=100 * lengths.sum() / (1024 * len(rows)),
        unit="%",
        bar=FILL_BAR,
        at_least=True,
        limit=100 * lengths.sum() / (1024 * -(-lengths.sum() // 1024)),
        limit_name="whole rows",
        note=f"{WINDOW} conversations of log-normal lengths, rows of 1,024",
    )
