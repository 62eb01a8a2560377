"""Medusa heads against the published equations written out, and their training loss against full logits."""

import pytest
import torch
import torch.nn.functional as F
from drafter_tools import CHANGES, V, W, case_id, draft_chain, extend_in_chunks, features, make, target_of
from oracles import pack, random_documents, random_prompts, stepped

from distill.decode import Decoder
from distill.drafters.medusa import Medusa, MedusaConfig
from distill.errors import UserError
from distill.export import load_drafter, save_drafter
from distill.graphs import Graphs
from distill.losses import LossConfig, total
from distill.sampling import Sampling
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic, Static
from distill.vocab import choose_vocab

CASES = [("medusa", change) for change in ({}, *CHANGES["medusa"])]
LENGTH = 20


def plain_hidden(drafter, i, feature):
    """Head i on one feature [D]: x <- x + SiLU(W x + b) for every block."""
    weights = dict(drafter.named_parameters())
    x = feature
    for block in range(drafter.config.blocks):
        prefix = f"heads.{i}.{block}.linear."
        z = weights[prefix + "weight"] @ x + weights[prefix + "bias"]
        x = x + z * torch.sigmoid(z)
    return x


def plain_logits(drafter, i, feature):
    """Head i's logits over the draft vocabulary, Gemma's soft-capping included."""
    x = plain_hidden(drafter, i, feature)
    if drafter.config.head == "shared":
        weight = drafter.target.model.get_output_embeddings().weight
    else:
        names = [name for name, _ in drafter.named_parameters() if name.startswith("lm_heads.")]
        weight = dict(drafter.named_parameters())[names[0 if drafter.config.head == "pruned" else i]]
    cap = getattr(drafter.target.config_hf, "final_logit_softcapping", None)
    logits = weight @ x
    return logits if cap is None else torch.tanh(logits / cap) * cap


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_forward_equals_the_equations(case, family):
    name, options = case
    drafter = make(name, target=target_of(family), **options)
    batch = pack(random_documents(2, LENGTH, V, seed=1), LENGTH)
    output = drafter.target.forward(batch.ids_BL, positions_BL=batch.positions_BL, doc_BL=batch.doc_BL)
    predictions = drafter.training_steps(batch, output)
    assert [p.shift for p in predictions] == [2 + i for i in range(drafter.config.heads)]
    assert [p.weight for p in predictions] == [0.8**i for i in range(drafter.config.heads)]
    for i, prediction in enumerate(predictions):
        logits = prediction.head(prediction.hidden_BLD)
        for b, t in ((0, 0), (0, 7), (1, 3)):
            wanted = plain_logits(drafter, i, output.last_BLD[b, t])
            torch.testing.assert_close(logits[b, t], wanted, rtol=1e-9, atol=1e-9)


