"""The site's files, under the paths that they have in the repository, so that `../README.md` is a link here too."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

REPO = Path(__file__).resolve().parents[1]
SHOWN = (
    "*.md",
    "LICENSE",
    "docs/**/*",
    "ds_configs/*",
    "recipes/**/*",
    "finetune/**/*.py",
    "tests/**/*.py",
    "benchmarks/*.py",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Not docs/ alone: pages, what they show, and the sources that they link to, beside the theme's own files."""
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    found = {
        path for pattern in SHOWN for path in REPO.glob(pattern) if path.is_file() and "__pycache__" not in path.parts
    }
    ours = [File.generated(config, path.relative_to(REPO).as_posix(), abs_src_path=str(path)) for path in sorted(found)]
    return Files([*of_theme, *ours])
