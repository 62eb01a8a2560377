"""A target forward through cache and tree mask equals the plain model on each path, run from scratch.

The reference is transformers' own model on the committed tokens plus one root-to-node path: no mask of ours, no
cache of ours. Targets are fp64.
"""

import pytest
import torch

from distill.attention import tree_mask
from distill.target.tiny import FAMILIES, tiny_target
from distill.tree import geometry

V = 40
# Norms and rotary tables inside transformers round to fp32 whatever the model's precision, but always the same
# way for the same input: agreement is far below that.
TIGHT = {"rtol": 1e-9, "atol": 1e-9}
# Eager attention (the only kind with soft-capping) takes its softmax in fp32.
LOOSE = {"rtol": 1e-5, "atol": 1e-5}


def make(family: str, layers: int = 2):
    return tiny_target(family, seed=1, vocab_size=V, hidden=16, layers=layers, dtype=torch.float64)


def close(target, got, want):
    torch.testing.assert_close(got, want, **(LOOSE if target.config_hf._attn_implementation == "eager" else TIGHT))


@torch.no_grad()
def plain(target, ids: list[int]) -> torch.Tensor:
    """Final hidden states of the plain backbone."""
    return target.model.get_decoder()(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]


def random_parents(generator, n: int) -> list[int]:
    return [0, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, n))]


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def forward(target, cache, tokens, parents, depth):
    ancestors, depths = geometry(parents, depth)
    view = cache.begin(tokens.shape[1])
    mask = tree_mask(
        lengths_B=cache.lengths_B,
        ancestors_BNM=ancestors,
        depths_BM=depths,
        view=view,
        window=target.info.sliding_window,
    )
    return target.forward(tokens, positions_BL=cache.lengths_B[:, None] + depths, mask=mask, cache=cache, taps=(1,))


def prefill(target, cache, prompts):
    longest = max(map(len, prompts))
    ids = torch.tensor([p + [0] * (longest - len(p)) for p in prompts])
    parents = torch.arange(-1, longest - 1).clamp(min=0).expand(len(prompts), -1)
    output = forward(target, cache, ids, parents, longest - 1)
    cache.advance(torch.tensor([len(p) for p in prompts]), longest=longest)
    return output


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_tree_equals_each_path_alone(family):
    """Prefixes of uneven length, some longer than the window of 8, some shorter; trees deeper than three."""
    target = make(family)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, V, (n,), generator=generator).tolist() for n in (1, 6, 19)]
    cache = target.new_cache(3, 40)
    filled = prefill(target, cache, prompts)
    for b, prompt in enumerate(prompts):
        close(target, filled.last_BLD[b, : len(prompt)], plain(target, prompt))
    parents = torch.tensor([random_parents(generator, 9) for _ in range(3)])
    tokens = torch.randint(3, V, (3, 9), generator=generator)
    output = forward(target, cache, tokens, parents, 8)
    for b, prompt in enumerate(prompts):
        for node in range(9):
            path = path_to(parents[b].tolist(), node)
            alone = plain(target, prompt + tokens[b, path].tolist())
            close(target, output.last_BLD[b, node], alone[-1])


@pytest.mark.parametrize("family, rounds", [("llama", 200), ("mistral", 100), ("gemma3", 60), ("gemma2", 40)])
@torch.no_grad()
def test_many_rounds_equal_a_recomputation(family, rounds):
    """Random trees, random accepted paths of uneven length, rows that stand still; rejected entries are spoilt.

    Before every forward everything behind the committed entries is overwritten with huge numbers, so that one
    slot seen too many cannot go unnoticed. (Finite ones: masked slots still enter as 0 times a value.)
    """
    target = make(family)
    generator = torch.Generator().manual_seed(rounds)
    prompts = [torch.randint(3, V, (n,), generator=generator).tolist() for n in (2, 7, 4)]
    committed = [list(p) for p in prompts]
    cache = target.new_cache(3, 8)
    cache.reserve(64)
    prefill(target, cache, prompts)
    for turn in range(rounds):
        if max(map(len, committed)) > 50:  # start over with short rows: attention stays cheap
            committed = [c[:n] for c, n in zip(committed, (3, 1, 9), strict=True)]
            cache.lengths_B, cache.longest = torch.tensor([3, 1, 9]), 9
        for b, ids in enumerate(committed):
            cache.kv[:, :, b, :, len(ids) :] = 1e6
        n = 1 + int(torch.randint(0, 9, (1,), generator=generator))
        parents = torch.tensor([random_parents(generator, n) for _ in range(3)])
        tokens = torch.randint(3, V, (3, n), generator=generator)
        output = forward(target, cache, tokens, parents, n - 1)
        ends = torch.randint(-1, n, (3,), generator=generator).tolist()  # -1: the row stands still
        paths = [[] if end < 0 else path_to(parents[b].tolist(), end) for b, end in enumerate(ends)]
        width = max(1, *map(len, paths))
        grown = [c + tokens[b, p].tolist() for b, (c, p) in enumerate(zip(committed, paths, strict=True))]
        cache.commit(
            torch.tensor([p + [-1] * (width - len(p)) for p in paths]),
            torch.tensor([len(p) for p in paths]),
            longest=max(map(len, grown)),
        )
        if turn % 5 == 0 or turn == rounds - 1:
            for b, path in enumerate(paths):
                if path:
                    close(target, output.last_BLD[b, path[-1]], plain(target, grown[b])[-1])
        committed = grown
    # After everything: a plain chain over the cache, and the cache's own keys and values against a fresh prefill.
    fresh = target.new_cache(3, 64)
    prefill(target, fresh, committed)
    assert fresh.lengths_B.tolist() == cache.lengths_B.tolist() == [len(c) for c in committed]
    for b, ids in enumerate(committed):
        close(target, cache.kv[:, :, b, :, : len(ids)], fresh.kv[:, :, b, :, : len(ids)])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@torch.no_grad()
