"""What EAGLE-3 drafts equals what it was trained to say, on chains and on every path of a tree."""

import io
from types import SimpleNamespace

import pytest
import torch
from oracles import PlainEagle3, pack, random_documents

from distill.attention import packed_mask
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.errors import UserError
from distill.losses import LossConfig, total
from distill.target.tiny import tiny_target
from distill.types import Frontier
from distill.vocab import choose_vocab

V, W, K = 40, 27, 5
FLAGS = [
    {},
    {"norm_before_residual": True},
    {"fc_norm": True, "norm_output": True},
    {"taps": [0, 2, 6], "norm_output": True, "norm_before_residual": True},
]
PRECISIONS = [(torch.float64, 1e-9), (torch.float32, 1e-5)]


def make(dtype=torch.float64, family="llama", **flags):
    target = tiny_target(family, seed=4, vocab_size=V, hidden=16, layers=6, dtype=dtype)
    torch.manual_seed(1)
    vocab, _ = choose_vocab(torch.rand(V), W)
    config = Eagle3Config(draft_vocab_size=W, ttt_steps=K, **flags)
    return target, vocab, Eagle3(config, target, vocab).to(dtype).requires_grad_(False)


def features_of(target, drafter, ids_BL):
    return target.forward(ids_BL, taps=drafter.taps(drafter.config, target.info))


def slice_of(output, part):
    return type(output)(last_BLD=output.last_BLD[part], taps={k: x[part] for k, x in output.taps.items()})


def extend_in_chunks(drafter, state, ids, output, chunk):
    """Feed positions 0..n-1 of one row; ids[n] is the root."""
    n = len(ids) - 1
    for begin in range(0, n, chunk):
        end = min(begin + chunk, n)
        drafter.extend(
            state,
            torch.tensor([ids[begin:end]]),
            torch.tensor([ids[end]]),
            slice_of(output, (slice(None), slice(begin, end))),
            torch.tensor([end - begin]),
            longest=end,
        )


def frontier(tokens, depth, parents, ancestors):
    return Frontier(
        tokens_BF=torch.tensor(tokens),
        depth=depth,
        parent_BF=torch.tensor(parents),
        ancestors_BFM=torch.tensor(ancestors, dtype=torch.bool),
    )


