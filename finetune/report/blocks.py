"""What a report is made of, before it is HTML or Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from finetune.drawing.shapes import Picture
from finetune.drawing.table import Table
from finetune.report.curves import Panel


@dataclass(frozen=True)
class Words:
    """A paragraph. `kind` is "", "verdict", "bad" (a verdict that is none to be glad of) or "muted"."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Tiles:
    """The few figures that are looked for first: what it is, and its value."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Drawn:
    """A picture for the screen, the same for the telephone, and what is said below."""

    wide: Picture
    narrow: Picture
    caption: str = ""


@dataclass(frozen=True)
class Curves:
    """Small pictures beside each other; `key` names what is compared. The page shows them over one of `axes`."""

    panels: tuple[Panel, ...]
    axes: tuple[str, ...]
    key: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Panels:
    """Small pictures beside each other."""

    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class Image:
    """A PNG of the run folder, as bytes."""

    name: str
    png: bytes
    alt: str


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Facts:
    """Names and what is said of them."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Folded:
    """Opened where somebody wants it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Heading:
    """Of a part of a section."""

    text: str


Block: TypeAlias = Words | Tiles | Drawn | Curves | Panels | Image | Code | Facts | Folded | Heading | Table


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Report:
    title: str
    sections: tuple[Section, ...]
    command: str = ""
