"""Validates trainer_state.json before anything relies on it: whoever recomputed its hash may have forged its values. No
torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.run.files import STATE_FILE
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.manifest import CHECKPOINT

MOST = 2**63  # a streamed data set has about this many epochs
SUMS = 4  # of each source of a mixture (finetune.training.running_loss)
MOST_ROWS = 100_000  # rows of log_history; our runs keep far fewer (training/run_folder.py)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _is_number(value: Any, least: float = -math.inf) -> bool:
    """A loss may be NaN or infinite; with `least` it may not."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return good and (least == -math.inf or least <= value < MOST)


def _is_amount(value: Any) -> bool:
    """Any size is valid: a large model's floating-point operations exceed 2**63 in a day."""
    return _is_number(value) and math.isfinite(value) and value >= 0


def _is_sums(value: Any) -> bool:
    lists = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(one, list) and len(one) == SUMS and {*map(type, one)} == {float} for one in lists)


def _is_window(value: Any) -> bool:
    """What finetune.models.experts.Experts.noted returns."""
    if not isinstance(value, dict) or not value:
        return value == {}
    tokens, losses = value.get("tokens"), value.get("losses")
    is_table = isinstance(tokens, list) and all(isinstance(row, list) and all(map(_is_count, row)) for row in tokens)
    has_losses = isinstance(losses, list) and bool(losses) and all(map(_is_number, losses))
    return is_table and has_losses and len({len(row) for row in tokens or ()}) == 1 and _is_count(value.get("steps"))


Rule = tuple[Callable[[Any], bool], str]
COUNT: Rule = (_is_count, "a whole number from 0 on")
FROM_ZERO: Rule = (lambda value: value is None or _is_number(value, 0), "a number from 0 on, or null")
NUMBER: Rule = (lambda value: value is None or _is_number(value), "a number, or null")
TEXT: Rule = (lambda value: value is None or isinstance(value, str), "a text, or null")
SWITCH: Rule = (lambda value: value is None or isinstance(value, bool), "true or false")
OBJECT: Rule = (lambda value: value is None or isinstance(value, dict), "an object, or null")
RULES = {
    **dict.fromkeys(("global_step", "max_steps", "num_train_epochs"), COUNT),  # required to resume
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps", "num_input_tokens_seen"), FROM_ZERO),
    "total_flos": (lambda value: value is None or _is_amount(value), "a number from 0 on, or null"),
    "best_metric": NUMBER,
    **dict.fromkeys(("best_model_checkpoint", "trial_name"), TEXT),
    **dict.fromkeys(("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"), SWITCH),
    "trial_params": OBJECT,
    "train_batch_size": (lambda value: value is None or (_is_count(value) and value > 0), "a whole number from 1 on"),
}
# The other fields of TrainerState in transformers 5.23 (trainer_callback.py), which accepts no other names.
KEPT = "epoch best_global_step log_history stateful_callbacks".split()
OF_CALLBACKS: dict[str, Rule] = {
    "sums": (lambda value: isinstance(value, list) and all(map(_is_number, value)), "a list of numbers"),
    "total": (_is_number, "a number"),
    "kept_of_sources": (_is_sums, f"an object of lists of {SUMS} numbers"),
    "kept_of_experts": (_is_window, "an object of a table of tokens, losses and steps"),
    "early_stopping_patience_counter": (lambda value: _is_number(value, 0), "a number from 0 on"),
}


def state_problems(folder: Path, step: int | None) -> list[str]:
    """What is wrong with the values in the state of a checkpoint for `step`, one sentence each."""
    try:
        state = read_json_object(folder / STATE_FILE)
    except RequestError as error:
        return [str(error)]
    found = [_broken(name, state.get(name), *rule) for name, rule in RULES.items()]
    if not any(found):
        named = CHECKPOINT.fullmatch(folder.name)
        step = int(named[1]) if step is None and named else step
        if step is not None and state["global_step"] != step:
            found.append(f"global_step is {state['global_step']}, but the checkpoint is for step {step}")
    found += [f"has {name[:40]!r}, which the Trainer does not know" for name in state if name not in {*RULES, *KEPT}]
    found += _of_steps(state)
    found += _of_callbacks(state.get("stateful_callbacks", {}), state.get("global_step"))
    return [f"{folder.name}/{STATE_FILE}: {problem}." for problem in found if problem]


def _of_steps(state: dict[str, Any]) -> Iterator[str | None]:
    """Check values that cannot exceed the number of steps taken. An epoch has at least one step."""
    step = state.get("global_step")
    last = step if _is_count(step) else MOST

    def is_until_then(value: Any) -> bool:
        return value is None or (_is_number(value, 0) and value <= last)

    for name in ("epoch", "best_global_step"):
        yield _broken(name, state.get(name), is_until_then, f"a number from 0 to {last}, its step, or null")
    rows = state.get("log_history", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        yield "log_history is not a list of objects"
    elif len(rows) > MOST_ROWS:
        yield f"log_history has {len(rows):,} rows, but at most {MOST_ROWS:,} are accepted"
    else:
        wrong = next((row["step"] for row in rows if not is_until_then(row.get("step"))), 0)
        yield _broken("log_history's step", wrong, is_until_then, f"a number from 0 to {last}")


def _of_callbacks(callbacks: Any, step: Any) -> Iterator[str | None]:
    """Check the state that callbacks saved: flags, numbers, and lists of numbers."""
    if not isinstance(callbacks, dict):
        yield "stateful_callbacks is not an object"
        return

    def is_past(value: Any) -> bool:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= -1
        return good and (not isinstance(step, int) or value <= step)

    rules = {**OF_CALLBACKS, "logged_step": (is_past, "a step up to this one, or -1")}
    for name, kept in callbacks.items():
        for one in kept if isinstance(kept, list) else [kept]:
            attributes = one.get("attributes", {}) if isinstance(one, dict) else None
            if isinstance(attributes, dict):
                for key in filter(attributes.__contains__, rules):
                    yield _broken(f"{str(name)[:40]}.{key}", attributes[key], *rules[key])
            else:
                yield f"its entry for {str(name)[:40]!r} is not an object"


def _broken(name: str, value: Any, fits: Callable[[Any], bool], rule: str) -> str | None:
    return None if fits(value) else f"{name} is {str(value)[:40]!r}, but it must be {rule}"
