"""What to train on, how it is written, how it is packed."""

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from distill.config import opt
from distill.errors import UserError
from distill.sampling import Sampling

Source = Literal["self", "prompts", "chat", "text"]

Writer = Literal["target", "endpoint"]

DEFAULT_SELF_CONVERSATIONS = 1000


@dataclass(kw_only=True)
class EndpointConfig:
    """A server that runs the target and writes for us, over the OpenAI completions API."""

    url: str | None = opt(None, "address of the API, http://host:8000/v1 (vLLM, SGLang, llama.cpp, ...)")
    model: str | None = opt(None, "name of the target there; null: the only one it serves")
    concurrency: int = opt(64, "answers asked for at the same time")
    api_key_env: str | None = opt(None, "environment variable that holds the key; null: none is sent")
    timeout_s: float = opt(300.0, "seconds without an answer before a request is tried again")
    retries: int = opt(6, "further tries of a request before writing stops")
    check: bool = opt(True, "compare a few greedy tokens with the target's own before anything is written")

    def __post_init__(self) -> None:
        if self.url is not None and not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", self.url):
            raise UserError(f"data.endpoint.url must look like http://host:8000/v1, got {self.url!r}")
        if self.concurrency < 1:
            raise UserError(f"data.endpoint.concurrency must be at least 1, got {self.concurrency}")
        if self.retries < 0:
            raise UserError(f"data.endpoint.retries must be at least 0, got {self.retries}")
        if not 0 < self.timeout_s < math.inf:
            raise UserError(f"data.endpoint.timeout_s must be above 0, got {self.timeout_s}")


