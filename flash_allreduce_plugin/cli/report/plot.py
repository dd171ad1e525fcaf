"""The curves of the report: matplotlib draws SVG, and the page sets the colours, for dark screens too."""

from __future__ import annotations

import io
from collections.abc import Sequence
from xml.etree import ElementTree

_MARKED = 60  # most points with a mark each
# Colours for matplotlib, which the page's style replaces.
_COLOURS = {"#000001": "var(--ink)", "#000002": "var(--rule)"}
_INK, _GRID = _COLOURS

Point = tuple[float, float]
Across = tuple[str, float, float]  # the x axis: its label, its first and its last value


def curve(points: Sequence[Point], across: Across, unit: str, low: float, high: float, kind: str, name: str) -> str:
    """Return the SVG element of a curve. Each point has a title, which a browser shows under the mouse.

    points: by rising x. low, high: the least range of the y axis. kind: a class of the page's style, for the colour.
    name: the description for those who do not see the curve.
    """
    import matplotlib
    from matplotlib.figure import Figure

    x_label, first, last = across
    xs, ys = zip(*points, strict=True)
    # The names of the elements depend on the salt only, not on the time or a random number.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 8}):
        figure = Figure((5.2, 1.9), frameon=False)
        axes = figure.add_axes((0.09, 0.18, 0.88, 0.76), frameon=False)
        axes.plot(xs, ys, color=_INK, linewidth=1.5, clip_on=False, gid="line")
        if kind == "saved":
            axes.fill_between(xs, ys, min(low, *ys), color=_INK, alpha=0.1, linewidth=0, clip_on=False)
        group, size = ("points", 4) if len(points) <= _MARKED else ("hidden points", 10)
        axes.plot(xs, ys, color=_INK, linestyle="", marker="o", markersize=size, clip_on=False, gid=group)
        axes.set_ylim(min(low, *ys), max(high, *ys))
        axes.set_xlim(*(first, last) if first < last else (first - 1, last + 1))
        axes.locator_params(nbins=5)
        axes.ticklabel_format(style="plain", useOffset=False)
        axes.set_xlabel(x_label, loc="right", labelpad=1)
        axes.grid(axis="y", color=_GRID, linewidth=0.7, clip_on=False)
        axes.tick_params(length=0)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    said = [f"{x_label} {x:,.10g}: {y:.1f} {unit}" for x, y in points]
    return _element(buffer.getvalue(), said, kind, name)


def _element(svg: str, said: Sequence[str], kind: str, name: str) -> str:
    """Return the root of a drawing as an element of a page: no namespaces, the page's style, a title a point."""
    root = ElementTree.fromstring(svg)
    root.remove(root[0])  # a style for the whole page
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key in [key for key in element.attrib if key.startswith("{")]:
            element.set(key.rpartition("}")[2], element.attrib.pop(key))
        element.tail = None
        if element.tag == "text":
            element.set("text-anchor", element.attrib.pop("style").partition("text-anchor: ")[2].partition(";")[0])
        else:
            element.text = None
        for drawn, shown in _COLOURS.items() if "style" in element.attrib else ():
            element.set("style", element.attrib["style"].replace(drawn, shown))
        if element.tag == "g" and (group := element.attrib.pop("id", "")) in ("line", "points", "hidden points"):
            element.set("class", group)
    for mark, text in zip(root.findall(".//g[@class]//use"), said, strict=True):
        del mark.attrib["style"]
        ElementTree.SubElement(mark, "title").text = text
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": name, "class": kind}
    return ElementTree.tostring(root, encoding="unicode")
