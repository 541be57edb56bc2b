"""A report as one HTML page, or as Markdown with its pictures beside it. Their texts are in `templates/`.

The page loads nothing and works without its script: its content security policy forbids all requests and all other
scripts (https://www.w3.org/TR/CSP3/). Everything passed to a template is escaped for its format, unless it is Markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from finetune.errors import RequestError, plain
from finetune.report import text
from finetune.report.curves import WORDS, Panel, draw
from finetune.report.shapes import DAY, NARROW, NIGHT, WIDE, Picture, variables
from finetune.report.svg import LOOK, escaped, svg, svg_file

LONGEST_CAPTION = 300  # letters
TEMPLATES = Path(__file__).with_name("templates")


class Block(NamedTuple):
    """A part of a section. `kind` tells the templates how to show it:

    "table"; "words", "verdict", "bad" (a bad verdict), "muted" words, "heading", "code"; "tiles" or "facts" (pairs of
    texts); a "drawn" picture (one for large screens, one for phones), "panels" (small ones), "curves", an "image" (a
    PNG's bytes); "folded" blocks. `more` is a picture's caption, an image's description, or the title of folded blocks.
    """

    kind: str
    value: Any
    more: str = ""


class Curves(NamedTuple):
    """Panels side by side; `key` is the legend. The page shows them over one of `axes`."""

    panels: tuple[Panel, ...]
    axes: tuple[str, ...]
    key: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Report:
    title: str
    sections: tuple[Section, ...]
    command: str = ""


def drawn(draw: Callable[..., Picture | None], *of: Any, caption: bool | str = False) -> list[Block]:
    """A block with what `draw` returns for `of` at both widths; no block if it returns None. `caption`: the text below
    it, or whether to use the picture's `alt`."""
    wide, narrow = draw(*of, WIDE), draw(*of, NARROW)
    if wide is None:
        return []
    alt = wide.alt if caption and len(wide.alt) <= LONGEST_CAPTION else ""  # for longer ones, a table says the same
    return [Block("drawn", (wide, narrow), caption if isinstance(caption, str) else alt)]


def as_html(report: Report) -> str:
    numbers = count(1)

    def numbered(picture: Picture, kind: str) -> Markup:
        return Markup(svg(picture, kind, f"p{next(numbers)}"))

    script = (TEMPLATES / "sort.js").read_text(encoding="utf-8")
    return template("page.html", plain).render(
        report=report, svg=numbered, draw=draw, axis_words=WORDS, unique=lambda: f"axis{next(numbers)}", wide=WIDE,
        shortened=text.shortened, day=Markup(variables(DAY)), night=Markup(variables(NIGHT)), script=Markup(script),
        style=Markup(LOOK + (TEMPLATES / "page.css").read_text(encoding="utf-8")),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )  # fmt: skip


def write_markdown(report: Report, path: Path) -> None:
    """Write `path`, and its pictures to the folder `NAME_files` beside it. Raises RequestError if it cannot."""
    beside, numbers = path.with_name(f"{_slug(path.stem)}_files"), count(1)

    def keep(title: str, content: Picture | bytes) -> Markup:
        """Write the picture; returns its path relative to the Markdown."""
        name = f"{next(numbers):02}_{_slug(title)}.{'svg' if isinstance(content, Picture) else 'png'}"
        write(beside / name, svg_file(content) if isinstance(content, Picture) else content, makes_folder=True)
        return Markup(f"{beside.name}/{name}")

    write(path, markdown("page.md").render(report=report, keep=keep, draw=draw))


def write(path: Path, content: str | bytes, *, makes_folder: bool = False) -> None:
    """Write a file. Raises RequestError if it cannot."""
    try:
        if makes_folder:
            path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error}). Give another path.") from error


def markdown(name: str) -> Template:
    return template(name, lambda words: Markup(text.cell(words)))


def template(name: str, safe: Callable[[str], str]) -> Template:
    """A template that passes every text through `safe`."""
    engine = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, autoescape=True, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, finalize=lambda one: safe(one) if type(one) is str else one,
    )  # fmt: skip
    more: dict[str, Callable[[Any], str]] = {
        "linked": _linked, "lines": _lines, "base64": lambda png: base64.b64encode(png).decode(),
        "fenced": lambda words: Markup(text.fenced(words)), "html": lambda words: Markup(escaped(words)),
    }  # fmt: skip
    engine.filters |= more
    return engine.get_template(name)


def _linked(words: str) -> Markup:
    """`words` with web addresses as links, which are not loaded."""
    address = r"(https?://(?:[^\s,;:()&]|&amp;)+)"
    return Markup(re.sub(address, r'<a href="\1" rel="noreferrer">\1</a>', escaped(words)))


def _lines(code: str) -> Markup:
    return Markup("\n".join(map(escaped, code.expandtabs(4).split("\n"))))


def _slug(words: str) -> str:
    """`words` as a file name: letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", words.lower())[:40].strip("-") or "picture"
