"""A real HTTP server that runs a tiny target, speaks several dialects and fails on command."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from distill.decode import Decoder
from distill.sampling import Sampling
from distill.target.tiny import tiny_target

VLLM_ONLY = {"return_token_ids", "return_tokens_as_token_ids", "stop_token_ids", "min_p", "repetition_penalty"}


def answering_target(seed=0):
    """A random target whose turns end now and then; fp64, so that batches do not matter."""
    target = tiny_target("llama", dtype=torch.float64, tokenizer=True, max_position_embeddings=512, seed=seed)
    eos = target.tokenizer.eos_token_id
    head = target.model.get_output_embeddings().weight
    with torch.no_grad():
        head[eos] = 0.3 * head.sum(0)
    return target


class Server:
    """State of the server.

    Attributes:
        dialect: how ids come back: vllm, old-vllm, llama.cpp, pieces, text (this one refuses unknown fields).
        faults: fault for the n-th completion request, counted from 1.
        bodies, headers: of all completion requests, in order.
        generated: (prompt, ids) of all answers.
    """

    def __init__(self, target, *, dialect="vllm", faults=None, models=("tiny-llama",)):
        self.target, self.dialect, self.faults, self.models = target, dialect, faults or (lambda n: None), models
        self.bodies, self.headers, self.generated = [], [], set()
        self.extra_prompt_tokens = 0
        self.lock = threading.Lock()
        self.url = ""

    def write(self, body):
        sampling = Sampling(
            temperature=body["temperature"],
            top_k=max(body.get("top_k", 0), 0),
            top_p=body["top_p"],
            seed=body["seed"],
        )
        with self.lock:
            (done,) = Decoder(self.target, sampling=sampling).generate(
                [body["prompt"]], max_new_tokens=body["max_tokens"]
            )
            self.generated.add((tuple(body["prompt"]), tuple(done.ids)))
        return done.ids, "stop" if done.finished == "eos" else "length"

    def answer(self, body):
        ids, finish = self.write(body)
        words = self.target.tokenizer
        shown = ids[:-1] if finish == "stop" else ids
        choice = {"index": 0, "text": words.decode(shown), "finish_reason": finish, "logprobs": None}
        usage = {"prompt_tokens": len(body["prompt"]) + self.extra_prompt_tokens, "completion_tokens": len(ids)}
        if self.dialect == "vllm" and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
        if self.dialect == "old-vllm" and body.get("return_tokens_as_token_ids"):
            choice["logprobs"] = {"tokens": [f"token_id:{token}" for token in ids]}
        if self.dialect == "llama.cpp" and body.get("logprobs"):
            choice["logprobs"] = {"content": [{"id": token, "token": words.decode([token])} for token in ids]}
        if self.dialect == "pieces" and body.get("logprobs"):
            choice["logprobs"] = {"tokens": [words.decode([token]) for token in ids]}
        return {"object": "text_completion", "choices": [choice], "usage": usage}


class Handler(BaseHTTPRequestHandler):
    """Plays out what ``server.state`` says."""

    def log_message(self, *_):
        pass

    def do_GET(self):  # noqa: N802
        self.reply(200, {"data": [{"id": name} for name in self.server.state.models]})

    def do_POST(self):  # noqa: N802
        state = self.server.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with state.lock:
            state.bodies.append(body)
            state.headers.append(dict(self.headers))
            fault = state.faults(len(state.bodies))
        if state.dialect == "text" and VLLM_ONLY & set(body):
            return self.reply(400, {"error": {"message": "unknown field min_p"}})
        if fault is None:
            return self.reply(200, state.answer(body))
        if isinstance(fault, int):
            return self.reply(fault, {"error": {"message": "on purpose"}})
        if isinstance(fault, tuple):
            return self.reply(fault[0], {"error": "busy"}, {"Retry-After": fault[1]})
        data = json.dumps(state.answer(body)).encode()
        if fault == "hang":
            time.sleep(3)
            return None
        if fault == "drop":
            return None
        if fault == "short":  # fewer bytes than announced
            return self.reply(200, data[:40], length=len(data))
        if fault == "torn":  # half of the JSON, correctly announced
            return self.reply(200, data[:40])
        if fault == "aborted":
            return self.reply(200, {"choices": [{"text": "", "token_ids": [], "finish_reason": "abort"}]})
        raise AssertionError(fault)

    def reply(self, status, answer, headers=(), length=None):
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)


class QuietServer(ThreadingHTTPServer):
    """Callers may hang up."""

    def handle_error(self, request, client_address):
        pass


@contextmanager
def serving(target, **options):
    """Run a server; yields its state, with the address in ``url``."""
    state = Server(target, **options)
    server = QuietServer(("127.0.0.1", 0), Handler)
    server.state = state
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