def test_masks_are_those_of_places_where_a_draft_can_start():
    """Head i counts at t where t+1 .. t+2+i were all written, in one document: read off one by one."""
    drafter = make("medusa", target=target_of())
    rows = random_documents(3, LENGTH, V, seed=5, share=0.8)
    batch = pack(rows, LENGTH)
    output = drafter.target.forward(batch.ids_BL, positions_BL=batch.positions_BL, doc_BL=batch.doc_BL)
    for i, prediction in enumerate(drafter.training_steps(batch, output)):
        for b, row in enumerate(rows):
            wanted = []
            for _, written in row:
                n = len(written)
                wanted += [t + 2 + i < n and all(written[t + 1 : t + 3 + i]) for t in range(n)]
            assert prediction.mask_BL[b].tolist() == wanted + [False] * (LENGTH - len(wanted))
        assert prediction.mask_BL.any()


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
@pytest.mark.parametrize("head", ["shared", "own", "pruned"])
def test_every_head_starts_as_the_targets_own(head, family):
    """Bit for bit where the shapes are the same, soft-capping included; pruned: of the tokens that are kept."""
    target = tiny_target(family, seed=4, vocab_size=V, hidden=16, layers=3)
    vocab = choose_vocab(torch.rand(V), W)[0] if head == "pruned" else None
    config = MedusaConfig(head=head, blocks=2, draft_vocab_size=W if vocab else None)
    drafter = Medusa(config, target, vocab).eval()
    ids = torch.randint(3, V, (1, 9), generator=torch.Generator().manual_seed(0))
    output, batch = features(drafter, ids), pack([[(ids[0].tolist(), [1] * 9)]], 9)
    kept = torch.arange(V) if vocab is None else vocab.target_ids
    with torch.enable_grad():  # as in training, and as transformers multiplies
        own = target.model(input_ids=ids).logits[..., kept]
        predictions = drafter.training_steps(batch, output)
        for prediction in predictions:
            assert torch.equal(prediction.hidden_BLD, output.last_BLD)
            said = prediction.head(prediction.hidden_BLD)
            assert torch.equal(said, own) if vocab is None else torch.allclose(said, own, rtol=1e-6, atol=1e-6)
    assert len(predictions) == 4
    state = drafter.new_state(1, 16)
    extend_in_chunks(drafter, state, ids[0].tolist(), output, chunk=3)
    for logits in draft_chain(drafter, state, [int(ids[0, -1]), 5, 6, 7]):
        torch.testing.assert_close(logits, own[0, -2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["ce", "hard"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_loss_and_gradients_equal_full_logits(case, loss):
    """The whole total, from the target's own logits and the equations, position by position, by autograd."""
    name, options = case
    drafter = make(name, target=target_of(), **options).train()
    batch = pack(random_documents(2, LENGTH, V, seed=2, share=0.8), LENGTH)
    output = drafter.target.forward(batch.ids_BL, positions_BL=batch.positions_BL, doc_BL=batch.doc_BL)
    parameters = dict(drafter.named_parameters())
    got = total(
        drafter.training_steps(batch, output),
        batch,
        output,
        target=drafter.target,
        vocab=drafter.vocab,
        config=LossConfig(name=loss, chunk=5),
    )
    grads = torch.autograd.grad(got.loss, list(parameters.values()))

    kept = torch.arange(V) if drafter.vocab is None else drafter.vocab.target_ids
    teacher = drafter.target.model.get_output_embeddings()(output.last_BLD)
    wanted, weights = 0, [0.8**i for i in range(drafter.config.heads)]
    for i, weight in enumerate(weights):
        for b, t in _starts(batch, i):
            row, said = teacher[b, t + 1 + i], plain_logits(drafter, i, output.last_BLD[b, t]).log_softmax(-1)
            if loss == "hard":
                hit = (kept == batch.ids_BL[b, t + 2 + i]).nonzero()
                wanted = wanted - weight * (said[hit].sum() if len(hit) else 0)
            elif int(row.argmax()) in kept.tolist():
                wanted = wanted - weight * (row[kept].softmax(-1) * said).sum()
    wanted = wanted / (sum(weights) * batch.denominator)
    torch.testing.assert_close(got.loss, wanted, rtol=1e-9, atol=0)
    for key, one, other in zip(parameters, grads, torch.autograd.grad(wanted, list(parameters.values())), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}")
        assert float(one.abs().max()) > 0


def _starts(batch, i):
    """Positions where head i counts, by looking at every token between."""
    written, doc = batch.loss_mask_BL, batch.doc_BL
    for b in range(len(written)):
        for t in range(written.shape[1] - 2 - i):
            run = range(t + 1, t + 3 + i)
            if int(doc[b, t]) >= 0 and all(bool(written[b, j]) and int(doc[b, j]) == int(doc[b, t]) for j in run):
                yield b, t


def test_prompt_tokens_cost_nothing_and_idle_rows_keep_what_they_had():
    """``extend`` keeps one hidden state per row, whatever it is given."""
    drafter = make("medusa", target=target_of())
    ids = torch.randint(3, V, (2, 6), generator=torch.Generator().manual_seed(2))
    output = features(drafter, ids)
    state = drafter.new_state(2, 16)
    drafter.extend(state, ids, ids[:, 0], output, torch.tensor([6, 2]), longest=6)
    assert torch.equal(state.last_B1D[:, 0], torch.stack([output.last_BLD[0, 5], output.last_BLD[1, 1]]))
    drafter.extend(state, ids, ids[:, 0], output, torch.tensor([0, 4]), longest=6)
    assert torch.equal(state.last_B1D[:, 0], torch.stack([output.last_BLD[0, 5], output.last_BLD[1, 3]]))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=2)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("plan", [Chain(3), Dynamic(top_k=3, depth=3, total=8)], ids=["chain", "dynamic"])
@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_proposals_without_a_cache_are_recorded(name, plan, sampling):
    """With a stand-in for CUDA graphs (``test_graphs.py``): recordings read their state from their own buffers."""
    from test_graphs import stand_in

    target = tiny_target("mistral", seed=3, vocab_size=V, hidden=16, layers=2, dtype=torch.float64)
    decoder = Decoder(target, make(name, target=target), plan=plan, sampling=sampling, engine="fast")
    decoder.drafting.graphs = Graphs(stand_in, patience=1)
    prompts = random_prompts(3, V, seed=6)
    for _ in range(2):
        found = decoder.generate(prompts, max_new_tokens=20, ignore_eos=True)
        assert [g.ids for g in found] == stepped(target, prompts, 20, sampling, stop=())
    assert decoder.drafting.graphs.recordings >= 1


def test_a_tree_deeper_than_the_heads_is_refused():
    drafter = make("medusa", target=target_of())
    for plan in (Chain(5), Static(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)))):
        with pytest.raises(UserError, match=r"medusa can propose at most 4|at most 4"):
            Decoder(drafter.target, drafter, plan=plan)


