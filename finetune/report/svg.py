"""A picture's shapes as SVG."""

from __future__ import annotations

from html import escape

from finetune.errors import plain
from finetune.report.shapes import DASH, DAY, NIGHT, RING, SMALL, SPACE, Box, Dot, Line, Picture, Shape, variables

LETTERS = f"white-space:pre;font-size:{SMALL:g}px;fill:var(--ink)"
LOOK = f"text{{{LETTERS}}}polyline{{fill:none;stroke-width:1px;stroke:var(--grid)}}"


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
        look += (
            f";stroke-width:{shape.width:g}" * (shape.width != 1)
            + f";stroke-dasharray:{DASH:g} {SPACE:g}" * shape.dashed
        )
        look += f";opacity:{shape.opacity:g}" * (shape.opacity < 1)
        return f'<polyline points="{points}"{_style(look)}/>'
    if isinstance(shape, Dot):
        place = f'cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}"'
        look = f"fill:{'none' if shape.hollow else colour};stroke:{colour};stroke-width:{RING:g}"
        return f'<circle {place} style="{look}"{_titled("circle", shape.title)}'
    anchor = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
    look = f"fill:{colour}" if shape.colour != "ink" else ""
    look += f";font-size:{shape.size:g}px" * (shape.size != SMALL) + ";font-weight:700" * shape.bold
    return f'<text x="{shape.x:.1f}" y="{shape.y:.1f}"{anchor}{_style(look)}>{escaped(shape.text)}</text>'


def _style(look: str) -> str:
    return f' style="{look.lstrip(";")}"' if look else ""


def _titled(tag: str, title: str) -> str:
    """The end of a shape, with its tooltip."""
    return f"><title>{escaped(title)}</title></{tag}>" if title else "/>"


def escaped(text: str) -> str:
    return escape(plain(text))
