"""Tokenizers with real merges, chat templates of the kinds met in practice, and decoders that only pretend."""

import random
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from distill.decode import Generation
from distill.target.tiny import tiny_tokenizer

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<|head|>", "<|/head|>", "[INST]", "[/INST]")
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "asked",
    "why",
    "dogs",
    "run",
    "so",
    "fast",
    "when",
    "rain",
    "falls",
]

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (  # content is trimmed, as many templates do
    "{{ '<s>' }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
INST = (  # instruction marks that are tokens; no generation prompt
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
PLAIN = (  # marks are ordinary text and nothing ends a turn
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n' }}"
    "{% else %}{{ 'Assistant: ' + m['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
REASONING = (  # an earlier turn's thoughts are dropped from the history
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1] | trim %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EMPTY_THOUGHT = (  # writes an empty thought before every answer, as templates do with thinking switched off
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_CONTENT = (  # the markers leave the turn end out
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + m['content'] }}{% endgeneration %}{{ '</s>' }}{% endif %}{% endfor %}"
)


def pieces(name, messages):
    """What each template writes, in plain Python: (text, written by the assistant)."""
    out = []
    for i, m in enumerate(messages):
        role, text, mine = m["role"], m["content"], m["role"] == "assistant"
        if name in ("CHATML", "MARKED"):
            if name == "CHATML" and i == 0 and role != "system":
                out.append(("<|im_start|>system\nBe good.<|im_end|>\n", False))
            out += [(f"<|im_start|>{role}\n", False), (text + "<|im_end|>", mine), ("\n", False)]
        elif name == "HEADERS":
            out += [("<s>" * (i == 0) + f"<|head|>{role}<|/head|>\n\n", False), (text.strip() + "<|eot|>", mine)]
        elif name in ("INST", "MARKED_CONTENT"):
            if mine:
                out.append((f" {text}</s>", True))
            else:
                out.append(("<s>" * (i == 0) + f"[INST] {text} [/INST]", False))
        elif name == "PLAIN":
            head = "Assistant:" if mine else "User:"
            out += [(head, False), (f" {text}", mine), ("\n", False)]
        elif name == "EMPTY_THOUGHT":
            thought = "<think>\n\n</think>\n\n" if mine else ""
            out += [(f"<|im_start|>{role}\n{thought}", False), (text + "<|im_end|>", mine), ("\n", False)]
        else:
            raise AssertionError(name)
    return out


NAMES = ("CHATML", "HEADERS", "INST", "PLAIN", "EMPTY_THOUGHT", "MARKED", "MARKED_CONTENT")
TEMPLATES = {name: globals()[name] for name in NAMES}
END = {"HEADERS": "<|eot|>", "INST": "</s>", "MARKED_CONTENT": "</s>", "PLAIN": None}


@lru_cache
def _backend() -> str:
    backend = Tokenizer(models.BPE())
    # Line breaks stay together whatever follows, as in the tokenizers of recent models.
    pattern = Regex(r"\s*[\r\n]+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    corpus = [
        " ".join(WORDS * 2),
        "\n\n\n\n".join(WORDS),
        "User: Assistant: system user assistant\n\n <think> </think>",
    ] * 9
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet))
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return backend.to_str()


def tokenizer(name="CHATML", template=None):
    """A byte-level BPE tokenizer (it merges line breaks) with one of the templates."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        eos_token=END.get(name, "<|im_end|>") or "</s>",
        chat_template=TEMPLATES.get(name) if template is None else template,
    )


def target(words=None, *, max_positions=4096, eos_ids=None, fingerprint="w0"):
    """As much of a target as writing needs; by default with the tiny character tokenizer."""
    words = tiny_tokenizer() if words is None else words
    info = SimpleNamespace(
        name="fake", vocab_size=len(words), max_positions=max_positions, eos_ids=eos_ids or (words.eos_token_id,)
    )
    return SimpleNamespace(info=info, tokenizer=words, fingerprint={"weights": fingerprint}, device=torch.device("cpu"))


def conversation(rng, turns=3, system=False):
    """Random messages."""

    def text():
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 6))) + rng.choice(["", ".", "?", "!\n\nAnd so", "\nYes"])

    messages = [{"role": "system", "content": text()}] if system else []
    for _ in range(turns):
        messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
    return messages


@dataclass
class FakeDecoder:
    """Answers from a function of the request; rows finish in a scrambled order, as lengths would make them."""

    target: object
    sampling: object
    answer: object
    seed: int = 0

    def stream(self, requests, *, slots):
        rng, running, waiting = random.Random(self.seed), [], iter(requests)
        while True:
            while len(running) < slots and (request := next(waiting, None)) is not None:
                running.append(request)
            if not running:
                return
            request = running.pop(rng.randrange(len(running)))
            ids = self.answer(request, request.sampling or self.sampling)[: request.max_new_tokens]
            ended = ids[-1] in self.target.info.eos_ids
            yield Generation(
                request_id=request.request_id,
                prompt_len=len(request.prompt),
                ids=ids,
                finished="eos" if ended else "length",
            )


def decoders_of(answer, seed=0):
    """What ``prepare`` calls to make its decoders."""
    return lambda target, sampling: FakeDecoder(target, sampling, answer, seed)


def babble(request, sampling):
    """A pure function of (request, seed): some words, then the end of the turn (or none, when too long)."""
    words = tiny_tokenizer_cached()
    rng = random.Random(f"{request.request_id} {sampling.seed} {sampling.temperature} {len(request.prompt)}")
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
    return [*words.encode(text, add_special_tokens=False), words.eos_token_id]


@lru_cache
def tiny_tokenizer_cached():
    return tiny_tokenizer()


def keyed(value):
    """A number that depends on the value only."""
    return random.Random(str(value)).randrange(10**6)
