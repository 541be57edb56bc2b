"""A grid in YAML, and the cells that it says. Never imports torch.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from finetune.bench.layouts import LAYOUTS
from finetune.bench.models import BenchModel, find_model, nearest
from finetune.dsconfig.check import read
from finetune.dsconfig.config import Config
from finetune.dsconfig.load import find_config
from finetune.dsconfig.parse import NotJsonError, parse
from finetune.errors import RequestError
from finetune.measure.processes import DEEPSPEED, PYTHON
from finetune.run.flat_yaml import read_flat_yaml

PRECISIONS = ("fp32", "bf16", "fp16")
MOST_CELLS = 10_000


@dataclass(frozen=True)
class Cell:
    """One configuration; `global_batch` is 0 where none was asked for."""

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
        """Such as gptlite-zero2-2x8, or gptlite-pipeline2-2x8-a4: what differs from the usual comes behind."""
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
        """Of a step, over all ranks."""
        return self.micro_batch * self.accumulation * (self.world_size // self.stages)


@dataclass(frozen=True)
class Block:
    """The lists of one product, as the YAML has them."""

    models: list[str]
    layouts: list[str]
    ds_configs: list[str] = field(default_factory=list)
    world_sizes: list[int] = field(default_factory=lambda: [1])
    stages: list[int] = field(default_factory=lambda: [1])
    micro_batches: list[int] = field(default_factory=lambda: [1])
    accumulations: list[int] = field(default_factory=lambda: [1])
    checkpoint_intervals: list[int] = field(default_factory=lambda: [0])
    precisions: list[str] = field(default_factory=lambda: ["fp32"])
    global_batch: int = 0


@dataclass(frozen=True)
class Grid:
    """`steps` are measured, after `warmup_steps` that are not, beside those in which memory is watched."""

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
        """Of all that a figure hangs on, DeepSpeed's configs among it; not of how often, how long and where."""
        beside = ("cells", "models", "changes", "repeats", "timeout_seconds")
        content = {
            "cells": [asdict(cell) | {"ds_config_sha256": config_sha256(cell.ds_config)} for cell in self.cells],
            "models": {name: asdict(model) for name, model in self.models.items()},
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in beside},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_grid(path: str, scale: float | None = None, repeats: int | None = None) -> Grid:
    """The grid of a YAML file; `scale` and `repeats` overrule it. Raises RequestError for what is wrong with it."""
    content = read_flat_yaml(path, path, "`grid:`, a list of blocks (docs/bench.md)")
    given = {"scale": scale, "repeats": repeats}
    try:
        return _grid({**content, **{name: value for name, value in given.items() if value is not None}})
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error


def _grid(content: dict[str, Any]) -> Grid:
    settings: dict[str, Any] = {f.name: f.default for f in fields(Grid) if f.name not in ("cells", "models", "changes")}
    known = (*settings, "models", "grid")
    for key in content:
        if key not in known:
            raise RequestError(f"{key!r} is no key of a grid.{nearest(key, known)}")
    for name in ("repeats", "steps", "timeout_seconds"):
        settings[name] = _whole(name, content.get(name, settings[name]), 1)
    for name in ("warmup_steps", "seed", "dataloader_num_workers"):
        settings[name] = _whole(name, content.get(name, settings[name]), 0)
    settings["scale"] = content.get("scale", settings["scale"])
    rate = settings["learning_rate"] = content.get("learning_rate", settings["learning_rate"])
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


def _add(block: Block, places: dict[Cell, int], number: int) -> None:
    """The cells of a block into `places`, with its number. Raises RequestError where one is there already."""
    seen = {cell.name: (cell, place) for cell, place in places.items()}
    for cell in _cells(block):
        if cell.name not in seen:
            places[cell], seen[cell.name] = number, (cell, number)
        elif seen[cell.name][1] != number or seen[cell.name][0] != cell:  # `none` is the same at any world
            raise RequestError(f"{cell.name} is there already, in block {seen[cell.name][1]}. Drop one.")
    if len(places) > MOST_CELLS:
        raise RequestError(f"with it there are more than {MOST_CELLS:,} cells. Mistyped?")


def _block(content: Any) -> Block:
    if not isinstance(content, dict):
        raise RequestError(f"must hold `key: value` lines, but holds {content!r}.")
    known = [f.name for f in fields(Block)]
    if wrong := next((key for key in content if key not in known), None):
        raise RequestError(f"{wrong!r} is no key of a block.{nearest(wrong, known)}")
    for name in ("models", "layouts"):
        if not content.get(name):
            raise RequestError(f"{name} is missing. Give a list.")
    values: dict[str, Any] = {
        name: value if name == "global_batch" or isinstance(value, list) else [value] for name, value in content.items()
    }
    for name in ("models", "layouts", "ds_configs", "precisions"):
        if (other := next((one for one in values.get(name, ()) if not isinstance(one, str)), None)) is not None:
            raise RequestError(f"{name} holds {other!r}, but it must hold names.")
    for name in ("world_sizes", "stages", "micro_batches", "accumulations"):
        values[name] = [_whole(name, one, 1) for one in values.get(name, [1])]
    values["checkpoint_intervals"] = [
        _whole("checkpoint_intervals", one, 0) for one in values.get("checkpoint_intervals", [0])
    ]
    if "global_batch" in values:
        _whole("global_batch", values["global_batch"], 1)
        if "accumulations" in content:
            raise RequestError("global_batch says what accumulation there is, and accumulations too. Drop one.")
    block = Block(**values)
    _check(block)
    return block


