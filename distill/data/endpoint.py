"""A server that runs the target writes for us, over the OpenAI completions API (vLLM, SGLang, llama.cpp, ...).

Prompts go out as token ids, and the ids the server generated must come back: as ids where the server can say them,
else from the text, and then only what tokenises back to the same text in as many tokens. What cannot be recovered
is dropped and counted. The noise of a sampled answer is the server's own, seeded by (seed, conversation, length of
the prompt).
"""

import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from distill.data.client import Client, RefusedError
from distill.data.config import EndpointConfig
from distill.data.conversation import check_ids, keyed_hash
from distill.data.progress import say
from distill.data.template import ChatTemplate
from distill.decode import Generation, Request
from distill.errors import UserError, did_you_mean
from distill.sampling import Sampling
from distill.target import Target

PROBES = ("Name three colours and say where each is seen.", "What is a river?", "Count from one to ten in words.")
PROBE_TOKENS = 24

AGREEMENT = 0.8
"""Share of greedy tokens that must be the target's own. Rounding (bf16, fp8) moves a few per cent of them."""

# What each kind of server understands beyond the standard, most telling first; the first that is accepted and
# returns ids wins. Defaults a server takes from the model's own generation config are switched off by name.
_PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": False, "spaces_between_special_tokens": False}
DIALECTS: tuple[dict[str, Any], ...] = (
    {**_PLAIN, "return_token_ids": True},
    {**_PLAIN, "logprobs": 1, "return_tokens_as_token_ids": True},
    {"logprobs": 1},
    {},
)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What came back for one request.

    Attributes:
        ids: as the server generated them; empty when they could not be recovered.
        ended: the last one ends the turn.
        exact: the server said the ids, nothing was tokenised again.
        fault: why the ids are unknown, or None.
    """

    ids: list[int]
    ended: bool
    exact: bool
    fault: str | None = None


class Endpoint:
    """A server whose model is the target.

    Args:
        config: address, patience.
        target: what it must serve.
        template: the target's.

    Raises:
        UserError: no answer, another model, a server that cannot continue token ids.
    """

    def __init__(self, config: EndpointConfig, target: Target, template: ChatTemplate):
        assert config.url is not None, "checked with the data's options"
        self.url = config.url.rstrip("/")
        self.client = Client(self.url, timeout_s=config.timeout_s, retries=config.retries, key=_key(config))
        self._words = template
        self._vocab_size = target.info.vocab_size
        self._eos = sorted(target.info.eos_ids)
        try:
            self.model = self._find_model(config.model, target.info.name)
            self._dialect = self._find_dialect()
            if config.check:
                self._compare(target)
        except BaseException:
            self.client.close()
            raise

    def close(self) -> None:
        """Break off whatever is under way."""
        self.client.close()

    def decoder(self, target: Target, *, sampling: Sampling) -> "EndpointDecoder":
        """Stands in for the target's own decoder."""
        return EndpointDecoder(self, sampling)

    def complete(self, request: Request, sampling: Sampling) -> Written:
        """Have one prompt continued.

        Raises:
            UserError: no answer after all tries, or one that shows that the server runs something else.
        """
        return self._ask(request, sampling, self._dialect)

    def _ask(self, request: Request, sampling: Sampling, dialect: dict[str, Any]) -> Written:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": keyed_hash("endpoint", sampling.seed, request.request_id, len(request.prompt)) >> 32,
            **dialect,
        }
        if "min_p" in dialect:
            body |= {"top_k": sampling.top_k or -1, "stop_token_ids": self._eos}
        elif sampling.top_k and not sampling.greedy:
            body["top_k"] = sampling.top_k
        return self.client.call("/completions", body, read=lambda answer: self._read(answer, request))

    def _read(self, answer: dict[str, Any], request: Request) -> Written:
        """Take the ids out of an answer; what raises anything but a UserError is a broken answer, tried again."""
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        if choice["finish_reason"] not in ("stop", "length"):
            raise ValueError(f"an answer that ended because of {choice['finish_reason']!r}")
        prompt, n_prompt = choice.get("prompt_token_ids"), usage.get("prompt_tokens")
        if prompt not in (None, request.prompt) or n_prompt not in (None, len(request.prompt)):
            raise UserError(
                f"endpoint {self.url} must continue the prompt's own token ids, got a prompt it changed; "
                "it must not add tokens of its own"
            )
        ids = _said_ids(choice)
        exact = ids is not None
        if ids is None:
            ids = self._tokenised(choice, usage)
        if ids is None:
            return Written(ids=[], ended=False, exact=False, fault="ids_unknown")
        check_ids(ids, self._vocab_size, f"what endpoint {self.url} writes")
        end = next((i for i, token in enumerate(ids) if token in self._eos), None)
        ids = ids if end is None else ids[: end + 1]
        stopped = choice["finish_reason"] == "stop"
        if stopped and end is None and len(self._eos) == 1 and usage.get("completion_tokens") == len(ids) + 1:
            end, ids = len(ids), ids + self._eos  # counted, but not said
        if stopped and end is None:
            return Written(ids=[], ended=False, exact=exact, fault="end_unknown")
        if not 0 < len(ids) <= request.max_new_tokens:
            raise ValueError(f"{len(ids)} tokens where 1 to {request.max_new_tokens} were asked for")
        return Written(ids=ids, ended=end is not None, exact=exact)

    def _tokenised(self, choice: dict[str, Any], usage: dict[str, Any]) -> list[int] | None:
        """Ids of the text, if they can only be the ones it was made of; the turn's end is added where it is certain."""
        text = choice["text"]
        ids = self._words.encode(text)
        if self._words.decode(ids) != text:
            return None
        stopped = choice["finish_reason"] == "stop"
        pieces = (choice.get("logprobs") or {}).get("tokens")
        if pieces and not (
            len(pieces) in (len(ids), len(ids) + stopped)
            and [self._words.decode([token]) for token in ids] == pieces[: len(ids)]
        ):
            return None
        if stopped and not (ids and ids[-1] in self._eos):
            which = self._eos if choice.get("stop_reason") is None else [choice["stop_reason"]]
            ids += [which[0]] if len(which) == 1 and which[0] in self._eos else []
        # Servers count the end of the turn or leave it out.
        return ids if usage.get("completion_tokens") in (None, len(ids), len(ids) - stopped) else None

    def _find_model(self, wanted: str | None, target: str) -> str:
        try:
            served = self.client.call("/models", read=lambda answer: [str(model["id"]) for model in answer["data"]])
        except RefusedError as error:
            if wanted is not None and error.status == 404:  # a server without a list
                return wanted
            raise
        name = wanted or (target if target in served else served[0] if len(served) == 1 else None)
        if name not in served:
            raise UserError(
                f"data.endpoint.model must be one of {', '.join(served) or '(none)'}, which {self.url} serves, got "
                f"{name}.{did_you_mean(str(name), served)}"
            )
        return str(name)

    def _find_dialect(self) -> dict[str, Any]:
        """The most telling way this server can be asked."""
        refusal: RefusedError | None = None
        known: list[tuple[bool, dict[str, Any]]] = []
        for dialect in DIALECTS:
            try:
                written = self._ask(self._probe(PROBES[0]), Sampling(), dialect)
            except RefusedError as error:
                if error.status not in (400, 422):
                    raise
                refusal = error
                continue
            if written.exact:
                return dialect
            known.append((written.fault is None, dialect))
        if not known:
            assert refusal is not None
            raise refusal
        return max(known, key=lambda pair: pair[0])[1]

    def _probe(self, text: str) -> Request:
        prompt = self._words.encode(self._words.render([{"role": "user", "content": text}], add_generation_prompt=True))
        return Request(prompt=prompt, max_new_tokens=PROBE_TOKENS)

    @torch.inference_mode()
    def _compare(self, target: Target) -> None:
        """Refuse a server whose greedy tokens are not the target's, given the same tokens before them."""
        same = total = 0
        exact = True
        for text in PROBES:
            request = self._probe(text)
            written = self.complete(request, Sampling())
            if not written.ids:
                continue
            exact &= written.exact
            ids_1L = torch.tensor([request.prompt + written.ids], device=target.device)
            before_ND = target.forward(ids_1L).last_BLD[0, len(request.prompt) - 1 : -1]
            own_N = target.logits(before_ND).argmax(-1)
            same += int((own_N == ids_1L[0, len(request.prompt) :]).sum())
            total += len(written.ids)
        if not total:
            raise UserError(
                f"endpoint {self.url} must return token ids, or text that tokenises back to itself, got neither; "
                "serve the target with a server that returns token ids (vLLM)"
            )
        if same < AGREEMENT * total:
            raise UserError(
                f"endpoint {self.url} must serve the target {target.info.name!r}, got {self.model!r}, which writes "
                f"{same} of {total} greedy tokens as the target would; serve the same weights "
                "(data.endpoint.check=false writes all the same)"
            )
        how = "returns token ids" if exact else "returns text, which is tokenised again and checked"
        say(f"{self.model} at {self.url} {how}; {same} of {total} greedy tokens are the target's")


