"""The one decode loop: propose -> verify -> commit.

Plain autoregressive decoding is this loop with an empty proposal, so every speedup compares like with like.
Per round there is one pass of the target and one read from the device to the host.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from distill.attention import tree_mask
from distill.decode.coupling import RoundNoise
from distill.decode.drafting import Drafting
from distill.decode.records import Generation, Request, StepRecord
from distill.decode.rejection import rejection
from distill.decode.rows import Rows, compact, merge
from distill.decode.verify import Typical, match, resolve, typical
from distill.drafters.base import Drafter
from distill.errors import UserError
from distill.graphs import Graphs
from distill.growing import root_only
from distill.kv_cache import KVCache
from distill.sampling import Sampling
from distill.target import Target
from distill.tree import Plan, Static, geometry
from distill.types import Accepted, DraftTree, TargetOutput

Engine = Literal["eager", "fast"]
OnStep = Callable[[int, StepRecord | None, list[int]], None]


class Decoder:
    """Decodes with a frozen target and, optionally, a drafter and the plan its proposals follow.

    Args:
        target: the frozen target.
        drafter: None decodes autoregressively.
        plan: shape of the proposals; required with a drafter.
        sampling: temperature, filters and seed.
        verifier: ``match``, ``rejection`` or ``typical`` (not lossless); see ``decode/verify.py``.
        candidates: how drafts are picked: ``auto`` (what suits the verifier), ``topk``, ``coupled`` or ``sampled``.
        typical: thresholds of typical acceptance.
        engine: ``eager`` runs the target's own forward, ``fast`` the same weights with a quicker decode step
            (``target/fast.py``); drafting and plain decoding alike.
        prefill_chunk: prompt tokens per target pass.

    Raises:
        UserError: a verifier that does not fit, a tree deeper than the drafter can propose.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        plan: Plan | None = None,
        sampling: Sampling | None = None,
        verifier: str = "match",
        candidates: str = "auto",
        typical: Typical | None = None,
        engine: Engine = "eager",
        prefill_chunk: int = 512,
    ):
        assert (drafter is None) == (plan is None), "a drafter needs a plan and a plan a drafter"
        if isinstance(drafter, Drafter) and drafter.target.base is not None and drafter.target is not target:
            raise UserError(
                f"target must be the one {drafter.name} was trained with, adapted by it, got {target.info.name} as it "
                "is; decode with drafter.target"
            )
        if engine not in get_args(Engine):
            raise UserError(f"engine must be one of {', '.join(get_args(Engine))}, got {engine!r}")
        self.target = target
        self.model: Any = target.fast if engine == "fast" else target
        """What passes go through: the target itself, or its fast twin."""
        self.drafter = drafter
        if isinstance(drafter, Drafter) and engine == "fast":
            drafter.accelerate()
        self.plan = plan
        self.sampling = sampling or Sampling()
        self.rule, picked = resolve(verifier, candidates, drafter=drafter, plan=plan, sampling=self.sampling)
        self.typical = typical or Typical()
        self.drafting: Drafting | None = None
        if drafter is not None and plan is not None:
            graphs = Graphs() if engine == "fast" and target.device.type == "cuda" else None
            self.drafting = Drafting(drafter, plan, self.sampling, candidates=picked, graphs=graphs)
        self.prefill_chunk = prefill_chunk
        self._taps = () if drafter is None else drafter.taps(drafter.config, target.info)
        self._eos = frozenset(target.info.eos_ids)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        request_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        on_step: OnStep | None = None,
    ) -> list[Generation]:
        """Continue every prompt, all in one batch.

        Args:
            prompts: token ids, each at least one long.
            max_new_tokens: generated tokens at most.
            request_ids: keys of the noise; the row index by default.
            ignore_eos: keep going past the end of text (pure speed runs).
            on_step: called as ``on_step(row, record, new_ids)``; record is None for the prefill's token.

        Raises:
            UserError: empty prompt, or prompt plus new tokens longer than the model's context.
        """
        ids = request_ids if request_ids is not None else range(len(prompts))
        requests = [
            Request(prompt=list(prompt), max_new_tokens=max_new_tokens, request_id=i)
            for prompt, i in zip(prompts, ids, strict=True)
        ]
        if not requests:
            return []
        rows = self._admit(requests, ignore_eos=ignore_eos, on_step=on_step)
        while any(rows.active):
            self._round(rows, ignore_eos=ignore_eos, on_step=on_step)
        return rows.results

    @torch.inference_mode()
    def stream(self, requests: Iterable[Request], *, slots: int, ignore_eos: bool = False) -> Iterator[Generation]:
        """Decode many requests autoregressively, refilling slots as they finish; yields in finishing order."""
        assert self.drafter is None, "slots are refilled in autoregressive decoding only"
        assert slots >= 1, "at least one slot"
        waiting = iter(requests)
        rows: Rows | None = None
        exhausted = False
        while True:
            free = slots if rows is None else rows.active.count(False) + slots - len(rows.active)
            # Prefilling in groups keeps the batch full without a prefill pass per finished row.
            if not exhausted and (rows is None or free * 8 >= slots or not any(rows.active)):
                new: list[Request] = []
                while len(new) < free and not exhausted:
                    request = next(waiting, None)
                    exhausted = request is None
                    if request is not None:
                        new.append(request)
                if new:
                    fresh = self._admit(new, ignore_eos=ignore_eos)
                    yield from (g for b, g in enumerate(fresh.results) if not fresh.active[b])
                    rows = fresh if rows is None else merge(rows, fresh)
            if rows is None or not any(rows.active):
                if exhausted:
                    return
                continue
            before = list(rows.active)
            self._round(rows, ignore_eos=ignore_eos)
            yield from (rows.results[b] for b, was in enumerate(before) if was and not rows.active[b])
            if exhausted and rows.active.count(True) * 2 <= len(rows.active):
                rows = compact(rows)

    def _check(self, request: Request) -> None:
        limit = self.target.info.max_positions
        total = len(request.prompt) + request.max_new_tokens
        if not request.prompt:
            raise UserError("a prompt must have at least one token, got none")
        if request.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be >= 1, got {request.max_new_tokens}")
        if total > limit:
            raise UserError(
                f"prompt plus max_new_tokens must fit the model's {limit} positions, got "
                f"{len(request.prompt)} + {request.max_new_tokens}; shorten the prompt or lower max_new_tokens"
            )
        if request.sampling is not None and not request.sampling.greedy and request.sampling != self.sampling:
            raise UserError("a batch can mix greedy rows with one sampled setting only")

    def _admit(self, requests: list[Request], *, ignore_eos: bool, on_step: OnStep | None = None) -> Rows:
        """Prefill a batch of requests and emit each row's first token."""
        start = time.perf_counter()
        for request in requests:
            self._check(request)
        device, batch = self.target.device, len(requests)
        extra = 1 if self.plan is None else max(self.plan.n_nodes, self.plan.fed) + self.plan.depth + 1
        capacity = max(len(r.prompt) + r.max_new_tokens for r in requests) + extra
        rows = Rows(
            cache=self.model.new_cache(batch, capacity),
            drafter=None if self.drafting is None else self.drafting.new_state(batch, capacity),
            root_B=torch.zeros(batch, dtype=torch.long, device=device),
            request_B=torch.tensor([r.request_id for r in requests], device=device),
            active_B=torch.ones(batch, dtype=torch.bool, device=device),
            lengths=[0] * batch,
            requests=requests,
            results=[Generation(request_id=r.request_id, prompt_len=len(r.prompt), tag=r.tag) for r in requests],
            started=[start] * batch,
            active=[True] * batch,
            greedy=[(r.sampling or self.sampling).greedy for r in requests],
        )
        longest = max(len(r.prompt) for r in requests)
        for begin in range(0, longest, self.prefill_chunk):
            self._prefill(rows, begin, min(begin + self.prefill_chunk, longest))
        now = time.perf_counter()
        for b, token in enumerate(rows.root_B.tolist()):
            result = rows.results[b]
            result.ttft_s = now - start
            rows.started[b] = now
            self._emit(rows, b, [token], ignore_eos=ignore_eos)
            if on_step is not None:
                on_step(b, None, [token])
        return rows

    def _prefill(self, rows: Rows, begin: int, end: int) -> None:
        """Feed prompt tokens [begin, end); rows that end inside get their first token as root."""
        device = self.target.device
        prompts = [r.prompt for r in rows.requests]
        width = end - begin
        chunk = [p[begin:end] + [0] * (width - len(p[begin:end])) for p in prompts]
        ids_BL = torch.tensor(chunk, device=device)
        count = [max(0, min(len(p), end) - begin) for p in prompts]
        n_B = torch.tensor(count, device=device)
        depths_BL = torch.arange(width, device=device).expand(len(prompts), -1)
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(len(prompts), -1, -1)
        output = self._forward(rows.cache, ids_BL, depths_BL, causal)
        last_B = (n_B - 1).clamp(min=0)
        hidden_B1D = output.last_BLD[torch.arange(len(prompts), device=device), last_B][:, None]
        noise = self._noise(rows, rows.cache.lengths_B + n_B, count=1)
        first_B = self._choose(rows, self.model.logits(hidden_B1D), noise, depths_BL[:, :1])
        follows = [p[end] if len(p) > end else 0 for p in prompts]
        ends_here_B = torch.tensor([begin < len(p) <= end for p in prompts], device=device)
        next_B = torch.where(ends_here_B, first_B[:, 0], torch.tensor(follows, device=device))
        rows.root_B = torch.where(ends_here_B, first_B[:, 0], rows.root_B)
        rows.lengths = [length + n for length, n in zip(rows.lengths, count, strict=True)]
        rows.cache.advance(n_B, longest=max(rows.lengths))
        if self.drafter is not None:
            self.drafter.extend(rows.drafter, ids_BL, next_B, output, n_B, longest=max(rows.lengths))

    def _forward(self, cache: KVCache, ids_BN: Tensor, depths_BN: Tensor, ancestors_BNN: Tensor) -> TargetOutput:
        """One target pass over nodes that hang below each row's committed tokens."""
        view = cache.begin(ids_BN.shape[1])
        window = self.target.info.sliding_window
        # One row, one node, no masked slots in between: nothing to hide from it.
        everything = len(ids_BN) == cache.bucket == 1 and view == cache.longest + 1
        if everything and self.model.maskless and (window is None or view <= window):
            positions_11 = cache.lengths_B[:, None]
            return self.model.forward(ids_BN, positions_BL=positions_11, mask=None, cache=cache, taps=self._taps)
        mask = tree_mask(
            lengths_B=cache.lengths_B,
            ancestors_BNM=ancestors_BNN,
            depths_BM=depths_BN,
            view=view,
            window=window,
        )
        positions_BN = cache.lengths_B[:, None] + depths_BN
        return self.model.forward(
            ids_BN.clamp(min=0), positions_BL=positions_BN, mask=mask, cache=cache, taps=self._taps
        )

    def _noise(self, rows: Rows, first_B: Tensor, *, count: int) -> RoundNoise:
        """Noise for the tokens from position ``first_B`` on, for the rows that sample."""
        picked = self._picked(rows)
        return RoundNoise.starting(
            self.sampling,
            rows.request_B if picked is None else rows.request_B[picked],
            first_B if picked is None else first_B[picked],
            count=count,
            vocab=self.target.info.vocab_size,
        )

    def _choose(self, rows: Rows, logits_BNV: Tensor, noise: RoundNoise, depths_BN: Tensor) -> Tensor:
        """The target's own token after every node."""
        picked = self._picked(rows)
        if self.rule == "typical":
            return logits_BNV.argmax(-1)
        if picked is None:
            return noise.choose(logits_BNV, depths_BN)
        chosen_BN = logits_BNV.argmax(-1)
        if len(picked):
            chosen_BN[picked] = noise.choose(logits_BNV[picked], depths_BN[picked])
        return chosen_BN

    def _picked(self, rows: Rows) -> Tensor | None:
        """Rows to draw noise for where greedy and sampled rows are mixed (autoregressive only); None: all alike."""
        if self.sampling.greedy or not any(rows.greedy):
            return None
        assert self.drafter is None, "drafting couples every row to its noise"
        return torch.tensor([b for b in rows.live if not rows.greedy[b]], dtype=torch.long, device=self.target.device)

    def _round(self, rows: Rows, *, ignore_eos: bool, on_step: OnStep | None = None) -> None:
        """One round for every active row."""
        count = 1 if self.plan is None else self.plan.depth + 1
        noise = self._noise(rows, rows.cache.lengths_B + 1, count=count)
        if self.drafting is None:
            tree = root_only(rows.root_B)
        else:
            tree = self.drafting.propose(rows.drafter, rows.root_B, noise)
        ancestors_BNN, depths_BN = geometry(tree.parents_BN, tree.max_depth)
        output = self._forward(rows.cache, tree.tokens_BN, depths_BN, ancestors_BNN)
        accepted = self._verify(rows, tree, self.model.logits(output.last_BLD), noise, depths_BN)
        n_B = torch.where(rows.active_B, accepted.n_B, 0)
        path_BP = accepted.path_BN
        deepest_B = torch.where(tree.tokens_BN >= 0, depths_BN, 0).amax(1)
        # The one read of the round: counts, depth, next token, the path and the tree's tokens, packed.
        head_B3 = torch.stack([n_B, deepest_B, accepted.next_B], 1)
        packed = torch.cat([head_B3, path_BP, tree.tokens_BN], 1).tolist()
        counts = [row[0] for row in packed]
        rows.lengths = [length + n for length, n in zip(rows.lengths, counts, strict=True)]
        if self.plan is not None and not (isinstance(self.plan, Static) and max(self.plan.children) == 1):
            rows.cache.commit(path_BP, n_B, longest=max(rows.lengths))
        else:  # a chain, or the root alone: every entry is where it has to be
            rows.cache.advance(n_B, longest=max(rows.lengths))
        rows.root_B = torch.where(rows.active_B, accepted.next_B, rows.root_B)
        if self.drafter is not None:
            keep = path_BP.clamp(min=0)
            self.drafter.extend(
                rows.drafter,
                tree.tokens_BN.gather(1, keep),
                accepted.next_B,
                _gather(output, keep),
                n_B,
                longest=max(rows.lengths),
            )
        width = path_BP.shape[1]
        for b in rows.live:
            (count, deepest, following), rest = packed[b][:3], packed[b][3:]
            path, tokens = rest[:count], rest[width:]
            new = [tokens[i] for i in path[1:]] + [following]
            others = tuple(t for i, t in enumerate(tokens) if i not in path and t >= 0)
            kept = self._emit(rows, b, new, ignore_eos=ignore_eos)
            record = StepRecord(
                tokens=tuple(kept),
                accepted=min(len(new) - 1, len(kept)),
                offered=len(kept) if len(kept) < len(new) else deepest,
                rejected=others,
            )
            rows.results[b].steps.append(record)
            if on_step is not None:
                on_step(b, record, kept)

    def _verify(
        self, rows: Rows, tree: DraftTree, logits_BNV: Tensor, noise: RoundNoise, depths_BN: Tensor
    ) -> Accepted:
        """Decide which drafts stay, by the rule."""
        if self.rule == "typical":
            return typical(tree, logits_BNV, self.sampling, self.typical)
        if self.rule == "rejection":
            assert self.drafter is not None
            assert isinstance(self.plan, Static)
            columns = None if self.drafter.vocab is None else self.drafter.vocab.target_ids
            return rejection(tree, logits_BNV, noise, children=self.plan.children, draft_to_target=columns)
        return match(tree, self._choose(rows, logits_BNV, noise, depths_BN), depths_BN)

    def _emit(self, rows: Rows, b: int, new: list[int], *, ignore_eos: bool) -> list[int]:
        """Append to row b, cut at the end of text and at the limit; marks the row finished."""
        result, request = rows.results[b], rows.requests[b]
        kept = new[: request.max_new_tokens - len(result.ids)]
        if not ignore_eos:
            stop = next((i for i, token in enumerate(kept) if token in self._eos), None)
            if stop is not None:
                kept, result.finished = kept[: stop + 1], "eos"
        result.ids.extend(kept)
        result.decode_s = time.perf_counter() - rows.started[b]
        if result.finished == "eos" or len(result.ids) >= request.max_new_tokens:
            rows.active[b] = False
            rows.active_B[b] = False
        return kept


def _gather(output: TargetOutput, index_BP: Tensor) -> TargetOutput:
    """Keep the positions ``index_BP`` of every feature."""

    def pick(x_BLD: Tensor) -> Tensor:
        return x_BLD.gather(1, index_BP[:, :, None].expand(-1, -1, x_BLD.shape[2]))

    return TargetOutput(last_BLD=pick(output.last_BLD), taps={k: pick(x) for k, x in output.taps.items()})
