"""Medusa-2: an adapter that the drafter owns, a target that keeps every bit, and a merged one that decodes."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from drafter_tools import V, draft_chain, extend_in_chunks, make, target_of
from oracles import pack, random_documents, random_prompts, stepped

from distill.decode import Decoder
from distill.drafters.medusa import Medusa, MedusaConfig
from distill.errors import UserError
from distill.export import load_drafter, save_drafter
from distill.losses import LossConfig, total
from distill.sampling import Sampling
from distill.target.adapter import require_peft
from distill.target.tiny import tiny_target
from distill.train.config import TrainConfig
from distill.train.module import step_loss
from distill.train.schedule import OptimConfig, build_optimizer
from distill.tree import Chain, Dynamic, Static

pytest.importorskip("peft")
LENGTH, RANK, ALPHA = 20, 3, 6
OPTIONS = {"lora_rank": RANK, "lora_alpha": ALPHA}


def batch_of(seed=2):
    return pack(random_documents(2, LENGTH, V, seed=seed, share=0.8), LENGTH)


def original(target, batch):
    return target.forward(batch.ids_BL, positions_BL=batch.positions_BL, doc_BL=batch.doc_BL)


def changed_by_hand(drafter):
    """The plain model with s B A added to every projection of its layers, computed here from the named parameters."""
    target = drafter.target
    model = type(target.model)(target.model.config)
    model.load_state_dict(target.model.state_dict())
    model = model.to(target.dtype).eval()
    weights = dict(drafter.adapter.named_parameters())
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in n]
    assert linears == drafter.adapter.names
    for i, name in enumerate(linears):
        delta = ALPHA / RANK * weights[f"pairs.{i}.B.weight"] @ weights[f"pairs.{i}.A.weight"]
        model.get_submodule(name).weight.data += delta.detach()
    return model


def by_hand(model, batch):
    """Last hidden states of every document alone."""
    found = torch.zeros(*batch.ids_BL.shape, model.config.hidden_size, dtype=torch.float64)
    for b in range(len(batch.ids_BL)):
        for d in range(int(batch.doc_BL[b].max()) + 1):
            at = batch.doc_BL[b] == d
            found[b, at] = model.model(input_ids=batch.ids_BL[b, at][None], use_cache=False).last_hidden_state[0]
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
@torch.no_grad()
def test_adapter_on_equals_weights_changed_by_hand(family):
    drafter = make("medusa", target=target_of(family), **OPTIONS)
    batch, target = batch_of(), drafter.target
    inside = batch.doc_BL >= 0
    before = original(target, batch).last_BLD[inside]
    wanted = by_hand(changed_by_hand(drafter), batch)[inside]
    merged = drafter.decoding().target
    torch.testing.assert_close(drafter.adapter(batch)[inside], wanted, rtol=1e-6, atol=1e-6)  # norms round to fp32
    torch.testing.assert_close(original(merged, batch).last_BLD[inside], wanted, rtol=1e-6, atol=1e-6)
    assert float((wanted - before).abs().max()) > 0.1
    assert torch.equal(original(target, batch).last_BLD[inside], before), "the target itself has changed"


def test_adapter_starts_as_nothing_and_its_digest_counts_every_bit():
    target = target_of()
    drafter = Medusa(MedusaConfig(**OPTIONS), target).double()
    batch = batch_of()
    inside = batch.doc_BL >= 0
    assert torch.equal(drafter.adapter(batch)[inside], original(target, batch).last_BLD[inside])
    info = target.info
    sizes = {"q": info.n_heads, "k": info.n_kv_heads, "v": info.n_kv_heads}
    ends = sum(info.hidden_size + n * info.head_dim for n in sizes.values()) + info.n_heads * info.head_dim
    ends += info.hidden_size + 3 * (info.hidden_size + info.intermediate_size)
    assert sum(p.numel() for p in drafter.adapter.parameters()) == info.n_layers * RANK * ends
    first = drafter.adapter.digest()
    drafter.adapter.pairs[4].B.weight.data[0, 0] += 1e-15
    assert drafter.adapter.digest() != first
    assert Medusa(MedusaConfig(lora_rank=RANK, lora_alpha=5), target).adapter.digest() != first


@pytest.mark.parametrize("head", ["shared", "own"])
@pytest.mark.parametrize("loss", ["kl", "ce", "hard"])
def test_loss_and_gradients_equal_plain_autograd(loss, head):
    """Both terms, from a model whose weights are W + s B A by plain operations that autograd sees."""
    drafter = make("medusa", target=target_of(), head=head, heads=2, base_weight=1.5, heads_weight=0.3, **OPTIONS)
    drafter.train()
    drafter.on_step(3, 10)
    batch, parameters = batch_of(), dict(drafter.named_parameters())
    output = original(drafter.target, batch)
    got = step_loss(drafter, batch, LossConfig(name=loss, chunk=5))
    grads = torch.autograd.grad(got.loss, list(parameters.values()))

    target = drafter.target
    model = target.model
    changed = {
        f"{name}.weight": model.get_submodule(name).weight + ALPHA / RANK * pair.B.weight @ pair.A.weight
        for name, pair in zip(drafter.adapter.names, drafter.adapter.pairs, strict=True)
    }
    head_weight = model.get_output_embeddings().weight
    teacher = (output.last_BLD @ head_weight.T).log_softmax(-1)
    hidden = _functional(model, changed, batch)
    ramp = math.sin(math.pi / 2 * 4 / 10)
    weights = {1: 1.5, 2: 0.3 * ramp, 3: 0.3 * ramp * 0.8}
    wanted, own = 0, 0
    for shift, weight in weights.items():
        for b, t in _starts(batch, shift):
            g = hidden[b, t]
            if shift == 1:
                said = (head_weight @ g).log_softmax(-1)
            else:
                i = shift - 2
                z = parameters[f"heads.{i}.0.linear.weight"] @ g + parameters[f"heads.{i}.0.linear.bias"]
                rows = head_weight if head == "shared" else parameters[f"lm_heads.{i}.weight"]
                said = (rows @ (g + z * torch.sigmoid(z))).log_softmax(-1)
            p = teacher[b, t + shift - 1]
            one = {
                "kl": (p.exp() * (p - said)).sum(),
                "ce": -(p.exp() * said).sum(),
                "hard": -said[batch.ids_BL[b, t + shift]],
            }[loss]
            wanted = wanted + weight * one
            own = own + one.detach() if shift == 1 else own
    wanted = wanted / (sum(weights.values()) * batch.denominator)
    # The target's norms leave fp64: both sides round to fp32 there, in another order.
    torch.testing.assert_close(got.loss, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.terms["other_0"][0], own, rtol=1e-6, atol=0)
    assert len(got.loss_K) == 2, "the target's own term is no draft"
    for key, one, other in zip(parameters, grads, torch.autograd.grad(wanted, list(parameters.values())), strict=True):
        scale = float(other.abs().max())
        assert scale > 0, key
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * scale, msg=lambda text, key=key: f"{key}: {text}")


def _functional(model, changed, batch):
    rows = []
    for b in range(len(batch.ids_BL)):
        row = torch.zeros(LENGTH, model.config.hidden_size, dtype=torch.float64)
        for d in range(int(batch.doc_BL[b].max()) + 1):
            at = (batch.doc_BL[b] == d).nonzero()[:, 0]
            arguments = {"input_ids": batch.ids_BL[b, at][None], "use_cache": False}
            state = {key.removeprefix("model."): value for key, value in changed.items()}
            out = torch.func.functional_call(model.model, state, (), arguments).last_hidden_state[0]
            row = row.index_copy(0, at, out)
        rows.append(row)
    return torch.stack(rows)


def _starts(batch, shift):
    written, doc = batch.loss_mask_BL, batch.doc_BL
    for b in range(len(written)):
        for t in range(LENGTH - shift):
            run = range(t + 1, t + shift + 1)
            if int(doc[b, t]) >= 0 and all(bool(written[b, j]) and int(doc[b, j]) == int(doc[b, t]) for j in run):
                yield b, t


def test_stored_features_are_the_teachers():
    """Features from disk take the place of the frozen forward; the adapted one runs all the same."""
    drafter, batch = make("medusa", target=target_of(), **OPTIONS), batch_of()
    stored = replace(batch, features=original(drafter.target, batch))
    online, offline = (step_loss(drafter, b, LossConfig(name="kl")) for b in (batch, stored))
    assert torch.equal(online.loss, offline.loss)
    assert float(online.terms["other_0"][0]) > 0


def test_training_moves_adapter_and_heads_and_leaves_the_target_alone():
    target = target_of(dtype=torch.float32)
    drafter = make("medusa", target=target, **OPTIONS).train()
    frozen = {key: value.clone() for key, value in target.model.state_dict().items()}
    names = list(target.model.state_dict())
    before = {key: value.detach().clone() for key, value in drafter.named_parameters()}
    optimizer, schedule = build_optimizer(drafter, OptimConfig(lr=1e-2, warmup=0), max_steps=4)
    for step in range(4):
        drafter.on_step(step, 4)
        step_loss(drafter, batch_of(), LossConfig(name="kl")).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert {k for k, p in drafter.named_parameters() if torch.equal(p, before[k])} == set()
    assert list(target.model.state_dict()) == names
    assert all(torch.equal(target.model.state_dict()[key], value) for key, value in frozen.items())
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
    assert {key.split(".")[0] for key in drafter.state_dict()} == {"adapter", "heads"}


def test_the_term_alone_brings_the_adapted_target_back():
    """Only the adapter is trained, from a random change: KL to the original falls by far, so its sign is right."""
    drafter = make("medusa", target=target_of(), **OPTIONS).train()
    optimizer = torch.optim.Adam(drafter.adapter.parameters(), lr=3e-2)
    batch, found = batch_of(), []
    output = original(drafter.target, batch)
    for _ in range(12):
        predictions = [p for p in drafter.training_steps(batch, output) if not p.drafted]
        result = total(predictions, batch, output, target=drafter.target, vocab=None, config=LossConfig(name="kl"))
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        found.append(float(result.loss.detach()))
    assert found[0] > 0.3
    assert found[-1] < found[0] / 4


def test_groups_have_their_own_rate_and_warm_up():
    drafter = make("medusa", target=target_of(), adapter_lr=0.25, adapter_warmup=0.5, **OPTIONS)
    optimizer, schedule = build_optimizer(drafter, OptimConfig(lr=1.0, warmup=0, schedule="constant"), max_steps=8)
    sizes = [sum(p.numel() for p in g["params"]) for g in optimizer.param_groups]
    adapter = sum(p.numel() for p in drafter.adapter.parameters())
    assert sizes[-1] == adapter
    assert sum(sizes) == sum(p.numel() for p in drafter.parameters())
    seen = []
    for _ in range(6):
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[-1]["lr"]))
        optimizer.step()
        schedule.step()
    assert [head for head, _ in seen] == [1.0] * 6
    assert [round(rate, 6) for _, rate in seen] == [0.0625, 0.125, 0.1875, 0.25, 0.25, 0.25]


@torch.no_grad()
def test_teacher_forced_equals_drafted_with_merged_weights():
    """What the heads said in training on adapted features is what is drafted with the merged target."""
    drafter = make("medusa", target=target_of(), **OPTIONS)
    ids = torch.randint(3, V, (18,), generator=torch.Generator().manual_seed(3)).tolist()
    batch = pack([[(ids, [1] * 18)]], 18)
    said = [p for p in drafter.training_steps(batch, original(drafter.target, batch)) if p.drafted]
    decoding = drafter.decoding()
    output = original(decoding.target, batch)
    again = decoding.training_steps(batch, output)
    assert len(again) == len(said) == 4
    for i in (0, 4, 9):
        state = decoding.new_state(1, 26)
        extend_in_chunks(decoding, state, ids[: i + 2], output, chunk=2)
        for depth, drafted in enumerate(draft_chain(decoding, state, ids[i + 1 : i + 5])):
            # W x + s B A x and (W + s B A) x differ before a norm that rounds to fp32; the same weights do not.
            for p, tolerance in ((said[depth], 1e-6), (again[depth], 1e-9)):
                torch.testing.assert_close(drafted, p.head(p.hidden_BLD[0, i]), rtol=tolerance, atol=tolerance)
    other = [p for p in drafter.decoding().training_steps(batch, original(drafter.target, batch)) if p.drafted]
    assert float((other[0].hidden_BLD - said[0].hidden_BLD).abs().max()) > 0.1


def exported(path):
    """An export of a drafter whose adapter matters, and the target it was made for."""
    target = tiny_target("llama", seed=4, vocab_size=V, hidden=16, layers=3, dtype=torch.float64)
    drafter = make("medusa", target=target, **OPTIONS)
    return save_drafter(drafter, path / "export", provenance={}), drafter


def test_export_and_load(tmp_path):
    folder, drafter = exported(tmp_path)
    target = drafter.target
    loaded = load_drafter(folder, target)
    assert loaded.target is not target
    assert loaded.target.base == target.fingerprint
    assert loaded.target.fingerprint["weights"] not in ("none", target.fingerprint["weights"])
    assert loaded.target.fingerprint == load_drafter(folder, target).target.fingerprint
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    assert "Adapted target (Medusa-2)" in (folder / "README.md").read_text()
    # Written again, it is still a drafter for the original target.
    again = save_drafter(loaded, tmp_path / "again", provenance={})
    assert load_drafter(again, target).target.fingerprint == loaded.target.fingerprint
    # Another adapter is another model.
    drafter.adapter.pairs[0].B.weight.data += 0.1
    other = load_drafter(save_drafter(drafter, tmp_path / "other", provenance={}), target)
    assert other.target.fingerprint != loaded.target.fingerprint
    # The original target is checked first.
    with pytest.raises(UserError, match=r"was trained for tiny-llama \(weights"):
        load_drafter(folder, tiny_target("llama", seed=5, vocab_size=V, hidden=16, layers=3, dtype=torch.float64))
    with pytest.raises(UserError, match=r"must be loaded for a target as it was published, got tiny-llama, adapted"):
        load_drafter(folder, loaded.target)
    with pytest.raises(UserError, match="target must be the one medusa was trained with, adapted by it"):
        Decoder(target, loaded, plan=Chain(2))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=20, seed=3)], ids=["greedy", "T0.9"])
def test_lossless_relative_to_the_adapted_target(sampling, tmp_path):
    """Drafted, plain and fast decoding emit what the model changed by hand emits, not what the original does."""
    folder, drafter = exported(tmp_path)
    loaded = load_drafter(folder, drafter.target)
    prompts = random_prompts(5, V, seed=7, longest=20)
    changed = _Plain(changed_by_hand(drafter), drafter.target.info)
    wanted = stepped(changed, prompts, 14, sampling, stop=())
    assert wanted != stepped(drafter.target, prompts, 14, sampling, stop=())
    for engine in ("eager", "fast"):
        plain = Decoder(loaded.target, sampling=sampling, engine=engine)
        assert [g.ids for g in plain.generate(prompts, max_new_tokens=14, ignore_eos=True)] == wanted
        for plan in (Chain(4), Static(((0,), (1,), (0, 0), (1, 0), (0, 0, 0))), Dynamic(top_k=3, depth=3, total=9)):
            decoder = Decoder(loaded.target, loaded, plan=plan, sampling=sampling, engine=engine, prefill_chunk=7)
            assert [g.ids for g in decoder.generate(prompts, max_new_tokens=14, ignore_eos=True)] == wanted


class _Plain:
    """What the oracle asks of a target."""

    def __init__(self, model, info):
        self.model, self.info = model, info


def test_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setattr("distill.target.adapter.find_spec", lambda _: None)
    sentence = r"without the package peft, which is not installed; run pip install 'peft>=0\.21'$"
    with pytest.raises(UserError, match=sentence):
        TrainConfig(drafter={"name": "medusa", "lora_rank": 4}).trained_class()
    with pytest.raises(UserError, match=sentence):
        require_peft()
    TrainConfig(drafter={"name": "medusa"}).trained_class()


def test_decoding_needs_no_package(monkeypatch, tmp_path):
    folder, drafter = exported(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    assert load_drafter(folder, drafter.target).target.base is not None


def test_a_divided_target_is_refused():
    from distill.target import TargetConfig

    with pytest.raises(UserError, match="target.shard must be none with drafter.lora_rank"):
        TrainConfig(target=TargetConfig(shard="fsdp"), drafter={"name": "medusa", "lora_rank": 4})
