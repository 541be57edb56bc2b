"""A report as Markdown for a model card: tables, and pictures in files beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from finetune.drawing.html import write
from finetune.drawing.markdown import cell, fenced, table_markdown
from finetune.drawing.render import escaped, svg_file
from finetune.drawing.shapes import Picture
from finetune.drawing.table import Table
from finetune.drawing.words import plain
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
from finetune.report.curves import draw

Keep = Callable[[str, str | bytes, str], str]  # title, content, ending -> where it lies, seen from the Markdown


def write_markdown(report: Report, path: Path) -> None:
    """`path`, and its pictures in the folder `NAME_files` beside it. Raises RequestError where it cannot write."""
    pictures: dict[str, str | bytes] = {}
    folder, numbers = f"{_slug(path.stem)}_files", count(1)

    def keep(title: str, content: str | bytes, ending: str) -> str:
        name = f"{next(numbers):02}_{_slug(title)}.{ending}"
        pictures[name] = content
        return f"{folder}/{name}"

    parts = [f"# {cell(plain(report.title))}"]
    for section in report.sections:
        parts.append(f"## {cell(plain(section.title))}")
        parts += [text for block in section.blocks for text in _block(block, keep)]
    if report.command:
        parts += ["## Made by", fenced(report.command)]
    write(path, "\n\n".join(parts) + "\n")
    beside = path.with_name(folder)
    for name, content in pictures.items():
        beside.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            (beside / name).write_bytes(content)
        else:
            write(beside / name, content)


def _block(block: Block, keep: Keep) -> Iterator[str]:
    if isinstance(block, Table):
        yield f"**{cell(plain(block.title))}**"
        yield table_markdown(block)
    elif isinstance(block, Words):
        text = cell(plain(block.text))
        yield f"**{text}**" if block.kind in ("verdict", "bad") else text
    elif isinstance(block, Drawn):
        yield _picture(block.wide, keep)
    elif isinstance(block, Curves):
        for panel in block.panels:
            if block.axes:
                yield _picture(draw(panel, block.axes[0], with_key=bool(block.key)), keep)
    elif isinstance(block, Panels):
        for picture in block.pictures:
            yield _picture(picture, keep)
    elif isinstance(block, Image):
        yield f"![{cell(plain(block.alt))}]({keep(Path(block.name).stem, block.png, 'png')})"
    elif isinstance(block, Code):
        yield fenced(block.text)
    elif isinstance(block, Facts | Tiles):
        yield table_markdown(Table("", ("what", "value"), block.pairs, texts=("value",)))
    elif isinstance(block, Heading):
        yield f"### {cell(plain(block.text))}"
    else:
        yield from _folded(block, keep)


def _folded(block: Folded, keep: Keep) -> Iterator[str]:
    yield f"<details><summary>{escaped(block.title)}</summary>"
    for one in block.blocks:
        yield from _block(one, keep)
    yield "</details>"


def _picture(picture: Picture, keep: Keep) -> str:
    linked = f"![{cell(plain(picture.alt))}]({keep(picture.title, svg_file(picture), 'svg')})"
    return f"**{cell(plain(picture.title))}**\n\n{linked}"


def _slug(text: str) -> str:
    """For a file's name: letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", text.lower())[:40].strip("-") or "picture"
