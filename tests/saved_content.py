"""What the files of a checkpoint hold, for comparing two of them."""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from pathlib import Path


def content_of(checkpoint: Path, without: Collection[str]) -> dict[str, bytes]:
    """The bytes of each file, by name. A file of torch.save is a zip archive: the bytes of each of its records, in
    their order. Its inner folder is left out, which torch names after the file, or `archive` if it saved to an object
    (torch 2.13, caffe2/serialize/inline_container.cc)."""
    found: dict[str, bytes] = {}
    for path in (path for path in checkpoint.rglob("*") if path.is_file() and path.name not in without):
        name = str(path.relative_to(checkpoint))
        if not zipfile.is_zipfile(path):
            found[name] = path.read_bytes()
            continue
        with zipfile.ZipFile(path) as archive:
            for number, record in enumerate(archive.namelist()):
                found[f"{name}: {number} {record.partition('/')[2]}"] = archive.read(record)
    return found
