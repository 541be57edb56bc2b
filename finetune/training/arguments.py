"""Flags and YAML to dataclasses, beside the Trainer's own; and the checks that a request must pass."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import netrc
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from transformers import HfArgumentParser, TrainingArguments

from finetune.errors import RequestError
from finetune.training.flat_yaml import read_flat_yaml
from finetune.training.launch import Launch


@dataclass
class RunArguments:
    """How to run, beside what the Trainer's arguments say."""

    config: str | None = field(
        default=None, metadata={"help": "YAML file of flat flag: value lines; flags overrule it"}
    )
    deepspeed_config: str | None = field(default=None, metadata={"help": "the same as --deepspeed"})
    nvme_path: str | None = field(default=None, metadata={"help": "folder on a fast disk for NVMe offload"})
    disable_check: list[str] | None = field(
        default=None, metadata={"help": "codes of docs/check.md that are not looked for in the DeepSpeed config"}
    )
    resume: str | None = field(
        default=None,
        metadata={
            "help": "'auto', or the checkpoint folder to go on from; 'allow': 'auto' if there is one, else start"
        },
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "delete the run that output_dir holds"})
    early_stopping_patience: int | None = field(default=None, metadata={"help": "evaluations without improvement"})
    group_by_length: bool = field(default=True, metadata={"help": "batches of like length, so that little is padding"})
    activation_checkpoint_interval: int | None = field(
        default=None,
        metadata={"help": "compute every k-th layer's activations again in the backward pass, to save memory; 1: all"},
    )


class Parser(HfArgumentParser):
    """The Trainer's parser, made to raise RequestError where argparse prints two hundred flags and exits. `refused` are
    flags of other recipes, with what to do instead."""

    refused: dict[str, str]

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}. `--help` lists the flags.")


class Request:
    """What the user asked for, before `TrainingArguments` is built: values by name, and which were given at all."""

    def __init__(
        self,
        groups: Sequence[type],
        defaults: dict[str, Any],
        argv: Sequence[str],
        launch: Launch,
        scratch_defaults: dict[str, Any],
    ) -> None:
        self.groups = tuple(groups)
        self.launch, self.argv = launch, tuple(argv)
        parser = _parser((*groups, TrainingArguments), defaults)
        flags = parse_flags(parser, list(argv))
        path = flags.get("config")
        self.given = {**(_read_yaml(path, parser) if path else {}), **flags}
        if self.given.get("early_stopping_patience"):
            defaults = {**defaults, "load_best_model_at_end": True}  # what "best" is, --metric_for_best_model says
        if self.given.get("push_to_hub"):
            # Once, with the model card; and nobody's data become public unasked.
            defaults = {**defaults, "hub_private_repo": True, "hub_strategy": "end"}
        if not self.given.get("model_name_or_path"):
            defaults = {**defaults, **scratch_defaults}
        self.values: dict[str, Any] = {**defaults, **self.given}
        _check(self.values, self.given)

    def value(self, name: str) -> Any:
        """The value of any flag: as given, or the recipe's default, or the Trainer's."""
        return self.values.get(name, trainer_default(name))

    @property
    def stages(self) -> int | None:
        """Of a recipe that trains a pipeline, how many stages; None for one by the Trainer."""
        if not any(f.name == "pipeline_parallel_size" for group in self.groups for f in fields(group)):
            return None
        return int(self.values.get("pipeline_parallel_size", 1))

    def build(self, **settled: Any) -> tuple[Any, ...]:
        """The dataclasses of the groups, then `TrainingArguments` with what the runtime `settled`."""
        known = {f.name for f in fields(TrainingArguments) if f.init}
        training = {k: v for k, v in {**self.values, **settled}.items() if k in known}
        built = [
            group(**{f.name: self.values[f.name] for f in fields(group) if f.name in self.values})
            for group in self.groups
        ]
        try:
            return (*built, TrainingArguments(**training))
        except ValueError as error:
            raise RequestError(str(error)) from error


def trainer_default(name: str) -> Any:
    """The default of a field of TrainingArguments; None for any other name."""
    found = {f.name: f.default for f in fields(TrainingArguments)}
    return found.get(name)


