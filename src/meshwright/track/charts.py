"""Charts as small inline SVG, drawn for `report.html`.

The SVG holds curves only, in a square of 100 by 100 that the page stretches to any width without touching the width of
lines; the words around it are HTML, so they keep their size on a phone.
"""

import itertools
import json
import math
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np

from meshwright.track.text import short

_MOST_POINTS = 1000
SMOOTH_FROM = 100
"""The count of points from which `smooth` changes them."""


@dataclass(frozen=True)
class Series:
    """One curve of a chart."""

    name: str
    x: np.ndarray
    y: np.ndarray
    """NaN and infinities are gaps."""
    look: Literal["faint", "line", "dots"] = "line"
    tone: Literal["train", "validation"] = "train"


@dataclass(frozen=True)
class Axis:
    """A range of values, and where each lies in it."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """The place of a value: 0 at the low end, 100 at the high end.

        Arguments:
            value: a finite number, above 0 on a logarithmic axis; it may lie outside the range.
        """
        low, high, at = (math.log(one) if self.log else one for one in (self.low, self.high, value))
        return 100 * (at - low) / (high - low)


def chart(title: str, series: list[Series], *, last_x: float, wide: bool = False) -> str:
    """Draw one chart; its y axis starts at 0.

    Arguments:
        title: what it shows.
        series: the curves, the later over the earlier.
        last_x: the last step of the run; the x axis starts at 0.
        wide: whether it fills the page's width, and shows losses: the y axis then starts near the lowest one, and is
            logarithmic where they span more than a factor of 3.

    Returns:
        HTML: a `<figure>`. The curves' points lie in it as JSON, for the page's script to show on hover.
    """
    drawn = [_thin(one) for one in series if np.isfinite(one.y).any()]
    open_tag = f'<figure class="{"chart wide" if wide else "chart"}"><figcaption>{escape(title)}'
    if not drawn:
        return f'{open_tag}</figcaption><p class="note">no finite values</p></figure>'
    values = np.concatenate([one.y[np.isfinite(one.y)] for one in drawn])
    y_axis, ticks, notes = _y_axis(values, from_zero=not wide)
    # A little room at the right, for the last dot.
    x_axis = Axis(0.0, last_x * 1.012)
    x_ticks = [tick for tick in _ticks(0.0, last_x) if tick <= last_x]
    curves = "".join(_curve(one, x_axis, y_axis) for one in drawn)
    rules = "".join(f'<path class="rule" d="M0 {_flipped(y_axis, tick)}H100"/>' for tick in ticks)
    y_labels = "".join(f'<span style="top:{_flipped(y_axis, tick)}%">{short(tick)}</span>' for tick in ticks)
    x_labels = "".join(f'<span style="left:{x_axis.place(tick):.2f}%">{short(tick)}</span>' for tick in x_ticks)
    label = escape(f"{title}: " + "; ".join(_in_words(one) for one in drawn), quote=True)
    points = {"x_end": x_axis.high, "series": [_points(one) for one in drawn]}
    return (
        f'{open_tag}{_legend(drawn)}</figcaption><div class="plot"><div class="y">{y_labels}</div><div class="area">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{label}">{rules}{curves}</svg>'
        f'<div class="x">{x_labels}</div></div></div>{_note(notes + _gaps(series))}'
        f'<script type="application/json">{json.dumps(points, separators=(",", ":"))}</script></figure>'
    )


def smooth(values: np.ndarray) -> np.ndarray:
    """A centred mean over a fiftieth of the points; gaps are left out of it.

    Arguments:
        values: the points, NaN and infinities as gaps.

    Returns:
        As many points; NaN where all that the mean covers is gaps.
    """
    window = np.ones(2 * (len(values) // SMOOTH_FROM) + 1)
    good = np.isfinite(values)
    total = np.convolve(np.where(good, values, 0.0), window, mode="same")
    count = np.convolve(good.astype(np.float64), window, mode="same")
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0.5)


def _thin(one: Series) -> Series:
    """The lowest and the highest point of each stretch, so that no spike is lost."""
    count = len(one.x)
    y = np.where(np.isfinite(one.y), one.y, np.nan)
    if count <= _MOST_POINTS:
        return Series(one.name, one.x, y, one.look, one.tone)
    edges = np.linspace(0, count, _MOST_POINTS // 2 + 1).astype(int)
    keep = {0, count - 1}
    for start, stop in itertools.pairwise(edges):
        part = y[start:stop]
        if np.isnan(part).all():
            keep.add(start)
        else:
            keep |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    index = np.array(sorted(keep))
    return Series(one.name, one.x[index], y[index], one.look, one.tone)


def _y_axis(values: np.ndarray, from_zero: bool) -> tuple[Axis, list[float], list[str]]:
    """The axis that suits finite values, the ticks on it, and what the reader must be told about it."""
    low, top = float(values.min()), float(values.max())
    if from_zero:
        low = min(low, 0.0)
    high, notes = top, []
    usual = low + 1.3 * (float(np.percentile(values, 98)) - low)
    if usual > low and top - low > 4 * (usual - low):
        # A few spikes would flatten all the rest.
        high, notes = usual, [f"cut at the top; highest value {short(top)}"]
    if high == low:
        high = low + (abs(low) or 1.0)
    if not from_zero and low > 0 and high > 3 * low:
        return Axis(low / 1.04, high * 1.04, log=True), _log_ticks(low, high), ["logarithmic scale", *notes]
    room = 0.0 if from_zero else 0.03 * (high - low)
    axis = Axis(low - room, high + 0.03 * (high - low))
    return axis, [tick for tick in _ticks(low, high) if axis.low <= tick <= axis.high], notes


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, about five to the range; the outermost may lie a little outside it."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for sizes in ((1, 1.5, 2, 3, 4, 6, 8), (1, 2, 5), (1,)):
        ticks = [float(f"{size}e{decade}") for decade in decades for size in sizes]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 8:
            break
    return ticks


def _flipped(axis: Axis, value: float) -> str:
    return f"{100 - axis.place(value):.2f}"


def _curve(one: Series, x_axis: Axis, y_axis: Axis) -> str:
    places = [
        f"{x_axis.place(x):.2f} {_flipped(y_axis, y)}" if math.isfinite(y) else ""
        for x, y in zip(one.x, one.y, strict=True)
    ]
    # A line of no length with round ends is a dot, so a point between two gaps shows; a circle would be stretched.
    line = "".join(
        (f"L{place}" if before else f"M{place}h0") for before, place in itertools.pairwise(["", *places]) if place
    )
    curve = f'<path class="{"faint" if one.look == "faint" else "line"} {one.tone}" d="{line}"/>'
    if one.look != "dots":
        return curve
    return f'{curve}<path class="dots {one.tone}" d="{"".join(f"M{place}h0" for place in places if place)}"/>'


def _points(one: Series) -> dict[str, Any]:
    return {
        "name": one.name,
        "css": f"{one.look} {one.tone}",
        "xs": [int(x) for x in one.x],
        "ys": [float(f"{y:.5g}") if math.isfinite(y) else None for y in one.y],
    }


def _legend(series: list[Series]) -> str:
    if len(series) < 2:
        return ""
    items = "".join(f'<span class="{one.look} {one.tone}">{escape(one.name)}</span>' for one in series)
    return f'<span class="legend">{items}</span>'


def _in_words(one: Series) -> str:
    good = one.y[np.isfinite(one.y)]
    return f"{one.name} from {short(good[0])} to {short(good[-1])}, lowest {short(good.min())}"


def _gaps(series: list[Series]) -> list[str]:
    notes = []
    # The first of each tone only: the smoothed curve has the gaps of the raw one.
    for one in {one.tone: one for one in reversed(series)}.values():
        bad = ~np.isfinite(one.y)
        if bad.any():
            count = f"{bad.sum():,} of {bad.size:,} records"
            notes.append(f"{one.name} not finite at {count}, first at step {one.x[bad][0]:,.0f}")
    return notes


def _note(parts: list[str]) -> str:
    return f'<p class="note">{escape("; ".join(parts))}</p>' if parts else ""
