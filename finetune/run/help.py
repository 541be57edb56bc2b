"""`recipes/X.py --help`: common flags first, then the recipe's own flags, then the Trainer's."""

from __future__ import annotations

import shutil
import textwrap

from finetune.run.flag import Flag
from finetune.run.recipe import Recipe

COMMON = (
    *("output_dir", "config", "model_name_or_path", "model_size", "train_file", "validation_file", "test_file"),
    *("train_dir", "dataset_name", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    *("max_steps", "learning_rate", "bf16", "deepspeed", "pipeline_parallel_size", "resume", "report_to", "seed"),
)
CLOSING = """A list takes several words (--report_to wandb tensorboard), and --flag alone means True.
--config takes a YAML of the same flags; the command line overrides it."""
BY_MACHINE = ("bf16", "fp16")  # chosen automatically by default
INDENT, COLUMN = "  ", 34


def help_of(recipe: Recipe, about: str | None) -> str:
    """The help text; `about` is the docstring of the recipe's file."""
    flags = dict(recipe.flags)
    common = [flags.pop(name) for name in COMMON if name in flags]
    parts = [(about or recipe.script).strip(), _section("Common flags", recipe, common)]
    for group in (*recipe.groups, *recipe.trainer_groups, *recipe.pipeline_groups):
        own = [flags.pop(flag.name) for flag in recipe.own_flags if flag.group is group and flag.name in flags]
        title = (group.__doc__ or group.__name__).strip().splitlines()[0]
        parts += [_section(title, recipe, own)] if own else []
    parts.append(_section("Trainer flags (transformers.TrainingArguments)", recipe, list(flags.values())))
    parts.append(CLOSING)
    return "\n\n".join(parts)


def _section(title: str, recipe: Recipe, flags: list[Flag]) -> str:
    return "\n".join([f"{title.rstrip('.')}:", *(_entry(flag, recipe) for flag in flags)])


def _entry(flag: Flag, recipe: Recipe) -> str:
    default = recipe.default(flag.name)
    words = "" if flag.kind == "bool" else f" {flag.kind.upper()}" + (" ..." if flag.many else "")
    choices = f" [{', '.join(flag.choices)}]" if flag.choices and flag.choices[0] not in flag.help else ""
    shown = "" if default is None or default in ("", []) or flag.name in BY_MACHINE else f" (default: {default})"
    if flag.kind == "bool" and default is True and flag.default is True:
        shown = f" (default: True; --no_{flag.name} for False)"
    if flag.name in recipe.scratch_defaults:
        shown = f" (default: {default}; for a model from scratch {recipe.scratch_defaults[flag.name]})"
    head = f"{INDENT}--{flag.name}{words}"
    width = max(60, min(120, shutil.get_terminal_size().columns))
    body = textwrap.wrap(f"{flag.help}{choices}{shown}", width - COLUMN) or [""]
    first = f"{head:<{COLUMN}}{body[0]}" if len(head) < COLUMN else f"{head}\n{' ' * COLUMN}{body[0]}"
    return "\n".join([first, *(f"{' ' * COLUMN}{line}" for line in body[1:])])
