"""What a recipe is: its flags and its defaults. One stands in `finetune/run/recipes/` for each of `recipes/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from finetune.run.flag import OUTPUT, Flag, Void, flags_of
from finetune.run.task import NO_TASK, Task
from finetune.run.trainer_flags import trainer_flags

TRAINER, PIPELINE = "trainer", "pipeline"
# What the recipes of tasks have in common, where the Trainer's own defaults are others.
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
# Of texts that a model writes: the metrics of ours, and what those give that judge where --metrics says nothing.
METRICS_OF_TEXTS = ("exact_match", "rouge", "bleu", "chrf", "ter")
FIGURES_OF_TEXTS = ("exact_match", "rouge1", "rouge2", "rougeL", "rougeLsum")
ENGINE_FLAG = "pipeline_parallel_size"  # by which a recipe of two engines is asked for the pipeline


@dataclass(frozen=True)
class Recipe:
    """`groups` are dataclasses of flags, in the order of --help; those of one engine alone are beside them. A recipe of
    both engines trains by DeepSpeed's pipeline engine where --pipeline_parallel_size is given.

    `defaults` overrule the Trainer's and the groups'; `scratch_defaults` overrule them where no model is named. `reads`
    names recipes whose YAMLs this one takes, too; `void` has flags of its own that others make void. `figures` are what
    an evaluation gives where --metrics says nothing; `metrics` are those of ours that it may name. `scratch` makes of
    the flags' values, by name, the config of the model that is built where none is named, for the planner; None:
    `finetune.plan.run_model` knows it.
    """

    name: str  # of the file in recipes/
    groups: tuple[type, ...]
    defaults: Mapping[str, Any]
    task: Task = NO_TASK
    tasks: Mapping[tuple[str, Any], Task] = field(default_factory=dict)  # others, by a flag and its value
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
        """All by name: the recipe's, then the Trainer's."""
        return {flag.name: flag for flag in (*self.own_flags, *trainer_flags())}

    @property
    def inputs(self) -> Sequence[str]:
        """The flags that name what a run reads, which nothing may delete."""
        return [flag.name for flag in self.flags.values() if flag.path not in (None, OUTPUT)]

    def task_of(self, read: Callable[[str], Any]) -> Task:
        """Of a run; `read` gives the values of its flags by name."""
        return next((task for (name, value), task in self.tasks.items() if read(name) == value), self.task)

    def default(self, name: str) -> Any:
        """Of any flag; None for a name that is none."""
        flag = self.flags.get(name)
        return self.defaults.get(name, flag.default if flag else None)
