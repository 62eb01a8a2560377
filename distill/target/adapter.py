"""A low-rank adapter on the frozen target (LoRA, arXiv:2106.09685): W x becomes W x + s B A x in every decoder layer.

A is [r, I], B is [O, r] and zero at the start, s = alpha / r. The target keeps its modules and every bit of its
weights: in training the adapter sits in a second tree of modules around the same weights (made by the package
``peft``), and what decodes is a copy whose adapted weights are W + s B A (``Target.adapted``).
"""

import copy
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from distill.errors import UserError
from distill.target import fingerprint
from distill.target.backbone import Backbone, twin
from distill.target.model import Target
from distill.types import Batch


def require_peft() -> None:
    """Refuse to train an adapter without the package that runs it; decoding with one does without.

    Raises:
        UserError: it is not installed.
    """
    if find_spec("peft") is None:
        raise UserError(
            "drafter.lora_rank must be 0 without the package peft, which is not installed; run pip install 'peft>=0.21'"
        )


class Pair(nn.Module):
    """A [r, I] and B [O, r] of one linear layer [O, I]."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.A = nn.Linear(linear.in_features, rank, bias=False)
        self.B = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.B.weight)


def linear_layers(target: Target) -> dict[str, nn.Linear]:
    """What an adapter changes: the linear layers inside the decoder layers, by name.

    Raises:
        UserError: there are no plain ones.
    """
    inside = {id(module) for layer in target._layers for module in layer.modules()}
    found = {
        name: module
        for name, module in target.model.named_modules()
        if id(module) in inside and type(module) is nn.Linear and module.weight.is_floating_point()
    }
    if not found:
        raise UserError(
            f"target {target.info.name} must have plain linear layers for an adapter, got none; use drafter.lora_rank=0"
        )
    return found


class Adapter(nn.Module):
    """A and B for every linear layer inside the target's decoder layers; nothing of the target's own.

    Args:
        target: what is adapted; not changed.
        rank: r.
        alpha: s times r.

    Raises:
        UserError: the target has no plain linear layers.
    """

    def __init__(self, target: Target, *, rank: int, alpha: int):
        super().__init__()
        self.rank, self.alpha = rank, alpha
        self._target = [target]  # a list hides it from nn.Module
        self._backbone: list[Backbone] = []
        linears = linear_layers(target)
        self.names = list(linears)
        self.pairs = nn.ModuleList(Pair(linear, rank) for linear in linears.values())

    def forward(self, batch: Batch) -> Tensor:
        """The adapted target's last hidden states on a packed batch, with gradients: [B, L, D].

        Raises:
            UserError: ``peft`` is missing.
        """
        if not self._backbone:
            self._backbone.append(self._adapted_backbone())
        return self._backbone[0].run(batch.ids_BL, positions_BL=batch.positions_BL, doc_BL=batch.doc_BL).last_BLD

    def _adapted_backbone(self) -> Backbone:
        require_peft()
        from peft import LoraConfig, inject_adapter_in_model

        target = self._target[0]
        model = twin(target.model)
        config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=self.names)
        # Its own first weights are drawn, and replaced by ours.
        with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
            inject_adapter_in_model(config, model)
        for name, pair in zip(self.names, self.pairs, strict=True):
            layer: Any = model.get_submodule(name)
            layer.lora_A["default"], layer.lora_B["default"] = pair.A, pair.B
        return Backbone(model.eval(), name=target.info.name)

    def alone(self) -> "Adapter":
        """The same A and B without the target, whose memory can then be freed."""
        copied = copy.copy(self)
        copied._target, copied._backbone = [], []
        return copied

    @torch.no_grad()
    def deltas(self) -> dict[str, Tensor]:
        """What the adapter adds to each weight: module name -> s B A [O, I], in the adapter's own precision."""
        scale, found = self.alpha / self.rank, {}
        for name, pair in zip(self.names, self.pairs, strict=True):
            assert isinstance(pair, Pair)
            found[name] = scale * (pair.B.weight @ pair.A.weight)
        return found

    def digest(self) -> str:
        """Sixteen hex digits that change with every bit of the adapter."""
        scale = torch.tensor(self.alpha / self.rank, dtype=torch.float64)
        # FSDP has put the weights together for now: the state dict is still in pieces, and hashing must not hold them.
        weights = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        return fingerprint.state_weights({**weights, "scale": scale})
