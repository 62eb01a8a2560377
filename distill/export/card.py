"""The model card: what the drafter is, for which target, how to use it, what was measured."""

from collections.abc import Mapping

FRONT = """---
base_model: {target}
library_name: draftsmith
tags:
- speculative-decoding
- {drafter}
---
"""

OWN = """proposal, so the text is the target's own; this drafter only decides how fast it comes.
"""
ADAPTED = """proposal.

**Adapted target (Medusa-2).** The files hold a low-rank adapter of {target} as well,
which loading merges into a copy of its weights in memory. What decodes, drafted or not, is that adapted model: lossless
means relative to it, not to {target} as published.
"""

USAGE = """
```python
from distill.decode import Decoder
from distill.export import load_drafter
from distill.target import TargetConfig, load_target
from distill.tree import Chain

target = load_target(TargetConfig(name="{target}"))
drafter = load_drafter("PATH/TO/THIS/FOLDER", target)
prompt = target.encode_chat([{{"role": "user", "content": "Why is the sky blue?"}}], add_generation_prompt=True)
answer = Decoder(drafter.target, drafter, plan=Chain(4)).generate([prompt], max_new_tokens=128)[0]
print(target.decode(answer.ids))
```
"""


def render(config: Mapping, provenance: Mapping) -> str:
    """Return the card's Markdown.

    Args:
        config: the export's ``config.json``.
        provenance: the export's ``provenance.json``; ``measured`` holds figures by name.
    """
    target, name = config["target"], config["drafter"]
    vocab = config["draft_vocab_size"]
    reads = ", ".join(str(tap) for tap in config["taps"])
    speaks = f"{vocab} of the target's {target['vocab_size']} tokens" if vocab else "the target's whole vocabulary"
    prints = ", ".join(f"{part} `{value}`" for part, value in target["fingerprint"].items())
    git = provenance.get("git", {})
    commit = f"`{git['commit']}`{' with local changes' if git.get('dirty') else ''}" if git.get("commit") else "unknown"
    lines = [
        FRONT.format(target=target["name"], drafter=name),
        f"# {name} drafter for {target['name']}\n",
        f"A small model that proposes tokens for {target['name']} in speculative decoding. The target checks every",
        ADAPTED.format(target=target["name"]) if config["config"].get("lora_rank") else OWN,
        *([f"- reads the target's hidden states entering layers {reads}"] if reads else []),
        f"- speaks {speaks}",
        f"- weights: {config['dtype']}, sha256 `{config['weights_sha256'][:16]}`",
        f"- works with one target only: {prints}\n",
        "## Use",
        USAGE.format(target=target["name"]),
        "## Measured\n",
        *_table(provenance.get("measured", {})),
        "\n## Made with\n",
        f"- {provenance.get('date', 'unknown date')}, commit {commit}",
        f"- `{' '.join(provenance.get('argv', []))}`",
        f"- data hash `{provenance.get('data_hash')}`; versions, hardware and the whole config: `provenance.json`\n",
    ]
    return "\n".join(lines)


def _table(measured: Mapping) -> list[str]:
    if not measured:
        return ["Nothing measured yet."]
    rows = [f"| {name} | {f'{value:.4g}' if isinstance(value, float) else value} |" for name, value in measured.items()]
    return ["| figure | value |", "| --- | --- |", *rows]


LICENCES = {
    "llama": "Llama models come under Meta's community licence, others of the family (SmolLM2) under Apache-2.0",
    "gemma": "Gemma models come under Google's terms of use",
    "gemma2": "Gemma models come under Google's terms of use",
    "gemma3_text": "Gemma models come under Google's terms of use",
}
"""What to look up about a family's licence; the others name theirs in the target's own repository."""


def render_foreign(config: Mapping, provenance: Mapping, *, reader: str, command: str, note: str) -> str:
    """Return the Markdown of an export in another program's layout.

    Args:
        config: of the native export it was made from.
        provenance: likewise.
        reader: the program.
        command: what serves it.
        note: what to know before relying on it.
    """
    target, name = config["target"], config["drafter"]
    licence = LICENCES.get(target["model_type"], "see the target's own repository")
    lines = [
        FRONT.format(target=target["name"], drafter=name),
        f"# {name} drafter for {target['name']}, for {reader}\n",
        f"Written from a native export (sha256 `{config['weights_sha256'][:16]}`); the text stays the target's own.\n",
        *([f"{note}\n"] if note else []),
        "## Use\n",
        f"```bash\n{command}\n```\n",
        "## Measured\n",
        *_table(provenance.get("measured", {})),
        "\nMeasured before the conversion; `draftsmith check` measures acceptance in the engine, side by side.\n",
        "## Licence\n",
        "A drafter is derived from its target's outputs and, in part, weights, so the target's licence applies:",
        f"{licence}.",
    ]
    return "\n".join(lines) + "\n"
