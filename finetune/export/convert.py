"""Converts a checkpoint of any layout into a model that `from_pretrained` opens."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from finetune.export.request import bytes_of
from finetune.export.source import Source, read_source
from finetune.export.write import whole, write_companions, write_merged, write_thresholds, write_weights
from finetune.training.run_folder import explained_disk_errors
from finetune.versions import versions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RECORD = "export.json"


def convert(asked: argparse.Namespace) -> int:
    """The exit status. A failed export leaves nothing behind."""
    out, dtype, most_bytes = Path(asked.out).expanduser(), DTYPES[asked.dtype], bytes_of(asked.max_shard_size)
    source = read_source(Path(asked.checkpoint).expanduser())
    notes = list(source.notes)
    with explained_disk_errors(out.absolute().parent), whole(out) as folder:
        if asked.merge_adapter:
            notes += _merge(source, folder, asked, dtype)
        else:
            stem = "adapter_model" if source.is_adapter else "model"
            write_weights(folder, stem, source.weights, dtype, most_bytes)
            notes += write_companions(source.folder, folder, dtype)
            notes += write_thresholds(source.folder, folder)
        _record(source, folder, asked)
    files = sorted(path for path in out.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files) / 2**20
    print(f"{out}: {len(source.weights):,} weights from {source.layout}, {asked.dtype}, {len(files)} file(s), "
          f"{size:,.1f} MiB; read back and compared", *notes, sep="\n")  # fmt: skip
    return 0


def _merge(source: Source, folder: Path, asked: argparse.Namespace, dtype: torch.dtype) -> list[str]:
    """Write the adapter alone to a folder beside, with the shards' fp32 weights, and merge that into its base."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-adapter-") as place:
        adapter = Path(place)
        write_weights(adapter, "adapter_model", source.weights, torch.float32, bytes_of("100GB"))
        (adapter / "adapter_config.json").write_bytes((source.folder / "adapter_config.json").read_bytes())
        base = write_merged(adapter, folder, asked.base_model, dtype, asked.max_shard_size)
    config = (folder / "config.json").read_bytes()  # the base's own, with its actual sizes
    write_companions(source.folder, folder, dtype)
    (folder / "config.json").write_bytes(config)
    (folder / "adapter_config.json").unlink()
    return [f"merged into {base}"]


def _record(source: Source, folder: Path, asked: argparse.Namespace) -> None:
    """Record where the export came from, without local paths."""
    record = {
        "from": source.folder.name or "run",
        "step": source.step,
        "layout": source.layout,
        "dtype": asked.dtype,
        "verified_against_manifest": source.verified,
        "adapter": "merged" if asked.merge_adapter else "kept" if source.is_adapter else None,
        "notes": [note.replace(str(source.folder), source.folder.name) for note in source.notes],
        "versions": versions(),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
