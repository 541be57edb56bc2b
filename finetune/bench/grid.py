"""A grid in YAML, and its cells. Never imports torch.

scale: 0.125                    # of every model; `models` changes single sizes
repeats: 3
grid:
  - models: [wide, deep]        # each block is the product of its lists
    layouts: [ddp, zero1, zero2]
    world_sizes: 2
    micro_batches: [32, 64]
    global_batch: 128           # accumulation makes up for it
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from finetune.bench.models import BenchModel, find_model, nearest
from finetune.dsconfig.check import read
from finetune.dsconfig.config import Config
from finetune.dsconfig.load import find_config
from finetune.dsconfig.parse import NotJsonError, parse
from finetune.errors import RequestError
from finetune.measure.processes import DEEPSPEED, PYTHON, TORCHRUN
from finetune.run.flat_yaml import read_flat_yaml

PRECISIONS = ("fp32", "bf16", "fp16")
MOST_CELLS = 10_000
# A block is the product of these lists; the values are their defaults.
LISTS: dict[str, list[Any]] = {
    "models": [], "layouts": [], "ds_configs": [], "world_sizes": [1], "stages": [1], "micro_batches": [1],
    "accumulations": [1], "checkpoint_intervals": [0], "precisions": ["fp32"],
}  # fmt: skip
LEAST = {  # of each whole number
    "world_sizes": 1, "stages": 1, "micro_batches": 1, "accumulations": 1, "global_batch": 1, "repeats": 1, "steps": 1,
    "timeout_seconds": 1, "checkpoint_intervals": 0, "warmup_steps": 0, "seed": 0, "dataloader_num_workers": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks. `ds_config` is the shipped one; None without DeepSpeed, and if only the grid
    gives one. `flags` are the recipe's."""

    launcher: str
    ds_config: str | None = None
    flags: dict[str, object] = field(default_factory=dict)
    has_stages: bool = False


LAYOUTS: dict[str, Layout] = {
    "none": Layout(PYTHON),  # one process, whatever the world size
    "ddp": Layout(TORCHRUN),
    "checkpointing": Layout(TORCHRUN),  # ddp with activation checkpointing
    "fsdp": Layout(TORCHRUN, flags={"fsdp": True}),
    **{name: Layout(DEEPSPEED, name) for name in ("zero0", "zero1", "zero2", "zero3", "zeropp")},
    **{name: Layout(DEEPSPEED, name) for name in ("zero2_offload", "zero3_offload", "zero3_nvme")},
    "deepspeed": Layout(DEEPSPEED),  # with each of the grid's ds_configs
    "pipeline": Layout(DEEPSPEED, "pipeline", has_stages=True),
}


