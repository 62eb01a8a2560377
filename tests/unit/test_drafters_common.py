"""What holds for every drafter: its size by a formula, a target that training leaves alone, every weight trained."""

import pytest
import torch
from drafter_tools import CASES, TRAINABLE, V, W, case_id, make, target_of
from oracles import pack, random_documents

from distill.losses import LossConfig
from distill.train.module import step_loss

TARGET = target_of(dtype=torch.float32)


def block(info, *, reads=1):
    """Projections and feed-forward layer of a Llama layer whose attention reads ``reads`` times the width."""
    width, heads, groups, head = info.hidden_size, info.n_heads, info.n_kv_heads, info.head_dim
    attention = reads * width * (heads + 2 * groups) * head + heads * head * width
    return attention + 3 * width * info.intermediate_size


def eagle1(drafter, info, config):
    width = info.hidden_size
    norms = width * (2 * config.num_layers - 1)  # the first layer has none at its input
    return width * (2 * width + config.fc_bias) + config.num_layers * block(info) + norms


def eagle3(drafter, info, config):
    width = info.hidden_size
    norms = width * (4 + 3 * config.fc_norm)
    return 3 * width * width + block(info, reads=2) + norms + W * width


def medusa(drafter, info, config):
    width = info.hidden_size
    rows = {"shared": 0, "own": config.heads * V, "pruned": W}[config.head]
    return config.heads * config.blocks * (width * width + width) + rows * width


def hydra(drafter, info, config):
    width, k = info.hidden_size, config.heads
    rows = {"shared": 0, "own": k * V, "pruned": W}[config.head]
    joined = sum((i + 2) * width for i in range(k))
    return joined * 2 * width + k * width + k * (config.blocks - 1) * (width * width + width) + rows * width


def draft_model(drafter, info, config):
    ours = drafter.backbone.info
    width, tied = ours.hidden_size, drafter.lm_head.weight is drafter.model.embed_tokens.weight
    return V * width * (1 if tied else 2) + ours.n_layers * (block(ours) + 2 * width) + width


FORMULAS = {"draft_model": draft_model, "eagle1": eagle1, "eagle3": eagle3, "hydra": hydra, "medusa": medusa}


def test_every_trainable_drafter_has_a_formula():
    assert set(FORMULAS) == set(TRAINABLE)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_parameters_by_formula(case):
    name, options = case
    drafter = make(name, target=TARGET, **options)
    assert sum(p.numel() for p in drafter.parameters()) == FORMULAS[name](drafter, TARGET.info, drafter.config)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_training_changes_the_drafter_and_not_the_target(case):
    """Three steps: the target is bit for bit what it was and has no gradient; every weight of the drafter moves."""
    name, options = case
    drafter = make(name, target=TARGET, **options).train()
    frozen = {key: value.clone() for key, value in TARGET.model.state_dict().items()}
    before = {key: value.detach().clone() for key, value in drafter.named_parameters()}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(3):
        torch.manual_seed(0)
        rows = random_documents(2, 24, V, seed=0, share=0.9)
        result = step_loss(drafter, pack(rows, 24), LossConfig())
        result.loss.backward()
        losses.append(float(result.loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert {k for k, p in drafter.named_parameters() if torch.equal(p, before[k])} == set()
    after = TARGET.model.state_dict()
    assert set(after) == set(frozen)
    assert all(torch.equal(after[key], value) for key, value in frozen.items())
    assert all(p.grad is None and not p.requires_grad for p in TARGET.model.parameters())


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_predictions_are_what_the_drafter_announces(case):
    """How many there are, and how many go through one head: the memory estimate counts on it."""
    name, options = case
    drafter = make(name, target=TARGET, **options)
    batch = pack(random_documents(2, 24, V, seed=0), 24)
    taps = drafter.taps(drafter.config, TARGET.info)
    output = TARGET.forward(batch.ids_BL, positions_BL=batch.positions_BL, doc_BL=batch.doc_BL, taps=taps)
    predictions = [p for p in drafter.training_steps(batch, output) if p.kind == "logits"]
    heads = [p.head for p in predictions]
    assert len(predictions) == drafter.steps
    assert max(sum(head == other for other in heads) for head in heads) == drafter.steps_per_head
