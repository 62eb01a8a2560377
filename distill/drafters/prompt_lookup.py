"""Prompt lookup: what followed the last few tokens the last time they occurred (Saxena, 2023). Nothing is trained.

The longest suffix of the text, of ``max_ngram`` down to ``min_ngram`` tokens, that occurs earlier is looked up; the
tokens after its latest occurrence are drafted, and those after earlier ones are the lower ranks of a tree. Summaries,
code and answers that quote their question repeat themselves; other text does not, and then nothing is proposed.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from distill.config import opt
from distill.drafters.base import Drafter, DrafterState
from distill.errors import UserError
from distill.target import Target, TargetInfo
from distill.types import Batch, Frontier, StepPrediction, TargetOutput
from distill.vocab import DraftVocab

RANKS = 8
"""Different continuations that are told apart."""


@dataclass(kw_only=True)
class PromptLookupConfig:
    """How much of the text must repeat."""

    name: str = opt("prompt_lookup", "drafter name")
    max_ngram: int = opt(3, "longest suffix that is looked up, in tokens")
    min_ngram: int = opt(1, "shortest one")

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise UserError(
                f"drafter.min_ngram and max_ngram must satisfy 1 <= min <= max, got {self.min_ngram} and "
                f"{self.max_ngram}"
            )


Node = tuple[list[int], list[int]]


@dataclass(kw_only=True)
class PromptLookupState(DrafterState):
    """Decoding state, on the host.

    Attributes:
        texts: tokens the target has processed, per row.
        nodes: for each node of the frontier before, per row, the tokens from the root to it and what was found after
            them; None for a node that is no draft.
    """

    texts: list[list[int]]
    nodes: list[list["Node | None"]] = field(default_factory=list)


class PromptLookup(Drafter):
    """Looks up n-grams; ranks, but gives no distribution."""

    name = "prompt_lookup"
    Config = PromptLookupConfig
    config: PromptLookupConfig
    soft = False
    trainable = False

    def __init__(self, config: PromptLookupConfig, target: Target, vocab: DraftVocab | None = None):
        super().__init__(config, target, None)

    @classmethod
    def taps(cls, config: PromptLookupConfig, info: TargetInfo) -> tuple[int, ...]:
        """None."""
        return ()

    def accelerate(self) -> None:
        """Nothing to pack."""

    def training_steps(self, batch: Batch, output: TargetOutput) -> list[StepPrediction]:
        """Nothing to train."""
        raise UserError("drafter must be one with weights to train, got prompt_lookup; it is used without training")

    def new_state(self, batch_size: int, capacity: int) -> PromptLookupState:
        """Empty state."""
        return PromptLookupState(cache=None, texts=[[] for _ in range(batch_size)])

    def extend(
        self,
        state: PromptLookupState,
        ids_BL: Tensor,
        next_B: Tensor,
        output: TargetOutput,
        n_B: Tensor,
        *,
        longest: int,
    ) -> None:
        """Append to the texts."""
        for text, ids, n in zip(state.texts, ids_BL.tolist(), n_B.tolist(), strict=True):
            text += ids[:n]

    def step(self, state: PromptLookupState, frontier: Frontier) -> Tensor:
        """Scores_BFW: RANKS - r for the r-th continuation found, -inf for all other tokens."""
        tokens, parents = frontier.tokens_BF.tolist(), frontier.parent_BF.tolist()
        scores = torch.full((*frontier.tokens_BF.shape, self.target.info.vocab_size), float("-inf"))
        above, state.nodes = state.nodes, []
        for row, text in enumerate(state.texts):
            found: list[Node | None] = []
            for token, parent in zip(tokens[row], parents[row], strict=True):
                upper = ([], [token]) if frontier.depth == 0 else above[row][parent]
                # Below a node where nothing was found there is a place in the tree, and no draft.
                if upper is None or token not in upper[1]:
                    found.append(None)
                    continue
                path = [*upper[0], token]
                found.append((path, self.continuations(text + path)))
            state.nodes.append(found)
            for node, known in enumerate(found):
                for rank, token in enumerate(known[1] if known else ()):
                    scores[row, node, token] = RANKS - rank
        return scores.to(frontier.tokens_BF.device)

    def continuations(self, text: list[int]) -> list[int]:
        """Tokens that followed earlier occurrences of the text's end: longest suffix first, then the latest."""
        found: list[int] = []
        for n in range(min(self.config.max_ngram, len(text) - 1), self.config.min_ngram - 1, -1):
            suffix = text[-n:]
            for at in range(len(text) - n - 1, -1, -1):
                if text[at : at + n] == suffix and text[at + n] not in found:
                    found.append(text[at + n])
                    if len(found) == RANKS:
                        return found
        return found

    def rollback(self, state: PromptLookupState) -> None:
        """Forget the proposal."""
        state.nodes = []
