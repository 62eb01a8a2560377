"""Recorded steps: the bookkeeping around CUDA graphs, with a stand-in that replays by calling the step again.

The stand-in keeps what makes graphs easy to get wrong: inputs are read from the recording's buffers, output is written
over the previous one, host numbers are those of the recording.
"""

import dataclasses

import pytest
import torch
from oracles import random_prompts, stepped
from torch import Tensor

from distill.decode import Decoder
from distill.drafters.eagle3 import Eagle3, Eagle3Config
from distill.graphs import Graphs, Storage
from distill.sampling import Sampling
from distill.target.tiny import tiny_target
from distill.tree import Chain, Dynamic
from distill.vocab import choose_vocab


def tensors_of(value):
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


def stand_in(step):
    output = step()

    def replay():
        for old, new in zip(tensors_of(output), tensors_of(step()), strict=True):
            old.copy_(new)

    for tensor in tensors_of(output):
        tensor.set_(tensor.clone())
    return replay, output


def pair():
    target = tiny_target("mistral", seed=3, vocab_size=40, hidden=16, layers=2, dtype=torch.float64)
    torch.manual_seed(0)
    vocab, _ = choose_vocab(torch.rand(40), 25)
    return target, Eagle3(Eagle3Config(draft_vocab_size=25), target, vocab).double().requires_grad_(False)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=2)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "plan", [None, Chain(3), Dynamic(top_k=3, depth=3, total=8)], ids=["plain", "chain", "dynamic"]
)
def test_recorded_decoding_equals_the_oracle(plan, sampling):
    target, drafter = pair()
    target.fast.graphs = Graphs(stand_in, patience=1)
    decoder = Decoder(target, drafter if plan else None, plan=plan, sampling=sampling, engine="fast")
    if plan:
        decoder.drafting.graphs = Graphs(stand_in, patience=1)
    # Longer than a bucket of cache slots, so that recordings of two widths take turns.
    prompts = random_prompts(3, 40, seed=6, longest=120)
    for _ in range(2):  # the second time in the memory the first one left
        found = decoder.generate(prompts, max_new_tokens=30, ignore_eos=True)
        assert [g.ids for g in found] == stepped(target, prompts, 30, sampling, stop=())
    assert target.fast.graphs.recordings >= 1
    if plan:
        assert decoder.drafting.graphs.recordings >= 1
        assert decoder.drafting.graphs.recordings <= 3


def test_memory_is_handed_on_only_when_nobody_uses_it():
    target, _ = pair()
    storage = Storage()
    first = storage.adopt(target.new_cache(1, 8))
    second = storage.adopt(target.new_cache(1, 8))
    assert first.kv.data_ptr() != second.kv.data_ptr()
    address = first.kv.data_ptr()
    del first
    assert storage.adopt(target.new_cache(1, 16)).kv.data_ptr() != address
    third = storage.adopt(target.new_cache(1, 8))
    assert third.kv.data_ptr() == address


def test_a_shape_is_recorded_when_it_keeps_coming_up():
    graphs = Graphs(stand_in, patience=2)
    calls = [graphs.run(lambda x: x + 1, [torch.full((2,), float(i))], key="a").clone() for i in range(5)]
    assert [c[0].item() for c in calls] == [1, 2, 3, 4, 5]
    assert graphs.recordings == 1
    graphs.run(lambda x: x + 1, [torch.zeros(3)], key="a")
    assert graphs.recordings == 1