def draft_chain(drafter, state, root: int, path: list[int]):
    """Logits at depth 0..len(path) along one forced path."""
    found = [drafter.step(state, frontier([[root]], 0, [[0]], [[[True]]]))[0, 0]]
    for depth, token in enumerate(path, start=1):
        seen = [[[True] * (depth + 1)]]
        found.append(drafter.step(state, frontier([[token]], depth, [[0]], seen))[0, 0])
    drafter.rollback(state)
    return found


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_training_equals_drafting(flags, dtype, tolerance):
    """Prediction of step k at i = what is drafted at depth k below the prefix that ends with token i + 1."""
    target, _, drafter = make(dtype, **flags)
    ids = torch.randint(3, V, (16,)).tolist()
    batch = pack([[(ids, [1] * 16)]], 16)
    output = features_of(target, drafter, batch.ids_BL)
    trained = [p.head(p.hidden_BLD)[0] for p in drafter.training_steps(batch, output)]
    for i in (0, 1, 4, 9):
        state = drafter.new_state(1, 32)
        prefix = ids[: i + 2]  # positions 0..i were processed, token i + 1 is the root
        extend_in_chunks(drafter, state, prefix, output, chunk=1 + i % 3)
        drafted = draft_chain(drafter, state, prefix[-1], ids[i + 2 : i + 2 + K - 1])
        for k in range(K):
            torch.testing.assert_close(drafted[k], trained[k][i], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen3", "mistral"])
def test_training_equals_drafting_for_other_families(family):
    """Scaled embeddings, windows (the drafter has none), other rotary settings."""
    target, _, drafter = make(family=family)
    ids = torch.randint(3, V, (20,)).tolist()
    batch = pack([[(ids, [1] * 20)]], 20)
    mask = packed_mask(batch.doc_BL, batch.positions_BL, window=target.info.sliding_window)
    taps = drafter.taps(drafter.config, target.info)
    output = target.forward(batch.ids_BL, positions_BL=batch.positions_BL, mask=mask, taps=taps)
    trained = [p.head(p.hidden_BLD)[0] for p in drafter.training_steps(batch, output)]
    state = drafter.new_state(1, 40)
    extend_in_chunks(drafter, state, ids[:14], output, chunk=4)
    for k, drafted in enumerate(draft_chain(drafter, state, ids[13], ids[14 : 14 + K - 1])):
        torch.testing.assert_close(drafted, trained[k][12], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_drafting_equals_the_equations(flags):
    """Past the depth that was trained, too."""
    target, _, drafter = make(**flags)
    ids = torch.randint(3, V, (9,)).tolist()
    output = features_of(target, drafter, torch.tensor([ids]))
    state = drafter.new_state(1, 32)
    extend_in_chunks(drafter, state, ids, output, chunk=3)
    path = torch.randint(3, V, (8,)).tolist()
    taps = [output.taps[k][0] for k in drafter.taps(drafter.config, target.info)]
    want = PlainEagle3(drafter, target).draft(ids, taps, path)
    for got, logits in zip(draft_chain(drafter, state, ids[-1], path), want, strict=True):
        torch.testing.assert_close(got, logits, rtol=1e-9, atol=1e-9)


def random_levels(generator, batch: int, widths: list[int]):
    """Frontiers of a random tree: per depth tokens, parent inside the previous frontier, and paths."""
    levels, paths = [], [[()] for _ in range(batch)]
    for width in widths:
        tokens = torch.randint(3, V, (batch, width), generator=generator).tolist()
        parents = torch.randint(0, len(paths[0]), (batch, width), generator=generator).tolist()
        paths = [
            [(*paths[b][parents[b][f]], (len(levels), f, tokens[b][f])) for f in range(width)] for b in range(batch)
        ]
        levels.append((tokens, parents, paths))
    return levels


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("flags", FLAGS[:3], ids=str)
def test_every_path_of_a_tree_equals_the_path_alone(flags, dtype, tolerance):
    """Uneven rows in one batch; the tree is grown depth by depth, the path in a state of its own."""
    target, _, drafter = make(dtype, **flags)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, V, (n,), generator=generator).tolist() for n in (2, 7, 12)]
    width = max(map(len, sequences)) - 1
    padded = torch.tensor([s[:-1] + [0] * (width + 1 - len(s)) for s in sequences])
    output = features_of(target, drafter, padded)
    state = drafter.new_state(3, 64)
    roots = torch.tensor([s[-1] for s in sequences])
    counts = torch.tensor([len(s) - 1 for s in sequences])
    drafter.extend(state, padded, roots, output, counts, longest=width)
    for attempt in range(2):  # the second round must find no trace of the first
        levels = random_levels(generator, 3, [3, 4, 2, 3])
        state.cache.kv[:, :, 0, :, 1:] = 1e6 if attempt else 0  # behind row 0's only committed entry
        grown = [drafter.step(state, frontier(roots[:, None].tolist(), 0, [[0]] * 3, [[[True]]] * 3))]
        fed = [[()] for _ in range(3)]
        for depth, (tokens, parents, paths) in enumerate(levels, start=1):
            for b in range(3):
                fed[b] += paths[b]
            seen = [
                [
                    [q == path[: len(q)] for q in fed[b][: len(fed[b]) - len(paths[b])]]
                    + [g == f for g in range(len(paths[b]))]
                    for f, path in enumerate(paths[b])
                ]
                for b in range(3)
            ]
            grown.append(drafter.step(state, frontier(tokens, depth, parents, seen)))
        drafter.rollback(state)
        for b, sequence in enumerate(sequences):
            alone = drafter.new_state(1, 40)
            row = features_of(target, drafter, torch.tensor([sequence[:-1]]))
            extend_in_chunks(drafter, alone, sequence, row, chunk=5)
            for depth, (_, _, paths) in enumerate(levels, start=1):
                for f, path in enumerate(paths[b]):
                    chain = draft_chain(drafter, alone, sequence[-1], [token for _, _, token in path])
                    torch.testing.assert_close(grown[depth][b, f], chain[-1], rtol=tolerance, atol=tolerance)
                    torch.testing.assert_close(grown[0][b, 0], chain[0], rtol=tolerance, atol=tolerance)