class EndpointDecoder:
    """Autoregressive decoding by a server, many requests at a time.

    Args:
        endpoint: who decodes.
        sampling: for requests that bring none.
    """

    def __init__(self, endpoint: Endpoint, sampling: Sampling):
        self._endpoint = endpoint
        self._sampling = sampling

    def stream(self, requests: Iterator[Request], *, slots: int) -> Iterator[Generation]:
        """Continue requests, ``slots`` at a time; yields in finishing order.

        A generation whose ids are unknown has none, and the reason as its ``tag``.

        Raises:
            UserError: the endpoint is gone.
        """
        waiting, running = iter(requests), set[Future[Generation]]()
        pool = ThreadPoolExecutor(slots, thread_name_prefix="endpoint")
        try:
            while True:
                while len(running) < slots and (request := next(waiting, None)) is not None:
                    running.add(pool.submit(self._generation, request))
                if not running:
                    return
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                # Answers first: those that came before the endpoint went are kept.
                yield from (future.result() for future in sorted(finished, key=lambda f: f.exception() is not None))
        finally:
            self._stop(pool, running)

    def _generation(self, request: Request) -> Generation:
        written = self._endpoint.complete(request, request.sampling or self._sampling)
        return Generation(
            request_id=request.request_id,
            prompt_len=len(request.prompt),
            ids=written.ids,
            finished="eos" if written.ended else "length",
            tag=written.fault,
        )

    def _stop(self, pool: ThreadPoolExecutor, running: set[Future[Generation]]) -> None:
        if running:
            self._endpoint.close()  # threads that wait for an answer would keep the process alive
        pool.shutdown(wait=True, cancel_futures=True)


def _said_ids(choice: dict[str, Any]) -> list[int] | None:
    """The ids where the server says them: vLLM's two ways, llama.cpp's."""
    if isinstance(choice.get("token_ids"), list):
        if any(type(token) is not int for token in choice["token_ids"]):
            raise ValueError(f"token_ids must be integers, got {choice['token_ids'][:8]}")
        return list(choice["token_ids"])
    logprobs = choice.get("logprobs") or {}
    tokens = logprobs.get("tokens") or []
    if tokens and all(str(token).startswith("token_id:") for token in tokens):
        return [int(str(token).partition(":")[2]) for token in tokens]
    content = logprobs.get("content") or []
    if content and all(isinstance(token.get("id"), int) for token in content):
        return [token["id"] for token in content]
    return None


def _key(config: EndpointConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise UserError(
            f"data.endpoint.api_key_env must name an environment variable that holds the key, got "
            f"{config.api_key_env}, which is not set"
        )
    return key
