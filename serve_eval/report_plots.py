"""The report's plots: small SVG drawings that take their colours from the page and scale to any width.

Series colours are the CSS classes ``s0`` .. ``s5`` (the Okabe-Ito palette, told apart by colour-blind readers);
everything is plain markup, so the page needs no script and no network.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 480
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 14, 46
N_COLOURS = 6


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one colour; ``colour`` is the palette index."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One dot with whiskers; ``low`` and ``high`` are None where there is no interval."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    colour: int = 0


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers that span [low, high]."""
    span = high - low or abs(high) or 1.0
    raw = span / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def number(value: float) -> str:
    """Return a short label: 0.25, 1.5, 12, 3k."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _label_width(labels: Sequence[str]) -> int:
    """Room for row labels, at the larger letters of narrow screens."""
    return min(max(round(8.8 * max(map(len, labels))) + 12, 60), 200)


class _Canvas:
    """Collects markup in a plot area with linear axes."""

    def __init__(self, *, height: int, x: tuple[float, float], y: tuple[float, float], left: int = LEFT):
        self.height, self.left = height, left
        self.parts: list[str] = []
        self._x, self._y = x, y

    def x(self, value: float) -> float:
        low, high = self._x
        return self.left + (value - low) / ((high - low) or 1) * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        return self.height - BOTTOM - (value - low) / ((high - low) or 1) * (self.height - BOTTOM - TOP)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>')

    def text(self, x: float, y: float, text: str, *, anchor: str = "middle", css: str = "") -> None:
        name = f' class="{css}"' if css else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{name}>{escape(text)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, css: str, title: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" rx="1.5" '
            f'class="{css}"><title>{escape(title)}</title></rect>'
        )

    def dot(self, x: float, y: float, css: str, title: str, radius: float = 4.5) -> None:
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{css}"><title>{escape(title)}</title></circle>'
        )

    def y_axis(self, ticks: Sequence[float], label: str, *, percent: bool = False) -> None:
        for tick in ticks:
            at = self.y(tick)
            self.line(self.left, at, WIDTH - RIGHT, at, "grid")
            self.text(self.left - 6, at + 4.5, f"{tick:.0%}" if percent else number(tick), anchor="end")
        if not label:
            return
        self.parts.append(
            f'<text transform="translate(12 {(self.height - BOTTOM + TOP) / 2:.0f}) rotate(-90)" '
            f'text-anchor="middle" class="label">{escape(label)}</text>'
        )

    def x_axis(self, ticks: Sequence[tuple[float, str]], label: str) -> None:
        base = self.height - BOTTOM
        self.line(self.left, base, WIDTH - RIGHT, base, "axis")
        for at, text in ticks:
            self.text(self.x(at), base + 17, text)
        self.text((self.left + WIDTH - RIGHT) / 2, self.height - 6, label, css="label")

    def svg(self, description: str) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(description, quote=True)}">'
            + "".join(self.parts)
            + "</svg>"
        )


def bars(series: Sequence[Series], *, x_label: str, y_label: str = "", description: str, height: int = 230) -> str:
    """Draw grouped vertical bars of shares at whole-number x, with the value over each bar where there is room."""
    groups = sorted({x for s in series for x in s.x})
    top = max((y for s in series for y in s.y), default=1.0)
    ticks = [0, 0.25, 0.5, 0.75, 1.0] if top > 0.6 else nice_ticks(0, top * 1.08)
    canvas = _Canvas(height=height, x=(min(groups, default=1) - 0.5, max(groups, default=1) + 0.5), y=(0, ticks[-1]))
    canvas.y_axis(ticks, y_label, percent=True)
    width = (canvas.x(1) - canvas.x(0)) * 0.8 / max(len(series), 1)
    for index, one in enumerate(series):
        for x, y in zip(one.x, one.y, strict=True):
            left = canvas.x(x) + (index - len(series) / 2) * width
            shown = f"{y:.0%}"
            canvas.rect(
                left + 0.5, canvas.y(y), width - 1, canvas.y(0) - canvas.y(y), f"f{one.colour}", f"{one.name}: {shown}"
            )
            if width >= 30:
                canvas.text(left + width / 2, canvas.y(y) - 4, shown, css="value")
    canvas.x_axis([(x, f"{x:g}") for x in groups], x_label)
    return canvas.svg(description)


def lines(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    description: str,
    log_x: bool = False,
    y_from_zero: bool = False,
    points: Sequence[Series] = (),
    reference: float | None = None,
    height: int = 250,
) -> str:
    """Draw ``series`` as lines, with dots when there are few, and ``points`` as loose dots.

    ``log_x`` places x by its logarithm to base 2; ``reference`` is the y of a dashed line; ``description`` is for
    readers who cannot see the plot.
    """

    def place(x: float) -> float:
        return math.log2(x) if log_x else x

    every = [*series, *points]
    xs = [place(x) for s in every for x in s.x]
    ys = [y for s in every for y in s.y] + ([] if reference is None else [reference])
    ticks = nice_ticks(0 if y_from_zero else min(ys), max(ys))
    canvas = _Canvas(height=height, x=(min(xs), max(xs)), y=(ticks[0], ticks[-1]))
    canvas.y_axis(ticks, y_label)
    if reference is not None:
        canvas.line(canvas.left, canvas.y(reference), WIDTH - RIGHT, canvas.y(reference), "reference")
    for one in series:
        path = " ".join(f"{canvas.x(place(x)):.1f},{canvas.y(y):.1f}" for x, y in zip(one.x, one.y, strict=True))
        canvas.parts.append(f'<polyline points="{path}" class="l{one.colour}"/>')
        if len(one.x) <= 24:
            for x, y in zip(one.x, one.y, strict=True):
                canvas.dot(canvas.x(place(x)), canvas.y(y), f"f{one.colour}", f"{one.name}: {number(x)}, {number(y)}")
    for one in points:
        for x, y in zip(one.x, one.y, strict=True):
            canvas.dot(
                canvas.x(place(x)),
                canvas.y(y),
                f"f{one.colour} ring",
                f"{one.name}: {number(x)}, {number(y)}",
                radius=6,
            )
    own = sorted({x for s in series for x in s.x})
    shown = [x for x in own if math.log2(x).is_integer()] if log_x else nice_ticks(min(xs), max(xs), 6)
    canvas.x_axis([(place(x), number(x)) for x in shown if min(xs) <= place(x) <= max(xs)], x_label)
    return canvas.svg(description)


def intervals(items: Sequence[Interval], *, x_label: str, description: str, reference: float = 1.0) -> str:
    """Draw one row per label; dots of one label (several colours) share its row."""
    labels = list(dict.fromkeys(item.label for item in items))
    per_label = max(sum(item.label == label for item in items) for label in labels)
    pitch = 15 * per_label + 12
    height = TOP + BOTTOM + pitch * len(labels)
    left = _label_width(labels)
    ends = [v for item in items for v in (item.low, item.value, item.high) if v is not None]
    ticks = nice_ticks(min(*ends, reference), max(*ends, reference), 6)
    canvas = _Canvas(height=height, x=(ticks[0], ticks[-1]), y=(0, 1), left=left)
    for tick in ticks:
        canvas.line(canvas.x(tick), TOP, canvas.x(tick), height - BOTTOM, "grid")
    canvas.line(canvas.x(reference), TOP - 6, canvas.x(reference), height - BOTTOM, "reference")
    for row, label in enumerate(labels):
        own = [item for item in items if item.label == label]
        middle = TOP + pitch * (row + 0.5)
        canvas.text(left - 8, middle + 4.5, label, anchor="end")
        for index, item in enumerate(own):
            y = middle + (index - (len(own) - 1) / 2) * 15
            if item.low is not None and item.high is not None:
                canvas.line(canvas.x(item.low), y, canvas.x(item.high), y, f"l{item.colour}")
            canvas.dot(canvas.x(item.value), y, f"f{item.colour}", f"{label}: {item.value:.2f}x")
    canvas.x_axis([(tick, number(tick)) for tick in ticks], x_label)
    return canvas.svg(description)


def stacks(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, x_label: str, description: str, unit: float = 1.0
) -> str:
    """Draw horizontal stacked bars: (label, [(part, value), ...]); parts take the colours in order."""
    left = _label_width([label for label, _ in rows])
    height = TOP + BOTTOM + 36 * len(rows)
    totals = [sum(value for _, value in parts) * unit for _, parts in rows]
    ticks = nice_ticks(0, max(totals))
    canvas = _Canvas(height=height, x=(0, ticks[-1]), y=(0, 1), left=left)
    for tick in ticks:
        canvas.line(canvas.x(tick), TOP, canvas.x(tick), height - BOTTOM, "grid")
    for row, (label, parts) in enumerate(rows):
        top = TOP + 36 * row + 6
        canvas.text(left - 8, top + 17, label, anchor="end")
        start = 0.0
        for colour, (part, value) in enumerate(parts):
            size = value * unit
            x = canvas.x(start)
            canvas.rect(x, top, canvas.x(start + size) - x, 24, f"f{colour}", f"{label}, {part}: {number(size)}")
            start += size
    canvas.x_axis([(tick, number(tick)) for tick in ticks], x_label)
    return canvas.svg(description)