@dataclass(kw_only=True)
class DataConfig:
    """Options of the training data; see ``docs/data.md``."""

    source: Source = opt("self", "who wrote what: the target all (self), the answers (prompts), nothing (chat, text)")
    path: str | None = opt(None, "JSONL file, folder of them, or name of a hub data set (not for self)")
    subset: str | None = opt(None, "configuration name of a hub data set")
    split: str = opt("train", "split of a hub data set")
    folder: str | None = opt(None, "where prepared shards live; null: data/ inside the run folder")
    part: str | None = opt(None, "write only this part of the data, 2/8: the second of eight; null: all")

    writer: Writer = opt("target", "what runs the target for self and prompts: this process, or a server (endpoint)")
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)

    n_conversations: int | None = opt(None, "stop after this many kept ones; null: 1000 for self, else all")
    max_tokens: int | None = opt(None, "stop once this many supervised tokens are there; null: no limit")
    max_minutes: float | None = opt(None, "stop writing after this time, earlier runs included; null: no limit")
    system: str | None = opt(None, "system message of every conversation; null: whatever the template adds")

    prompt_temperature: float = opt(1.0, "temperature of the user turns the target writes (self)")
    prompt_top_k: int = opt(50, "top-k of the user turns the target writes (self); 0: off")
    prompt_top_p: float = opt(1.0, "top-p of the user turns the target writes (self); 1: off")
    max_prompt_tokens: int = opt(48, "longest user turn the target writes (self); longer ones are dropped")

    greedy_share: float = opt(0.5, "share of conversations answered greedily; the rest is sampled")
    temperature: float = opt(0.8, "temperature of the sampled answers")
    top_k: int = opt(50, "top-k of the sampled answers; 0: off")
    top_p: float = opt(1.0, "top-p of the sampled answers; 1: off")
    min_answer_tokens: int = opt(8, "answers with fewer tokens are dropped")
    max_answer_tokens: int = opt(256, "answers are cut here")
    slots: int | None = opt(
        None, "answers written at the same time; null: 32 on a CPU, 256 on a GPU, or the endpoint's"
    )
    shard_size: int = opt(64, "conversations per shard: the most an interruption can lose")

    max_len: int = opt(1024, "longest conversation in tokens; longer ones are cut, longer texts divided")
    pack_len: int = opt(1024, "tokens in one packed training row, at least max_len")
    validation: float = opt(0.05, "share of conversations held out, chosen by a hash of their content")
    seed: int = opt(0, "keys the sampling, the split and the order of batches")

    features: Literal["online", "store"] = opt("online", "target's features: in every step (online), or stored once")
    features_folder: str | None = opt(None, "where the feature store lives; null: features/ inside the run folder")
    features_dtype: Literal["bf16", "fp32", "target"] = opt("bf16", "of the feature store; target: what it runs in")
    features_confirm: bool = opt(False, "write a large feature store (> 1 GB or > 10 % of the disk) without asking")

    def __post_init__(self) -> None:
        if self.source == "self" and self.path is not None:
            raise UserError(f"data.path must be empty for data.source=self, got {self.path!r}")
        if self.source != "self" and not self.path:
            raise UserError(f"data.path must name a file, folder or data set for data.source={self.source}")
        for name in ("n_conversations", "max_tokens", "max_minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"data.{name} must be above 0, got {value}; null means no limit")
        for name in (
            "max_prompt_tokens",
            "max_answer_tokens",
            "slots",
            "shard_size",
            "max_len",
            "min_answer_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"data.{name} must be at least 1, got {value}")
        for name in ("greedy_share", "validation"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise UserError(f"data.{name} must be between 0 and 1, got {value}")
        if self.pack_len < self.max_len:
            raise UserError(f"data.pack_len must be at least data.max_len ({self.max_len}), got {self.pack_len}")
        if self.source in ("self", "prompts") and self.max_answer_tokens >= self.max_len:
            raise UserError(
                f"data.max_answer_tokens must leave room for a prompt in data.max_len ({self.max_len}), "
                f"got {self.max_answer_tokens}"
            )
        if self.source in ("self", "prompts") and self.min_answer_tokens > self.max_answer_tokens:
            raise UserError(
                f"data.min_answer_tokens must be at most data.max_answer_tokens ({self.max_answer_tokens}), "
                f"got {self.min_answer_tokens}"
            )
        if self.writer == "endpoint" and self.source not in ("self", "prompts"):
            raise UserError(
                f"data.writer must be target for data.source={self.source}, got endpoint: nothing is written"
            )
        if (self.writer == "endpoint") != (self.endpoint.url is not None):
            raise UserError(
                f"data.writer=endpoint and data.endpoint.url go together, got data.writer={self.writer} and "
                f"{self.endpoint.url}"
            )
        if self.features == "online" and (self.features_folder is not None or self.features_dtype != "bf16"):
            raise UserError(
                "data.features must be store for data.features_folder or data.features_dtype to matter, got online"
            )
        self.share()
        self.prompt_sampling()
        self.answer_sampling()

    @property
    def limit(self) -> int | None:
        """Kept conversations to stop at."""
        budgets = (self.n_conversations, self.max_tokens, self.max_minutes)
        if self.source == "self" and not any(budgets):
            return DEFAULT_SELF_CONVERSATIONS
        return self.n_conversations

    def share(self) -> tuple[int, int] | None:
        """Which part to write, and of how many; None for all.

        Raises:
            UserError: ``part`` is not a number, a slash and a number not below it.
        """
        if self.part is None:
            return None
        found = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", self.part)
        if found is None or int(found[1]) > int(found[2]):
            raise UserError(f"data.part must be like 2/8 (the second of eight parts), got {self.part!r}")
        return int(found[1]), int(found[2])

    def prompt_sampling(self) -> Sampling:
        """How the target picks the tokens of user turns."""
        return Sampling(
            temperature=self.prompt_temperature,
            top_k=self.prompt_top_k,
            top_p=self.prompt_top_p,
            seed=2 * self.seed,
        )

    def answer_sampling(self) -> Sampling:
        """How the target picks the tokens of the answers that are not greedy."""
        # Another seed than the prompts': request ids are the same, and noise must not repeat.
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=2 * self.seed + 1)

    def writing_settings(self) -> dict[str, object]:
        """Everything that decides what is in the shards; budgets, sizes of batches and the split do not."""
        names = ["source"]
        if self.source in ("self", "prompts"):
            names += ["system", "greedy_share", "temperature", "top_k", "top_p", "min_answer_tokens"]
            names += ["max_answer_tokens", "max_len", "seed"]
        if self.source == "self":
            names += ["prompt_temperature", "prompt_top_k", "prompt_top_p", "max_prompt_tokens"]
        if self.source == "text":
            names += ["max_len"]
        if self.writer == "endpoint":  # its noise is not ours: other samples of the same distribution
            names += ["writer"]
        return {name: getattr(self, name) for name in names}
