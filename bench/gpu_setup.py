"""What the parts of ``bench.gpu_check`` share: shapes, a random model that runs without any file, and a clock.

The random model has a habit: after token t it always says ``successor[t]``, by a lead of many bf16 steps. Its weights
are random and its cost is that of any model of the shape, but its text is known beforehand and survives rounding, so
forced acceptance stays exact over a long decode and all implementations can be held to the same text, in bf16 too.
"""

import gc
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.record import Measurement
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.errors import UserError
from distill.target import Target
from distill.vocab import DraftVocab

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model that is measured, and how much of it.

    Attributes:
        model: fields of transformers' Llama config.
        draft_vocab: W.
        context: cached tokens behind which passes are timed.
        prompt, new_tokens: length of a decode.
        train_length: tokens of the packed row a training step takes.
        ttt_steps: of that step.
        copy_bytes: size of the array the memory bandwidth is measured with.
        matrix: side of the square product the matrix rate is measured with.
        repeats: measurements per figure, of which the median counts.
    """

    name: str
    model: Mapping[str, Any]
    draft_vocab: int
    context: int
    prompt: int
    new_tokens: int
    train_length: int
    ttt_steps: int
    copy_bytes: int
    matrix: int
    repeats: int
    widths: tuple[int, ...]


SHAPES = {
    "llama-3.1-8b": Shape(
        name="llama-3.1-8b",
        model={
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        draft_vocab=32_000,
        context=512,
        prompt=128,
        new_tokens=61,  # 60 rounds' worth: every forced acceptance from 1 to 6 comes out even
        train_length=2048,
        ttt_steps=7,
        copy_bytes=4 << 30,
        matrix=8192,
        repeats=5,
        widths=(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64),
    ),
    "tiny": Shape(
        name="tiny",
        model={
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 2048,
        },
        draft_vocab=96,
        context=32,
        prompt=8,
        new_tokens=13,
        train_length=64,
        ttt_steps=2,
        copy_bytes=1 << 20,
        matrix=64,
        repeats=1,
        widths=(1, 6, 64),
    ),
}


@dataclass(kw_only=True)
class Setting:
    """One worker's device and models; models are built when a part first asks for them.

    Attributes:
        known: figures of earlier parts that later ones set theirs against.
    """

    device: torch.device
    shape: Shape
    seed: int = 0
    known: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, device: str, shape: str) -> "Setting":
        """Resolve ``auto``: cuda where there is one, and the big shape there.

        Raises:
            UserError: there is no such device.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(
                f"--device must be one this PyTorch ({torch.__version__}) sees, got {device}; use cpu or auto"
            )
        if shape == "auto":
            shape = "llama-3.1-8b" if device.startswith("cuda") else "tiny"
        return cls(device=torch.device(device), shape=SHAPES[shape])

    @property
    def cuda(self) -> bool:
        """Whether the device is a CUDA one."""
        return self.device.type == "cuda"

    @cached_property
    def model(self) -> "HabitModel":
        """The model of ``shape`` in bf16, its weights made on the device."""
        return habit_model(self.shape, self.device, torch.bfloat16, seed=self.seed)

    @cached_property
    def drafter(self) -> Eagle3:
        """An untrained EAGLE-3 for it, in bf16."""
        return random_eagle3(self.model.target, self.model.kept_W, ttt_steps=self.shape.ttt_steps).bfloat16().eval()

    def clear(self) -> None:
        """Give memory back between parts; the models stay."""
        if self.cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def answers(self) -> bool:
        """Whether the device still computes: a failed kernel leaves a context in which every call fails."""
        try:
            return float(torch.ones(2, device=self.device).sum()) == 2
        except RuntimeError:
            return False

    def describe(self) -> dict[str, Any]:
        """Device and shape, for the record."""
        found: dict[str, Any] = {"device": str(self.device), "shape": self.shape.name}
        if self.cuda:
            properties = torch.cuda.get_device_properties(self.device)
            found["gpu"] = {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / (1 << 30), 1),
                "processors": properties.multi_processor_count,
                "cuda": torch.version.cuda,
            }
        return found | {"threads": torch.get_num_threads()}


@dataclass(frozen=True, kw_only=True)
class HabitModel:
    """A random target and the text it writes.

    Attributes:
        kept_W: the ids its text is made of, ascending; also the draft vocabulary.
        successor_V: the token it says after each token (for ids outside ``kept_W``: anything).
    """

    target: Target
    kept_W: Tensor
    successor_V: Tensor

    def prompt(self, length: int, *, seed: int = 0) -> list[int]:
        """Random ids of the kept vocabulary."""
        generator = torch.Generator().manual_seed(seed)
        return self.kept_W.cpu()[torch.randint(len(self.kept_W), (length,), generator=generator)].tolist()

    def text(self, prompt: list[int], length: int) -> list[int]:
        """What it says after ``prompt``."""
        successor, ids = self.successor_V.tolist(), [prompt[-1]]
        for _ in range(length):
            ids.append(successor[ids[-1]])
        return ids[1:]


@torch.no_grad()
def habit_model(shape: Shape, device: torch.device, dtype: torch.dtype, *, seed: int = 0) -> HabitModel:
    """Build the random model of the module's docstring.

    The embedding is large beside what the layers add, and the head's row for ``successor[t]`` is t's embedding: the
    residual stream then carries the last token through to the head.
    """
    config = AutoConfig.for_model(
        "llama", **shape.model, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        vocab = config.vocab_size
        kept_W = torch.randperm(vocab)[: shape.draft_vocab].sort().values
        order_W = kept_W[torch.randperm(len(kept_W))]
        successor_V = kept_W[torch.randint(len(kept_W), (vocab,))]
        successor_V[order_W] = order_W.roll(-1)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.normal_()
        head.normal_(std=config.hidden_size**-0.5)
        head[order_W.roll(-1)] = embedding[order_W] * config.hidden_size**-0.5
        for layer in model.get_decoder().layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
    target = Target(model, name=f"random {shape.name}", weights=lambda: "random")
    return HabitModel(target=target, kept_W=kept_W, successor_V=successor_V)


def random_eagle3(target: Target, kept_W: Tensor, *, ttt_steps: int = 7, seed: int = 0, **options: Any) -> Eagle3:
    """An untrained EAGLE-3 in fp32, made on the target's device."""
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(target.device):
        torch.manual_seed(seed)
        vocab = DraftVocab(kept_W.to(target.device), target.info.vocab_size)
        config = Eagle3Config(draft_vocab_size=len(kept_W), ttt_steps=ttt_steps, **options)
        return Eagle3(config, target, vocab).to(target.device)


def figure(part: str, name: str, value: float, unit: str, **others: Any) -> Measurement:
    """A ``Measurement`` in one line."""
    return Measurement(part=part, name=name, value=value, unit=unit, **others)
