"""Seeded random targets of real architectures, small enough to test and try things with in milliseconds."""

from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from distill.errors import UserError, did_you_mean
from distill.target import fingerprint
from distill.target.model import Target

_SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "<unk>")
_MIXED = ["sliding_attention", "full_attention"]

# What each family adds to the common sizes: windows short enough to matter, soft-caps low enough to bite.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "gemma2": {
        "sliding_window": 8,
        "layer_types": _MIXED,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3": {"sliding_window": 8, "layer_types": _MIXED, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": 8},
}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_target(
    family: str = "llama",
    *,
    seed: int = 0,
    vocab_size: int = 64,
    hidden: int = 32,
    layers: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    tokenizer: bool = False,
    attention: str | None = None,
    **config_overrides: Any,
) -> Target:
    """Build a random target; equal arguments give equal weights, whatever the dtype.

    Args:
        family: one of ``FAMILIES``.
        seed: seed of the weights.
        vocab_size: V; raised to the tokenizer's size when one is asked for.
        hidden: D, split over 4 query heads (2 key/value heads).
        layers: decoder layers.
        dtype: precision the weights are cast to.
        device: where it lives.
        tokenizer: also build a character tokenizer with a chat template (generation markers included).
        attention: sdpa or eager; by default what the family supports.
        **config_overrides: fields of the transformers config.

    Raises:
        UserError: unknown family.
    """
    if family not in FAMILIES:
        raise UserError(
            f"family of a tiny target must be one of {', '.join(FAMILIES)}, got {family!r}."
            f"{did_you_mean(family, FAMILIES)}"
        )
    words = tiny_tokenizer() if tokenizer else None
    fields: dict[str, Any] = {
        "vocab_size": max(vocab_size, len(words) if words else 0),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **FAMILIES[family],
    }
    if fields.get("layer_types") is _MIXED:
        fields["layer_types"] = [_MIXED[i % 2] for i in range(layers)]
    fields.update(config_overrides)
    config = AutoConfig.for_model("gemma3_text" if family == "gemma3" else family, **fields)
    # transformers initialises from the global generator; leave that as it was.
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    _randomise(model, seed)
    weights = fingerprint.state_weights(model.state_dict())
    model = model.to(device=device, dtype=dtype)
    return Target(model, name=f"tiny-{family}", tokenizer=words, weights=lambda: weights)


@torch.no_grad()
def _randomise(model: nn.Module, seed: int) -> None:
    """Draw weights large enough that attention is peaked and the most likely token depends on the context."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.add_(0.1 * noise)  # norms and biases
        elif "embed" in name:
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one id per printable ASCII character and newline, plus ChatML-like markers."""
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocab = {token: i for i, token in enumerate([*_SPECIAL, *characters])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )
