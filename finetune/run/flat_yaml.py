"""A recipe's YAML: one flag and its value per line. Imports nothing heavy, because `finetune check` reads it too."""

from __future__ import annotations

import os
from typing import Any

import yaml

from finetune.errors import RequestError, or_meant
from finetune.safe_read import SAFE_LOADER, is_plain_file, read_bounded, read_yaml
from finetune.shipped import DS_CONFIGS, config, files

# Keys that only configs of DeepSpeed, or of accelerate, have.
OF_DEEPSPEED = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
OF_ACCELERATE = {"compute_environment", "distributed_type"}
FLAGS = "flat `flag: value` lines"
MOST = 1_000  # lines in a file: recipes have 150 flags, and each unknown one is compared with all of them


class _OneOfEach(yaml.SafeLoader):
    """Refuses duplicate keys; YAML's own loader silently takes the last."""

    said_elsewhere: Any = None  # the node whose keys are checked elsewhere

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key, _ in node.value if node is not self.said_elsewhere else ():
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} appears twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Lines(_OneOfEach):
    """Allows duplicate keys at the top level of the file."""

    def construct_document(self, node: Any) -> Any:
        self.said_elsewhere = node
        return super().construct_document(node)


def read_flat_yaml_lines(name: str) -> list[tuple[str, Any, int]]:
    """The file of --config as `read_flat_yaml` reads it: each line's key, value and number, from 1. A key may appear
    twice."""
    read_flat_yaml(name, loader=_Lines)
    node: Any = yaml.compose(read_bounded(config(name)), Loader=SAFE_LOADER)
    made = yaml.constructor.SafeConstructor()
    return [
        (str(made.construct_object(key)), made.construct_object(value, deep=True), key.start_mark.line + 1)
        for key, value in node.value
    ]


def read_flat_yaml(
    name: str, said: str | None = None, holds: str = FLAGS, loader: type[yaml.SafeLoader] = _OneOfEach
) -> dict[str, Any]:
    """The file's keys and values. Raises RequestError, with line and column, for an invalid file; `said` is how it was
    asked for, if not by --config, and `holds` what the file should contain."""
    path, said = config(name), said or f"--config is {name!r} (command line)"
    if os.path.isdir(path):
        raise RequestError(f"{said}, but that is a folder. Give a YAML in it.")
    shipped = DS_CONFIGS / f"{name}.json"
    if holds == FLAGS and "/" not in name and not path.exists() and shipped.is_file():
        raise RequestError(f"{said}, but that is a DeepSpeed config. Use --deepspeed {name}.")
    if not is_plain_file(path):
        what = "is not a regular file" if os.path.exists(path) else "there is no such file"
        names = [each for each in files("configs/*.yaml") if not each.startswith("bench_")] if holds == FLAGS else []
        hint = or_meant(path.stem, names, f" Shipped ones: {', '.join(names)}." if names else "")
        raise RequestError(f"{said}: cannot be read ({what}).{hint} Give the path of a YAML file.")
    content = read_yaml(path, name, loader)
    if holds == FLAGS and isinstance(content, dict):
        _refuse_other_kinds(name, said, content)
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise RequestError(f"{name}: must hold {holds}, but {found}.")
    if len(content) > MOST:
        raise RequestError(f"{name}: has {len(content):,} lines; at most {MOST:,} are read.")
    return content


def _refuse_other_kinds(name: str, said: str, content: dict[str, Any]) -> None:
    """Raises RequestError for a file that is meant for another command or flag."""
    if isinstance(content.get("grid"), list):
        raise RequestError(f"{name}: is a grid for `finetune bench {name}`, not a recipe's YAML.")
    if OF_ACCELERATE & content.keys():
        raise RequestError(
            f"{name}: is a config of accelerate, not a recipe's YAML. Start with `accelerate launch --config_file "
            f"{name} RECIPE`, which checks it before anything is loaded, or give the file of its deepspeed_config_file."
        )
    if OF_DEEPSPEED & content.keys():
        raise RequestError(f"{said}, but that is a DeepSpeed config. Use --deepspeed {name}.")
