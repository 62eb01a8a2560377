"""The draft model against transformers: packed documents, cached trees, and what assisted generation accepts."""

import pytest
import torch
from oracles import pack, random_documents, random_prompts, stepped
from test_graphs import stand_in
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from distill.decode import Decoder
from distill.drafters.draft_model import DraftModel, DraftModelConfig
from distill.graphs import Graphs
from distill.losses import LossConfig, total
from distill.sampling import Sampling
from distill.target import TargetConfig, load_target
from distill.target.cache import cache_dir
from distill.target.tiny import FAMILIES, tiny_target
from distill.tree import Chain, Dynamic
from distill.types import Frontier

V = 40
TIGHT = {"rtol": 1e-9, "atol": 1e-9}
LOOSE = {"rtol": 1e-5, "atol": 1e-5}  # Gemma-2's softmax, and the final norms of some families, are in fp32


def target_of(family: str = "llama", dtype=torch.float64, **options):
    return tiny_target(family, seed=3, vocab_size=V, hidden=16, layers=4, dtype=dtype, **options)


def tolerance(family: str):
    return LOOSE if family in ("gemma2", "gemma3") else TIGHT


def plain_model(drafter):
    """What the state dict and the recorded architecture say, as a transformers model of its own."""
    fields = dict(drafter.config.architecture)
    lm = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**fields), dtype=torch.float64, attn_implementation=drafter.backbone.attention
    )
    missing, unexpected = lm.load_state_dict(drafter.state_dict(), strict=False)
    assert not unexpected
    assert missing in ([], ["lm_head.weight"])
    return lm.eval()


# -- training


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents(family):
    """Every document of a packed row reads as if it stood alone: values, and gradients of a loss over all of them."""
    torch.manual_seed(0)
    target = target_of(family)
    drafter = DraftModel(DraftModelConfig(n_layers=2, hidden_size=12), target)
    lm = plain_model(drafter)
    documents = random_documents(2, 30, V, seed=2)
    batch = pack(documents, 34)
    output = target.forward(batch.ids_BL, positions_BL=batch.positions_BL, doc_BL=batch.doc_BL)
    (prediction,) = drafter.training_steps(batch, output)
    assert prediction.shift == 1
    logits_BLV = prediction.head(prediction.hidden_BLD)
    oracle = torch.zeros((), dtype=torch.float64)
    for row, docs in enumerate(documents):
        start = 0
        for ids, written in docs:
            alone = lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            torch.testing.assert_close(logits_BLV[row, start : start + len(ids)], alone, **tolerance(family))
            with torch.no_grad():
                p = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].softmax(-1)
            for t in range(len(ids) - 1):
                assert bool(prediction.mask_BL[row, start + t]) == bool(written[t + 1])
                if written[t + 1]:
                    oracle = oracle - (p[t] * alone[t].log_softmax(-1)).sum()
            start += len(ids)
    oracle = oracle / batch.denominator
    loss = total([prediction], batch, output, target=target, vocab=None, config=LossConfig(name="ce")).loss
    torch.testing.assert_close(loss, oracle, **tolerance(family))
    loss.backward()
    oracle.backward()
    theirs = dict(lm.named_parameters())
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, **tolerance(family))


# -- decoding: a random tree per round, rows that take in different numbers of tokens


@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_trees(family, rows, engine):
    """Every node's logits equal those of the whole text read at once."""
    target = target_of(family)
    drafter = DraftModel(DraftModelConfig(n_layers=3), target).eval()
    if engine == "fast":
        drafter.accelerate()
    lm = plain_model(drafter)
    g = torch.Generator().manual_seed(rows)

    def draw(*shape: int, most: int = V):
        return torch.randint(0, most, shape, generator=g)

    state = drafter.new_state(rows, 120)
    texts: list[list[int]] = [[] for _ in range(rows)]
    lengths = [[20, 3, 9], [2, 0, 1], [1, 4, 0], [5, 0, 0], [1, 1, 3], [4, 2, 0]]
    with torch.inference_mode():
        for round_, wanted in enumerate(lengths):
            n = [max(1, x) if rows == 1 else x for x in wanted][:rows]
            ids = draw(rows, max(20, *n) if round_ == 0 else 5)
            if round_ and round_ % 2:  # take in some of what was drafted, as the loop does
                ids[:, : fed.shape[1]] = fed[:, :5]  # noqa: F821 - of the round before
            for b in range(rows):
                texts[b] += ids[b, : n[b]].tolist()
            longest = max(map(len, texts))
            drafter.extend(state, ids, draw(rows), None, torch.tensor(n), longest=longest)
            fed, paths, seen = None, [], None
            for depth, width in enumerate([1, 1, 1] if round_ in (3, 4) else [1, 3, 4]):
                tokens = draw(rows, width)
                parents = (
                    torch.zeros(rows, 1, dtype=torch.long) if depth == 0 else draw(rows, width, most=len(paths[0]))
                )
                own = torch.eye(width, dtype=torch.bool).expand(rows, -1, -1)
                if depth == 0:
                    paths, seen = [[[int(tokens[b, 0])]] for b in range(rows)], own
                else:
                    above = seen[:, -len(paths[0]) :].gather(1, parents[:, :, None].expand(-1, -1, seen.shape[2]))
                    seen = torch.cat([above, own], 2)
                    paths = [
                        [paths[b][int(parents[b, f])] + [int(tokens[b, f])] for f in range(width)] for b in range(rows)
                    ]
                frontier = Frontier(tokens_BF=tokens, depth=depth, parent_BF=parents, ancestors_BFM=seen)
                fed = tokens if fed is None else torch.cat([fed, tokens], 1)
                logits = drafter.step(state, frontier)
                for b in range(rows):
                    for f in range(width):
                        whole = lm(input_ids=torch.tensor([texts[b] + paths[b][f]]), use_cache=False).logits[0, -1]
                        torch.testing.assert_close(logits[b, f], whole, **tolerance(family))
            drafter.rollback(state)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=2)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("plan", [Chain(3), Dynamic(top_k=3, depth=3, total=9)], ids=["chain", "dynamic"])