def test_chunked_prefill_equals_one_piece(family):
    target = make(family)
    ids = torch.randint(3, V, (2, 23))
    whole = target.new_cache(2, 23)
    expected = prefill(target, whole, ids.tolist())
    for chunk in (1, 4, 9):
        cache = target.new_cache(2, 23)
        pieces = []
        for begin in range(0, 23, chunk):
            part = ids[:, begin : begin + chunk]
            n = part.shape[1]
            parents = torch.arange(-1, n - 1).clamp(min=0).expand(2, -1)
            pieces.append(forward(target, cache, part, parents, n - 1))
            cache.advance(torch.full((2,), n), longest=begin + n)
        close(target, torch.cat([p.last_BLD for p in pieces], 1), expected.last_BLD)
        close(target, torch.cat([p.taps[1] for p in pieces], 1), expected.taps[1])
        close(target, cache.kv, whole.kv)


@torch.no_grad()
def test_the_window_is_there():
    """Control: a full-attention mask on the same windowed model gives something else."""
    target = make("mistral")
    prompt = torch.randint(3, V, (20,)).tolist()
    cache = target.new_cache(1, 30)
    prefill(target, cache, [prompt])
    parents = torch.zeros(1, 1, dtype=torch.long)
    token = torch.tensor([[7]])
    right = forward(target, cache, token, parents, 0).last_BLD[0, 0]
    close(target, right, plain(target, [*prompt, 7])[-1])
    full = tree_mask(lengths_B=cache.lengths_B, ancestors_BNM=torch.ones(1, 1, 1, dtype=torch.bool), view=21)
    mask = type(full)(full_B1QT=full.full_B1QT, sliding_B1QT=full.full_B1QT)
    cache.begin(1)
    wrong = target.forward(token, positions_BL=torch.tensor([[20]]), mask=mask, cache=cache).last_BLD[0, 0]
    assert float((wrong - right).abs().max()) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_taps_are_transformers_hidden_states(family):
    """Tap k enters layer k; the last one is before the final norm, which transformers' own last is not."""
    target = make(family, layers=5)
    ids = torch.randint(3, V, (2, 12))
    reference = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    output = target.forward(ids, taps=range(6))
    for k in range(5):
        close(target, output.taps[k], reference.hidden_states[k])
    close(target, output.taps[0], target.embed(ids))
    close(target, output.last_BLD, reference.hidden_states[5])
    close(target, target.logits(output.last_BLD), reference.logits)
    assert float((output.taps[5] - output.last_BLD).abs().max()) > 1e-3
    normed = target.model.get_decoder().norm(output.taps[5])
    close(target, normed, output.last_BLD)
    assert set(target.forward(ids, taps=(1, 3)).taps) == {1, 3}


@torch.no_grad()
def test_packed_documents_equal_documents_alone():
    """Features that training uses: documents packed in a row see neither each other nor padding."""
    from oracles import pack, random_documents

    from distill.attention import packed_mask

    for family in ("llama", "mistral", "gemma3"):
        target = make(family)
        rows = random_documents(3, 40, V, seed=5)
        batch = pack(rows, 40)
        mask = packed_mask(batch.doc_BL, batch.positions_BL, window=target.info.sliding_window)
        output = target.forward(batch.ids_BL, positions_BL=batch.positions_BL, mask=mask, taps=(1,))
        for b, row in enumerate(rows):
            start = 0
            for ids, _ in row:
                close(target, output.last_BLD[b, start : start + len(ids)], plain(target, ids))
                start += len(ids)
