"""The frozen target behind one class: features, logits and embeddings, the same for training and decoding."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.errors import UserError
from distill.target import fingerprint
from distill.target.backbone import Backbone, twin
from distill.target.fast import FastTarget


class Target(Backbone):
    """A frozen transformers causal LM whose attention honours a 4-D mask.

    Not an ``nn.Module``, so that it never enters a drafter's state dict or optimiser.

    Args:
        model: the causal LM; it is put into evaluation mode and frozen.
        name: what to call it in messages and records.
        tokenizer: its tokenizer; None where only ids are used.
        weights: returns the digest of the weights; by default the weights in memory are hashed.

    Raises:
        UserError: the architecture cannot be run this way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        tokenizer: Any = None,
        weights: Callable[[], str] | None = None,
    ):
        super().__init__(model.eval().requires_grad_(False), name=name, tokenizer=tokenizer)
        self._weights = weights or (lambda: fingerprint.state_weights(model.state_dict()))
        self.base: dict[str, str] | None = None
        """Fingerprint of what an adapted target was made from (``adapted``); None: it is as it was loaded."""

    @property
    def label(self) -> str:
        """Its name; of an adapted one also that it is another model, since lossless then means relative to that."""
        return self.info.name if self.base is None else f"{self.info.name}, adapted by its drafter"

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Digests of ``weights``, ``tokenizer`` and ``chat_template``, 16 hex digits each or "none"."""
        return {
            "weights": self._weights(),
            "tokenizer": fingerprint.tokenizer_digest(self.tokenizer),
            "chat_template": fingerprint.chat_template_digest(self.tokenizer),
        }

    @torch.no_grad()
    def adapted(self, deltas: Mapping[str, Tensor], digest: str) -> "Target":
        """Return another target, whose linear layers named in ``deltas`` have W + delta; all else is shared.

        Args:
            deltas: module name -> [O, I].
            digest: names the change; the new fingerprint covers it and the weights it was made from.
        """
        assert self.base is None, "adapted twice"
        model = twin(self.model)
        for name, delta_OI in deltas.items():
            linear = model.get_submodule(name)
            wide = torch.promote_types(linear.weight.dtype, delta_OI.dtype)
            changed_OI = (linear.weight.to(wide) + delta_OI.to(self.device, wide)).to(linear.weight.dtype)
            linear.weight = nn.Parameter(changed_OI, requires_grad=False)
        base = self.fingerprint
        weights = fingerprint.short(f"{base['weights']}+{digest}".encode())
        made = Target(model, name=self.info.name, tokenizer=self.tokenizer, weights=lambda: weights)
        made.base = base
        return made

    @cached_property
    def fast(self) -> FastTarget:
        """The same weights behind the fast engine, made (and compared with this forward) when first asked for."""
        return self.fast_twin()

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """As ``Backbone.embed``, frozen."""
        return super().embed(ids)

    @torch.no_grad()
    def head_rows(self, ids: Tensor) -> Tensor:
        """Return a copy of the output head's rows for ``ids`` [N]: [N, D]."""
        return self._head.weight[ids.to(self.device)].clone()

    @torch.no_grad()
    def head_bias(self, ids: Tensor) -> Tensor | None:
        """Return a copy of the output head's bias for ``ids`` [N], None where it has none."""
        return None if self._head.bias is None else self._head.bias[ids.to(self.device)].clone()

    def encode_chat(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        """Render ``messages`` (role, content) with the chat template and return the ids.

        Raises:
            UserError: there is no chat template, or it refuses these messages.
        """
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise UserError(
                f"target {self.info.name} must have a chat template to encode a conversation, got none; "
                "use an instruction-tuned target, or data=text"
            )
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, return_dict=False
            )
        except TemplateError as error:
            raise UserError(
                f"messages must fit the chat template of target {self.info.name}, got: {error}; "
                "check their roles and their order"
            ) from error

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Turn ids into text."""
        if self.tokenizer is None:
            raise UserError(f"target {self.info.name} must have a tokenizer to decode ids, got none")
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
