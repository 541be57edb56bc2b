"""A run: a recipe with every value resolved, and the source of each. `finetune.run.resolve` creates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

from finetune.run.launch import Launch
from finetune.run.parse import Setting
from finetune.run.recipe import ENGINE_FLAG, PIPELINE, TRAINER, Recipe
from finetune.run.task import Task

Group = TypeVar("Group")
SHOWN_CHARACTERS = 1_000  # of a value: a list may have thousands of characters


@dataclass(frozen=True)
class Run:
    """What one process of a run was asked to do. `settings` are the given values and the recipe's defaults."""

    recipe: Recipe
    launch: Launch
    argv: tuple[str, ...]
    settings: Mapping[str, Setting]
    notes: tuple[str, ...] = ()  # choices that may surprise the user

    @cached_property
    def values(self) -> dict[str, Any]:
        """By flag: the given values and the recipe's defaults, without the Trainer's."""
        return {name: setting.value for name, setting in self.settings.items()}

    @cached_property
    def given(self) -> dict[str, Any]:
        """By flag: the values from the command line and its YAML."""
        return {name: setting.value for name, setting in self.settings.items() if setting.is_given}

    @property
    def task(self) -> Task:
        """What the model is trained for."""
        return self.recipe.task_of(self.value)

    def value(self, name: str) -> Any:
        """The value of any flag: as given, or the recipe's default, or the flag's own; None for an unknown name."""
        return self.settings[name].value if name in self.settings else self.recipe.default(name)

    def said(self, name: str) -> str:
        """The beginning of an error: the flag, its value, and its source."""
        shown = repr(self.value(name))
        shown = shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}..."
        return f"--{name} is {shown} ({self.source(name)})"

    def source(self, name: str) -> str:
        return self.settings[name].source if name in self.settings else "default"

    @property
    def stages(self) -> int | None:
        """The number of pipeline stages; None for a run with the Trainer."""
        engines = self.recipe.engines
        is_pipeline = PIPELINE in engines and (TRAINER not in engines or self.value(ENGINE_FLAG) is not None)
        asked = self.value(ENGINE_FLAG)
        return (1 if asked is None else int(asked)) if is_pipeline else None

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share each text."""
        return int(self.value("sequence_parallel_size") or 1)

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that hold the experts of a mixture together."""
        return int(self.value("expert_parallel_size") or 1)

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of ranks, that read different samples."""
        return self.launch.world_size // ((self.stages or 1) * self.sequence_parallel_size)

    @property
    def without_pipeline(self) -> str:
        """How to train the same with the Trainer, worded as the fix in an error."""
        others = " or ".join(f"recipes/{name}.py" for name in self.recipe.reads)
        return f"drop --{ENGINE_FLAG}" if TRAINER in self.recipe.engines else f"use {others}"

    @property
    def groups(self) -> tuple[type, ...]:
        """The groups of flags that this run's engine reads."""
        recipe = self.recipe
        return (*recipe.groups, *(recipe.trainer_groups if self.stages is None else recipe.pipeline_groups))

    def __getitem__(self, group: type[Group]) -> Group:
        """The values of a group of flags: `run[ModelArguments].model_size`."""
        known = [f.name for f in fields(group) if f.name in self.recipe.flags]  # type: ignore[arg-type]
        return group(**{name: self.value(name) for name in known})

    def settled(self, source: str, **values: Any) -> Run:
        """The run with `values` that follow from `source`, such as the machine."""
        return replace(self, settings={**self.settings, **{k: Setting(v, source, False) for k, v in values.items()}})

    def noted(self, *notes: str) -> Run:
        """The run with further notes."""
        return replace(self, notes=(*self.notes, *notes))
