"""A picture's shapes as SVG, and as PNG through matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from finetune.errors import RequestError, plain
from finetune.report.shapes import DAY, NIGHT, Box, Dot, Line, Picture, Shape, Word, variables

PIXELS_PER_INCH, POINTS_PER_INCH, PNG_DOTS_PER_INCH = 96, 72, 180
MARGIN, HEAD, GAP = 20.0, 38.0, 18.0  # of a PNG: around it, for a picture's title, between two pictures
# Fonts with letters that matplotlib's own lacks, tried in this order if installed.
MORE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei", "Noto Sans Arabic", "Noto Sans Devanagari")

LOOK = "text{white-space:pre;font-size:11px;fill:var(--ink)}polyline{fill:none;stroke-width:1px;stroke:var(--grid)}"


def svg(picture: Picture, kind: str, name: str) -> str:
    """`kind` is the CSS class: the page shows either the "wide" or the "narrow" one. `name` is unique in the page."""
    size = f"{picture.width:.0f} {picture.height:.0f}"
    sides = 'width="{}" height="{}"'.format(*size.split())
    return (
        f'<svg class="{kind}" viewBox="0 0 {size}" {sides} role="img" aria-labelledby="{name}-title {name}-alt">'
        f'<title id="{name}-title">{escaped(picture.title)}</title><desc id="{name}-alt">{escaped(picture.alt)}</desc>'
        f"{''.join(map(_shape, picture.shapes))}</svg>"
    )


def svg_file(picture: Picture) -> str:
    """A standalone file, which follows the reader's light or dark mode."""
    style = (
        f":root{{{variables(DAY)}font-family:system-ui,sans-serif}}"
        f"@media(prefers-color-scheme:dark){{:root{{{variables(NIGHT)}}}}}svg{{background:var(--ground)}}{LOOK}"
    )
    start, _, rest = svg(picture, "file", "picture").partition(">")
    return f'<svg xmlns="http://www.w3.org/2000/svg" {start[5:]}><style>{style}</style>{rest}\n'


def _shape(shape: Shape) -> str:
    """The shape as SVG, without what `LOOK` sets by default."""
    colour = shape.colour if shape.colour.startswith("#") else f"var(--{shape.colour})"
    if isinstance(shape, Box):
        more = f' opacity="{shape.opacity:g}"' if shape.opacity < 1 else ""
        place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
        return f'<rect {place} style="fill:{colour}"{more}{_titled("rect", shape.title)}'
    if isinstance(shape, Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        if shape.filled:
            return f'<polygon points="{points}" style="fill:{colour};opacity:{shape.opacity:g}"/>'
        look = "" if shape.colour == "grid" else f"stroke:{colour}"
        look += f";stroke-width:{shape.width:g}" * (shape.width != 1) + ";stroke-dasharray:5 4" * shape.dashed
        look += f";opacity:{shape.opacity:g}" * (shape.opacity < 1)
        return f'<polyline points="{points}"{_style(look)}/>'
    if isinstance(shape, Dot):
        place = f'cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}"'
        look = f"fill:{'none' if shape.hollow else colour};stroke:{colour};stroke-width:1.5"
        return f'<circle {place} style="{look}"{_titled("circle", shape.title)}'
    anchor = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
    look = f"fill:{colour}" if shape.colour != "ink" else ""
    look += f";font-size:{shape.size:g}px" * (shape.size != 11) + ";font-weight:700" * shape.bold
    return f'<text x="{shape.x:.1f}" y="{shape.y:.1f}"{anchor}{_style(look)}>{escaped(shape.text)}</text>'


def _style(look: str) -> str:
    return f' style="{look.lstrip(";")}"' if look else ""


def _titled(tag: str, title: str) -> str:
    """The end of a shape, with its tooltip."""
    return f"><title>{escaped(title)}</title></{tag}>" if title else "/>"


def escaped(text: str) -> str:
    return escape(plain(text))


def write_png(path: Path, pictures: Sequence[Picture], words: Sequence[Word] = ()) -> None:
    """Write the pictures one below the other, in light mode, below `words`. Raises RequestError if it cannot."""
    from matplotlib import font_manager, rc_context
    from matplotlib.figure import Figure

    wide, y = max(picture.width for picture in pictures), max((word.y for word in words), default=0.0)
    height = y + sum(HEAD + picture.height + GAP for picture in pictures) + MARGIN
    size = (wide + 2 * MARGIN) / PIXELS_PER_INCH, height / PIXELS_PER_INCH
    installed = {font.name for font in font_manager.fontManager.ttflist}
    with rc_context({"font.family": ["DejaVu Sans", *(name for name in MORE_FONTS if name in installed)]}):
        figure = Figure(figsize=size, facecolor=DAY["ground"])
        axes: Any = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(-MARGIN, wide + MARGIN), ylim=(height, 0))
        axes.set_axis_off()
        _paint(axes, words, 0)
        for picture in pictures:
            _paint(axes, [Word(0, y + 24, picture.title, size=14, bold=True)], 0)
            _paint(axes, picture.shapes, y + HEAD)
            y += HEAD + picture.height + GAP
        try:
            figure.savefig(path, dpi=PNG_DOTS_PER_INCH, format="png")
        except OSError as error:
            raise RequestError(f"{path}: cannot be written ({error}). Give another path.") from error


def _paint(axes: Any, shapes: Sequence[Shape], down: float) -> None:
    """Paint on top, shifted down by `down`, on axes whose unit is a pixel. Boxes are batched: there may be many."""
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Ellipse, Rectangle

    points = POINTS_PER_INCH / PIXELS_PER_INCH
    level: dict[str, Any] = {"zorder": 1}  # the same for all, so that they are drawn in order
    for _, some in groupby(shapes, type):
        run = list(some)
        if boxes := [one for one in run if isinstance(one, Box)]:
            places = [Rectangle((b.x, b.y + down), b.width, b.height) for b in boxes]
            colours = [to_rgba(DAY.get(b.colour, b.colour), b.opacity) for b in boxes]
            axes.add_collection(PatchCollection(places, facecolors=colours, linewidths=0, **level), autolim=False)
            continue
        for shape in run:
            colour = DAY.get(shape.colour, shape.colour)
            if isinstance(shape, Line):
                x, y = [x for x, _ in shape.points], [y + down for _, y in shape.points]
                look: dict[str, Any] = {"color": colour, "alpha": shape.opacity, **level}
                if shape.filled:
                    axes.fill(x, y, linewidth=0, **look)
                else:
                    dashes: Any = (0, (4, 3)) if shape.dashed else "-"
                    axes.plot(x, y, linewidth=shape.width * points, linestyle=dashes, **look)
            elif isinstance(shape, Dot):
                fill, place = "none" if shape.hollow else colour, (shape.x, shape.y + down)
                look = {"facecolor": fill, "edgecolor": colour, "linewidth": 1.5 * points}
                axes.add_patch(Ellipse(place, 2 * shape.radius, 2 * shape.radius, **look, **level))
            elif isinstance(shape, Word):
                align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
                look = {"fontsize": shape.size * points, "weight": "bold" if shape.bold else "normal"}
                axes.text(shape.x, shape.y + down, shape.text, color=colour, ha=align, va="baseline", parse_math=False,
                          **look, **level)  # fmt: skip
