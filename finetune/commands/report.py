"""`finetune report`: write run folders and benchmarks as a page and as Markdown."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from finetune.errors import RequestError
from finetune.privacy import shown


def run(asked: argparse.Namespace) -> int:
    """The exit status, 0. Files that could not be read are noted on stderr and on the page. Raises RequestError."""
    from finetune.report.write import write

    paths = [Path(name) for name in asked.paths]
    html = Path(asked.html) if asked.html else None
    markdown = Path(asked.markdown) if asked.markdown else None
    if html is None and markdown is None:
        folder = paths[0].parent if paths[0].is_file() else paths[0]
        html = folder / "report.html" if len(paths) == 1 else Path("report.html")
    for path in (html, markdown):
        if path is not None and not path.absolute().parent.is_dir() and path.parent not in paths:
            raise RequestError(f"{path}: there is no folder {path.parent}. Make it, or give another path.")
        if path is not None and path.is_symlink():
            raise RequestError(f"{path}: is a link, whose target would be overwritten. Delete it.")
    for note in write(paths, html, markdown, shlex.join(["finetune", *sys.argv[1:]])):
        print(shown(f"note: {note}"), file=sys.stderr)
    for path in (html, markdown):
        if path is not None:
            print(f"wrote {path}")
    return 0