@dataclass(frozen=True)
class Cell:
    """One configuration; `global_batch` is 0 if the grid gives none."""

    model: str
    layout: str
    ds_config: str | None
    world_size: int
    stages: int
    micro_batch: int
    accumulation: int
    checkpoint_interval: int
    precision: str
    global_batch: int = 0

    @property
    def name(self) -> str:
        """Such as gptlite-zero2-2x8, or gptlite-pipeline2-2x8-a4: values other than the defaults come last."""
        parts = [self.model, self.layout + (str(self.stages) if LAYOUTS[self.layout].has_stages else "")]
        if self.ds_config != LAYOUTS[self.layout].ds_config:
            parts.append(Path(str(self.ds_config)).stem)
        parts.append(f"{self.world_size}x{self.micro_batch}")
        parts += [f"a{self.accumulation}"] if self.accumulation != 1 else []
        usual = 1 if self.layout == "checkpointing" else 0
        parts += [f"c{self.checkpoint_interval}"] if self.checkpoint_interval != usual else []
        parts += [self.precision] if self.precision != "fp32" else []
        return "-".join(parts)

    @property
    def samples(self) -> int:
        return self.micro_batch * self.accumulation * (self.world_size // self.stages)


@dataclass(frozen=True)
class Grid:
    """`steps` are timed, after steps in which memory is watched and `warmup_steps`, which are not timed."""

    cells: tuple[Cell, ...]
    models: Mapping[str, BenchModel]
    changes: Mapping[str, Mapping[str, Any]]  # of the models, from the YAML
    scale: float = 1.0
    repeats: int = 1
    steps: int = 5
    warmup_steps: int = 1
    timeout_seconds: int = 600
    learning_rate: float = 1e-4
    seed: int = 42
    dataloader_num_workers: int = 0

    @property
    def sha256(self) -> str:
        """Of everything that measurements depend on, including DeepSpeed configs; not of repeats and timeout."""
        beside = ("cells", "models", "changes", "repeats", "timeout_seconds")
        content = {
            "cells": [asdict(cell) | {"ds_config_sha256": config_sha256(cell.ds_config)} for cell in self.cells],
            "models": {name: asdict(model) for name, model in self.models.items()},
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in beside},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_grid(path: str, scale: float | None = None, repeats: int | None = None) -> Grid:
    """The grid of a YAML file; `scale` and `repeats` override it. Raises RequestError for mistakes in it."""
    content = read_flat_yaml(path, path, "`grid:`, a list of blocks (docs/bench.md)")
    given = {"scale": scale, "repeats": repeats}
    try:
        return _grid({**content, **{name: value for name, value in given.items() if value is not None}})
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error


def _grid(content: dict[str, Any]) -> Grid:
    defaults = {f.name: f.default for f in fields(Grid) if f.name not in ("cells", "models", "changes")}
    _check_known(content, (*defaults, "models", "grid"), "key of a grid")
    settings: dict[str, Any] = {name: content.get(name, default) for name, default in defaults.items()}
    for name, value in settings.items():
        _check_number(name, value)
    rate = settings["learning_rate"]
    if isinstance(rate, bool) or not isinstance(rate, int | float) or rate < 0:
        raise RequestError(f"learning_rate is {rate!r}, but it must be a number of 0 or more, such as 1.0e-4.")
    changes = content.get("models") or {}
    if not isinstance(changes, dict) or not all(isinstance(value, dict) for value in changes.values()):
        raise RequestError("models must hold the changes of each model, such as `models: {wide: {width: 512}}`.")
    blocks = content.get("grid")
    if not isinstance(blocks, list) or not blocks:
        raise RequestError("grid must list blocks, each with `models:` and `layouts:` at least (docs/bench.md).")
    for name in changes:
        find_model(name, settings["scale"], changes[name])
    places: dict[Cell, int] = {}
    for number, block in enumerate(blocks, start=1):
        try:
            _add(_block(block), places, number)
        except RequestError as error:
            raise RequestError(f"grid, block {number}: {error}") from error
    names = dict.fromkeys(cell.model for cell in places)
    models = {name: find_model(name, settings["scale"], changes.get(name)) for name in names}
    if unused := next((name for name in changes if name not in models), None):
        raise RequestError(f"models: {unused} is changed, but no block of the grid has it. Drop it, or add it there.")
    return Grid(tuple(places), models, changes, **settings)


def _add(block: dict[str, Any], places: dict[Cell, int], number: int) -> None:
    """Add the cells of a block to `places`, with its number. Raises RequestError for a duplicate."""
    seen = {cell.name: (cell, place) for cell, place in places.items()}
    for cell in _cells(block):
        if cell.name not in seen:
            places[cell], seen[cell.name] = number, (cell, number)
        elif seen[cell.name][1] != number or seen[cell.name][0] != cell:  # `none` is the same at any world size
            raise RequestError(f"{cell.name} is already in block {seen[cell.name][1]}. Drop one.")
    if len(places) > MOST_CELLS:
        raise RequestError(f"with it there are more than {MOST_CELLS:,} cells. Mistyped?")


def _block(content: Any) -> dict[str, Any]:
    """LISTS with the YAML's values, and `global_batch`, 0 if not given. Raises RequestError."""
    if not isinstance(content, dict):
        raise RequestError(f"must hold `key: value` lines, but holds {content!r}.")
    _check_known(content, (*LISTS, "global_batch"), "key of a block")
    for name in ("models", "layouts"):
        if not content.get(name):
            raise RequestError(f"{name} is missing. Give a list.")
    lists = {name: content.get(name, usual) for name, usual in LISTS.items()}
    block = {name: value if isinstance(value, list) else [value] for name, value in lists.items()}
    for name, values in block.items():
        for one in values:
            _check_number(name, one)
            if name not in LEAST and not isinstance(one, str):
                raise RequestError(f"{name} holds {one!r}, but it must hold names.")
    _check_names(block)
    batch = content.get("global_batch", 0)
    if "global_batch" in content:
        _check_number("global_batch", batch)
        if "accumulations" in content:
            raise RequestError("global_batch and accumulations both set the accumulation. Drop one.")
    return {**block, "global_batch": batch}


def _check_known(names: Iterable[Any], known: Collection[str], what: str) -> None:
    """Raises RequestError for the first unknown name."""
    for name in names:
        if name not in known:
            raise RequestError(f"{name!r} is not a {what}.{nearest(name, known)}")


def _check_number(name: str, value: Any) -> None:
    """Raises RequestError for a value that must be a whole number and is not, or is too small."""
    if name in LEAST and (isinstance(value, bool) or not isinstance(value, int) or value < LEAST[name]):
        raise RequestError(f"{name} is {value!r}, but it must be a whole number of {LEAST[name]} or more.")


def _check_names(block: dict[str, list[Any]]) -> None:
    """Raises RequestError for an unknown name, and for a list that nothing in the block uses."""
    for model in block["models"]:
        find_model(model)
    _check_known(block["layouts"], LAYOUTS, "layout")
    _check_known(block["precisions"], PRECISIONS, "precision")
    kinds = [LAYOUTS[layout] for layout in block["layouts"]]
    if block["ds_configs"] and not any(kind.launcher == DEEPSPEED for kind in kinds):
        raise RequestError("ds_configs: no layout of the block is DeepSpeed's. Drop it, or add zero1 for instance.")
    if block["stages"] != [1] and not any(kind.has_stages for kind in kinds):
        raise RequestError("stages: no layout of the block is a pipeline. Drop it, or add the layout pipeline.")
    if "deepspeed" in block["layouts"] and not block["ds_configs"]:
        raise RequestError("the layout deepspeed needs ds_configs, and there are none. Give a list.")
    for layout, config in product(block["layouts"], block["ds_configs"]):
        _check_same(layout, config)


def _check_same(layout: str, config: str) -> None:
    """Raises RequestError for a config that does something else than the layout whose config it replaces."""
    shipped, theirs = LAYOUTS[layout].ds_config, _does(config)
    if shipped is not None and not LAYOUTS[layout].has_stages and theirs != _does(shipped):
        raise RequestError(
            f"ds_configs: {config} is {theirs}, but the layout {layout} is {_does(shipped)}. Put them into a block of "
            "their own; the layout deepspeed takes any config."
        )


def _does(name: str) -> str:
    """What a config does, as far as a layout's name says it: ZeRO stage and offload."""
    config = Config(_content(name))
    stage = config.get("zero_optimization.stage") or 0
    moved = [
        f"{what} to {to}" for what in ("optimizer", "param") if (to := config.offload(f"offload_{what}")) != "none"
    ]
    plus = any(config.is_on(f"zero_optimization.zero_quantized_{what}") for what in ("weights", "gradients"))
    plus |= config.get("zero_optimization.zero_hpz_partition_size") not in (None, 1)
    said = f"ZeRO{'++' if plus else ''} stage {stage}"
    return said + (f" with offload of {' and '.join(moved)}" if moved else "")


def _cells(block: dict[str, Any]) -> Iterator[Cell]:
    for model, layout in product(block["models"], block["layouts"]):
        kind = LAYOUTS[layout]
        own = block["ds_configs"] if kind.launcher == DEEPSPEED else []
        worlds = [1] if kind.launcher == PYTHON else block["world_sizes"]
        stages_of = block["stages"] if kind.has_stages else [1]
        batches = (block[name] for name in ("micro_batches", "accumulations", "checkpoint_intervals", "precisions"))
        for config, world, stages, micro, accumulation, interval, precision in product(
            own or [kind.ds_config], worlds, stages_of, *batches
        ):
            if world % stages:
                raise RequestError(
                    f"{layout} of stages {stages} on world_sizes {world}: {world} ranks are not a multiple of {stages} "
                    f"stages. Give world_sizes {stages} or a multiple, or a block of their own."
                )
            batch, share = block["global_batch"], micro * (world // stages)
            if batch % share:
                near = max(1, round(batch / share)) * share
                raise RequestError(
                    f"global_batch {batch} is not a multiple of {micro} x {world // stages} = {share} (micro-batch x "
                    f"ranks that read different samples). Give {near}, or another micro-batch."
                )
            accumulation = batch // share or accumulation
            if layout == "checkpointing":
                interval = max(1, interval)
            yield Cell(model, layout, config, world, stages, micro, accumulation, interval, precision, batch)


def config_sha256(name: str | None) -> str | None:
    """The hash of a DeepSpeed config's content, ignoring whitespace. Raises RequestError if it cannot be read."""
    return None if name is None else hashlib.sha256(json.dumps(_content(name), sort_keys=True).encode()).hexdigest()


def _content(name: str) -> Any:
    try:
        return parse(read(find_config(name))).value
    except NotJsonError as error:
        raise RequestError(f"{name}: is not valid JSON ({error}). `finetune check {name}` says where.") from error
