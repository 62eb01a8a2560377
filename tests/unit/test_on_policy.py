"""On-policy distillation: what the draft writes into a batch, and that learning from it helps."""

from dataclasses import replace

import pytest
import torch
from oracles import pack

from distill.drafters.draft_model import DraftModel, DraftModelConfig
from distill.drafters.on_policy import Place, places, rewrite
from distill.errors import UserError
from distill.losses import LossConfig
from distill.target.tiny import tiny_target
from distill.train.config import TrainConfig
from distill.train.module import step_loss

V = 40


def documents():
    """Two rows: prompt and answer; two turns; an answer without a prompt; a prompt without an answer; one more pair."""
    return [
        [([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 1, 1]), ([11, 12, 13, 14, 15, 16, 17], [0, 1, 0, 0, 1, 1, 0])],
        [([20, 21, 22], [1, 1, 1]), ([23, 24], [0, 0]), ([25, 26, 27, 28], [0, 1, 1, 1])],
    ]


PLACES = [
    Place(row=0, start=0, begin=2, end=6),
    Place(row=0, start=6, begin=10, end=13),
]
"""The last document's one token before its answer is no prompt: plain text begins so."""


def model(share: float = 1.0, *, tokens: int = 64, dtype=torch.float64, **options) -> DraftModel:
    torch.manual_seed(1)
    target = tiny_target(seed=4, vocab_size=V, hidden=16, layers=4, dtype=dtype)
    return DraftModel(DraftModelConfig(n_layers=2, on_policy=share, on_policy_tokens=tokens, **options), target)


def test_where_a_document_can_be_continued():
    assert places(pack(documents(), 15)) == PLACES


def test_what_is_rewritten():
    batch = pack(documents(), 15)
    asked = []

    def sample(prompts, limits):
        asked.append((prompts, limits))
        return [[30, 31, 2], [32]]

    new = rewrite(batch, [PLACES[0], PLACES[1]], most=3, sample=sample)
    assert asked == [([[5, 6], [11, 12, 13, 14]], [3, 3])]
    assert new.ids_BL.tolist() == [
        [5, 6, 30, 31, 2, 10, 11, 12, 13, 14, 32, 16, 17, 0, 0],
        [20, 21, 22, 23, 24, 25, 26, 27, 28, 0, 0, 0, 0, 0, 0],
    ]
    # What the draft wrote counts, an earlier answer of the same document does not, other documents are as they were.
    assert new.loss_mask_BL.int().tolist() == [
        [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0],
    ]
    assert new.denominator == batch.denominator == float(batch.loss_mask_BL.sum())
    assert torch.equal(new.doc_BL, batch.doc_BL)
    assert torch.equal(new.positions_BL, batch.positions_BL)
    assert torch.equal(batch.ids_BL, pack(documents(), 15).ids_BL), "the batch itself must not change"


