"""The report from a small stored benchmark: structure, numbers, no outside references, and how it draws."""

import csv
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from distill.errors import UserError
from serve_eval import report, report_plots
from serve_eval.bench import make_rows
from serve_eval.cost import CostReport, RoundCost, VerifyCurve, predict, read_costs, write_costs
from serve_eval.rows import Record, write_jsonl
from serve_eval.summary import print_summary

VOID = {"meta", "br"}


class Outline(HTMLParser):
    """Checks nesting and collects tags, attributes and visible text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)


class Arm:
    def __init__(self, name):
        self.name, self.kind = name, {"ar": "ar", "hf": "hf"}.get(name, "spec")
        self.tree = name if self.kind == "spec" else None


def stored():
    """Two sets, two categories in the first, four arms, one differing output."""
    records = []
    for number, (set_, category) in enumerate([("mt", "math"), ("mt", "math"), ("mt", "<i>prose"), ("code", "all")]):
        for arm in ("ar", "chain-3", "dynamic-2x2-5", "hf"):
            spec = arm not in ("ar", "hf")
            emitted = {"ar": [1] * 6, "hf": []}.get(arm, [3, 1, 2])
            records.append(
                Record(
                    arm=arm,
                    prompts=set_,
                    category=category,
                    id=str(number),
                    turn=0,
                    prompt_tokens=9,
                    ids=[10, 11, 12, 13, 14, 15, 16],
                    emitted=emitted,
                    accepted=[2, 0, 1] if spec else [0] * len(emitted),
                    offered=[3, 3, 2] if spec else [0] * len(emitted),
                    ttft_s=[0.1],
                    decode_s=[{"ar": 1.0, "chain-3": 0.5, "dynamic-2x2-5": 0.8, "hf": 1.5}[arm] + 0.01 * number],
                    matches=not (arm == "chain-3" and number == 0),
                    peak_memory_bytes=5 << 20,
                    question="Why <b>is</b> the sky & sea blue?" if spec and number == 0 else "",
                    pieces=["The", " sky", " <", "&", " so", "\n", "blue"] if spec and number == 0 else None,
                )
            )
    records[1].first_difference, records[1].difference_gap, records[1].difference_tie = 4, 0.02, True
    common = {
        "target": "tiny-llama",
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "repeats": 1,
        "settings": {
            "command": "python -m serve_eval task=bench checkpoint=runs/x 'prompts=[mt,code]'",
            "checkpoint": "runs/x",
            "max_new_tokens": 7,
            "ignore_eos": False,
            "warmup": 1,
            "seed": 0,
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "target_fingerprint": {"weights": "00ff"},
            "drafter": "eagle3",
            "drafter_parameters": 1234,
        },
        "provenance": {
            "date": "2026-01-02T03:04:05+00:00",
            "argv": ["/a/serve_eval/__main__.py", "task=bench"],
            "git": {"commit": "abc123", "dirty": False},
            "versions": {"torch": "2.13.0", "draftsmith": None},
            "hardware": {"cpu": "Some CPU", "cores": 2, "gpus": [], "platform": "Linux"},
        },
    }
    arms = [Arm(name) for name in ("ar", "chain-3", "dynamic-2x2-5", "hf")]
    rows = make_rows(records, arms, seed=0, common=common)
    curve = VerifyCurve(context=64, widths=[1, 4, 5, 8], seconds=[0.1, 0.12, 0.13, 0.2], ratio=[1.0, 1.2, 1.3, 2.0])
    rounds = [
        RoundCost(arm=a, rounds=3, nodes=n, tau=t, target_s=0.1, draft_s=d, extend_s=d / 2, host_s=0.01)
        for a, n, t, d in (("ar", 1, 1.0, 0.0), ("chain-3", 4, 2.0, 0.02), ("dynamic-2x2-5", 5, 2.0, 0.03))
    ]
    costs = CostReport(
        curve=curve, rounds=rounds, predictions=predict(curve, rounds, {"chain-3": 2.0, "dynamic-2x2-5": 2.0}, {})
    )
    return rows, records, costs


@pytest.fixture
def folder(tmp_path):
    rows, records, costs = stored()
    write_jsonl(tmp_path / "results.jsonl", rows)
    write_jsonl(tmp_path / "records.jsonl", records)
    write_costs(tmp_path / "cost.json", costs)
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "train/loss", "val/tau"])
        writer.writeheader()
        writer.writerows(
            {"step": s, "train/loss": 5 - s / 10, "val/tau": 1 + s / 50 if s % 20 == 0 else ""}
            for s in range(10, 50, 10)
        )
    return tmp_path


def test_the_page_is_well_formed_and_needs_nothing_from_outside(folder):
    page = report.run(report.Config(results=str(folder), run=str(folder))).read_text(encoding="utf-8")
    outline = Outline(page)
    assert not {"script", "link", "iframe", "img"} & set(outline.tags)
    assert not [value for name, value in outline.attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert not re.findall(r"https?:|url\(|@import", page)
    assert outline.tags.count("svg") == 7  # speedup, depth, lengths, verify, round, two training curves
    assert ("viewport", "width=device-width, initial-scale=1") in [
        (dict(outline.attributes).get("name"), "width=device-width, initial-scale=1")
    ]


def test_the_page_shows_the_figures_of_the_best_plan_and_all_arms(folder):
    page = report.run(report.Config(results=str(folder), run=str(folder))).read_text(encoding="utf-8")
    text = " ".join(" ".join(Outline(page).texts).split())
    rows, *_ = stored()
    best = next(r for r in rows if r.arm == "chain-3" and r.prompts == "mt" and r.category == "all")
    assert f"{best.speedup_total:.2f}× decode speed of chain-3 over plain decoding on mt" in text
    for expected in (
        "2.00 tokens per target pass",
        "66.7 % of 3 outputs",
        "33.3 % part ways at a tie",
        "1 output differs from ar, at a tie",
        "0.02",
        "abc123",
    ):
        assert expected in text, expected
    for arm in ("ar", "chain-3", "dynamic-2x2-5", "hf"):
        assert f" {arm} " in text
    assert "python -m serve_eval task=bench checkpoint=runs/x 'prompts=[mt,code]'" in text
    assert "Started as python -m serve_eval task=bench" in text


def test_texts_are_escaped_and_drafted_tokens_marked(folder):
    page = report.run(report.Config(results=str(folder))).read_text(encoding="utf-8")
    assert "<b>is</b>" not in page
    assert "Why &lt;b&gt;is&lt;/b&gt; the sky &amp; sea blue?" in page
    assert "&lt;i&gt;prose" in page
    tokens = re.findall(r'<span( class="d")? title="([^"]*)">([^<]*)</span>', page)[:7]
    assert [bool(drafted) for drafted, *_ in tokens] == [False, True, True, False, False, True, False]
    assert [note for _, note, _ in tokens][:2] == ["first token, from the prefill", "pass 1: 2 accepted of depth 3"]
    assert "".join(piece for *_, piece in tokens) == "The sky &lt;&amp; so\nblue"


def test_a_benchmark_without_costs_training_or_drafter_still_makes_a_page(tmp_path):
    rows, records, _ = stored()
    plain = [r for r in rows if r.kind != "spec"]
    page = report.render(plain, [r for r in records if r.arm in ("ar", "hf")], None)
    outline = Outline(page)
    assert "svg" not in outline.tags
    assert "Where the time goes" not in page


def test_a_slower_drafter_is_called_slower():
    rows, records, costs = stored()
    for row in rows:
        row.speedup_total = 0.8 if row.kind == "spec" else row.speedup_total
    assert "Slower than plain decoding here" in report.render(rows, records, costs)


def test_results_of_another_version_or_none_are_refused(folder, tmp_path):
    with pytest.raises(UserError, match="results must be a folder"):
        report.run(report.Config())
    with pytest.raises(UserError, match="must exist"):
        report.run(report.Config(results=str(tmp_path / "none")))
    path = folder / "cost.json"
    path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 7'))
    with pytest.raises(UserError, match="schema version must be 2, got 7"):
        report.run(report.Config(results=str(folder)))
    path.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        read_costs(path)


def test_bars_stand_where_their_values_say():
    drawn = report_plots.bars(
        [report_plots.Series(name="a", x=[1, 2], y=[0.5, 1.0])], x_label="x", description="d & e", height=246
    )
    heights = [float(h) for h in re.findall(r'<rect [^>]*height="([\d.]+)"', drawn)]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)
    assert 'aria-label="d &amp; e"' in drawn


def test_interval_plot_places_value_between_its_ends():
    item = report_plots.Interval(label="all", value=1.5, low=1.25, high=2.0)
    drawn = report_plots.intervals([item], x_label="x", description="d")
    whisker = re.search(r'<line x1="([\d.]+)" y1="[\d.]+" x2="([\d.]+)" y2="[\d.]+" class="l0"', drawn)
    low, high = float(whisker[1]), float(whisker[2])
    dot = float(re.search(r'<circle cx="([\d.]+)"', drawn)[1])
    assert (dot - low) / (high - low) == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize(
    "low, high, expected",
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1.0]),
        (0, 7, [0, 2, 4, 6, 8]),
        (0.9, 1.9, [0.75, 1.0, 1.25, 1.5, 1.75, 2.0]),
        (3, 3, None),
    ],
)
def test_ticks_are_round_and_span_the_range(low, high, expected):
    ticks = report_plots.nice_ticks(low, high)
    assert expected is None or ticks == pytest.approx(expected)
    assert ticks[0] <= low
    assert ticks[-1] >= high


def test_the_terminal_summary_fits_a_narrow_window():
    rows, _, costs = stored()
    out = io.StringIO()
    print_summary(rows, costs, where=Path("nowhere"), console=Console(width=80, file=out))
    text = out.getvalue()
    best = next(r for r in rows if r.arm == "chain-3")
    assert f"{best.speedup_total:.2f} [{best.speedup_ci[0]:.2f}, {best.speedup_ci[1]:.2f}]" in text
    assert "…" not in text


@pytest.mark.slow
def test_a_browser_draws_the_page(folder):
    browser = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
    if browser is None:
        pytest.skip("no chromium here")
    page, shot = report.run(report.Config(results=str(folder), run=str(folder))), folder / "shot.png"
    subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--screenshot={shot}",
            "--window-size=390,2000",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    assert shot.stat().st_size > 10_000
