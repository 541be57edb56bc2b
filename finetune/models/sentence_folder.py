"""The files that let sentence-transformers open a model's folder, too: how a text's tokens become one vector.

They have the format that its releases since 2.0 write and its 6.2 reads (sentence_transformers/base/model.py and
sentence_transformer/modules/pooling.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from finetune.data.hub import hub_is_reachable
from finetune.errors import RequestError, first_line, plain
from finetune.run.files import SENTENCE_FILES, SENTENCE_MODULES, SENTENCE_POOLING, SENTENCE_SETTINGS, SENTENCE_SIZES
from finetune.safe_read import parse_json, read_bounded

# From pooling modes in its configs to values of --pooling. Until 6.0 each mode was a boolean of its own.
OURS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
READ = ("Transformer", "Pooling", "Normalize")  # the modules that can be trained here
MODULE = "sentence_transformers.models."


@dataclass(frozen=True)
class SentenceModel:
    """A folder's sentence-transformers settings; None, or empty, where it has none."""

    pooling: str | None = None
    max_seq_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # the name of the one to use by default


def read_sentence_model(name: str, revision: str, asked: str | None) -> SentenceModel:
    """The settings of a folder or hub id, with the pooling that is `asked` for, if any. Raises RequestError for a
    pooling, or a module, that cannot be trained here."""
    modules = _read(name, SENTENCE_MODULES, revision)
    if modules is None:
        return SentenceModel(asked)
    parts = modules if isinstance(modules, list) else [modules]
    kinds = [str(part.get("type") if isinstance(part, dict) else part).rpartition(".")[2] for part in parts]
    if strange := [kind for kind in kinds if kind not in READ]:
        raise RequestError(
            f"--model_name_or_path {name}: its {SENTENCE_MODULES} has {plain(strange[0])}, which would be lost. "
            f"Models of {', '.join(READ)} are trained here."
        )
    found = [_read(name, file, revision) for file in (SENTENCE_POOLING, SENTENCE_SIZES, SENTENCE_SETTINGS)]
    pooling, sizes, settings = (one if isinstance(one, dict) else {} for one in found)
    for key, part, usual in (("do_lower_case", sizes, False), ("include_prompt", pooling, True)):
        if (said := part.get(key, usual)) != usual:
            said = plain(f"{key} {said}"[:40])
            raise RequestError(f"--model_name_or_path {name}: its folder says {said}, which cannot be trained here.")
    most, prompts = sizes.get("max_seq_length"), settings.get("prompts")
    known = {str(key): str(value) for key, value in prompts.items()} if isinstance(prompts, dict) else {}
    if "document" not in known and "passage" in known:  # E5's word
        known["document"] = known["passage"]
    default = settings.get("default_prompt_name")
    return SentenceModel(
        asked or _mode(pooling, name),
        most if isinstance(most, int) and most > 0 else None,
        known,
        default if isinstance(default, str) and default in known else None,
    )


def _mode(pooling: Mapping[str, Any], name: str) -> str | None:
    said = pooling.get("pooling_mode")
    modes = [said] if isinstance(said, str) else [mode for flag, mode in FLAGS.items() if pooling.get(flag)]
    if not modes:
        return None
    if len(modes) > 1 or modes[0] not in OURS:
        raise RequestError(
            f"--model_name_or_path {name}: pools its tokens by {plain(' and '.join(modes))}. Only "
            f"{', '.join(OURS.values())} can be trained: choose one with --pooling."
        )
    return OURS[modes[0]]


def _read(name: str, file: str, revision: str) -> Any:
    """None if the folder, or the hub, has no such file. Raises RequestError for invalid JSON, and if it is unknown
    whether the hub has the file: otherwise a model could silently be trained with the wrong pooling."""
    folder, said = Path(name).expanduser(), f"--model_name_or_path {name}: {file}"
    if folder.is_dir():
        place = folder / file
        return parse_json(read_bounded(place, inside=folder, name=said), said) if place.exists() else None
    try:
        found = hf_hub_download(name, file, revision=revision, local_files_only=not hub_is_reachable())
    except Exception as error:  # the client's transport can raise others, too
        is_known = not isinstance(error, LocalEntryNotFoundError)  # that one means that the hub was not reached
        known = try_to_load_from_cache(name, file, revision=revision)  # a marker, not a path, if the hub lacks it
        if (is_known and isinstance(error, EntryNotFoundError)) or not isinstance(known, str | None):
            return None
        raise RequestError(
            f"{said} says how texts become vectors, but the hub could not be searched for it ({first_line(error)}). "
            "Try again, or give a folder with all of the model's files."
        ) from error
    return parse_json(read_bounded(Path(found), name=said), said)


def write_sentence_model(
    folder: Path,
    pooling: str,
    size: int,
    max_seq_length: int,
    prompts: Mapping[str, str],
    default_prompt: str | None = None,
) -> None:
    """Write the settings beside the weights. `size` is the length of a vector."""
    parts = zip(("", "1_Pooling", "2_Normalize"), READ, strict=True)
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{MODULE}{kind}"} for i, (path, kind) in enumerate(parts)
    ]
    modes = {flag: OURS.get(mode) == pooling for flag, mode in FLAGS.items()}
    settings = {"prompts": dict(prompts), "default_prompt_name": default_prompt, "similarity_fn_name": "cosine"}
    written: dict[str, Any] = {
        SENTENCE_MODULES: modules,
        SENTENCE_POOLING: {"word_embedding_dimension": size, **modes, "include_prompt": True},
        SENTENCE_SIZES: {"max_seq_length": max_seq_length, "do_lower_case": False},
        SENTENCE_SETTINGS: {"__version__": {}, **settings},
    }
    for name, value in written.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")


def copy_sentence_model(source: Path, folder: Path) -> None:
    """Copy the files that `write_sentence_model` wrote."""
    for name in SENTENCE_FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, folder / name)
