"""A draft model is a transformers model already: its folder is what ``save_pretrained`` would write."""

from typing import Any

from distill.errors import UserError
from distill.export.eagle import Lend
from distill.export.fields import rope_fields, type_fields
from distill.export.layout import Foreign, Native


def draft_model_plain(native: Native, lend: Lend) -> Foreign:
    """Architecture and weights, with the fields that older readers look for beside transformers' own.

    Raises:
        UserError: a vocabulary that engines would not map.
    """
    config: dict[str, Any] = dict(native.flags["architecture"])
    if config["vocab_size"] != native.target["vocab_size"]:
        raise UserError(
            f"a draft model must have the target's {native.target['vocab_size']} tokens to be served, got "
            f"{config['vocab_size']}; train one with the same vocabulary"
        )
    config |= type_fields(native)
    if config.get("rope_parameters") and "rope_theta" in config["rope_parameters"]:
        config |= rope_fields(config["rope_parameters"])
    return Foreign(config=config, tensors=dict(native.tensors), extra={"generation_config.json": _generation(config)})


def _generation(config: dict[str, Any]) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in names if config.get(name) is not None}
