"""Slow, plain oracles, and drafters that draft what a test wants.

Nothing here calls the library's own mathematics: tokens come from the transformers model itself, without a cache;
filters from transformers' logits processors; noise from a hash over Python integers or numpy's unsigned ones.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from distill.types import Batch

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


# -- keyed noise: splitmix64 over (seed, request, position), then two 32-bit finalisers over the token id


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def key64(seed: int, request: int, position: int) -> int:
    inner = splitmix64(splitmix64(seed & M64) ^ (request & M64))
    return splitmix64(inner ^ (position & M64))


def finalise32(x: int, second: int) -> int:
    x ^= x >> 16
    x = (x * 0x21F0AAAD) & M32
    x ^= x >> 15
    x = (x * second) & M32
    return x ^ (x >> 15)


def hash_bits(seed: int, request: int, position: int, token: int, *, second: int) -> int:
    key = key64(seed, request, position)
    return finalise32(finalise32(token ^ (key & M32), second) ^ (key >> 32), second)


def gumbel_of_bits(bits: int) -> float:
    """Gumbel noise of the low 31 bits, in double precision; large noise comes from small numbers."""
    v = min(((bits & 0x7FFFFFFF) + 0.5) / 2**31, 1 - 2**-24)
    return -math.log(-math.log1p(-v))


def noise(seed: int, request: int, positions: list[int], vocab: int, *, second: int) -> torch.Tensor:
    """G[len(positions), vocab] in fp32, by numpy's wrapping unsigned integers."""
    rows = []
    for position in positions:
        key = key64(seed, request, position)
        x = np.arange(vocab, dtype=np.uint32)
        for word in (key & M32, key >> 32):
            x = x ^ np.uint32(word)
            x = x ^ (x >> np.uint32(16))
            x = x * np.uint32(0x21F0AAAD)
            x = x ^ (x >> np.uint32(15))
            x = x * np.uint32(second)
            x = x ^ (x >> np.uint32(15))
        rows.append(torch.from_numpy((x & np.uint32(0x7FFFFFFF)).astype(np.float32)))
    # fp32 as documented: the token at a position must not depend on more precision than the library keeps.
    v = ((torch.stack(rows) + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


# -- what autoregressive decoding emits


def second_constant() -> int:
    """Second multiplier of the 32-bit finaliser in use.

    One finaliser is as good as another for the tests of losslessness; which one it must be is asked in
    ``test_sampling.py`` alone. Found by asking which of the candidates reproduces one value.
    """
    from distill.sampling import _mix32

    got = int(_mix32(torch.tensor([1], dtype=torch.int32))) & M32
    known = (0xD35A2D97, 0x735A2D97, 0xD2D69757)
    return next(c for c in known if finalise32(1, c) == got)


SECOND = second_constant()


def pick(logits_NV: torch.Tensor, sampling, noise_NV: torch.Tensor | None) -> torch.Tensor:
    """One token per row: argmax, or argmax of transformers' warped logits plus noise."""
    if sampling.temperature == 0:
        return logits_NV.argmax(-1)
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits_NV)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return (scores + noise_NV).argmax(-1)


@torch.no_grad()
def stepped(target, prompts, n_new, sampling, *, request_ids=None, stop=None, together=True):
    """Autoregressive decoding that recomputes the whole sequence for every token, through the plain model.

    ``together`` lays all prompts in one right-padded batch (causal attention never looks right); otherwise each
    prompt is a batch of its own.
    """
    if not together:
        ids = list(request_ids) if request_ids is not None else list(range(len(prompts)))
        one = [
            stepped(target, [p], n_new, sampling, request_ids=[r], stop=stop) for p, r in zip(prompts, ids, strict=True)
        ]
        return [g for (g,) in one]
    requests = list(request_ids) if request_ids is not None else list(range(len(prompts)))
    stop = set(target.info.eos_ids) if stop is None else set(stop)
    sequences = [list(p) for p in prompts]
    done = [False] * len(prompts)
    vocab = target.info.vocab_size
    table = None
    if sampling.temperature > 0:
        table = [
            noise(sampling.seed, r, range(len(p), len(p) + n_new), vocab, second=SECOND)
            for p, r in zip(prompts, requests, strict=True)
        ]
    for step in range(n_new):
        longest = max(len(s) for s in sequences)
        padded = torch.tensor([s + [0] * (longest - len(s)) for s in sequences])
        logits = target.model(input_ids=padded, use_cache=False).logits
        last = logits[torch.arange(len(sequences)), torch.tensor([len(s) - 1 for s in sequences])]
        chosen = pick(last, sampling, None if table is None else torch.stack([g[step] for g in table]))
        for b, token in enumerate(chosen.tolist()):
            if not done[b]:
                sequences[b].append(token)
                done[b] = token in stop
        if all(done):
            break
    return [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)]


