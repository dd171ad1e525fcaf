"""Curves of the report as inline SVG, for a page that is one file and looks well on paper and on a dark screen.

page.py sets colours and fonts. This module computes the geometry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 520, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 34  # of what is around the curve
_MARKED = 60  # more points than that are not marked one by one

Point = tuple[float, float]
Across = tuple[str, float, float]  # the x axis: what it is, where it begins and ends


def curve(points: Sequence[Point], across: Across, unit: str, low: float, high: float, kind: str, name: str) -> str:
    """points by rising x. low, high: what the y axis shows at least. kind: a class of the page's, for the colour;
    name: what it shows, for those who do not see it.
    """
    x_label, first, last = across
    ys = ticks(min(low, *(y for _, y in points)), max(high, *(y for _, y in points)), 4)
    if first == last:  # one point: in the middle
        first, last = first - 1, last + 1

    def at_x(x: float) -> float:
        return LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - ys[0]) / (ys[-1] - ys[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}" class="{kind}">']
    for y in ys:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at_y(y) + 4:.1f}" text-anchor="end">{y:,.10g}</text>')
    for x in (x for x in ticks(first, last, 6) if first <= x <= last):
        parts.append(f'<text x="{at_x(x):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{x:,.10g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_label)}</text>')
    where = [(at_x(x), at_y(y)) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
    floor = HEIGHT - BOTTOM
    parts.append(f'<polygon class="area" points="{where[0][0]:.1f},{floor} {line} {where[-1][0]:.1f},{floor}"/>')
    parts.append(f'<polyline class="line" points="{line}"/>')
    radius = 2.5 if len(points) <= _MARKED else 0
    for (x, y), (right, up) in zip(points, where, strict=True):
        said = escape(f"{x_label} {x:,.10g}: {y:.1f} {unit}")
        if radius:
            parts.append(f'<circle class="dot" cx="{right:.1f}" cy="{up:.1f}" r="{radius}"/>')
        parts.append(f'<circle class="hover" cx="{right:.1f}" cy="{up:.1f}" r="7"><title>{said}</title></circle>')
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from low or below to high or above, `about` as many steps."""
    if low == high:
        low, high = low - 1, high + 1
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    count = math.ceil(high / step - 1e-9) - first
    return [round((first + i) * step, 10) for i in range(count + 1)]
