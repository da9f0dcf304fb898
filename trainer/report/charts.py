"""Charts as SVG: lines by step, and what is stacked on each other. They need no script to be seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

from trainer.report.markup import escape, number
from trainer.report.runs import Points

WIDTH, HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 24
_MOST = 360
"""Points of a line that are drawn; of more, the least and the largest of each piece."""
_FEW = 24
"""Points up to which each is marked, and no mean is drawn."""


@dataclass(frozen=True)
class Line:
    """One metric of one run, or one layer of a stack."""

    name: str
    style: str
    """Classes, which give it its colour and hide it."""
    points: Points


@dataclass(frozen=True)
class Scale:
    """From values to the drawing's units."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, about: int) -> list[float]:
        """Round values within, at most about `about` of them: 1, 2, 2.5 or 5 times a power of ten apart."""
        rough = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(rough))
        apart = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
        first = math.ceil(self.low / apart - 1e-9)
        return [n * apart for n in range(first, math.floor(self.high / apart + 1e-9) + 1)]


@dataclass(frozen=True)
class Chart:
    """A chart with its caption."""

    title: str
    lines: list[Line]
    unit: str = ""
    smooth: bool = False
    """Draw a running mean, and the values faintly behind it."""
    stacked: bool = False
    note: str = ""
    """HTML below the drawing."""
    style: str = ""
    """Classes of the whole figure, by which a legend hides it."""
    bounds: tuple[float, float] | None = None
    """Of the steps; None: those of the lines."""

    def render(self, place: int) -> str:
        """The figure; place: its number on the page."""
        x, y = self._scales()
        shapes = [*_axes(x, y), *(self._areas(x, y) if self.stacked else self._curves(x, y))]
        last = ", ".join(
            f"{line.name} {number(line.points[-1][1])}{self.unit} at step {line.points[-1][0]:g}" for line in self.lines
        )
        shown = f"{number(self.lines[0].points[-1][1])}{self.unit}" if len(self.lines) == 1 else ""
        return (
            f'<figure class="chart {self.style}" data-chart="{place}"><figcaption><h3>{escape(self.title)}</h3>'
            f'<output aria-live="off">{escape(shown)}</output></figcaption>'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{self.title} by step. {last}")}">'
            f'{"".join(shapes)}<g class="cursor"></g></svg>{self.note}</figure>'
        )

    def data(self) -> dict[str, Any]:
        """What the page's script needs to show values: its lines as drawn, in the drawing's units and as text."""
        x, y = self._scales()
        lines, tops = [], dict.fromkeys((step for line in self.lines for step, _ in line.points), 0.0)
        for line in self.lines:
            for step, value in line.points:
                tops[step] = value + (tops[step] if self.stacked else 0.0)
            shown = thinned(line.points, _MOST)
            points = [[step, round(x(step), 1), round(y(tops[step]), 1), number(value)] for step, value in shown]
            lines.append({"name": line.name, "style": line.style, "points": points})
        return {"unit": self.unit, "lines": lines}

    def _scales(self) -> tuple[Scale, Scale]:
        steps = [step for line in self.lines for step, _ in line.points]
        first, last = self.bounds or (min(steps), max(steps))
        values = [value for line in self.lines for _, value in line.points]
        if self.stacked:
            totals: dict[float, float] = {}
            for line in self.lines:
                for step, value in line.points:
                    totals[step] = totals.get(step, 0.0) + value
            values = [0.0, *totals.values()]
        low, high = _range(min(values), max(values))
        return (
            Scale(first, max(last, first + 1), _LEFT, WIDTH - _RIGHT),
            Scale(low, high, HEIGHT - _BOTTOM, _TOP),
        )

    def _curves(self, x: Scale, y: Scale) -> list[str]:
        shapes = []
        for line in self.lines:
            smooth = self.smooth and len(line.points) > _FEW
            drawn = thinned(line.points, _MOST)
            path = _path([(x(step), y(value)) for step, value in drawn])
            shapes.append(f'<path class="line {line.style}{" faint" if smooth else ""}" d="{path}"/>')
            if smooth:
                mean = thinned(running_mean(line.points), _MOST)
                shapes.append(
                    f'<path class="line {line.style}" d="{_path([(x(step), y(value)) for step, value in mean])}"/>'
                )
            elif len(drawn) <= _FEW:
                dots = (f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.2"/>' for step, value in drawn)
                shapes.append(f'<g class="dots {line.style}">{"".join(dots)}</g>')
        return shapes

    def _areas(self, x: Scale, y: Scale) -> list[str]:
        """Each layer on those before it."""
        shapes, below = [], [(step, 0.0) for step, _ in self.lines[0].points]
        for line in self.lines:
            above = [(step, low + value) for (step, low), (_, value) in zip(below, line.points, strict=True)]
            outline = above + below[::-1]
            if len(below) == 1:  # one step is a bar
                (step, low), (_, high) = below[0], above[0]
                outline = [(step, low), (step, high), (step + 0.5, high), (step + 0.5, low)]
            path = _path([(x(step), y(value)) for step, value in outline])
            shapes.append(f'<path class="area {line.style}" d="{path}Z"/>')
            below = above
        return shapes


def _range(low: float, high: float) -> tuple[float, float]:
    """Of an axis: with some air, and from 0 where that is not far."""
    if low == high:
        return (0.0, 1.0) if low == 0.0 else (low - abs(low) * 0.1, high + abs(high) * 0.1)
    air = (high - low) * 0.06
    if 0.0 <= low < 0.5 * high:
        return 0.0, high + air
    return low - air, high + air


def _axes(x: Scale, y: Scale) -> list[str]:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    shapes = []
    for value in y.ticks(4):
        place = f"{y(value):.1f}"
        shapes.append(f'<path class="grid" d="M{_LEFT} {place}H{right}"/>')
        shapes.append(
            f'<text class="tick end" x="{_LEFT - 6}" y="{place}" dy="0.32em">{number(round(value, 12))}</text>'
        )
    for value in x.ticks(5):
        if value == int(value):  # there are no steps between two
            shapes.append(
                f'<text class="tick middle" x="{x(value):.1f}" y="{bottom + 16}">{number(round(value))}</text>'
            )
    return shapes


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def thinned(points: Points, most: int) -> Points:
    """At most `most` of the points (an even number), with every extreme: the least and the largest of each piece."""
    if len(points) <= most:
        return points
    pieces, kept = most // 2, []
    for k in range(pieces):
        piece = points[k * len(points) // pieces : (k + 1) * len(points) // pieces]
        extremes = {min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])}
        kept += sorted(extremes)
    return kept


def running_mean(points: Points) -> Points:
    """The mean of each value and its neighbours, a twentieth of all on each side, fewer at the ends."""
    reach = max(2, len(points) // 20)
    sums = [0.0, *accumulate(value for _, value in points)]
    means = []
    for place, (step, _) in enumerate(points):
        first, behind = max(0, place - reach), min(len(points), place + reach + 1)
        means.append((step, (sums[behind] - sums[first]) / (behind - first)))
    return means


def binned(points: Points, most: int) -> Points:
    """At most `most` points: the means of pieces of one length, but for the last, at the steps in their middles."""
    size = -(-len(points) // most)
    pieces = [points[first : first + size] for first in range(0, len(points), size)]
    return [(fmean(step for step, _ in piece), fmean(value for _, value in piece)) for piece in pieces]
