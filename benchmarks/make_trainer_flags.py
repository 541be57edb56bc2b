"""Records the flags of the installed `TrainingArguments`, for code that must not import transformers:

python benchmarks/make_trainer_flags.py
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import typing
from typing import Any

from finetune.run.flag import kind_of
from finetune.run.schedules import parameters_of
from finetune.run.snapshot import SNAPSHOT


def snapshot() -> dict[str, Any]:
    """The release and its flags: name, kind, default, help, whether it takes a list, choices."""
    import transformers
    from accelerate.utils import DynamoBackend

    # Texts for the Trainer, which ends in a trace by any other; the modes are those that torch.compile documents.
    words = {
        "torch_compile_backend": [one.value.lower() for one in DynamoBackend if one is not DynamoBackend.NO],
        "torch_compile_mode": "default reduce-overhead max-autotune max-autotune-no-cudagraphs".split(),
    }

    hints = typing.get_type_hints(transformers.TrainingArguments)
    rows = []
    for one in dataclasses.fields(transformers.TrainingArguments):
        kind, many = kind_of(hints[one.name])
        many = many and one.name not in WORDS
        if one.init and one.name not in LEFT_OUT:
            row = {"name": one.name, "kind": kind, "default": _default(one), "help": _help(one)}
            row |= {"many": True} if many else {}
            choices = words.get(one.name) or _choices(hints[one.name])
            row |= {"choices": choices} if choices and not many else {}
            rows.append(row)
    others = {"schedules": _schedules(), "optim_args": _optim_args()}
    return {"transformers": transformers.__version__, "flags": rows, **others}


# What a command line cannot say, and what the recipes end in their own way.
LEFT_OUT = ("parallelism_config", "local_rank", "resume_from_checkpoint")
WORDS = ("debug",)  # which the Trainer splits itself


def _schedules() -> dict[str, dict[str, Any]]:
    """By schedule, what --lr_scheduler_kwargs may say: the default, or REQUIRED."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR

    made_by: dict[str, Any] = {kind.value: function for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    made_by |= {"reduce_lr_on_plateau": ReduceLROnPlateau, "greedy": GreedyLR}
    return {kind: parameters_of(maker, BY_TRAINER) for kind, maker in made_by.items()}


def _optim_args() -> dict[str, list[str]]:
    """By optimizer, the names that its maker looks up in --optim_args."""
    from transformers import trainer_optimizer

    makers = {str(getattr(name, "value", name)): one for name, one in trainer_optimizer._OPTIMIZER_HANDLERS.items()}
    found = {name: KEYS.findall(inspect.getsource(maker)) for name, maker in makers.items()}
    named = {name: sorted(set(re.findall(r"\w+", str(keys)))) for name, keys in found.items()}
    # One function makes all of bitsandbytes': what it looks up is AdEMAMix's.
    return {
        name: keys for name, keys in named.items()
        if makers[name] is not trainer_optimizer._get_bitsandbytes_optimizer or "ademamix" in name
    }  # fmt: skip


# What get_scheduler hands over itself, or the Trainer.
BY_TRAINER = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
KEYS = re.compile(r'optim_args\.(?:get|pop)\("(\w+)"|for key in \(([^)]*)\)|"(\w+)" in ctx\.optim_args')


def _default(one: Any) -> Any:
    value = one.default_factory() if one.default is dataclasses.MISSING else one.default
    return value.value if isinstance(value, enum.Enum) else value


def _choices(hint: Any) -> list[str]:
    kinds: list[Any] = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, enum.EnumMeta)]
    return [str(word.value) for kind in kinds for word in kind]


def _help(one: Any) -> str:
    """The first sentence."""
    text = re.sub(r"\s+", " ", str(one.metadata.get("help", ""))).strip()
    return re.split(r"(?<=[.!?]) (?=[A-Z`\"'(])", text, maxsplit=1)[0].rstrip(".")


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(snapshot(), indent=1) + "\n")
