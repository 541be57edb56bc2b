"""A report as one HTML page, or as Markdown with its pictures beside it. What stands on either is said in `templates/`.

The page loads nothing and reads well without its script: its policy forbids every request, and every other script
(https://www.w3.org/TR/CSP3/). Whatever a template is given is escaped, for its own format, unless it is Markup.
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
from finetune.report.colours import DAY, NIGHT, variables
from finetune.report.curves import WORDS, Panel, draw
from finetune.report.shapes import NARROW, WIDE, Picture
from finetune.report.svg import LOOK, escaped, svg, svg_file

LONGEST_CAPTION = 300  # letters
TEMPLATES = Path(__file__).with_name("templates")


class Block(NamedTuple):
    """A part of a section, as the templates know it by its `kind`.

    A "table"; "words", a "verdict", a "bad" one, "muted" words, a "heading", "code"; "tiles" or "facts" (pairs of
    texts); a "drawn" picture (for the screen and for the telephone), "panels" (small ones), "curves", an "image" (a
    PNG's bytes); "folded" blocks. `more` is a picture's caption, what an image shows, or the title of what is folded.
    """

    kind: str
    value: Any
    more: str = ""


class Curves(NamedTuple):
    """Panels beside each other; `key` names what is compared. The page shows them over one of `axes`."""

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
    """What `draw` makes of `of` for either width; nothing where it makes nothing. `caption`: what is said below it, or
    whether it is what the picture says of itself."""
    wide, narrow = draw(*of, WIDE), draw(*of, NARROW)
    if wide is None:
        return []
    alt = wide.alt if caption and len(wide.alt) <= LONGEST_CAPTION else ""  # beyond, a table says the same
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
    """`path`, and its pictures in the folder `NAME_files` beside it. Raises RequestError where it cannot write."""
    beside, numbers = path.with_name(f"{_slug(path.stem)}_files"), count(1)

    def keep(title: str, content: Picture | bytes) -> Markup:
        """Where it lies, seen from the Markdown."""
        beside.mkdir(exist_ok=True)
        name = f"{next(numbers):02}_{_slug(title)}.{'svg' if isinstance(content, Picture) else 'png'}"
        write(beside / name, svg_file(content) if isinstance(content, Picture) else content)
        return Markup(f"{beside.name}/{name}")

    write(path, markdown("page.md").render(report=report, keep=keep, draw=draw))


def write(path: Path, content: str | bytes) -> None:
    """Raises RequestError where the file cannot be written."""
    try:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error}). Give another path.") from error


def markdown(name: str) -> Template:
    return template(name, lambda words: Markup(text.cell(words)))


def template(name: str, safe: Callable[[str], str]) -> Template:
    """Every text that goes into it goes through `safe` first."""
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
    """Its web addresses as links; these are not loaded."""
    address = r"(https?://(?:[^\s,;:()&]|&amp;)+)"
    return Markup(re.sub(address, r'<a href="\1" rel="noreferrer">\1</a>', escaped(words)))


def _lines(code: str) -> Markup:
    return Markup("\n".join(map(escaped, code.expandtabs(4).split("\n"))))


def _slug(words: str) -> str:
    """For a file's name: letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", words.lower())[:40].strip("-") or "picture"
