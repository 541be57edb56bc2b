"""A recipe's description: its flags and defaults. `finetune/run/recipes/` has one for each script in `recipes/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from finetune.run.flag import OUTPUT, Flag, Void, flags_of
from finetune.run.task import NO_TASK, Task
from finetune.run.trainer_flags import trainer_flags

TRAINER, PIPELINE = "trainer", "pipeline"
# Defaults shared by the task recipes that differ from the Trainer's own.
USUAL: Mapping[str, Any] = {
    "do_train": True,
    "do_eval": True,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 32,
    "num_train_epochs": 3,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "logging_steps": 10,
    "report_to": ["none"],
}
# For generated text: our metrics, and what the default ones report.
METRICS_OF_TEXTS = ("exact_match", "rouge", "bleu", "chrf", "ter")
FIGURES_OF_TEXTS = ("exact_match", "rouge1", "rouge2", "rougeL", "rougeLsum")
ENGINE_FLAG = "pipeline_parallel_size"  # selects the pipeline in a recipe with two engines


@dataclass(frozen=True)
class Recipe:
    """`groups` are dataclasses of flags, in the order of --help; `trainer_groups` and `pipeline_groups` belong to one
    engine. A recipe with both engines uses DeepSpeed's pipeline engine if --pipeline_parallel_size is given.

    `defaults` override the Trainer's and the groups'; `scratch_defaults` override them if no model is named. `reads`
    names recipes whose YAMLs this one also accepts; `void` lists its flags that other flags make void. `figures` are
    what an evaluation reports without --metrics; `metrics` are the shipped ones that --metrics may name. `scratch`
    turns the flags' values, by name, into the config of a model from scratch, for the planner; None:
    `finetune.plan.run_model` knows it.
    """

    name: str  # the file's name in recipes/
    groups: tuple[type, ...]
    defaults: Mapping[str, Any]
    task: Task = NO_TASK
    tasks: Mapping[tuple[str, Any], Task] = field(default_factory=dict)  # other tasks, by a flag and its value
    scratch_defaults: Mapping[str, Any] = field(default_factory=dict)
    engines: tuple[str, ...] = (TRAINER,)
    trainer_groups: tuple[type, ...] = ()
    pipeline_groups: tuple[type, ...] = ()
    reads: tuple[str, ...] = ()
    void: tuple[Void, ...] = ()
    figures: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    scratch: Callable[[Callable[[str], Any]], dict[str, Any]] | None = None

    @property
    def script(self) -> str:
        return f"recipes/{self.name}.py"

    @cached_property
    def own_flags(self) -> tuple[Flag, ...]:
        return flags_of((*self.groups, *self.trainer_groups, *self.pipeline_groups))

    @cached_property
    def flags(self) -> Mapping[str, Flag]:
        """All flags by name: the recipe's, then the Trainer's."""
        return {flag.name: flag for flag in (*self.own_flags, *trainer_flags())}

    @property
    def inputs(self) -> Sequence[str]:
        """The flags that name a run's input files, which must never be deleted."""
        return [flag.name for flag in self.flags.values() if flag.path not in (None, OUTPUT)]

    def task_of(self, read: Callable[[str], Any]) -> Task:
        """The task of a run; `read` returns the values of its flags by name."""
        return next((task for (name, value), task in self.tasks.items() if read(name) == value), self.task)

    def default(self, name: str) -> Any:
        """The default of any flag; None for an unknown name."""
        flag = self.flags.get(name)
        return self.defaults.get(name, flag.default if flag else None)