def test_accepted_tokens_are_fed_with_true_features():
    """After rounds of drafting and accepting, the state equals one built from scratch with the true features.

    Keeping the drafted (approximate) entries instead would be lossless still, and slowly lose acceptance.
    """
    target, _, drafter = make()
    ids = torch.randint(3, V, (24,)).tolist()
    output = features_of(target, drafter, torch.tensor([ids]))
    state = drafter.new_state(1, 64)
    extend_in_chunks(drafter, state, ids[:5], output, chunk=4)
    at = 4
    for n in (1, 3, 2, 1, 5):
        draft_chain(drafter, state, ids[at], torch.randint(3, V, (4,)).tolist())
        # Accepted: the root and n - 1 drafted tokens, padded as the loop pads them.
        padded = torch.tensor([ids[at : at + n] + [ids[at]] * 3])
        index = torch.tensor([*range(at, at + n), at, at, at])
        drafter.extend(
            state,
            padded,
            torch.tensor([ids[at + n]]),
            slice_of(output, (slice(None), index)),
            torch.tensor([n]),
            longest=at + n,
        )
        at += n
        fresh = drafter.new_state(1, 64)
        extend_in_chunks(drafter, fresh, ids[: at + 1], output, chunk=50)
        assert state.cache.lengths_B.tolist() == fresh.cache.lengths_B.tolist() == [at]
        torch.testing.assert_close(
            state.cache.kv[:, :, :, :, :at], fresh.cache.kv[:, :, :, :, :at], rtol=1e-10, atol=1e-12
        )
        torch.testing.assert_close(state.last_B1D, fresh.last_B1D, rtol=1e-10, atol=1e-12)


def test_rows_that_take_nothing_stay_as_they_are():
    target, _, drafter = make()
    ids = torch.randint(3, V, (2, 8))
    output = features_of(target, drafter, ids)
    state = drafter.new_state(2, 32)
    drafter.extend(state, ids, torch.tensor([5, 6]), output, torch.tensor([8, 3]), longest=8)
    before = state.last_B1D.clone(), state.cache.kv[:, :, 1, :, :3].clone()
    drafter.extend(
        state,
        ids[:, :4],
        torch.tensor([5, 6]),
        slice_of(output, (slice(None), slice(0, 4))),
        torch.tensor([4, 0]),
        longest=12,
    )
    assert state.cache.lengths_B.tolist() == [12, 3]
    assert torch.equal(state.last_B1D[1], before[0][1])
    assert not torch.equal(state.last_B1D[0], before[0][0])
    assert torch.equal(state.cache.kv[:, :, 1, :, :3], before[1])


# -- what belongs to the drafter


