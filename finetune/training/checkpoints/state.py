"""trainer_state.json before anything counts on it: whoever made its hash anew may have made up its numbers. Never
imports torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.run.files import STATE_FILE
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.manifest import CHECKPOINT

COUNTS = ("global_step", "max_steps", "num_train_epochs")  # without which nothing goes on
OTHER_COUNTS = ("logging_steps", "eval_steps", "save_steps", "best_global_step", "train_batch_size")
NUMBERS = ("epoch", "total_flos", "best_metric", "num_input_tokens_seen")
MOST = 2**63  # a stream has so many epochs


def state_problems(folder: Path, step: int | None) -> list[str]:
    """What is wrong with the numbers of a checkpoint's state, which is of `step`, a sentence each."""
    place = f"{folder.name}/{STATE_FILE}"
    try:
        state = read_json_object(folder / STATE_FILE)
    except RequestError as error:
        return [str(error)]
    found = [_about(name, state.get(name), "a whole number from 0 on") for name in COUNTS if not _count(state, name)]
    found += [
        _about(name, state[name], "a number from 0 on, or null")
        for name in OTHER_COUNTS
        if state.get(name) is not None and not _number(state[name], least=0)
    ]
    found += [
        _about(name, state[name], "a number, or null")
        for name in NUMBERS
        if state.get(name) is not None and not _number(state[name])
    ]
    if not found:
        named = CHECKPOINT.fullmatch(folder.name)
        step = int(named[1]) if step is None and named else step
        if step is not None and state["global_step"] != step:
            found.append(f"global_step is {state['global_step']}, and the checkpoint is of step {step}")
    rows = state.get("log_history", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        found.append("log_history is no list of objects")
    best = state.get("best_model_checkpoint")
    if best is not None and not isinstance(best, str):
        found.append(_about("best_model_checkpoint", best, "a text, or null"))
    found += _of_callbacks(state.get("stateful_callbacks", {}), state.get("global_step"))
    return [f"{place}: {problem}." for problem in found]


def _of_callbacks(callbacks: Any, step: Any) -> list[str]:
    """What callbacks remember: flags and numbers, and lists of numbers."""
    if not isinstance(callbacks, dict):
        return ["stateful_callbacks is no object"]
    found = []
    for name, kept in callbacks.items():
        for one in kept if isinstance(kept, list) else [kept]:
            attributes = one.get("attributes", {}) if isinstance(one, dict) else None
            if not isinstance(attributes, dict):
                found.append(f"what it keeps of {str(name)[:40]!r} is no object")
                continue
            found += [
                _about(f"{str(name)[:40]}.{key[:40]}", value, rule)
                for key, value in attributes.items()
                if (rule := _broken(key, value, step)) is not None
            ]
    return found


def _broken(key: str, value: Any, step: Any) -> str | None:
    """The rule that a value of a callback breaks."""
    if key == "sums":
        good = isinstance(value, list) and all(_number(one) for one in value)
        return None if good else "a list of numbers"
    if key == "logged_step":
        good = isinstance(value, int) and not isinstance(value, bool) and value >= -1
        return None if good and (not isinstance(step, int) or value <= step) else "a step until then, or -1"
    if key == "total":
        return None if _number(value) else "a number"
    if key == "early_stopping_patience_counter":
        return None if _number(value, least=0) else "a number from 0 on"
    return None


def _count(state: dict[str, Any], name: str) -> bool:
    value = state.get(name)
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _number(value: Any, least: float = -math.inf) -> bool:
    """A loss may be NaN or infinite; with `least` it may not."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return good and (least == -math.inf or least <= value < MOST)


def _about(name: str, value: Any, rule: str) -> str:
    return f"{name} is {str(value)[:40]!r}, but it must be {rule}"