def test_recorded_proposals(plan, sampling):
    """With proposals replayed from recordings the drafts are those of the plain loop."""
    target = target_of("mistral")
    prompts = random_prompts(3, V, seed=6, longest=120)  # more than a bucket of cache slots
    steps = []
    for graphs in (None, Graphs(stand_in, patience=1)):
        drafter = DraftModel(DraftModelConfig(n_layers=3), target).eval()
        decoder = Decoder(target, drafter, plan=plan, sampling=sampling, engine="fast")
        decoder.drafting.graphs = graphs
        found = decoder.generate(prompts, max_new_tokens=30, ignore_eos=True)
        assert [g.ids for g in found] == stepped(target, prompts, 30, sampling, stop=())
        steps.append([g.steps for g in found])
    assert decoder.drafting.graphs.recordings >= 1
    assert steps[0] == steps[1]


# -- assisted generation


def assisted_matches(model, assistant, prompt: list[int], *, k: int, n_new: int, monkeypatch) -> list[int]:
    """Drafts that transformers accepts in each pass of the target, greedily, with ``k`` drafts a pass."""
    found: list[int] = []
    update = AssistedCandidateGenerator.update_candidate_strategy

    def noted(self, input_ids, scores, num_matches):
        found.append(int(num_matches))
        return update(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", noted)
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
    settings.assistant_confidence_threshold = 0.0
    ids = torch.tensor([prompt])
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=assistant,
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=n_new, pad_token_id=0),
    )
    return found


def acceptance_of_both(target, drafter, prompt: list[int], *, k: int, n_new: int, engine: str, monkeypatch):
    """Per pass, ours and transformers', as far as neither was cut by the limit."""
    (ours,) = Decoder(target, drafter, plan=Chain(k), engine=engine).generate(
        [prompt], max_new_tokens=n_new, ignore_eos=True
    )
    # transformers drafts for the first token too; ours begins behind the prefill's.
    lm = drafter.backbone.model
    theirs = assisted_matches(target.model, lm, [*prompt, ours.ids[0]], k=k, n_new=n_new - 1, monkeypatch=monkeypatch)
    mine, done = [], 1
    for step in ours.steps:
        if done + k + 1 > n_new - 1:
            break
        mine.append(step.accepted)
        done += len(step.tokens)
    return mine, theirs[: len(mine)]


@pytest.mark.parametrize("family, engine", [("llama", "fast"), ("qwen3", "eager")])
@pytest.mark.parametrize("k", [1, 4])
def test_assisted_generation_accepts_as_many(family, engine, k, monkeypatch):
    target = target_of(family, eos_token_id=None)
    torch.manual_seed(5)
    drafter = DraftModel(DraftModelConfig(layers=[0, 1, 3]), target).eval()
    compared: list[int] = []
    for prompt in random_prompts(4, V, seed=8, longest=25)[1:]:
        mine, theirs = acceptance_of_both(
            target, drafter, prompt, k=k, n_new=40, engine=engine, monkeypatch=monkeypatch
        )
        assert mine == theirs
        compared += mine
    assert len(compared) > 15
    assert len(set(compared)) > 1, "always the same number: choose another draft"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_assisted_generation_accepts_as_many_with_smollm2(engine, monkeypatch):
    """A real model: SmolLM2 with three of its layers left out drafts for the whole one."""
    if not list((cache_dir() / "targets").glob("smollm2-*")):
        pytest.skip("SmolLM2 has not been fetched yet")
    target = load_target(TargetConfig(name="smollm2", dtype="float32", device="cpu"))
    layers = [i for i in range(30) if i not in (12, 17, 22)]
    drafter = DraftModel(DraftModelConfig(layers=layers), target).eval()
    messages = [{"role": "user", "content": "Name three rivers in Europe and say where each of them ends."}]
    prompt = target.encode_chat(messages, add_generation_prompt=True)
    mine, theirs = acceptance_of_both(target, drafter, prompt, k=3, n_new=48, engine=engine, monkeypatch=monkeypatch)
    assert mine == theirs
    assert len(mine) > 8
    assert len(set(mine)) > 1