def test_the_target_stays_bit_identical_and_outside():
    target, vocab, drafter = make()
    drafter.requires_grad_(True)
    before = {name: x.clone() for name, x in target.model.state_dict().items()}
    start = {name: x.clone() for name, x in drafter.state_dict().items()}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    batch = pack(random_documents(2, 14, V, seed=1), 14)
    mask = packed_mask(batch.doc_BL, batch.positions_BL)
    output = target.forward(
        batch.ids_BL, positions_BL=batch.positions_BL, mask=mask, taps=drafter.taps(drafter.config, target.info)
    )
    for _ in range(3):
        optimizer.zero_grad()
        predictions = drafter.training_steps(batch, output)
        total(predictions, batch, output, target=target, vocab=vocab, config=LossConfig()).loss.backward()
        optimizer.step()
    assert all(torch.equal(x, before[name]) for name, x in target.model.state_dict().items())
    moved = {name for name, x in drafter.state_dict().items() if not torch.equal(x, start[name])}
    assert moved == {name for name, _ in drafter.named_parameters()}, "every weight trains, no buffer does"
    assert drafter.target is target
    drafter.train()
    assert not target.model.training


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}, {"taps": [1, 4], "fc_norm": True, "intermediate_size": 50}])
def test_state_dict_holds_the_drafter_alone(flags):
    target, _, drafter = make(**flags)
    layer = "layers.0."
    names = {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        *(f"{layer}{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        *(f"{layer}self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"{layer}mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
        *(f"fc_norm.{i}.weight" for i in range(len(flags.get("taps", [0] * 3))) if flags.get("fc_norm")),
        "vocab.d2t",
        "vocab.t2d",
    }
    assert set(drafter.state_dict()) == names
    info = target.info
    d, n_taps, inner = info.hidden_size, len(drafter.taps(drafter.config, info)), flags.get("intermediate_size", 32)
    q, kv = info.n_heads * info.head_dim, info.n_kv_heads * info.head_dim
    formula = n_taps * d * d + 2 * d * (q + 2 * kv) + q * d + 3 * d * inner + 4 * d + W * d
    formula += n_taps * d if flags.get("fc_norm") else 0
    assert sum(p.numel() for p in drafter.parameters()) == formula


def test_state_dict_round_trip():
    target, vocab, drafter = make(fc_norm=True)
    torch.manual_seed(50)
    other_vocab, _ = choose_vocab(torch.rand(V), W)
    other = Eagle3(drafter.config, target, other_vocab).double()
    buffer = io.BytesIO()
    torch.save(drafter.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other.vocab.target_ids, vocab.target_ids)
    batch = pack(random_documents(2, 14, V, seed=1), 14)
    output = features_of(target, drafter, batch.ids_BL)
    for one, two in zip(drafter.training_steps(batch, output), other.training_steps(batch, output), strict=True):
        assert torch.equal(one.head(one.hidden_BLD), two.head(two.hidden_BLD))


def test_draft_head_starts_from_the_targets_rows():
    target, vocab, drafter = make()
    rows = target.model.get_output_embeddings().weight[vocab.target_ids]
    assert torch.equal(drafter.lm_head.weight, rows)
    assert drafter.lm_head.weight.data_ptr() != target.model.get_output_embeddings().weight.data_ptr()
    _, _, random = make(head_init="random")
    assert not torch.equal(random.lm_head.weight, rows)


def test_drafter_ids_are_mapped():
    _, vocab, drafter = make()
    ids = torch.arange(W).view(1, W)
    assert drafter.to_target_ids(ids)[0].tolist() == vocab.target_ids.tolist()


def test_drafter_of_another_precision_than_the_target():
    """fp32 drafter over a bf16 target: everything is computed in the drafter's precision."""
    target = tiny_target("llama", seed=4, vocab_size=V, hidden=16, layers=6, dtype=torch.bfloat16)
    vocab, _ = choose_vocab(torch.rand(V), W)
    drafter = Eagle3(Eagle3Config(draft_vocab_size=W, ttt_steps=2), target, vocab)
    batch = pack(random_documents(2, 14, V, seed=1), 14)
    output = features_of(target, drafter, batch.ids_BL)
    for prediction in drafter.training_steps(batch, output):
        assert prediction.hidden_BLD.dtype == torch.float32


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}


@pytest.mark.parametrize("rope", [None, LLAMA3, YARN, LINEAR], ids=["default", "llama3", "yarn", "linear"])
def test_rotary_positions_are_the_targets(rope):
    """Scaling types included: a drafter with other angles than its target loses acceptance over long texts."""
    extra = {} if rope is None else {"rope_parameters": rope}
    target = tiny_target("llama", vocab_size=V, hidden=16, layers=4, **extra)
    vocab, _ = choose_vocab(torch.rand(V), W)
    drafter = Eagle3(Eagle3Config(draft_vocab_size=W), target, vocab)
    positions = torch.tensor([[0, 1, 5, 63, 64, 300, 2000]])
    want = target.model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
    got = drafter.rotary(positions, torch.float32)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours[:, 0], theirs)
    if rope is not None:
        default = tiny_target("llama", vocab_size=V, hidden=16, layers=4)
        plain = default.model.model.rotary_emb(torch.zeros(1), positions)
        assert not torch.equal(plain[0], want[0])


# -- bad configs


@pytest.mark.parametrize("taps", [[2, 2, 3], [3, 2, 1], [0, 7], [-1, 2], []])
def test_impossible_taps(taps):
    with pytest.raises(UserError, match="drafter.taps must be ascending, distinct and between 0 and 6"):
        Eagle3.taps(Eagle3Config(taps=taps), SimpleNamespace(n_layers=6))


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"ttt_steps": 0}, "ttt_steps must be >= 1"),
        ({"step_decay": 0.0}, "step_decay must be in"),
        ({"step_decay": 1.5}, "step_decay must be in"),
        ({"head_init": "zeros"}, "head_init must be target or random"),
    ],
)
def test_impossible_configs(bad, message):
    with pytest.raises(UserError, match=message):
        Eagle3Config(**bad)
