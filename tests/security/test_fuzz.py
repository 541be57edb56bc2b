"""Random files, and right ones that were altered: each reader gives a value or an error of ours.

HYPOTHESIS_PROFILE=long looks for minutes; without it, for about 20 seconds in all.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.bench.grid import read_grid
from finetune.bench.result import read_rows
from finetune.data.cifar import read_pickle
from finetune.dsconfig.check import check, read
from finetune.dsconfig.context import Context
from finetune.errors import FinetuneError
from finetune.export.source import read_source
from finetune.hostfile import read_hostfile
from finetune.plan.machine import SHIPPED, read_machine
from finetune.plan.model import model_of, read_config
from finetune.plan.weights import weights_of
from finetune.report.run_folder import read_run
from finetune.run.flat_yaml import read_flat_yaml
from finetune.safe_read import read_json_object, read_yaml
from finetune.safe_read.checkpoint_files import refuse_unsafe
from finetune.training.checkpoints.manifest import problems

EXAMPLES = 2000 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 60
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
)


def ds_config(path: Path) -> None:
    check(read(path), Context(2, 2, False, None, {}))


def export(path: Path) -> None:
    read_source(path.parent)


def weights(path: Path) -> None:
    weights_of(path.parent)


def run_folder(path: Path) -> None:
    read_run(path.parent, "x")


def checkpoint(path: Path) -> None:
    problems(path.parent, hashes=True)


GRID = b"""scale: 0.1
repeats: 1
grid:
  - models: [wide]
    layouts: [ddp]
    world_sizes: 2
    micro_batches: [32]
"""
HEADER = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
SAFETENSORS = struct.pack("<Q", len(HEADER)) + HEADER + b"\0\0\0\0"

# The reader, the name that its file has, and a file that it takes.
READERS: dict[str, tuple[Callable[[Path], Any], str, bytes]] = {
    "a recipe's YAML": (lambda path: read_flat_yaml(str(path)), "r.yaml", b"max_steps: 3\nlabels: [a, b]\n"),
    "a grid": (lambda path: read_grid(str(path)), "g.yaml", GRID),
    "the shared YAML reader": (read_yaml, "x.yaml", b"a: {b: [1, 2.5, null, 2020-01-01]}\n"),
    "the shared JSON reader": (read_json_object, "x.json", b'{"a": [1, 2.5e3, null, "\\u0041"]}'),
    "a DeepSpeed config": (ds_config, "z.json", (REPO / "ds_configs" / "zero3.json").read_bytes()),
    "a hostfile": (read_hostfile, "hosts", b"# ours\nworker-1 slots=8\nworker-2 slots=4\n"),
    "a machine's profile": (read_machine, "m.json", (SHIPPED / "L4.json").read_bytes()),
    "a model's config": (
        lambda path: model_of(read_config(path)),
        "config.json",
        b'{"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 64, "n_positions": 8}',
    ),
    "the header of safetensors": (weights, "model.safetensors", SAFETENSORS),
    "safetensors for export": (export, "model.safetensors", SAFETENSORS),
    "a manifest": (checkpoint, "manifest.json", b'{"format": 1, "step": 1, "files": {"a": {"bytes": 1}}}'),
    "metrics.jsonl in a report": (run_folder, "metrics.jsonl", b'{"step": 1, "loss": 2.5}\n{"step": 2}\n'),
    "a bench's results": (read_rows, "results.jsonl", b'{"model": "wide"}\n'),
    "a batch of CIFAR": (
        read_pickle,
        "batch",
        b"\x80\x02}(U\x04dataT\x00\x0c\x00\x00" + bytes(3072) + b"U\x06labels](K\x01eu.",
    ),
    "a torch file": (refuse_unsafe, "x.pt", b"PK\x03\x04"),
    "a sharded checkpoint": (refuse_unsafe, ".metadata", b"\x80\x04}."),
}


def altered(content: bytes) -> st.SearchStrategy[bytes]:
    """One piece cut out, and others put in its place."""
    place = st.integers(0, len(content))
    return st.builds(
        lambda a, b, put: content[: min(a, b)] + put + content[max(a, b) :], place, place, st.binary(max_size=12)
    )


@pytest.mark.parametrize("name", READERS)
def test_only_errors_of_ours_come_from(name: str, tmp_path: Path) -> None:
    reader, file, good = READERS[name]
    path = tmp_path / file
    shaped = VALUES.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.binary(max_size=200) | altered(good) | altered(good) | shaped)
    def read_it(content: bytes) -> None:
        path.write_bytes(content)
        with suppress(FinetuneError):
            reader(path)

    read_it()


RIGHT = [
    name for name in READERS if name not in ("a manifest", "a bench's results", "a torch file", "a sharded checkpoint")
]


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_altered_was_right_before(name: str, tmp_path: Path) -> None:
    """Or only refusals would be tried."""
    reader, file, good = READERS[name]
    (tmp_path / file).write_bytes(good)
    reader(tmp_path / file)
