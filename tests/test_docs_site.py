"""The documentation site builds without a warning and without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

# What a browser would fetch when it opens a page; a link that the reader follows is not.
FETCHED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*?\ssrc=[\"']?(https?:)?//|<link\b[^>]*?stylesheet[^>]*?(https?:)?//"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: mkdocs.yml makes a warning of each link and anchor that leads nowhere, and of a page left out."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    no_network = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=REPO, env={**os.environ, **no_network}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_every_page_is_built_and_the_readme_is_the_first(site: Path) -> None:
    pages = [path.relative_to(REPO) for path in (REPO / "docs").rglob("*.md")]
    assert len(pages) > 40
    built = [page.with_name("index.html") if page.stem == "README" else page.with_suffix(".html") for page in pages]
    assert [str(page) for page in built if not (site / page).is_file()] == []
    assert "install.sh" in (site / "index.html").read_text()


def test_every_page_finds_the_files_that_it_is_drawn_with(site: Path) -> None:
    drawn = re.compile(
        r"<(?:link\b[^>]*?stylesheet[^>]*?\shref|script\b[^>]*?\ssrc|img\b[^>]*?\ssrc)=[\"']?([^\"' >]+)"
    )
    pages = {page: drawn.findall(page.read_text()) for page in site.rglob("*.html") if page.name != "404.html"}
    assert all(any(name.endswith(".css") for name in names) for names in pages.values())
    missing = {name for page, names in pages.items() for name in names if not (page.parent / name).is_file()}
    assert not missing


def test_a_page_fetches_nothing(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert [str(page.relative_to(site)) for page in pages if FETCHED.search(page.read_text())] == []


def test_the_index_leads_to_every_page_of_the_navigation() -> None:
    nav = (REPO / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = set(re.findall(r"docs/(\w+\.md)", nav)) - {"index.md"}
    linked = set(re.findall(r"\]\((\w+\.md)", (REPO / "docs" / "index.md").read_text()))
    assert len(named) > 25
    assert named - linked == set()
