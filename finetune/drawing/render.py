"""A picture's shapes as SVG, and as PNG by matplotlib."""

from __future__ import annotations

from html import escape
from typing import Any

from finetune.drawing.shapes import Area, Box, Dot, Line, Picture, Shape
from finetune.drawing.words import plain

PIXELS_PER_INCH, POINTS_PER_INCH = 96, 72
SERIES = tuple(f"s{index}" for index in range(1, 9))

# By day and by night: the page's own colours; s1 to s8 are of things that are compared.
DAY = {
    "ink": "#1c2127",
    "muted": "#5c6670",
    "grid": "#dfe3e8",
    "ground": "#ffffff",
    "limit": "#c2185b",
    "accent": "#0057b7",
    **dict(
        zip(
            SERIES,
            ("#0057b7", "#d9730d", "#00844a", "#8e44ad", "#c2185b", "#0097a7", "#8d6e3f", "#5c6670"),
            strict=True,
        )
    ),
}
NIGHT = {
    "ink": "#e8ebee",
    "muted": "#a3adb8",
    "grid": "#343b44",
    "ground": "#15191e",
    "limit": "#ff6f9c",
    "accent": "#6cb6ff",
    **dict(
        zip(
            SERIES,
            ("#6cb6ff", "#ffa657", "#4fc98a", "#cf9dff", "#ff6f9c", "#4dd0e1", "#d0ad7b", "#a3adb8"),
            strict=True,
        )
    ),
}


def svg(picture: Picture, kind: str) -> str:
    """`kind` is the class: the page shows the "wide" one or the "narrow" one."""
    name = f"{picture.name}-{kind}"
    shapes = "".join(_shape(shape) for shape in picture.shapes)
    return (
        f'<svg class="{kind}" viewBox="0 0 {picture.width:.0f} {picture.height:.0f}" width="{picture.width:.0f}" '
        f'height="{picture.height:.0f}" role="img" aria-labelledby="{name}-title {name}-alt">'
        f'<title id="{name}-title">{escaped(picture.title)}</title><desc id="{name}-alt">{escaped(picture.alt)}</desc>'
        f"{shapes}</svg>"
    )


def svg_file(picture: Picture) -> str:
    """A file of its own, which follows the reader's day and night where it is shown."""
    day, night = ("".join(f"--{name}:{colour};" for name, colour in colours.items()) for colours in (DAY, NIGHT))
    style = (
        f":root{{{day}font-family:system-ui,sans-serif}}@media(prefers-color-scheme:dark){{:root{{{night}}}}}"
        "svg{background:var(--ground)}"
    )
    inner = svg(picture, "file").replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    start = inner.index(">") + 1
    return f"{inner[:start]}<style>{style}</style>{inner[start:]}\n"


def _shape(shape: Shape) -> str:
    colour = shape.colour if shape.colour.startswith("#") else f"var(--{shape.colour})"
    if isinstance(shape, Box):
        more = f' opacity="{shape.opacity:g}"' if shape.opacity < 1 else ""
        place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
        return f'<rect {place} style="fill:{colour}"{more}{_titled("rect", shape.title)}'
    if isinstance(shape, Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        dashes = ";stroke-dasharray:5 4" if shape.dashed else ""
        faint = f";opacity:{shape.opacity:g}" if shape.opacity < 1 else ""
        look = f"fill:none;stroke:{colour};stroke-width:{shape.width:g}{dashes}{faint}"
        return f'<polyline points="{points}" style="{look}"/>'
    if isinstance(shape, Area):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        return f'<polygon points="{points}" style="fill:{colour};opacity:{shape.opacity:g}"/>'
    if isinstance(shape, Dot):
        place = f'cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}"'
        look = f"fill:{'none' if shape.hollow else colour};stroke:{colour};stroke-width:1.5"
        return f'<circle {place} style="{look}"{_titled("circle", shape.title)}'
    look = f"fill:{colour};font-size:{shape.size:g}px" + (";font-weight:700" if shape.bold else "")
    return (
        f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}" style="{look}" xml:space="preserve">'
        f"{escaped(shape.text)}</text>"
    )


def _titled(tag: str, title: str) -> str:
    """The end of a shape, with what is shown where the pointer rests on it."""
    return f"><title>{escaped(title)}</title></{tag}>" if title else "/>"


def escaped(text: str) -> str:
    return escape(plain(text))


def paint(axes: Any, shape: Shape, down: float) -> None:
    """On axes whose unit is a pixel, `down` pixels below, and over what is there."""
    from matplotlib.patches import Ellipse, Polygon, Rectangle

    colour, points = DAY.get(shape.colour, shape.colour), POINTS_PER_INCH / PIXELS_PER_INCH
    level: dict[str, Any] = {"zorder": 1}  # one for all: then they are drawn in the order in which they come
    if isinstance(shape, Box):
        look: dict[str, Any] = {"facecolor": colour, "linewidth": 0, "alpha": shape.opacity}
        axes.add_patch(Rectangle((shape.x, shape.y + down), shape.width, shape.height, **look, **level))
    elif isinstance(shape, Line):
        x, y = zip(*shape.points, strict=True)
        look = {"color": colour, "linewidth": shape.width * points, "linestyle": (0, (4, 3)) if shape.dashed else "-",
                "alpha": shape.opacity}  # fmt: skip
        axes.plot(x, [v + down for v in y], **look, **level)
    elif isinstance(shape, Area):
        corners = [(x, y + down) for x, y in shape.points]
        axes.add_patch(Polygon(corners, facecolor=colour, linewidth=0, alpha=shape.opacity, **level))
    elif isinstance(shape, Dot):
        look = {"facecolor": "none" if shape.hollow else colour, "edgecolor": colour, "linewidth": 1.5 * points}
        axes.add_patch(Ellipse((shape.x, shape.y + down), 2 * shape.radius, 2 * shape.radius, **look, **level))
    else:
        align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
        look = {"color": colour, "fontsize": shape.size * points, "weight": "bold" if shape.bold else "normal"}
        axes.text(shape.x, shape.y + down, shape.text, ha=align, va="baseline", parse_math=False, **look, **level)
