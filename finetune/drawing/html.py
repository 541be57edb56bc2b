"""HTML that loads nothing: the skeleton of a page, its style, and what stands on it.

The page's policy forbids every request (https://www.w3.org/TR/CSP3/), and every script but the one it is given.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from finetune.drawing.render import DAY, NIGHT, escaped, svg
from finetune.drawing.shapes import Picture
from finetune.drawing.table import Table
from finetune.drawing.words import plain
from finetune.errors import RequestError

WIDE, NARROW = 860.0, 340.0  # pixels of a picture on a screen, and on a telephone
STYLE = """
:root{color-scheme:light dark;DAY}
@media(prefers-color-scheme:dark){:root{NIGHT}}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:892px;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:20px;line-height:1.3;margin:8px 0}h2{font-size:18px;margin:32px 0 8px}
.verdict{font-weight:700;border-left:5px solid var(--accent);padding:4px 12px}.verdict.no{border-color:var(--limit)}
figure{margin:0}figcaption,.muted{color:var(--muted);font-size:13.5px}
svg{display:block;max-width:100%;height:auto;font-family:inherit}svg.narrow{display:none}
.scroll{overflow-x:auto;margin:0 0 12px}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
.caption{font-weight:700;font-size:13.5px;margin:16px 0 0}
th,td{padding:3px 14px 3px 0;text-align:right;
vertical-align:top;border-bottom:1px solid var(--grid);overflow-wrap:normal;white-space:nowrap}
th{color:var(--muted);font-weight:600;vertical-align:bottom}
.text{text-align:left}.long{white-space:normal;min-width:190px}tr.total td{font-weight:700}
code{font-size:13px}pre{white-space:pre-wrap;background:var(--grid);padding:10px;border-radius:6px}
dl{display:grid;
grid-template-columns:minmax(90px,170px) 1fr;gap:4px 16px;font-size:13.5px}dd{margin:0}dt{font-weight:600}
@media(max-width:700px){svg.wide{display:none}svg.narrow{display:block}h1{font-size:18px}
dl{grid-template-columns:1fr}dd{margin-bottom:6px}}
"""


def document(title: str, body: str, more_style: str = "", script: str = "") -> str:
    """A whole page. `body` is HTML; `script` is code of ours, with nothing of the data in it."""
    day, night = ("".join(f"--{name}:{colour};" for name, colour in colours.items()) for colours in (DAY, NIGHT))
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escaped(title)}</title>
<style>{STYLE.replace("DAY", day).replace("NIGHT", night)}{more_style}</style></head><body><main>
{body}</main>{f"<script>{script}</script>" if script else ""}</body></html>
"""


def write(path: Path, text: str) -> None:
    """Raises RequestError where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error}). Give another path.") from error


def figure(wide: Picture, narrow: Picture, caption: str = "") -> str:
    """A picture for the screen and for the telephone, of which the page shows one."""
    below = f"<figcaption>{escaped(caption)}</figcaption>" if caption else ""
    return f"<figure>{svg(wide, 'wide')}{svg(narrow, 'narrow')}{below}</figure>"


def table_html(table: Table, *, sortable: bool = False) -> str:
    """In a frame that scrolls where it is too wide. `sortable`: by its heads, where the page has the script for it."""
    kinds = [
        ("text" if not index or name in table.texts else "") + (" long" if name in table.folding else "")
        for index, name in enumerate(table.columns)
    ]
    head = "".join(
        f'<th class="{kind}" scope="col">{"<br>".join(map(escaped, name.splitlines()))}</th>'
        for kind, name in zip(kinds, table.columns, strict=True)
    )
    body = ""
    for number_of, row in enumerate(table.rows):
        total = ' class="total"' if table.total is not None and number_of >= table.total else ""
        cells = (f'<td class="{kind}">{escaped(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))
        body += f"<tr{total}>{''.join(cells)}</tr>"
    return (
        f'<p class="caption">{escaped(table.title)}</p><div class="scroll" tabindex="0">'
        f'<table{" class=sortable" if sortable else ""} aria-label="{escaped(table.title)}"><thead><tr>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def pairs(of: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escaped(name)}</dt><dd>{linked(value)}</dd>" for name, value in of) + "</dl>"


def linked(text: str) -> str:
    """Escaped, its web addresses as links; these are not loaded."""
    parts = re.split(r"(https?://[^\s,;:()<>\"']+)", plain(text))
    return "".join(
        f'<a href="{escape(part)}" rel="noreferrer">{escape(part)}</a>' if index % 2 else escape(part)
        for index, part in enumerate(parts)
    )
