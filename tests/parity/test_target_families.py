"""The target against the model's own forward, for every family, on texts longer than the sliding windows."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distill.attention import AttentionMask, packed_mask, tree_mask
from distill.target.check import verify
from distill.target.model import Target
from distill.target.tiny import FAMILIES, tiny_target

LENGTH = 24  # three windows of the tiny targets
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
WINDOWED = [family for family, extra in FAMILIES.items() if "sliding_window" in extra]

families = pytest.mark.parametrize("family", FAMILIES)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def random_ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(1))


def own(target: Target, ids_BL: torch.Tensor):
    """The model's own forward; it builds its masks and positions itself."""
    with torch.no_grad():
        return target.model(input_ids=ids_BL, output_hidden_states=True, use_cache=False)


def agree(ours: torch.Tensor, theirs: torch.Tensor, *, family: str = "") -> None:
    # Eager attention (Gemma-2) takes its softmax in fp32 whatever the dtype, and sums over other lengths here.
    tolerance = 1e-5 if family == "gemma2" else TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@families
@dtypes
def test_logits_and_taps_are_the_models_own(family, dtype):
    target = tiny_target(family, dtype=dtype)
    ids_BL = random_ids(2, LENGTH)
    reference = own(target, ids_BL)
    output = target.forward(ids_BL, taps=range(target.info.tap_out + 1))
    agree(target.logits(output.last_BLD), reference.logits)
    for layer in range(target.info.n_layers):
        agree(output.taps[layer], reference.hidden_states[layer])
    agree(target.model.get_decoder().norm(output.taps[target.info.tap_out]), output.last_BLD)
    agree(target.embed(ids_BL), reference.hidden_states[0])


@families
def test_only_the_requested_taps_are_kept(family):
    target = tiny_target(family)
    assert list(target.forward(random_ids(1, 5), taps=(2, 0)).taps) == [2, 0]
    assert target.forward(random_ids(1, 5)).taps == {}


@families
def test_start_up_check_passes(family):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        verify(tiny_target(family, dtype=dtype))


@pytest.mark.parametrize("family", WINDOWED)
def test_window_matters_beyond_its_length(family):
    target = tiny_target(family)
    ids_BL = random_ids(1, LENGTH)
    positions_BL = torch.arange(LENGTH)[None]
    mask = packed_mask(torch.zeros_like(ids_BL), positions_BL, window=target.info.sliding_window)
    unlimited = AttentionMask(full_B1QT=mask.full_B1QT, sliding_B1QT=mask.full_B1QT)
    right = target.forward(ids_BL, mask=mask).last_BLD
    wrong = target.forward(ids_BL, mask=unlimited).last_BLD
    window = target.info.sliding_window
    agree(wrong[:, :window], right[:, :window])
    assert ((wrong - right)[:, window:].abs().amax(-1) > 1e-3).all()


def test_window_counts_positions_not_slots():
    # Two packed documents: the second starts a new count, so its last token still sees its first one only
    # within the window, and never the other document.
    target = tiny_target("mistral")
    first, second = random_ids(2, 12)
    ids_1L = torch.cat([first, second])[None]
    doc_1L = torch.tensor([[0] * 12 + [1] * 12])
    positions_1L = torch.cat([torch.arange(12), torch.arange(12)])[None]
    mask = packed_mask(doc_1L, positions_1L, window=target.info.sliding_window)
    packed = target.forward(ids_1L, positions_BL=positions_1L, mask=mask).last_BLD[0]
    for part, alone in ((packed[:12], first), (packed[12:], second)):
        agree(part, target.forward(alone[None]).last_BLD[0])


def test_both_soft_caps_are_honoured():
    target = tiny_target("gemma2")
    ids_BL = random_ids(2, LENGTH)
    reference = own(target, ids_BL).logits
    output = target.forward(ids_BL)
    cap = target.config_hf.final_logit_softcapping
    agree(target.logits(output.last_BLD), reference)
    # The caps bite here, so that dropping either shows above.
    bare = target.model.get_output_embeddings()(output.last_BLD)
    assert (bare - reference).abs().max() > 0.5
    assert bare.abs().max() > cap > reference.abs().max()
    uncapped = tiny_target("gemma2", attn_logit_softcapping=None)
    assert (uncapped.forward(ids_BL).last_BLD - output.last_BLD).abs().max() > 0.1


