"""Speculative sampling written out, one request, token by token; the keys of its randomness are the library's."""

import torch
from oracles import SECOND, hash_bits, noise
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


def stream(seed: int, number: int) -> int:
    """Seed of stream 1 (draft), 2 (coins) or 3 (last draw), as ``sampling.stream_seed`` documents it."""
    m64 = 2**64 - 1
    x = (seed + number * 0xD1342543DE82EF95) & m64
    x = ((x ^ (x >> 32)) * 0xAEF17502108EF2D9) & m64
    x = ((x ^ (x >> 29)) * 0xDA942042E4DD58B5) & m64
    return x ^ (x >> 32)


def law(logits, sampling):
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores[0].softmax(-1)


def written_out(target, draft, plan, prompt, request, sampling, n_new, columns=None):
    """Ids of one request; ``draft(ids, path)`` gives the draft's logits after ``path`` below the round's ``ids``."""
    vocab, width = target.info.vocab_size, {}
    for path in plan.paths:
        width[tuple(path[:-1])] = width.get(tuple(path[:-1]), 0) + 1

    def gumbel(number: int, position: int, size: int):
        return noise(stream(sampling.seed, number), request, [position], size, second=SECOND)[0]

    def p_after(ids):
        return law(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1], sampling)

    ids, accepted = list(prompt), 0
    own = noise(sampling.seed, request, [len(ids)], vocab, second=SECOND)[0]
    ids.append(int((p_after(ids).log() + own).argmax()))
    while len(ids) < len(prompt) + n_new:
        begin, ranks = list(ids), ()
        while True:
            position = len(ids)
            r = p_after(ids)
            children = []
            if ranks in width:
                q_own = law(draft(begin, ids[len(begin) :]), sampling)
                scores = q_own.log() + gumbel(1, position, len(q_own))
                order = scores.argsort(descending=True).tolist()
                drawn = [i for i in order if q_own[i] > 0][: width[ranks]]
                children = drawn if columns is None else [int(columns[i]) for i in drawn]
                q = torch.zeros(vocab, dtype=torch.float64)
                q[slice(None) if columns is None else columns] = q_own
            kept = None
            for place, x in enumerate(children):
                bits = hash_bits(stream(sampling.seed, 2), request, position, place, second=SECOND)
                if ((bits & 0x7FFFFFFF) + 0.5) / 2**31 < float(r[x] / q[x]):
                    kept = place
                    break
                left = (r - q).clamp(min=0)
                r = left / left.sum()
                q[x] = 0
                q = q / q.sum()
            if kept is None:
                ids.append(int((r.log() + gumbel(3, position, vocab)).argmax()))
                break
            ids.append(children[kept])
            ranks += (kept,)
            accepted += 1
    return ids[len(prompt) :][:n_new], accepted