def _parser(groups: Sequence[type], defaults: dict[str, Any]) -> Parser:
    parser = Parser(groups, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.refused = {name: why for group in groups for name, why in getattr(group, "refused", {}).items()}
    for action in parser._actions:
        if action.dest in defaults:
            action.help = f"{action.help or ''} [this recipe: {defaults[action.dest]}]".replace("%", "%%")
        if action.dest != "help":
            action.default = argparse.SUPPRESS  # only what is given comes back
    return parser


def parse_flags(parser: Parser, argv: list[str]) -> dict[str, Any]:
    """The given flags by name. The deepspeed launcher's --local_rank ends here (transformers 5 has no such flag)."""
    argv = [word for word in argv if not word.startswith(("--local_rank=", "--local-rank="))]
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        if name in parser.refused:
            raise RequestError(f"--{name}: {parser.refused[name]}")
        raise RequestError(f"{unknown[0]} is no flag of this recipe.{_nearest(name, parser)}")
    return dict(vars(known))


def _nearest(word: str, parser: Parser) -> str:
    near = difflib.get_close_matches(word, [action.dest for action in parser._actions], 1)
    return f" Did you mean --{near[0]}?" if near else " `--help` lists them."


def _read_yaml(name: str, parser: Parser) -> dict[str, Any]:
    """Flat `key: value` lines, as if they were flags, so both take the same values and give the same errors."""
    content = read_flat_yaml(name)
    known = {action.dest for action in parser._actions} - {"help", "config"}
    argv: list[str] = []
    for key, value in content.items():
        if key not in known and key in parser.refused and not value:
            continue  # what is refused is not asked for
        if key not in known and key not in parser.refused:
            raise RequestError(f"{name}: {key!r} is no flag of this recipe.{_nearest(str(key), parser)}")
        if isinstance(value, dict):
            argv.append(f"--{key}={json.dumps(value)}")
        elif isinstance(value, list):
            argv += [f"--{key}", *map(str, value)]
        elif value is not None:
            argv.append(f"--{key}={value}")
    try:
        return parse_flags(parser, argv)
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from error


def _check(values: dict[str, Any], given: dict[str, Any]) -> None:
    """What is wrong with the flags alone, whatever the machine and the data."""
    if given.get("hub_model_id") and not given.get("push_to_hub"):
        raise RequestError("--hub_model_id names where to push, but nothing is pushed. Add --push_to_hub True.")
    if given.get("hub_token"):
        raise RequestError(
            "--hub_token: everybody on this machine sees a command line, and the shell keeps it. Set HF_TOKEN, or run "
            "`hf auth login`."
        )
    if values.get("resume") and values.get("overwrite_output_dir"):
        raise RequestError("--resume and --overwrite_output_dir contradict each other. Keep one.")
    if given.get("deepspeed") and given.get("deepspeed_config"):
        raise RequestError("--deepspeed and --deepspeed_config say the same thing twice. Keep one.")
    if values.get("learning_rate", 0.0) < 0:
        raise RequestError(f"--learning_rate is {values['learning_rate']}, but it must be 0 or more.")
    if values.get("max_steps", -1) == 0 or values.get("max_steps", -1) < -1:
        raise RequestError(f"--max_steps is {values['max_steps']}, but it must be 1 or more, or -1 for whole epochs.")
    if values.get("num_train_epochs", 1) <= 0:
        raise RequestError(f"--num_train_epochs is {values['num_train_epochs']}, but it must be more than 0.")
    if values.get("class_weights", "none") not in ("none", "balanced"):
        raise RequestError(f"--class_weights is {values['class_weights']!r}, but it must be none or balanced.")
    if values.get("task") not in (None, "classification", "regression"):
        raise RequestError(f"--task is {values['task']!r}, but it must be classification or regression.")
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if name in values and values[name] < 1:
            raise RequestError(f"--{name} is {values[name]}, but it must be 1 or more.")
    if given.get("dataloader_drop_last") or given.get("train_sampling_strategy", "random") != "random":
        flag = "dataloader_drop_last" if given.get("dataloader_drop_last") else "train_sampling_strategy"
        raise RequestError(
            f"--{flag}: steps are made here so that they do not depend on the number of ranks. Use --group_by_length."
        )
    tests = ("test_file", "test_dir", "cifar_dir", "dataset_name")
    if values.get("do_predict") and not any(values.get(name) for name in tests):
        raise RequestError(
            "--do_predict needs a test split. Give --test_file (of pictures --test_dir), or a --dataset_name that has "
            "one."
        )
    if (interval := values.get("activation_checkpoint_interval")) is not None and interval < 1:
        raise RequestError(f"--activation_checkpoint_interval is {interval}, but it must be 1 (every layer) or more.")
    _check_optimizer(str(values.get("optim", "")))
    reports = values.get("report_to") or []
    check_trackers([reports] if isinstance(reports, str) else reports)


def _check_optimizer(name: str) -> None:
    """An optimizer of a package that is missing would end the run once the model is loaded."""
    package = "torchao" if name.startswith("adamw_torch_") and name.endswith("bit") else None
    if package is None and ("8bit" in name or "bnb" in name or name.startswith("paged_")):
        package = "bitsandbytes"
    if package and importlib.util.find_spec(package) is None:
        raise RequestError(f"--optim {name} needs {package}, which is not installed. pip install {package}.")


def check_trackers(reports: list[str], flag: str = "report_to") -> None:
    """A tracker that is missing, or that would stop the run to ask, is refused before anything is loaded."""
    for name in ("tensorboard", "trackio"):
        if name in reports and importlib.util.find_spec(name) is None:
            raise RequestError(f"--{flag} {name}: it is not installed. pip install {name}, or leave it out.")
    if {"wandb", "all"} & set(reports) and not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE")):
        try:
            logged_in = any("wandb" in host for host in netrc.netrc().hosts)
        except (OSError, netrc.NetrcParseError):
            logged_in = False
        if not logged_in:
            raise RequestError(
                f"--{flag} wandb, but nobody is logged in, and a run must not stop to ask. Run `wandb login`, or set "
                "WANDB_API_KEY, or set WANDB_MODE=offline and `wandb sync` later."
            )