@pytest.mark.parametrize("other, what", [({"layers": 5}, "n_layers 6"), ({"hidden": 32}, "hidden_size 16")])
def test_heads_of_another_target_are_refused(other, what, tmp_path):
    drafter = make("medusa", target=target_of())
    save_drafter(drafter, tmp_path / "export", provenance={})
    sizes = {"seed": 4, "vocab_size": V, "hidden": 16, "layers": 6, "dtype": torch.float64, **other}
    with pytest.raises(UserError, match=rf"was trained for tiny-llama \({what}\)"):
        load_drafter(tmp_path / "export", tiny_target("llama", **sizes))


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"heads": 0}, "drafter.heads must be >= 1, got 0"),
        ({"blocks": 0}, "drafter.blocks must be >= 1, got 0"),
        ({"head": "shard"}, r"drafter.head must be one of shared, own, pruned, got 'shard'. Did you mean 'shared'\?"),
        ({"head": "pruned"}, "drafter.draft_vocab_size must be given with drafter.head=pruned"),
        ({"draft_vocab_size": 5}, "drafter.draft_vocab_size must be given with drafter.head=pruned and only then"),
        ({"decay": 0.0}, r"drafter.decay must be in \(0, 1\], got 0.0"),
        ({"lora_rank": -1}, "drafter.lora_rank must lie between 0 and 4096, got -1"),
        ({"adapter_warmup": 1.5}, r"drafter.adapter_warmup must lie in \[0, 1\], got 1.5"),
        ({"lora_rank": 2, "base_weight": float("inf")}, "drafter.base_weight must be above 0 and finite, got inf"),
        ({"adapter_lr": 0.5}, r"drafter.adapter_lr must be 0.25 without an adapter.* got 0.5; give drafter.lora_rank"),
        ({"lora_rank": 2, "head": "pruned", "draft_vocab_size": 5}, "drafter.head must be shared or own with"),
    ],
)
def test_options_that_fit_nothing_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        MedusaConfig(**options)


def test_heads_of_silu_are_those_of_torch():
    """The plain implementation's own activation, so that an error there would not go unseen."""
    z = torch.linspace(-4, 4, 9, dtype=torch.float64)
    torch.testing.assert_close(z * torch.sigmoid(z), F.silu(z), rtol=1e-12, atol=1e-12)
