"""Greedy decoding in OpenVINO GenAI; runs in its environment and imports nothing of Draftsmith."""

from typing import Any

from worker import Job, serve

PRECISION = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def run(job: Job) -> dict[str, Any]:
    """Decode prompt after prompt and add up the engine's counters."""
    import numpy
    import openvino
    import openvino_genai as genai

    precision = PRECISION[job["dtype"]]
    # Left alone, keys and values are kept in eight bits.
    exact = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    options: dict[str, Any] = {"scheduler_config": scheduler, **exact}
    if job["draft"] is not None:
        options["draft_model"] = genai.draft_model(job["draft"], "CPU", **exact)
    pipeline = genai.LLMPipeline(job["target"], "CPU", **options)
    config = pipeline.get_generation_config()
    config.max_new_tokens = job["max_new_tokens"]
    config.do_sample = False
    if job["draft"] is not None:
        config.num_assistant_tokens = job["k"]
    texts, drafted, accepted = [], 0, 0
    for ids in job["prompts"]:
        result = pipeline.generate(openvino.Tensor(numpy.array([ids], dtype=numpy.int64)), config)
        texts.append([int(i) for i in result.tokens[0]])
        if job["draft"] is not None:
            drafted += int(result.extended_perf_metrics.get_num_draft_tokens())
            accepted += int(result.extended_perf_metrics.get_num_accepted_tokens())
    return {
        "ids": texts,
        "version": genai.__version__,
        "drafts": None,
        "drafted": drafted,
        "accepted": accepted,
        "accepted_per_position": None,
    }


if __name__ == "__main__":
    serve(run)
