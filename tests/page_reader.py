"""Reads a page as a browser would, and refuses what is not closed."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "img", "input"}


class PageReader(HTMLParser):
    """Keeps texts, tags with their attributes, and the titles of pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.titles: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"rect", "circle", "polyline", "polygon"}
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open[-2:] == ["svg", "title"]:
            self.titles.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def is_plain(page: str) -> bool:
    """Whether it is words and tables alone: nothing that loads, runs or styles."""
    plain = {"div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    return all(tag in plain and not attributes for tag, attributes in PageReader(page).tags)