def _check(block: Block) -> None:
    """Raises RequestError for a name that is none, and for a list that nothing in the block takes."""
    for model in block.models:
        find_model(model)
    for layout in block.layouts:
        if layout not in LAYOUTS:
            raise RequestError(f"{layout!r} is no layout.{nearest(layout, LAYOUTS)}")
    for precision in block.precisions:
        if precision not in PRECISIONS:
            raise RequestError(f"{precision!r} is no precision.{nearest(precision, PRECISIONS)}")
    kinds = [LAYOUTS[layout] for layout in block.layouts]
    if block.ds_configs and not any(kind.launcher == DEEPSPEED for kind in kinds):
        raise RequestError("ds_configs: no layout of the block is DeepSpeed's. Drop it, or add zero1 for instance.")
    if block.stages != [1] and not any(kind.has_stages for kind in kinds):
        raise RequestError("stages: no layout of the block is a pipeline. Drop it, or add the layout pipeline.")
    if "deepspeed" in block.layouts and not block.ds_configs:
        raise RequestError("the layout deepspeed is what ds_configs say, and there are none. Give a list.")
    for layout, config in product(block.layouts, block.ds_configs):
        _check_same(layout, config)


def _check_same(layout: str, config: str) -> None:
    """Raises RequestError for a config that does something else than the layout in whose place it is to stand."""
    shipped = LAYOUTS[layout].ds_config
    theirs = _does(config)
    if shipped is not None and not LAYOUTS[layout].has_stages and theirs != _does(shipped):
        raise RequestError(
            f"ds_configs: {config} is {theirs}, but the layout {layout} is {_does(shipped)}. Put them into a block of "
            "their own; the layout deepspeed takes any config."
        )


def _does(name: str) -> str:
    """What of a config is in a layout's name."""
    config = Config(_content(name))
    stage = config.get("zero_optimization.stage") or 0
    moved = [
        f"{what} to {to}" for what in ("optimizer", "param") if (to := config.offload(f"offload_{what}")) != "none"
    ]
    plus = config.is_on("zero_optimization.zero_quantized_weights")
    plus |= config.is_on("zero_optimization.zero_quantized_gradients")
    plus |= config.get("zero_optimization.zero_hpz_partition_size") not in (None, 1)
    said = f"ZeRO{'++' if plus else ''} stage {stage}"
    return said + (f" with offload of {' and '.join(moved)}" if moved else "")


def _cells(block: Block) -> Iterator[Cell]:
    for model, layout in product(block.models, block.layouts):
        kind = LAYOUTS[layout]
        own = block.ds_configs if kind.launcher == DEEPSPEED else []
        configs: Sequence[str | None] = own or [kind.ds_config]
        worlds = [1] if kind.launcher == PYTHON else block.world_sizes
        lists = (
            *(configs, worlds, block.stages if kind.has_stages else [1], block.micro_batches),
            *(block.accumulations, block.checkpoint_intervals, block.precisions),
        )
        for config, world, stages, micro, accumulation, interval, precision in product(*lists):
            if world % stages:
                raise RequestError(
                    f"{layout} of stages {stages} on world_sizes {world}: {world} ranks are no multiple of {stages} "
                    f"stages. Give world_sizes {stages} or a multiple, or a block of their own."
                )
            if block.global_batch:
                accumulation = _accumulation(block.global_batch, micro, world, stages)
            if layout == "checkpointing":
                interval = max(1, interval)
            yield Cell(model, layout, config, world, stages, micro, accumulation, interval, precision,
                       block.global_batch)  # fmt: skip


def _accumulation(global_batch: int, micro: int, world: int, stages: int) -> int:
    """What makes up the global batch. Raises RequestError where nothing does."""
    share = micro * (world // stages)
    if global_batch % share:
        raise RequestError(
            f"global_batch {global_batch} is no multiple of {micro} x {world // stages} = {share} (micro-batch x ranks "
            f"that read different samples). Give {max(1, round(global_batch / share)) * share}, or another micro-batch."
        )
    return global_batch // share


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RequestError(f"{name} is {value!r}, but it must be a whole number of {least} or more.")
    return value


def config_sha256(name: str | None) -> str | None:
    """Of what a DeepSpeed config says, however it is spaced. Raises RequestError where it cannot be read."""
    return None if name is None else hashlib.sha256(json.dumps(_content(name), sort_keys=True).encode()).hexdigest()


def _content(name: str) -> Any:
    try:
        return parse(read(find_config(name))).value
    except NotJsonError as error:
        raise RequestError(f"{name}: is no JSON ({error}). `finetune check {name}` says where.") from error
