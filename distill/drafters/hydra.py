"""Hydra heads (arXiv:2402.05109): Medusa heads that see the tokens drafted before them.

Head i = 0..K-1 at position t reads the target's last hidden state f_t and the embeddings of t_{t+1} .. t_{t+1+i}:

    z = [ f_t ; e(t_{t+1}) ; ... ; e(t_{t+1+i}) ]            (i + 2) D
    x = R z + SiLU(W z + b),   x <- x + SiLU(W' x + b') for the other blocks,   q = output head(x)

and speaks about t_{t+2+i}. In training the tokens are the text's; while drafting they are the node's ancestors and the
node itself, so every node has logits of its own. R starts as the projection on f_t and everything else at zero: like
Medusa's, each head starts as the target's own next-token head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.alignment import generated_run, input_ids
from distill.config import opt
from distill.drafters.medusa import Medusa, MedusaConfig, MedusaState, ResBlock
from distill.products import project
from distill.target import Target
from distill.types import Batch, Frontier, StepPrediction, TargetOutput
from distill.vocab import DraftVocab


@dataclass(kw_only=True)
class HydraConfig(MedusaConfig):
    """As Medusa's; every flag is written into checkpoints."""

    name: str = opt("hydra", "drafter name")


class FirstBlock(nn.Module):
    """R z + SiLU(W z + b), from the joined inputs to D; the first D of them at the start."""

    def __init__(self, inputs: int, size: int):
        super().__init__()
        self.residual = nn.Linear(inputs, size, bias=False)
        self.linear = nn.Linear(inputs, size)
        nn.init.eye_(self.residual.weight)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, z: Tensor) -> Tensor:
        """Map [..., (i + 2) D] to [..., D]."""
        return project(self.residual, z) + F.silu(project(self.linear, z))


@dataclass(kw_only=True)
class HydraState(MedusaState):
    """Decoding state.

    Attributes:
        inputs_BFE: what the heads read at the nodes of the frontier before: feature and path, side by side.
    """

    inputs_BFE: Tensor | None = None


class Hydra(Medusa):
    """K heads on the target's last hidden state and the path to a node."""

    name = "hydra"
    Config = HydraConfig
    config: HydraConfig

    def __init__(self, config: HydraConfig, target: Target, vocab: DraftVocab | None = None):
        super().__init__(config, target, vocab)
        size = target.info.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(FirstBlock((i + 2) * size, size), *(ResBlock(size) for _ in range(config.blocks - 1)))
            for i in range(config.heads)
        )

    def kept_floats(self, share: float) -> float:
        """Joined inputs, and input and output of every block before and after its activation."""
        k = self.config.heads
        heads = (k * (k + 3) / 2 + k * 3 * self.config.blocks + k) * self.target.info.hidden_size
        return heads + self.adapter_floats()

    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """One prediction per head; head i reads the text up to t_{t+1+i} and speaks about t_{t+2+i}."""
        last_BLD, own = self.read(batch, output)
        inputs = last_BLD.to(next(self.parameters()).dtype)
        found = []
        for i, head in enumerate(self.heads):
            embedded = self.target.embed(input_ids(batch, i)).to(inputs.dtype)
            inputs = torch.cat([inputs, embedded], dim=-1)
            found.append(
                StepPrediction(
                    hidden_BLD=head(inputs),
                    head=self.output_head(i),
                    shift=2 + i,
                    mask_BL=generated_run(batch, 1, 2 + i),
                    weight=self.head_weight(i),
                )
            )
        return found + own

    def new_state(self, batch_size: int, capacity: int) -> HydraState:
        """Empty state."""
        return HydraState(cache=None, last_B1D=super().new_state(batch_size, capacity).last_B1D)

    def step(self, state: HydraState, frontier: Frontier) -> Tensor:
        """Logits_BFW of head ``frontier.depth`` for every node."""
        if frontier.depth == 0:
            above_BFE = state.last_B1D
        else:
            assert state.inputs_BFE is not None
            index_BFE = frontier.parent_BF[:, :, None].expand(-1, -1, state.inputs_BFE.shape[2])
            above_BFE = state.inputs_BFE.gather(1, index_BFE)
        embedded = self.target.embed(frontier.tokens_BF).to(above_BFE.dtype)
        state.inputs_BFE = torch.cat([above_BFE, embedded], dim=-1)
        hidden_BFD = self.heads[frontier.depth](state.inputs_BFE)
        if self.config.head == "shared":
            return self.target_logits(hidden_BFD)
        return self.output_head(frontier.depth)(hidden_BFD)

    def rollback(self, state: HydraState) -> None:
        """Forget the paths."""
        state.inputs_BFE = None
