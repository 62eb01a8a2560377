"""What to load, and the numbers of what was loaded."""

from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedModel

from distill.config import opt
from distill.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(kw_only=True)
class TargetConfig:
    """Which frozen model to run, and how."""

    name: str = opt("smollm2", "smollm2 (packaged), tiny, tiny-<family>, a local folder or a hub name")
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = opt("bfloat16", "precision of the weights")
    device: str = opt("auto", "auto (cuda where there is one), cpu, cuda, cuda:1, ...")
    revision: str | None = opt(None, "hub revision: branch, tag or commit")
    attention: Literal["auto", "sdpa", "eager"] = opt("auto", "attention implementation of the model")
    trust_remote_code: bool = opt(False, "run code that comes with the model")
    seed: int = opt(0, "seed of the random weights (tiny targets only)")
    verify: bool = opt(True, "compare with the model's own logits and masks at start-up")
    shard: Literal["none", "fsdp"] = opt("none", "training only; fsdp: decoder layers in pieces over all processes")


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """Numbers that drafters, caches and exports need.

    Attributes:
        name: the name it was loaded under.
        model_type: transformers' model type of the decoder.
        n_layers: decoder layers; also the index of ``tap_out``.
        hidden_size: D.
        vocab_size: V, the rows of the output head.
        n_heads: query heads.
        n_kv_heads: key/value heads.
        head_dim: width of a head.
        intermediate_size: width of the feed-forward layer.
        rms_norm_eps: epsilon of the norms.
        rope_parameters: rotary settings of the full-attention layers (rope_theta, rope_type, ...).
        max_positions: longest context, in tokens, over which positions keep one meaning.
        eos_ids: ids that end a generation.
        sliding_window: window in positions where some layers have one, else None; masks are built with it.
    """

    name: str
    model_type: str
    n_layers: int
    hidden_size: int
    vocab_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_positions: int
    eos_ids: tuple[int, ...]
    sliding_window: int | None

    @property
    def tap_out(self) -> int:
        """Tap index of the residual after the last layer, before the final norm."""
        return self.n_layers


def layer_kinds(config: Any, name: str) -> tuple[str, ...]:
    """Return the kinds of attention the layers use; without ``layer_types`` a window applies to all.

    Raises:
        UserError: a layer is neither full nor sliding-window attention.
    """
    types = getattr(config, "layer_types", None)
    if not types:
        return (SLIDING,) if getattr(config, "sliding_window", None) else (FULL,)
    kinds = tuple(dict.fromkeys(types[: config.num_hidden_layers]))
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise UserError(
            f"layers of target {name} must be full or sliding-window attention, got "
            f"{', '.join(sorted(unknown))}; choose a target without them"
        )
    return kinds


def describe(model: PreTrainedModel, *, name: str, tokenizer: Any, kinds: tuple[str, ...]) -> TargetInfo:
    """Read the numbers off a loaded model.

    Raises:
        UserError: the config lacks one, or has one per layer.
    """
    config: Any = model.get_decoder().config
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise UserError(f"target {name} must be built from attention layers, got {config.model_type}")
    head: Any = model.get_output_embeddings()
    eps = (getattr(config, key, None) for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"))
    rope = getattr(config, "rope_parameters", None) or {}
    rope = dict(rope.get(FULL, rope))
    try:
        return TargetInfo(
            name=name,
            model_type=config.model_type,
            n_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=head.weight.shape[0],
            n_heads=heads,
            n_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            rms_norm_eps=next((value for value in eps if value is not None), 1e-6),
            rope_parameters=rope,
            max_positions=_max_positions(config, rope),
            eos_ids=_eos_ids(getattr(model, "generation_config", None), config, tokenizer),
            sliding_window=config.sliding_window if SLIDING in kinds else None,
        )
    except (AttributeError, RuntimeError, TypeError) as error:
        raise UserError(
            f"target {name} must have one size for all layers and name it as Llama's config does, got "
            f"{config.model_type}: {str(error).splitlines()[0]}"
        ) from error


def _max_positions(config: Any, rope: dict[str, Any]) -> int:
    limit = config.max_position_embeddings
    # Past the original length these two change the frequencies of the whole forward, cached keys excepted:
    # a tree that crosses it would not decode what plain decoding does.
    if rope.get("rope_type") in ("longrope", "dynamic"):
        limit = min(limit, rope.get("original_max_position_embeddings") or limit)
    return limit


def _eos_ids(*sources: Any) -> tuple[int, ...]:
    found: list[int] = []
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(found))
