"""What `finetune generate` and `finetune chat` are asked for, looked at before anything heavy is imported."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.run.range import AT_LEAST_ONE, NOT_NEGATIVE, Range
from finetune.safe_read import read_json_object
from finetune.safe_read.folders import JSON_OBJECTS

RANGES = {
    "max_new_tokens": AT_LEAST_ONE,
    "temperature": NOT_NEGATIVE,
    "top_p": Range(above=0, most=1),
    "seed": NOT_NEGATIVE,
    "batch_size": AT_LEAST_ONE,
}
# What decides what the answers are: with others, answers that are there cannot be gone on with. Batch size, ranks and
# DeepSpeed are not among them: they change no more than the rounding.
DECIDING = (
    *("prompt_column", "max_new_tokens", "temperature", "top_p", "seed", "stop", "dtype", "chat_template", "reasoning"),
    "truncate_prompts",
)
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # how classes with a head that writes are called
ADAPTER, CONFIG = "adapter_config.json", "config.json"
ENDS_BYTES = 2**20  # of a file of weights that are looked at, at its beginning and at its end


def check_numbers(asked: argparse.Namespace) -> None:
    """Raises RequestError for a number that none can be meant by."""
    for name, allowed in RANGES.items():
        value = getattr(asked, name, None)
        if value is not None and not allowed.holds(value):
            raise RequestError(f"--{name} is {value}, but it must be {allowed}.")
    if asked.top_p is not None and asked.temperature == 0:
        raise RequestError(f"--top_p {asked.top_p} is for sampling, and --temperature 0 does not sample. Drop one.")
    if "" in (asked.stop or ()):
        raise RequestError("--stop '': an empty text is everywhere. Leave it out.")


def check_model(name: str) -> None:
    """Raises RequestError where a folder shows that it holds no model that writes. Of a hub id nothing is known yet."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise RequestError(f"{name}: there is no such folder. Give a run's folder, a model's, or a hub id.")
        return
    if (folder / ADAPTER).is_file():
        adapter = read_json_object(folder / ADAPTER, inside=folder)
        if (task := adapter.get("task_type")) not in (None, "CAUSAL_LM"):
            raise RequestError(f"{name}: is an adapter for {task}, which writes no text. Give one of a language model.")
        return
    if not (folder / CONFIG).is_file():
        checkpoints = sorted(path.name for path in folder.glob("checkpoint-*"))
        there = f"it holds {', '.join(checkpoints[:8])}. Give one of them" if checkpoints else "give a model's folder"
        raise RequestError(f"{name}: the folder has no {CONFIG}; {there}.")
    config = read_json_object(folder / CONFIG, inside=folder)
    kinds = config.get("architectures") or []
    kind = str(kinds[0]) if isinstance(kinds, list) and kinds else ""
    if (kind and not kind.endswith(WRITERS)) or config.get("is_encoder_decoder"):
        raise RequestError(
            f"{name}: is a {kind or 'model with an encoder'}, and not a causal language model, which alone goes on "
            "with a text. Give the folder of one."
        )


def identity_of(asked: argparse.Namespace, prompts: Any) -> dict[str, Any]:
    """All that decides what the answers are, by names to tell a difference by; without a path of this machine."""
    template = Path(asked.chat_template).expanduser() if asked.chat_template else None
    settings = {name: getattr(asked, name) for name in DECIDING}
    if template and template.is_file():
        settings["chat_template"] = _digest([template.read_bytes()])
    said = [repr([prompt.content, prompt.tools, prompt.id]).encode() for prompt in prompts]
    return {"model": _digest(_parts(asked.model)), "prompts": _digest(said), **settings}


def _parts(model: str) -> Iterator[bytes]:
    """Of a folder what decides how its model writes; of an adapter its base's, too."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        yield model.encode()
        return
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if path.name in JSON_OBJECTS or path.suffix in (".safetensors", ".jinja"):
            yield f"{path.name} {path.stat().st_size}".encode()
            with path.open("rb") as file:
                yield file.read(ENDS_BYTES)
                file.seek(max(0, path.stat().st_size - ENDS_BYTES))
                yield file.read(ENDS_BYTES)
    if (folder / ADAPTER).is_file():
        base = read_json_object(folder / ADAPTER, inside=folder).get("base_model_name_or_path")
        yield from _parts(base) if isinstance(base, str) and base and Path(base) != folder else ()


def _digest(parts: Any) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:16]
