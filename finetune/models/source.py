"""Open what a model folder or hub id holds, with errors that say where and how to mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from finetune.data.hub import hub_is_reachable
from finetune.errors import RequestError, first_line
from finetune.run import facts
from finetune.safe_read import read_bounded, read_json_object
from finetune.training.checkpoints.pickles import refuse_unsafe_weights

# What transformers parses, each an object; large vocabularies are among them.
JSON_OBJECTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "preprocessor_config.json", "adapter_config.json",
)  # fmt: skip


def positions_of(config: Any) -> int:
    """How many tokens the model can read."""
    return facts.positions_of(lambda name: getattr(config, name, None))


def from_pretrained(auto: Any, flag: str, name: str, arguments: Any) -> Any:
    """What `auto` (AutoConfig, AutoTokenizer) makes of a folder or hub id; `arguments` tell revision and trust. Raises
    RequestError, naming `flag`."""
    place = Path(name).expanduser()
    looks_local = place.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not place.is_dir():
        raise RequestError(f"--{flag} {name}: there is no such folder. Give one that holds config.json, or a hub id.")
    if looks_local and auto is AutoConfig and not (place / "config.json").is_file():
        there = ", ".join(sorted(p.name for p in place.iterdir())[:8]) or "nothing"
        raise RequestError(f"--{flag} {name}: the folder has no config.json; it holds {there}.")
    if looks_local:
        check_model_folder(place, f"--{flag} {name}")
    try:
        return auto.from_pretrained(
            str(place) if looks_local else name,
            revision=arguments.model_revision,
            trust_remote_code=arguments.trust_remote_code,
            local_files_only=not looks_local and not hub_is_reachable(),
        )
    except (OSError, ValueError, KeyError) as error:
        reason = first_line(error, 300)
        tried = "the folder" if looks_local else "the local cache and the hub"
        raise RequestError(
            f"--{flag} {name}: cannot be loaded; tried {tried} ({reason}). Offline? Give a folder with config.json, "
            "model.safetensors and tokenizer.json (for pictures preprocessor_config.json), or leave the flag out to "
            "train a small model from scratch."
        ) from error


def opening(arguments: Any, hub_id: str | None) -> dict[str, Any]:
    """What `from_pretrained` is told of any model's weights."""
    return {
        "revision": arguments.model_revision,
        "trust_remote_code": arguments.trust_remote_code,
        "local_files_only": hub_id is not None and not hub_is_reachable(),
        "dtype": torch.float32,  # transformers 5 takes the file's own, and AdamW on bf16 weights rounds its steps away
    }


def check_model_folder(folder: Path, said: str) -> None:
    """What a library would open in a folder from anybody: JSON of bounded depth, indexes that stay in the folder, whole
    headers, pickles that run nothing. Raises RequestError."""
    for path in sorted(folder.glob("*.json")):
        content = read_json_object(path) if path.name in JSON_OBJECTS else None
        if path.name.endswith(".index.json"):
            weights = read_json_object(path).get("weight_map")
            for place in weights.values() if isinstance(weights, dict) else ():
                if not isinstance(place, str) or Path(place).name != place:
                    raise RequestError(f"{said}: {path.name} names {str(place)[:80]!r}, which is no file beside it.")
        elif content is None:
            read_bounded(path)
    refuse_unsafe_weights(folder)


def refuse_without_weights(name: str) -> None:
    """Raises RequestError for a folder that holds no safetensors."""
    place = Path(name).expanduser()
    if place.is_dir() and not any(place.glob("*.safetensors*")):
        there = ", ".join(sorted(p.name for p in place.iterdir())[:8])
        old = any(place.glob("pytorch_model*.bin"))
        mend = "Convert the .bin to safetensors." if old else "Give the folder of a trained model."
        raise RequestError(f"--model_name_or_path {name}: the folder has no *.safetensors; it holds {there}. {mend}")
