"""A report as one HTML page. It loads nothing, reads well without its script, and shows no text that is not escaped."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator
from itertools import count

from finetune.drawing.html import WIDE, document, figure, linked, pairs, table_html
from finetune.drawing.render import escaped, svg
from finetune.drawing.shapes import Picture
from finetune.drawing.sorting import SORTING
from finetune.drawing.table import Table
from finetune.report.axes import WORDS
from finetune.report.blocks import (
    Block,
    Code,
    Curves,
    Drawn,
    Facts,
    Folded,
    Heading,
    Image,
    Panels,
    Report,
    Tiles,
    Words,
)
from finetune.report.curves import WIDTH, Panel, draw, shortened

STYLE = """
h1{font-size:24px;letter-spacing:-.01em}h2{margin:40px 0 10px;padding-top:14px;border-top:1px solid var(--grid)}
h3{font-size:15px;margin:20px 0 6px}h4{font-size:13.5px;font-weight:600;margin:0 0 2px}
nav{font-size:13.5px;margin:6px 0 0}nav a{margin-right:14px;white-space:nowrap}
a{color:var(--accent);text-decoration:none}a:hover,a:focus{text-decoration:underline}
.verdict{font-size:17px}figure{margin:10px 0 18px}figcaption{margin-top:4px}
th button{all:unset;cursor:pointer;font:inherit;color:inherit}
th button:focus-visible,summary:focus-visible,.scroll:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
th button:hover{color:var(--accent)}
th[aria-sort=ascending] button::after{content:" \\2191"}th[aria-sort=descending] button::after{content:" \\2193"}
tbody tr:hover{background:color-mix(in srgb,var(--grid) 45%,transparent)}
.panels{display:grid;grid-template-columns:1fr 1fr;gap:14px 20px}.panels figure{margin:0;min-width:0}
.panels svg{width:100%}.panels .main{grid-column:1/-1}.by{display:none}
.axes{margin:0 0 10px;padding:0;border:0;font-size:13.5px}.axes legend{float:left;margin-right:10px;color:var(--muted)}
.axes label{margin-right:12px;white-space:nowrap;cursor:pointer}
.key{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13.5px;margin:0 0 10px;padding:0;list-style:none}
.key svg{display:inline-block;margin-right:6px;vertical-align:-1px}
.shot{max-width:100%;height:auto;background:#fff;border-radius:6px;padding:6px}
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin:14px 0}
.tiles div{flex:1 1 120px;border:1px solid var(--grid);border-radius:8px;padding:8px 12px}
.tiles dt{font-weight:400;color:var(--muted);font-size:13px}
.tiles dd{font-size:21px;font-weight:600;margin:0;font-variant-numeric:tabular-nums}
.scroll{background:linear-gradient(90deg,var(--ground) 30%,transparent) 0 0/40px 100% no-repeat local,
linear-gradient(270deg,var(--ground) 30%,transparent) 100% 0/40px 100% no-repeat local,
linear-gradient(90deg,var(--grid),transparent) 0 0/12px 100% no-repeat scroll,
linear-gradient(270deg,var(--grid),transparent) 100% 0/12px 100% no-repeat scroll}
details{margin:10px 0}summary{cursor:pointer;color:var(--accent);font-size:13.5px}
pre{max-height:420px;overflow:auto;font-size:13px}footer{margin-top:40px}
@media(max-width:700px){.panels{grid-template-columns:1fr}h1{font-size:20px}}
@media print{details>*{display:block}.axes,nav{display:none}}
"""


def as_html(report: Report) -> str:
    numbers = count(1)
    parts = list[str]()
    heads = [f'<a href="#part-{place}">{escaped(one.title)}</a>' for place, one in enumerate(report.sections, 1)]
    for place, section in enumerate(report.sections, 1):
        inner = "".join(_block(block, numbers) for block in section.blocks)
        parts.append(f'<section><h2 id="part-{place}">{escaped(section.title)}</h2>{inner}</section>')
    made = (
        f"<footer><h3>Made by</h3><pre><code>{escaped(report.command)}</code></pre></footer>" if report.command else ""
    )
    body = f'<h1>{escaped(report.title)}</h1><nav aria-label="Parts">{"".join(heads)}</nav>{"".join(parts)}{made}\n'
    return document(report.title, body, STYLE, SORTING)


def _block(block: Block, numbers: Iterator[int]) -> str:
    if isinstance(block, Table):
        return table_html(block, sortable=True)
    if isinstance(block, Words):
        kind = {"verdict": "verdict", "bad": "verdict no", "muted": "muted"}.get(block.kind, "")
        return f'<p class="{kind}">{linked(block.text)}</p>' if kind else f"<p>{linked(block.text)}</p>"
    if isinstance(block, Tiles):
        tiles = (f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in block.pairs)
        return f'<dl class="tiles">{"".join(tiles)}</dl>'
    if isinstance(block, Drawn):
        wide, narrow = (_numbered(one, numbers) for one in (block.wide, block.narrow))
        return f"<h3>{escaped(wide.title)}</h3>{figure(wide, narrow, block.caption)}"
    if isinstance(block, Curves):
        return _curves(block, numbers)
    if isinstance(block, Panels):
        drawn = (f"<h4>{escaped(one.title)}</h4>{svg(_numbered(one, numbers), 'panel')}" for one in block.pictures)
        return f'<div class="panels">{"".join(f"<figure>{one}</figure>" for one in drawn)}</div>'
    if isinstance(block, Image):
        data = base64.b64encode(block.png).decode()
        return f'<figure><img class="shot" alt="{escaped(block.alt)}" src="data:image/png;base64,{data}"></figure>'
    if isinstance(block, Code):
        return f'<pre tabindex="0"><code>{_lines(block.text)}</code></pre>'
    if isinstance(block, Facts):
        return pairs(block.pairs)
    if isinstance(block, Heading):
        return f"<h3>{escaped(block.text)}</h3>"
    return _folded(block, numbers)


def _folded(block: Folded, numbers: Iterator[int]) -> str:
    inner = "".join(_block(one, numbers) for one in block.blocks)
    return f"<details><summary>{escaped(block.title)}</summary>{inner}</details>"


def _curves(block: Curves, numbers: Iterator[int]) -> str:
    """The choice of the axis is a group of radio buttons that the style alone obeys: it works without a script."""
    group = f"axis{next(numbers)}"
    inputs = rules = ""
    for place, axis in enumerate(block.axes):
        checked = " checked" if not place else ""
        inputs += f'<label><input type="radio" name="{group}" id="{group}-{axis}"{checked}> {WORDS[axis]}</label>'
        rules += f".curves:has(#{group}-{axis}:checked) .by-{axis}{{display:block}}"
    panels = ""
    for panel in block.panels:
        drawn = "".join(f'<div class="by by-{axis}">{_panel(panel, axis, numbers)}</div>' for axis in block.axes)
        panels += f"<figure{' class=main' if panel.is_main else ''}><h4>{escaped(panel.title)}</h4>{drawn}</figure>"
    key = "".join(
        f'<li><svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" rx="2" '
        f'style="fill:var(--{colour})"/></svg>{escaped(shortened(name))}</li>' for name, colour in block.key
    )  # fmt: skip
    hidden = " hidden" if len(block.axes) < 2 else ""  # there is nothing to choose
    choice = f'<fieldset class="axes"{hidden}><legend>over</legend>{inputs}</fieldset>'
    return (
        f'<div class="curves"><style>{rules}</style>{choice}{f"<ul class=key>{key}</ul>" if key else ""}'
        f'<div class="panels">{panels}</div></div>'
    )


def _panel(panel: Panel, axis: str, numbers: Iterator[int]) -> str:
    if not panel.is_main:
        return svg(_numbered(draw(panel, axis), numbers), "panel")
    wide, narrow = (svg(_numbered(draw(panel, axis, width), numbers), kind)
                    for width, kind in ((WIDE, "wide"), (WIDTH, "narrow")))  # fmt: skip
    return wide + narrow


def _numbered(picture: Picture, numbers: Iterator[int]) -> Picture:
    """With a name that no other picture of the page has."""
    return dataclasses.replace(picture, name=f"p{next(numbers)}")


def _lines(text: str) -> str:
    return "\n".join(escaped(line) for line in text.expandtabs(4).split("\n"))
