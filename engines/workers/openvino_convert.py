"""From a transformers folder to OpenVINO's graph; runs in OpenVINO's environment."""

from pathlib import Path
from typing import Any

from worker import Job, serve

GRAPH = "openvino_model"


def run(job: Job) -> dict[str, Any]:
    """Convert, then write the layers that an EAGLE-3 drafter reads into the graph, since the converter drops them."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    out = Path(job["out"])
    main_export(
        job["source"],
        output=out,
        task="text-generation-with-past",
        trust_remote_code=job["layers"] is not None,
        convert_tokenizer=job["tokenizer"],
        ov_config=OVConfig(dtype=job["weights"]),
    )
    if job["layers"] is not None:
        _write_layers(out, job["layers"])
    return {"files": sorted(path.name for path in out.iterdir())}


def _write_layers(out: Path, layers: str) -> None:
    import openvino

    model = openvino.Core().read_model(out / f"{GRAPH}.xml")
    model.set_rt_info(layers, "hidden_layers_list")
    fresh = out / "fresh"
    openvino.save_model(model, fresh / f"{GRAPH}.xml", compress_to_fp16=False)
    del model  # it maps the files that are replaced now
    for path in fresh.iterdir():
        path.replace(out / path.name)
    fresh.rmdir()


if __name__ == "__main__":
    serve(run)