def random_prompts(n: int, vocab: int, *, seed: int, longest: int = 12) -> list[list[int]]:
    """Prompts of uneven length, one of a single token among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, longest, *torch.randint(1, longest + 1, (n - 2,), generator=generator).tolist()]
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


# -- drafters that need no model


class Scripted:
    """A drafter that knows each row's continuation and says it as ``skill(row, position)`` allows.

    skill gives the score of the right token among noise in (0, 1): 1000 puts it first, 0.5 somewhere, -1e6 last.
    Nodes off the true path get noise. With ``check`` every ``extend`` is held against the truth: the loop may never
    feed a token that was not committed.
    """

    name, max_depth, vocab, config, soft = "scripted", None, None, None, True

    def __init__(self, vocab_size: int, truth: list[list[int]], skill, *, seed: int = 0, check: bool = True):
        self.vocab_size, self.truth, self.skill, self.check = vocab_size, truth, skill, check
        self.target = SimpleNamespace(info=SimpleNamespace(vocab_size=vocab_size))
        self.generator = torch.Generator().manual_seed(seed)

    def taps(self, _config, _info):
        return ()

    def to_target_ids(self, ids):
        return ids

    def new_state(self, batch_size: int, _capacity: int):
        return SimpleNamespace(rows=[[] for _ in range(batch_size)], root=[0] * batch_size, on=None)

    def extend(self, state, ids_BL, next_B, output, n_B, *, longest):
        assert output.last_BLD.shape[:2] == ids_BL.shape
        for b, n in enumerate(n_B.tolist()):
            if n:
                state.rows[b] += ids_BL[b, :n].tolist()
                state.root[b] = int(next_B[b])
                known, whole = self.truth[b], [*state.rows[b], state.root[b]]
                if self.check:
                    assert whole[: len(known)] == known[: len(whole)], "the loop fed tokens nobody committed"
        assert not self.check or longest == max(len(r) for r in state.rows)

    def _true(self, b: int, position: int) -> int:
        return self.truth[b][position] if position < len(self.truth[b]) else -1

    def step(self, state, frontier):
        batch, width = frontier.tokens_BF.shape
        logits = torch.rand(batch, width, self.vocab_size, generator=self.generator, dtype=torch.float64)
        above = state.on
        on = []
        for b in range(batch):
            base = len(state.rows[b])
            row = []
            for f in range(width):
                at = base + frontier.depth
                parent = frontier.depth == 0 or above[b][int(frontier.parent_BF[b, f])]
                right = parent and int(frontier.tokens_BF[b, f]) == self._true(b, at)
                row.append(right)
                token = self._true(b, at + 1)
                if right and token >= 0:
                    logits[b, f, token] = self.skill(b, at + 1)
            on.append(row)
        state.on = on
        return logits

    def rollback(self, state):
        state.on = None


def perfect(_row: int, _position: int) -> float:
    return 1000.0


def wrong(_row: int, _position: int) -> float:
    return -1e6


def mixed(row: int, position: int) -> float:
    """First, second, somewhere or last, by a fixed pattern that no tree shape is in step with."""
    return (1000.0, 0.97, 1000.0, 0.9, 1000.0, -1e6, 1000.0)[(7 * row + position * position + position // 3) % 7]


# -- packed batches


def pack(documents: list[list[tuple[list[int], list[int]]]], length: int) -> Batch:
    """Rows of documents, each (ids, written), padded to ``length``; written = 1 on tokens of the target."""
    rows = {name: [] for name in ("ids", "mask", "position", "doc")}
    for row in documents:
        flat = {name: [] for name in rows}
        for d, (ids, written) in enumerate(row):
            flat["ids"] += ids
            flat["mask"] += [bool(w) for w in written]
            flat["position"] += range(len(ids))
            flat["doc"] += [d] * len(ids)
        room = length - len(flat["ids"])
        assert room >= 0
        flat["ids"] += [0] * room
        flat["mask"] += [False] * room
        flat["position"] += [0] * room
        flat["doc"] += [-1] * room
        for name, values in flat.items():
            rows[name].append(values)
    mask = torch.tensor(rows["mask"])
    return Batch(
        ids_BL=torch.tensor(rows["ids"]),
        loss_mask_BL=mask,
        positions_BL=torch.tensor(rows["position"]),
        doc_BL=torch.tensor(rows["doc"]),
        denominator=float(mask.sum()),
    )


def random_documents(batch: int, length: int, vocab: int, *, seed: int, share: float = 0.6):
    """Documents of several turns each (runs of prompt and answer tokens), rows filled to different degrees."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(batch):
        room, row = int(rng.integers(length // 2, length + 1)), []
        while room > 0:
            size = int(min(room, rng.integers(1, max(2, length // 2))))
            written: list[int] = []
            while len(written) < size:
                written += [int(rng.random() < share)] * int(rng.integers(1, 6))
            row.append((rng.integers(0, vocab, size).tolist(), written[:size]))
            room -= size
        rows.append(row)
    return rows


# -- EAGLE-3 written out, one sequence, position by position


class PlainEagle3:
    """The published drafter (arXiv:2503.01840, appendix; fused taps, one layer over twice the width).

    Shares the parameters of a drafter and nothing else: no batch, no cache, no mask. ``theta``, sizes and epsilon
    come from the target's own config.
    """

    def __init__(self, drafter, target):
        self.w = dict(drafter.named_parameters())
        self.flags = drafter.config
        hf = target.config_hf
        self.heads, self.groups = hf.num_attention_heads, hf.num_key_value_heads
        self.dim = getattr(hf, "head_dim", None) or hf.hidden_size // self.heads
        self.eps, self.theta = hf.rms_norm_eps, hf.rope_parameters["rope_theta"]
        self.table = target.model.get_input_embeddings().weight.detach()

    def rms(self, x, name):
        return x / torch.sqrt((x * x).mean() + self.eps) * self.w[name]

    def rope(self, x, position):
        """Half-split rotation of every head; angles in fp32, as the target computes them."""
        half = self.dim // 2
        frequency = 1.0 / (self.theta ** (torch.arange(0, self.dim, 2).float() / self.dim))
        angle = float(position) * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], 1)

    def fused(self, taps):
        if self.flags.fc_norm:
            taps = [self.rms(x, f"fc_norm.{i}.weight") for i, x in enumerate(taps)]
        return self.w["fc.weight"] @ torch.cat(taps)

    def layer(self, token: int, g, position: int, keys: list, values: list):
        """One node; its own key and value are appended to the ones it may see."""
        p = "layers.0."
        normed = self.rms(g, p + "hidden_norm.weight")
        embedded = self.table[token].to(g.dtype)
        x = torch.cat([self.rms(embedded, p + "input_layernorm.weight"), normed])

        def project(name, heads):
            return (self.w[f"{p}self_attn.{name}_proj.weight"] @ x).view(heads, self.dim)

        q = self.rope(project("q", self.heads), position)
        keys = [*keys, self.rope(project("k", self.groups), position)]
        values = [*values, project("v", self.groups)]
        seen = []
        for h in range(self.heads):
            group = h // (self.heads // self.groups)
            scores = torch.stack([q[h] @ k[group] for k in keys]) / math.sqrt(self.dim)
            weights = scores.softmax(0)
            seen.append(sum(w * v[group] for w, v in zip(weights, values, strict=True)))
        attended = self.w[p + "self_attn.o_proj.weight"] @ torch.cat(seen)
        h = (normed if self.flags.norm_before_residual else g) + attended
        y = self.rms(h, p + "post_attention_layernorm.weight")
        gate, up = self.w[p + "mlp.gate_proj.weight"] @ y, self.w[p + "mlp.up_proj.weight"] @ y
        out = h + self.w[p + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        return out, keys[-1], values[-1]

    def logits(self, out):
        return self.w["lm_head.weight"] @ self.rms(out, "norm.weight")

    def feedback(self, out):
        return self.rms(out, "norm.weight") if self.flags.norm_output else out

    def train(self, ids: list[int], taps: list[torch.Tensor], steps: int):
        """Training-time test over one document: {(step, i): (out, logits)} wherever t_{i+1+step} exists."""
        length = len(ids)
        found, features = {}, {i: self.fused([t[i] for t in taps]) for i in range(length)}
        keys = {i: [] for i in range(length)}  # keys[i]: what position i has made, one per step
        values = {i: [] for i in range(length)}
        for k in range(steps):
            for i in range(length - 1 - k):
                # Keys of step 0 at j <= i, and of every later step at i itself; the current one joins in ``layer``.
                before = [keys[j][0] for j in range(i + (k > 0))] + keys[i][1:]
                before_v = [values[j][0] for j in range(i + (k > 0))] + values[i][1:]
                out, key, value = self.layer(ids[i + 1 + k], features[i], i + k, before, before_v)
                keys[i].append(key)
                values[i].append(value)
                found[k, i] = out, self.logits(out)
                features[i] = self.feedback(out)
        return found

    def draft(self, ids: list[int], taps: list[torch.Tensor], path: list[int]):
        """Logits after each node of a drafted path below a prefix: ids[:-1] were processed, ids[-1] is the root."""
        keys, values, out = [], [], None
        for i in range(len(ids) - 1):
            out, key, value = self.layer(ids[i + 1], self.fused([t[i] for t in taps]), i, keys, values)
            keys, values = [*keys, key], [*values, value]
        found = [self.logits(out)]
        for depth, token in enumerate(path):
            out, key, value = self.layer(token, self.feedback(out), len(ids) - 1 + depth, keys, values)
            keys, values = [*keys, key], [*values, value]
            found.append(self.logits(out))
        return found
