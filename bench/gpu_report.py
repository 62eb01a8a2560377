"""What ``bench.gpu_check`` prints: plain text, for a terminal on a machine that has little installed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def welcome(machine: Mapping[str, Any]) -> str:
    """What is about to be measured, and a warning where it is a CPU."""
    gpu = machine.get("gpu") or {}
    versions = machine.get("versions") or {}
    name = gpu.get("name") or (machine.get("hardware") or {}).get("cpu", "unknown")
    text = (
        f"{machine['shape']} on {machine['device']} ({name}), "
        f"torch {versions.get('torch')}, transformers {versions.get('transformers')}"
    )
    if not machine["device"].startswith("cuda"):
        text += "\nNo GPU: this shows that the script runs; its figures mean nothing."
    return text


def line(part: Mapping[str, Any]) -> str:
    """One part as it ends."""
    counted = ", ".join(f"{name} {_short(value)}" for name, value in part["detail"].items() if name != "traceback")
    return f"{part['status']:9}{part['name']} ({part['seconds']:.1f} s) {part['note'] or counted}".rstrip()


def summary(report: Mapping[str, Any], path: Path) -> str:
    """All figures in one table, then what failed and what was left out."""
    parts = report["parts"]
    rows = [("figure", "value", "unit", "limit", "set by", "note")]
    for m in (figure for part in parts for figure in part["figures"]):
        limit = "" if m["limit"] is None else number(m["limit"])
        bar = "" if m["met"] is None else f"bar {m['bar']:g} {'met' if m['met'] else 'missed'}"
        note = "; ".join(text for text in (bar, m["note"]) if text)
        rows.append((f"{m['part']}: {m['name']}", number(m["value"]), m["unit"], limit, m["limit_name"], note))
    a, b, c, d, e = (max(len(row[i]) for row in rows) for i in range(5))
    lines = ["", welcome(report["machine"])] if report["machine"] else [""]
    for figure, value, unit, limit, name, note in rows:
        lines.append(f"{figure:<{a}}  {value:>{b}} {unit:<{c}}  {limit:>{d}} {name:<{e}}  {note}".rstrip())
    count = {
        status: sum(p["status"] == status for p in parts) for status in ("passed", "measured", "failed", "skipped")
    }
    lines += ["", ", ".join(f"{n} {status}" for status, n in count.items()) + f" in {report['seconds']:.0f} s; {path}"]
    lines += [f"skipped {p['name']}: {p['note']}" for p in parts if p["status"] == "skipped"]
    lines += [f"FAILED {p['name']}: {p['note']}" for p in parts if p["status"] == "failed"]
    return "\n".join(lines)


def number(value: float) -> str:
    """Four significant digits at most."""
    if value != value:  # NaN: could not be measured
        return "-"
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 20 else 3}f}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "/".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
