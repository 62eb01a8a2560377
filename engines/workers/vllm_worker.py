"""Greedy decoding in vLLM; runs in vLLM's environment and imports nothing of Draftsmith."""

from typing import Any

from worker import Job, serve

METHODS = {"eagle3": "eagle3", "eagle1": "eagle", "medusa": "medusa", "draft_model": "draft_model"}
COUNTER = "vllm:spec_decode_num_"


def run(job: Job) -> dict[str, Any]:
    """Decode all prompts and read the engine's counters."""
    import vllm

    options: dict[str, Any] = {}
    if job["draft"] is not None:
        options["speculative_config"] = {
            "method": METHODS[job["method"]],
            "model": job["draft"],
            "num_speculative_tokens": job["k"],
        }
    llm = vllm.LLM(
        model=job["target"],
        dtype=job["dtype"],
        max_model_len=max(map(len, job["prompts"])) + job["max_new_tokens"] + job["k"] + 1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        **options,
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return {
        "ids": [list(output.outputs[0].token_ids) for output in outputs],
        "version": vllm.__version__,
        **counts(llm),
    }


def counts(llm: Any) -> dict[str, Any]:
    """The engine's own counters; without a drafter there are none."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(COUNTER):
            found[metric.name.removeprefix(COUNTER)] = getattr(metric, "values", None) or metric.value
    return {
        "drafts": found.get("drafts", 0),
        "drafted": found.get("draft_tokens", 0),
        "accepted": found.get("accepted_tokens", 0),
        "accepted_per_position": found.get("accepted_tokens_per_pos"),
    }


if __name__ == "__main__":
    serve(run)