@pytest.mark.parametrize(
    "family, fields",
    [
        ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("cohere2", {"logit_scale": 0.25, "sliding_window": 8}),
    ],
)
def test_logit_and_embedding_scales_outside_the_modules(family, fields):
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.3, **fields,
    )  # fmt: skip
    target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), name=family)
    ids_BL = random_ids(2, LENGTH)
    reference = own(target, ids_BL)
    output = target.forward(ids_BL, taps=(0,))
    agree(target.logits(output.last_BLD), reference.logits)
    agree(target.embed(ids_BL), reference.hidden_states[0])
    agree(output.taps[0], reference.hidden_states[0])


# Node 0 hangs on the prefix, the others on their parent: two levels of siblings.
PARENTS = [0, 0, 0, 1, 1, 2, 3]


def path_to(node: int) -> list[int]:
    return [0] if node == 0 else [*path_to(PARENTS[node]), node]


@families
def test_tree_forward_equals_a_forward_along_each_path(family):
    target = tiny_target(family, dtype=torch.float64)
    prefix, n = 12, len(PARENTS)
    ids_1L = random_ids(1, prefix + n)
    rows = [[*range(prefix), *(prefix + node for node in path_to(node))] for node in range(n)]
    positions = [*range(prefix), *(prefix + len(path_to(node)) - 1 for node in range(n))]
    allowed = torch.zeros(prefix + n, prefix + n, dtype=torch.bool)
    near = torch.zeros_like(allowed)
    window = target.info.sliding_window or 10**6
    for query in range(prefix + n):
        for key in rows[query - prefix] if query >= prefix else range(query + 1):
            allowed[query, key] = True
            near[query, key] = positions[key] > positions[query] - window
    mask = AttentionMask(full_B1QT=allowed[None, None], sliding_B1QT=near[None, None])
    in_tree = target.forward(ids_1L, positions_BL=torch.tensor([positions]), mask=mask, taps=(2,))
    for node, row in enumerate(rows):
        alone = target.forward(ids_1L[:, row], taps=(2,))
        agree(in_tree.last_BLD[:, prefix + node], alone.last_BLD[:, -1], family=family)
        agree(in_tree.taps[2][:, prefix + node], alone.taps[2][:, -1], family=family)


@families
def test_cached_chunks_equal_one_forward(family):
    target = tiny_target(family, dtype=torch.float64)
    ids_BL = random_ids(2, LENGTH)
    whole = target.forward(ids_BL)
    cache = target.new_cache(2, LENGTH)
    chunks = []
    for start, stop in ((0, 11), (11, 12), (12, LENGTH)):
        n = stop - start
        view = cache.begin(n)
        mask = tree_mask(
            lengths_B=cache.lengths_B,
            ancestors_BNM=torch.ones(n, n, dtype=torch.bool).tril().expand(2, n, n),
            depths_BM=torch.arange(n).expand(2, n),
            view=view,
            window=target.info.sliding_window,
        )
        positions_BL = torch.arange(start, stop).expand(2, n)
        output = target.forward(ids_BL[:, start:stop], positions_BL=positions_BL, mask=mask, cache=cache)
        cache.advance(torch.tensor([n, n]), longest=stop)
        chunks.append(output.last_BLD)
    agree(torch.cat(chunks, dim=1), whole.last_BLD, family=family)


@families
def test_padding_behind_a_row_changes_nothing(family):
    target = tiny_target(family, dtype=torch.float64)
    lengths = (5, 17, LENGTH)
    ids_BL = random_ids(3, LENGTH)
    doc_BL = torch.zeros_like(ids_BL)
    for row, length in enumerate(lengths):
        ids_BL[row, length:] = 0
        doc_BL[row, length:] = -1
    positions_BL = torch.arange(LENGTH).expand(3, LENGTH)
    mask = packed_mask(doc_BL, positions_BL, window=target.info.sliding_window)
    together = target.forward(ids_BL, positions_BL=positions_BL, mask=mask, taps=(1, 4))
    assert together.last_BLD.isfinite().all()
    for row, length in enumerate(lengths):
        alone = target.forward(ids_BL[row : row + 1, :length], taps=(1, 4))
        agree(together.last_BLD[row, :length], alone.last_BLD[0], family=family)
        for tap in (1, 4):
            agree(together.taps[tap][row, :length], alone.taps[tap][0], family=family)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_attention_implementations_give_the_same(attention):
    ids_BL = random_ids(2, LENGTH)
    target = tiny_target("qwen2", dtype=torch.float64, attention=attention)
    assert target.config_hf._attn_implementation == attention
    # Eager attention computes its softmax in fp32, hence the looser bound.
    reference = tiny_target("qwen2", dtype=torch.float64).forward(ids_BL).last_BLD
    torch.testing.assert_close(target.forward(ids_BL).last_BLD, reference, rtol=1e-5, atol=1e-5)
