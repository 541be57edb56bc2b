"""Writes weights to safetensors files of limited size, merged with an adapter's if asked for, and the other files that
`from_pretrained` needs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file

from finetune.errors import RequestError, RunError
from finetune.export.request import check_target
from finetune.export.weights import Weight, cast_of
from finetune.run.choose import recipes
from finetune.run.files import ADAPTER_CONFIG, GENERATION_CONFIG, LABELS, SENTENCE_FILES, UNFINISHED
from finetune.safe_read import read_bytes, read_json_object
from finetune.safe_read.folders import check_model_folder
from finetune.training.checkpoints.manifest import CHECKPOINT, READ_AND_WRITE
from finetune.training.checkpoints.writing import flush

CONFIGS = ("config.json", GENERATION_CONFIG, ADAPTER_CONFIG)
COMPANIONS = (
    "tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.spm", "sentencepiece*.model", "chat_template.*", "preprocessor_config.json", "processor_config.json",
    LABELS, *SENTENCE_FILES,
)  # fmt: skip
RELATIVE = re.compile(r"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)  # transformers, dynamic_module_utils.py
BASE = "base_model_name_or_path"


@contextmanager
def whole(place: Path) -> Iterator[Path]:
    """A folder to write to, which gets its final name once it is complete and flushed to disk. Raises RequestError if
    `place` already exists and is not empty, or is inside a checkpoint."""
    check_target(place)
    unfinished = place.with_name(f"{UNFINISHED}{place.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise RequestError(f"{place}: cannot be created ({error.strerror}). Give another folder.") from error
    try:
        yield unfinished
        for path in unfinished.iterdir():
            path.chmod(unfinished.stat().st_mode & READ_AND_WRITE)  # safetensors 0.8 makes files owner-only
            flush(path)
        flush(unfinished)
        os.replace(unfinished, place)
        flush(place.absolute().parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_weights(folder: Path, stem: str, weights: dict[str, Weight], dtype: torch.dtype, most_bytes: int) -> None:
    """Write `stem`.safetensors, or several files and their index, in order; each is read back and compared. A weight
    larger than `most_bytes` gets a separate file."""
    split = split_state_dict_into_shards_factory(
        weights,
        get_storage_size=lambda weight: weight.bytes_in(dtype),
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=most_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        tensors = {name: weights[name].read().to(cast_of(weights[name].dtype, dtype)).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        _compare(folder / file, tensors)
        del tensors
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write(folder / f"{stem}.safetensors.index.json", index)


def _compare(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Compare bits, because a NaN is not equal to itself."""
    with safe_open(path, framework="pt") as file:
        for name, tensor in tensors.items():
            back = file.get_tensor(name)
            same = back.shape == tensor.shape and back.dtype == tensor.dtype
            if not same or not torch.equal(back.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)):
                raise RunError(f"{path.name}: {name} was not read back as it was written. Check the disk for errors.")


def write_merged(adapter: Path, out: Path, base: str | None, dtype: torch.dtype, max_shard_size: str) -> str:
    """Merge the adapter in the folder `adapter` into its base model, and write it to `out`. Returns the base's name."""
    if importlib.util.find_spec("peft") is None:
        raise RequestError("--merge_adapter needs peft, which is not installed. pip install peft.")
    from finetune.models.adapters import open_trained
    from finetune.models.source import Named

    check_model_folder(adapter, "--merge_adapter")
    config = read_json_object(adapter / ADAPTER_CONFIG)
    named = base or config.get("base_model_name_or_path")
    classes = {task.adapter: task.auto for recipe in recipes().values() if (task := recipe.task).adapter}
    kind = classes.get(str(config.get("task_type")))
    if not isinstance(named, str) or not named:
        raise RequestError(
            f"--merge_adapter: {adapter / ADAPTER_CONFIG} does not name a base model. Give --base_model FOLDER."
        )
    if kind is None:
        raise RequestError(f"--merge_adapter: the adapter is for {config.get('task_type')!r}; known are {[*classes]}.")
    found = Named(named, adapter, "merge_adapter: its base")
    try:
        merged = open_trained(found, kind, "Give --base_model FOLDER.").merge_and_unload()
    except RequestError as error:
        said = str(error).replace(f"--model_name_or_path {adapter}", "--merge_adapter: the adapter")
        raise RequestError(f"{said} --base_model names another base.") from error
    merged.to(dtype).save_pretrained(str(out), max_shard_size=max_shard_size)
    return Path(named).name


def write_companions(source: Path, folder: Path, dtype: torch.dtype) -> list[str]:
    """Write configs (without local paths, except that of an adapter's base), the tokenizer, and the model's own code if
    its config names any. Returns notes for the user."""
    notes = []
    for name in CONFIGS:
        if (source / name).is_file():
            config = read_json_object(source / name)
            _without_path(config)
            notes += _with_base(config)
            if name == "config.json":
                config.pop("torch_dtype", None)  # the older name
                config["dtype"] = str(dtype).removeprefix("torch.")
            _write(folder / name, config)
    for path in _companions(source):
        place = folder / path.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, place)
    return notes


def write_thresholds(source: Path, folder: Path) -> list[str]:
    """Add to a multi-label checkpoint's config the thresholds that its run chose at its end, if the labels are the
    same. Returns notes for the user."""
    there = folder / "config.json"
    config = read_json_object(there) if there.is_file() else {}
    if config.get("problem_type") != "multi_label_classification" or "thresholds" in config:
        return []
    run = source.absolute().parent / "config.json"  # the final model's
    chosen = read_json_object(run) if CHECKPOINT.fullmatch(source.name) and run.is_file() else {}
    if "thresholds" not in chosen or chosen.get("id2label") != config.get("id2label"):
        return ["config.json has no thresholds: none were chosen for these labels, so each is assigned from 0.5 up."]
    _write(there, {**config, "thresholds": chosen["thresholds"]})
    return ["config.json has the thresholds that the run chose for its final model."]


def _without_path(config: dict[str, Any]) -> None:
    value = config.get("_name_or_path")
    if isinstance(value, str) and _is_local(value):
        config["_name_or_path"] = Path(value).name


def _with_base(config: dict[str, Any]) -> list[str]:
    """An adapter opens only where its base model is, so a local path is kept, and made absolute."""
    value = config.get(BASE)
    if not isinstance(value, str) or not _is_local(value):
        return []
    place = Path(value).expanduser()
    if not place.is_dir():
        return [
            f"{ADAPTER_CONFIG}: {BASE} is {value}, which is not here. Write the base model's folder or hub id there."
        ]
    config[BASE] = str(place.absolute())
    return [f"{ADAPTER_CONFIG}: {BASE} is {config[BASE]}, a folder of this machine. Change it before you share it."]


def _is_local(value: str) -> bool:
    return value.startswith(("/", "~", ".")) or "\\" in value or Path(value).is_dir()


def _companions(source: Path) -> Iterable[Path]:
    found = {path for pattern in COMPANIONS for path in source.glob(pattern)}
    config = read_json_object(source / "config.json") if (source / "config.json").is_file() else {}
    named = config.get("auto_map")
    modules = [str(value).partition(".")[0] for value in named.values()] if isinstance(named, dict) else []
    while modules:  # gptlite, of gptlite.GPTLiteForCausalLM; then gptlite_mlp, which it imports
        path = source / Path(modules.pop() + ".py").name
        if path not in found and path.is_file() and not path.is_symlink():
            found.add(path)
            modules += RELATIVE.findall(read_bytes(path, inside=source).decode(errors="replace"))
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