def test_sampled_text_follows_the_drafts_own_distribution():
    """The frequencies of the second token after two different prompts, against the model's own forward."""
    drafter = model().train()
    drafter.target.info.__dict__["eos_ids"] = ()
    prompts, n = [[5, 9, 17], [30]], 1500
    torch.manual_seed(0)
    texts = drafter.sample(prompts * n, [2] * (2 * n))
    assert {len(t) for t in texts} == {2}
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            lm = drafter.backbone.model
            first = lm(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
            after = lm(input_ids=torch.tensor([[*prompt, v] for v in range(V)])).logits[:, -1].softmax(-1)
        for at, law in ((0, first), (1, first @ after)):
            counts = torch.bincount(torch.tensor([t[at] for t in texts[i::2]]), minlength=V).double()
            often = law * n > 5
            statistic = ((counts - n * law)[often] ** 2 / (n * law)[often]).sum()
            freedom = int(often.sum()) - 1
            assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_text_ends_with_the_end_of_text_or_at_its_limit():
    drafter = model().train()
    ends = drafter.target.info.eos_ids
    assert ends == (2,)
    limits = [1, 4, 9] * 200
    texts = drafter.sample([[7], [8, 9], [3, 4, 5]] * 200, limits)
    assert all(2 not in text[:-1] for text in texts)
    assert all(len(text) == limit or text[-1] == 2 for text, limit in zip(texts, limits, strict=True))
    assert any(text[-1] == 2 and len(text) < limit for text, limit in zip(texts, limits, strict=True))


def test_rollout_is_a_function_of_the_seed_and_of_training_only():
    drafter, batch = model(tokens=3), pack(documents(), 15)
    rolled = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        rolled.append(drafter.train().rollout(batch))
    assert torch.equal(rolled[0].ids_BL, rolled[1].ids_BL)
    assert not torch.equal(rolled[0].ids_BL, rolled[2].ids_BL)
    assert drafter.training
    for place in PLACES:
        row, column = rolled[0].loss_mask_BL[place.row], range(place.begin, place.end)
        assert 1 <= sum(bool(row[i]) for i in column) <= 3
    assert drafter.eval().rollout(batch) is batch
    assert model(0.0).train().rollout(batch) is batch


def test_a_share_of_the_documents():
    drafter = model(0.3, tokens=1).train()
    batch = pack([[([5, 6, 7, 8], [0, 0, 1, 1])] * 10] * 30, 40)
    changed = drafter.rollout(batch)
    # A continued document keeps one supervised token, the others two.
    share = 2 - float(changed.loss_mask_BL.sum()) / 300
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / 300) ** 0.5


@pytest.mark.filterwarnings("error")
def test_no_document_to_continue():
    text = pack([[([5, 6, 7], [1, 1, 1])], [([8, 9], [1, 1])]], 4)
    with pytest.raises(UserError, match=r"drafter\.on_policy=1\.0 must have documents with a prompt"):
        model(1.0).train().rollout(text)
    drafter = model(0.5).train()
    with pytest.warns(UserWarning, match="got a batch without any"):
        assert drafter.rollout(text) is text
    assert drafter.rollout(text) is text, "said once"
    empty = pack([[([5, 6, 7], [0, 0, 0])]], 4)  # nothing supervised: nothing to say
    assert model(1.0).train().rollout(empty) is empty


def test_stored_features_are_refused():
    drafter = {"name": "draft_model", "on_policy": 0.5}
    config = TrainConfig(drafter=drafter)
    with pytest.raises(UserError, match=r"data\.features must be online with drafter\.on_policy"):
        replace(config, data=replace(config.data, features="store"))


def test_gradients_come_from_the_drafts_text():
    """The loss of a batch that was rolled out equals the loss of the same text given as data."""
    drafter, batch = model(tokens=3).train(), pack(documents(), 15)
    torch.manual_seed(9)
    text = drafter.rollout(batch)
    torch.manual_seed(9)
    step_loss(drafter, batch, LossConfig(name="kl")).loss.backward()
    grads = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    drafter.config.on_policy = 0.0
    step_loss(drafter, text, LossConfig(name="kl")).loss.backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-12, atol=1e-12)
        assert grads[name].abs().sum() > 0


def test_learning_on_its_own_text_brings_the_draft_closer():
    """Half a minute of training would do more; the total variation on fresh text of its own must fall clearly."""
    drafter = model(dtype=torch.float32, tokens=6).train()
    torch.manual_seed(0)
    batch = pack([[(torch.randint(3, V, (9,)).tolist(), [0, 0, 0] + [1] * 6) for _ in range(8)] for _ in range(4)], 72)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)

    def distance(seed: int) -> float:
        torch.manual_seed(seed)
        with torch.no_grad():
            result = step_loss(drafter, batch, LossConfig(name="tv"))
        return float(1 - result.alpha_K.sum() / result.count_K.sum())

    before = distance(1)
    for step in range(60):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        step_loss(drafter, batch, LossConfig(name="kl")).loss.backward()
        optimizer.step()
    assert distance(1) < 0.8 * before
