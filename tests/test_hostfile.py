"""Hostfiles and their filters, as DeepSpeed's own launcher reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.launcher.runner import fetch_hostfile, parse_resource_filter

from finetune.errors import RequestError
from finetune.hostfile import chosen, read_hostfile

TEXT = "# ours\nworker-0 slots=4\n\nworker-1   slots=2  # the small one\nworker-2 slots=4\n"
FILTERS = [
    ("", ""),
    ("worker-1", ""),
    ("worker-2@worker-0:0,2", ""),
    ("worker-0:3,1@worker-0:0", ""),
    ("", "worker-1"),
    ("", "worker-0:0,1,2,3@worker-2:0"),
]


def write(folder: Path, text: str) -> Path:
    path = folder / "hostfile"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("include", "exclude"), FILTERS)
def test_the_same_hosts_and_gpus_as_deepspeed_takes(include: str, exclude: str, tmp_path: Path) -> None:
    path = write(tmp_path, TEXT)
    every = fetch_hostfile(str(path))
    assert read_hostfile(path) == dict(every)
    theirs = parse_resource_filter({name: list(range(n)) for name, n in every.items()}, include, exclude)
    ours = chosen(read_hostfile(path), include, exclude)
    assert ours == {name: sorted(slots) for name, slots in theirs.items()}
    assert list(ours) == list(theirs)  # the order of the ranks


@pytest.mark.parametrize(
    ("text", "include", "exclude", "message"),
    [
        ("worker-1 8\n", "", "", r"hostfile:1: 'worker-1 8' is not a host"),
        ("a slots=2\na slots=2\n", "", "", r"hostfile:2: a appears twice"),
        ("# none\n", "", "", "names no host"),
        ("a slots=0\n", "", "", "is not a host"),
        (TEXT, "worker-9", "", "there is no host 'worker-9'. The hosts are worker-0"),
        (TEXT, "worker-1:2", "", "worker-1 has no GPU 2; it has 0 to 1"),
        (TEXT, "worker-1:x", "", "'x' is not a list of GPUs"),
        (TEXT, "worker-1", "worker-2", "cannot both be given"),
        ("a slots=1\n", "", "a", "leaves no GPU"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(
    text: str, include: str, exclude: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=message):
        chosen(read_hostfile(write(tmp_path, text)), include, exclude)
