"""A draft model: a small causal LM over the target's vocabulary, distilled from the target (arXiv:2310.08461).

Position t reads tokens up to t and speaks about t+1, as any language model does, and is compared with what the target
says there: full vocabulary, any loss of ``loss=``. Whatever the architecture, it is a plain transformers model: the
state dict has its names (``model.*``, ``lm_head.weight``), and ``config.architecture`` its config.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distill.config import opt
from distill.drafters.base import check_sizes
from distill.drafters.cached import CachedDrafter
from distill.drafters.draft_source import build_lm
from distill.drafters.on_policy import places, rewrite
from distill.errors import UserError
from distill.target import Target
from distill.target.backbone import Backbone
from distill.types import Batch, Frontier, StepPrediction, TargetOutput
from distill.vocab import DraftVocab

_ONLY = {
    "layers": ("layers",),
    "config": ("n_heads", "n_kv_heads"),
    "checkpoint": ("path",),
}
"""Options that only one source reads."""

_NOT_KEPT = ("transformers_version", "dtype", "_name_or_path")
"""What of a transformers config is no part of the architecture."""


@dataclass(kw_only=True)
class DraftModelConfig:
    """Where the draft model comes from, and how it is trained; null sizes follow the target."""

    name: str = opt("draft_model", "drafter name")
    source: Literal["layers", "config", "checkpoint"] = opt(
        "layers", "layers: cut out of the target; config: random weights; checkpoint: any causal LM with its vocabulary"
    )
    layers: list[int] | None = opt(None, "source=layers: layers of the target to keep; null: n_layers evenly spaced")
    n_layers: int | None = opt(None, "decoder layers; null: a quarter of the target's")
    hidden_size: int | None = opt(None, "width; narrower than the target's, the strongest channels are kept")
    intermediate_size: int | None = opt(None, "feed-forward width, likewise")
    n_heads: int | None = opt(None, "source=config: query heads")
    n_kv_heads: int | None = opt(None, "source=config: key/value heads")
    path: str | None = opt(None, "source=checkpoint: a local folder or a hub name")
    tie: bool | None = opt(None, "one matrix for embedding and head; null: as the target, or as the checkpoint")
    freeze_embedding: bool = opt(False, "do not train the embedding (nor the head, where it is the same matrix)")
    on_policy: float = opt(0.0, "share of the documents that the draft continues itself before the target scores them")
    on_policy_tokens: int = opt(64, "tokens of such a continuation at most")
    architecture: dict[str, Any] | None = opt(None, "the draft's transformers config; written into checkpoints")

    def __post_init__(self) -> None:
        for name in ("n_layers", "hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "on_policy_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"drafter.{name} must be >= 1, got {value}")
        check_sizes(self, "n_layers", "hidden_size", "intermediate_size", "n_heads", "n_kv_heads")
        if self.on_policy == 0 and self.on_policy_tokens != 64:
            raise UserError(
                f"drafter.on_policy_tokens must be 64 with drafter.on_policy=0, where it changes nothing, got "
                f"{self.on_policy_tokens}"
            )
        if not 0 <= self.on_policy <= 1:
            raise UserError(f"drafter.on_policy must be in [0, 1], got {self.on_policy}")
        for source, names in _ONLY.items():
            given = [name for name in names if getattr(self, name) is not None]
            if given and source != self.source:
                raise UserError(
                    f"drafter.{given[0]} must be null with drafter.source={self.source}, got "
                    f"{getattr(self, given[0])}; use source={source}"
                )
        sizes = [name for name in ("n_layers", "hidden_size", "intermediate_size") if getattr(self, name) is not None]
        if self.source == "checkpoint" and (sizes or self.path is None):
            got = f"drafter.{sizes[0]}" if sizes else "no path"
            raise UserError(f"drafter.source=checkpoint must have drafter.path and no sizes of its own, got {got}")
        if self.layers is not None and (self.n_layers is not None or not self.layers):
            raise UserError(
                f"drafter.layers must name at least one layer and stand without drafter.n_layers, got {self.layers} "
                f"and {self.n_layers}"
            )


class DraftModel(CachedDrafter):
    """A causal LM as drafter."""

    name = "draft_model"
    Config = DraftModelConfig
    config: DraftModelConfig

    def __init__(self, config: DraftModelConfig, target: Target, vocab: DraftVocab | None = None):
        super().__init__(config, target, vocab)
        lm = build_lm(config, target)
        config.architecture = {k: v for k, v in lm.config.to_diff_dict().items() if k not in _NOT_KEPT}
        self.backbone = Backbone(lm, name="draft_model")
        self._check_fits(target)
        self.model = lm.get_decoder()
        self.lm_head = lm.get_output_embeddings()
        self._tied = [f"model.{n}" for n, p in self.model.named_parameters() if p is self.lm_head.weight]
        if config.freeze_embedding:
            lm.get_input_embeddings().requires_grad_(False)
        self.register_state_dict_post_hook(_leave_out_tied)
        self.register_load_state_dict_pre_hook(_put_back_tied)
        self._warned = False

    @classmethod
    def check_target(cls, config: DraftModelConfig, target: Target) -> None:
        """Build it once: layers, sizes, a checkpoint that is not there and another vocabulary are refused here."""
        if config.architecture is not None and config.source != "config":
            raise UserError(
                f"drafter.architecture must be null with drafter.source={config.source}, got {config.architecture}; it "
                "stands in exports, and goes with source=config"
            )
        cls(replace(config), target)

    def _check_fits(self, target: Target) -> None:
        ours, theirs = self.backbone.info, target.info
        if ours.vocab_size != theirs.vocab_size:
            raise UserError(
                f"the draft model must have the target's vocabulary of {theirs.vocab_size} tokens, got "
                f"{ours.vocab_size}; choose a checkpoint of the same family"
            )
        if ours.max_positions < theirs.max_positions:
            raise UserError(
                f"the draft model must reach as far as the target's {theirs.max_positions} positions, got "
                f"{ours.max_positions}; choose another checkpoint"
            )

    # -- weights

    def _apply(self, *args: Any, **kwargs: Any) -> "DraftModel":
        moved = super()._apply(*args, **kwargs)
        self.backbone.device, self.backbone.dtype = self.lm_head.weight.device, self.lm_head.weight.dtype
        self._fast = None
        return moved

    def train(self, mode: bool = True) -> "DraftModel":
        """As in ``nn.Module``; what the fast engine has packed is dropped before weights change."""
        if mode:
            self._fast = None
        return super().train(mode)

    def accelerate(self) -> None:
        """Fuse and pack the weights as the target's are; until training begins again."""
        self.eval()
        self._fast = self.backbone.fast_twin()
        self._fast.graphs = None  # proposals are recorded whole

    # -- training

    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """As any cached drafter; a head that scales or caps its output is trained as a module."""
        (prediction,) = super().training_steps(batch, output)
        if prediction.head is self.lm_head:
            return [prediction]
        head = _Head(self.lm_head, self.backbone)
        return [
            StepPrediction(hidden_BLD=prediction.hidden_BLD, head=head, shift=1, mask_BL=prediction.mask_BL, weight=1.0)
        ]

    def kept_floats(self, share: float) -> float:
        """What the layers keep: norms, projections, rotated heads, attention and the feed-forward layer."""
        info = self.backbone.info
        wide, narrow = info.n_heads * info.head_dim, info.n_kv_heads * info.head_dim
        return info.n_layers * (8 * info.hidden_size + 3 * wide + 4 * narrow + 4 * info.intermediate_size)

    def backward_floats(self) -> float:
        """Gradients inside one layer."""
        return 2 * self.backbone.info.intermediate_size

    def rollout(self, batch: Batch) -> Batch:
        """Let the draft continue a share of the documents (``on_policy``), in training only.

        Raises:
            UserError: all documents are to be continued, and none of a batch can be.
        """
        share = self.config.on_policy
        if not self.training or share == 0:
            return batch
        assert batch.features is None, "stored features are those of the text before"
        found = places(batch)
        if not found and bool(batch.loss_mask_BL.any()):
            self._nothing_to_continue()
        chosen = [place for place, draw in zip(found, torch.rand(len(found)).tolist(), strict=True) if draw < share]
        return rewrite(batch, chosen, most=self.config.on_policy_tokens, sample=self.sample)

    def _nothing_to_continue(self) -> None:
        what = (
            f"drafter.on_policy={self.config.on_policy} must have documents with a prompt before the supervised text, "
            "got a batch without any; use conversations, or set drafter.on_policy=0"
        )
        if self.config.on_policy == 1:
            raise UserError(what)
        if not self._warned:
            self._warned = True
            warnings.warn(what, stacklevel=4)

    @torch.no_grad()
    def sample(self, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """Continue every prompt by sampling at temperature 1, all in one batch, from torch's generator.

        Args:
            prompts: token ids, at least one each.
            limits: tokens each continuation may have.

        Returns:
            Continuations up to and including the first end of text.
        """
        device, batch, most = self.lm_head.weight.device, len(prompts), max(limits)
        longest = max(len(p) for p in prompts) - 1
        ids_BL = torch.tensor([p[:-1] + [0] * (longest - len(p) + 1) for p in prompts], device=device)
        n_B = torch.tensor([len(p) - 1 for p in prompts], device=device)
        token_B = torch.tensor([p[-1] for p in prompts], device=device)
        written: list[Tensor] = []
        done_B = torch.zeros(batch, dtype=torch.bool, device=device)
        ends = torch.tensor(self.target.info.eos_ids, dtype=torch.long, device=device)
        limit_B = torch.tensor(limits, device=device)
        with self._as_in_decoding():
            state = self.new_state(batch, longest + most + 1)
            if longest:
                self.extend(state, ids_BL.long(), token_B, None, n_B, longest=longest)
            for depth in range(most):
                seen_B1M = torch.ones(batch, 1, depth + 1, dtype=torch.bool, device=device)
                frontier = Frontier(
                    tokens_BF=token_B[:, None],
                    depth=depth,
                    parent_BF=done_B[:, None].long() * 0,
                    ancestors_BFM=seen_B1M,
                )
                chances_BV = self.step(state, frontier)[:, 0].float().softmax(-1)
                if not bool(chances_BV.isfinite().all()):
                    raise UserError(
                        "the draft model must give finite logits to write its own text, got others; start a new run "
                        "with a lower optim.lr or another drafter.path"
                    )
                token_B = torch.multinomial(chances_BV, 1)[:, 0]
                written.append(torch.where(done_B, -1, token_B))
                done_B = done_B | torch.isin(token_B, ends) | (limit_B <= depth + 1)
                if bool(done_B.all()):
                    break
        return [[t for t in row if t >= 0] for row in torch.stack(written, 1).tolist()]

    @contextmanager
    def _as_in_decoding(self) -> Iterator[None]:
        """Without dropout, and in the weights' own precision, which is the cache's."""
        self.eval()
        try:
            with torch.autocast(self.lm_head.weight.device.type, enabled=False):
                yield
        finally:
            self.train()


class _Head(nn.Module):
    """The LM's head with its scaling and soft-capping."""

    def __init__(self, linear: nn.Linear, backbone: Backbone):
        super().__init__()
        self.linear, self._backbone = linear, backbone

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of hidden [..., D]."""
        return self._backbone.scale_logits(self.linear(hidden.to(self.linear.weight.dtype)))


# -- the state dict: a tied head is the embedding, and stored once


def _leave_out_tied(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    if module._tied:
        state.pop(prefix + "lm_head.weight", None)


def _put_back_tied(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if module._tied and prefix + module._tied[0] in state:
        state[prefix + "lm_head.weight"] = state[prefix + module._tied[0]]
