"""Greedy decoding in llama.cpp; runs in its environment and imports nothing of Draftsmith."""

import json
import os
import urllib.error
import urllib.request
from typing import Any

from worker import Job, serve

METHODS = {"eagle3": "DRAFT_EAGLE3", "draft_model": "DRAFT_SIMPLE"}
F32, OFF = 0, 0
"""llama.cpp's numbers for 32-bit floats and for no flash attention."""


def run(job: Job) -> dict[str, Any]:
    """Decode prompt after prompt and add up the engine's counters."""
    import xllamacpp

    server = xllamacpp.Server(parameters(xllamacpp, job))
    texts, drafted, accepted = [], 0, 0
    for ids in job["prompts"]:
        options = {"n_predict": job["max_new_tokens"], "temperature": 0.0, "cache_prompt": False, "return_tokens": True}
        answer = ask(f"{server.listening_address}/completion", {"prompt": ids, **options})
        texts.append(answer["tokens"])
        drafted += answer["timings"].get("draft_n", 0)
        accepted += answer["timings"].get("draft_n_accepted", 0)
    return {
        "ids": texts,
        "version": xllamacpp.__version__,
        "drafts": None,
        "drafted": drafted,
        "accepted": accepted,
        "accepted_per_position": None,
    }


def ask(address: str, question: dict[str, Any]) -> dict[str, Any]:
    """One request to the server in this process; its Python call leaves the token ids out."""
    request = urllib.request.Request(address, json.dumps(question).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"llama.cpp refused: {error.read().decode(errors='replace')}") from error


def parameters(xllamacpp: Any, job: Job) -> Any:
    """Everything the server is told: one request at a time, keys and values in full precision."""
    params = xllamacpp.CommonParams()
    params.model.path = job["target"]
    params.n_ctx = max(map(len, job["prompts"])) + job["max_new_tokens"] + 2 * job["k"] + 2
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.fit_params = False
    params.cache_ram_mib = 0
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    draft = params.speculative.draft
    places = [params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch]
    for place in places:
        place.n_threads = threads
    if job["dtype"] == "float32":
        # Its flash attention rounds when several rows are verified at once, and drafted text leaves the plain one.
        params.flash_attn_type = OFF
        params.cache_type_k = params.cache_type_v = draft.cache_type_k = draft.cache_type_v = F32
    if job["draft"] is not None:
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{METHODS[job['method']]}")]
        draft.mparams.path = job["draft"]
        draft.n_gpu_layers = 0
        draft.n_max = job["k"]
        draft.n_min = 0
        draft.p_min = 0.0  # never stop early: every proposal has k tokens
    return params


if __name__ == "__main__":
    serve(run)
