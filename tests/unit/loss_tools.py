"""Settings and the slow full-logit reference for the tests of the losses."""

from types import SimpleNamespace

import torch
from oracles import pack, random_documents
from torch import nn

from distill.alignment import recurrent_mask
from distill.losses import LossConfig, total
from distill.types import StepPrediction, TargetOutput
from distill.vocab import choose_vocab

NAMES = ("ce", "kl", "reverse_kl", "jsd", "tv", "lk", "hard")
SOFT = NAMES[:-1]
B, L, D, V, W, K = 2, 18, 8, 30, 17, 3


class Head:
    """A stand-in for the target: its logits, soft-capped as Gemma's are."""

    def __init__(self, vocab=V, size=D, dtype=torch.float64):
        self.weight = torch.randn(vocab, size, dtype=dtype)
        self.info = SimpleNamespace(vocab_size=vocab)

    def logits(self, hidden):
        return 10 * torch.tanh(hidden.to(self.weight.dtype) @ self.weight.T / 10)


def setting(*, pruned=True, steps=K, dtype=torch.float64, seed=0, length=L, head=None):
    """A packed batch, the target's features, and predictions of K steps through one shared head."""
    torch.manual_seed(seed)
    rows = random_documents(B, length, V, seed=seed, share=0.8)
    rows[0] = [([3, 1, 4, 1, 5, 9, 2, 6], [0, 0, 1, 1, 1, 1, 1, 1]), ([5, 3, 5, 8, 9], [0, 1, 1, 0, 1])]
    batch = pack(rows, length)
    target = Head()
    output = TargetOutput(last_BLD=torch.randn(B, length, D, dtype=torch.float64), taps={})
    vocab = choose_vocab(torch.rand(V), W)[0] if pruned else None
    head = head or nn.Linear(D, W if pruned else V, bias=False).to(dtype)
    hiddens = [torch.randn(B, length, D, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(steps)]
    predictions = [
        StepPrediction(hidden_BLD=hidden, head=head, shift=2 + k, mask_BL=recurrent_mask(batch, k), weight=0.7**k)
        for k, hidden in enumerate(hiddens)
    ]
    return SimpleNamespace(
        batch=batch, target=target, output=output, vocab=vocab, head=head, hiddens=hiddens, predictions=predictions
    )


def run(s, name="ce", chunk=7, **options):
    config = LossConfig(name=name, chunk=chunk, **options)
    return total(s.predictions, s.batch, s.output, target=s.target, vocab=s.vocab, config=config)


def one_position(name, teacher, student, ids, beta=0.5):
    """Soft loss and acceptance at one position, from full distributions over the target's vocabulary."""
    p = teacher.softmax(-1)  # over everything
    kept = p[ids] / p[ids].sum()
    q = student.softmax(-1)
    alpha = sum(min_(p[t], q[d]) for d, t in enumerate(ids.tolist()))
    if name == "ce":
        loss = -(kept * q.log()).sum()
    elif name == "kl":
        loss = (kept * (kept.log() - q.log())).sum()
    elif name == "reverse_kl":
        loss = (q * (q.log() - kept.log())).sum()
    elif name == "jsd":
        middle = beta * kept + (1 - beta) * q
        loss = beta * (kept * (kept / middle).log()).sum() + (1 - beta) * (q * (q / middle).log()).sum()
    elif name == "tv":
        loss = 1 - alpha
    else:
        loss = -torch.log(alpha)
    return loss, alpha


def min_(a, b):
    return a if float(a.detach()) < float(b.detach()) else b


def reference(s, name, *, beta=0.5, hard=0.0):
    """Everything ``LossResult`` holds, position by position."""
    hard = 1.0 if name == "hard" else hard
    n = len(s.predictions)
    ids = torch.arange(V) if s.vocab is None else s.vocab.target_ids
    teacher = s.target.logits(s.output.last_BLD)
    loss, loss_K, alpha_K, hits, count = 0, [0.0] * n, [0.0] * n, torch.zeros(n, *s.batch.ids_BL.shape), [0] * n
    for k, prediction in enumerate(s.predictions):
        logits = prediction.head(prediction.hidden_BLD)
        for b in range(len(logits)):
            for i in range(logits.shape[1]):
                if not prediction.mask_BL[b, i]:
                    continue
                count[k] += 1
                row = teacher[b, i + prediction.shift - 1]
                one, alpha = one_position("ce" if name == "hard" else name, row, logits[b, i], ids, beta)
                alpha_K[k] += float(alpha.detach())
                best = int(row.argmax())
                hits[k, b, i] = int(ids[logits[b, i].argmax()]) == best
                learned = (1 - hard) * one if best in ids.tolist() else 0.0
                written = int(s.batch.ids_BL[b, i + prediction.shift]) if hard else -1
                if written in ids.tolist():
                    learned = learned - hard * logits[b, i].log_softmax(-1)[ids.tolist().index(written)]
                loss = loss + prediction.weight * learned
                loss_K[k] += float(torch.as_tensor(learned).detach())
    weights = sum(p.weight for p in s.predictions)
    return loss / (weights * s.batch.denominator), loss_K, alpha_K, hits.bool(), count


def top_reference(s):
    """Positions per step whose target choice is among the 1, ..., 5 likeliest draft tokens, by sorting."""
    ids = list(range(V)) if s.vocab is None else s.vocab.target_ids.tolist()
    teacher = s.target.logits(s.output.last_BLD)
    found = []
    for prediction in s.predictions:
        logits, counts = prediction.head(prediction.hidden_BLD), [0] * 5
        for b, i in prediction.mask_BL.nonzero().tolist():
            best = int(teacher[b, i + prediction.shift - 1].argmax())
            order = [ids[w] for w in logits[b, i].argsort(descending=True).tolist()]
            for j in range(5):
                counts[j] += best in order[: j + 1]
        found.append(counts)
    return found


def gradients(s, loss):
    leaves = [*s.hiddens, *s.head.parameters()]
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
