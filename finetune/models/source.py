"""Open what a model folder or hub id holds, with errors that say where and how to mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig

from finetune.data.hub import hub_is_reachable
from finetune.errors import RequestError, first_line, plain
from finetune.run import facts
from finetune.safe_read.folders import check_model_folder, has_weights, refuse_code


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
        there = ", ".join(plain(p.name) for p in sorted(place.iterdir())[:8]) or "nothing"
        raise RequestError(f"--{flag} {name}: the folder has no config.json; it holds {there}.")
    if looks_local:
        check_model_folder(place, f"--{flag} {name}", arguments.trust_remote_code)
    where = {
        "revision": arguments.model_revision,
        "local_files_only": not looks_local and not hub_is_reachable(),
    }
    try:
        if auto is AutoConfig and not looks_local and not arguments.trust_remote_code:
            refuse_code(PretrainedConfig.get_config_dict(name, **where)[0], "config.json", f"--{flag} {name}")
        return auto.from_pretrained(
            str(place) if looks_local else name, trust_remote_code=arguments.trust_remote_code, **where
        )
    except RequestError:
        raise
    except Exception as error:  # whatever a folder made to break it can raise
        reason = plain(first_line(error, 300))
        tried = "the folder" if looks_local else "the local cache and the hub"
        raise RequestError(
            f"--{flag} {name}: cannot be loaded; tried {tried} ({reason}). Offline? Give a folder with config.json, "
            "model.safetensors and tokenizer.json (for pictures preprocessor_config.json), or leave the flag out to "
            "train a small model from scratch."
        ) from error


def load_weights(auto: Any, name: str, config: Any, is_local: bool, arguments: Any, **chosen: Any) -> Any:
    """The model that `auto` (AutoModelForCausalLM) makes of a folder or hub id, from safetensors alone. Raises
    RequestError where they are not whole or do not fit."""
    try:
        return auto.from_pretrained(
            name,
            config=config,
            revision=arguments.model_revision,
            trust_remote_code=arguments.trust_remote_code,
            use_safetensors=True,
            local_files_only=not is_local and not hub_is_reachable(),
            dtype=torch.float32,  # transformers 5 takes the file's own, and AdamW on bf16 weights rounds its steps away
            **chosen,
        )
    except torch.OutOfMemoryError:
        raise
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise RequestError(
            f"--model_name_or_path {name}: its weights cannot be loaded ({plain(first_line(error, 300))}). Get them "
            "from their source again."
        ) from error


def refuse_without_weights(name: str) -> None:
    """Raises RequestError for a folder that holds no safetensors: pickles are not opened, whatever else is beside
    them."""
    place = Path(name).expanduser()
    if place.is_dir() and not has_weights(place):
        there = ", ".join(plain(p.name) for p in sorted(place.iterdir())[:8])
        old = any(place.glob("pytorch_model*.bin"))
        mend = "Convert the .bin to safetensors." if old else "Give the folder of a trained model."
        raise RequestError(
            f"--model_name_or_path {name}: the folder has no model.safetensors; it holds {there}. {mend}"
        )
