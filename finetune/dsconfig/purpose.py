"""Files that look like the config of a training run but are not: they get one message, not one per line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from finetune.dsconfig.config import Config
from finetune.dsconfig.finding import Finding
from finetune.dsconfig.shape import schema

# ${NAME}, $NAME, {{ name }}, <name>, __NAME__, @NAME@, %(name)s; without quotes also a name in capitals.
# Lengths are bounded, and an unterminated string or comment extends to the end, so no file takes quadratic time.
MARK = (
    r"\$\{[^}\n]{0,200}\}|\$[A-Za-z_]\w{0,200}|\{\{[^}\n]{0,200}\}\}|\{%[^\n]{0,200}?%\}|<[A-Za-z][\w .-]{0,200}>"
    r"|__[A-Za-z]\w{0,200}__|@\w{1,200}@|%\(\w{1,200}\)s"
)
QUOTED = re.compile(rf'"(?P<key>\w+)"\s*:\s*"(?P<quoted>{MARK})"')
BARE = re.compile(rf"[:,\[]\s*(?P<bare>{MARK}|[A-Z][A-Z\d_]+)(?=\s*[,\]}}\n])")
TEXT_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*"?)|(?:#|//)[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
LITERALS = {"TRUE", "FALSE", "NULL", "NONE", "NAN", "INF"}
# Fields that only deepspeed.init_inference has (deepspeed 0.19.8, inference/config.py). A test compares them.
OF_INFERENCE = (
    "replace_with_kernel_inject kernel_inject replace_method injection_policy injection_dict injection_policy_tuple "
    "max_out_tokens max_tokens min_out_tokens min_tokens mp_size enable_cuda_graph use_triton triton_autotune "
    "triangular_masking tm keep_module_on_host set_empty_params save_mp_checkpoint_path return_tuple training_mp_size "
    "transposed_mode ep_size moe quant zero dtype"
).split()
WITHOUT_LISTS = {"integer", "boolean", "number"}
WRAPPER = "deepspeed_config"
OF_TRAINING = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer")


def template(text: str) -> Finding | None:
    """DS009 for a text with placeholders in places where no free text is allowed."""
    code = TEXT_OR_COMMENT.sub(lambda found: found[1] or "", text)
    texts = set(_text_keys(schema()))  # a job's name may contain a dollar sign
    marks = [(mark.start(), mark["quoted"]) for mark in QUOTED.finditer(code) if mark["key"] not in texts]
    bare = TEXT_OR_COMMENT.sub(lambda found: f'"{" " * (len(found[0]) - 2)}"', code)
    marks += [(mark.start(), mark["bare"]) for mark in BARE.finditer(bare) if mark["bare"] not in LITERALS]
    if not marks:
        return None
    names = list(dict.fromkeys(name for _, name in sorted(marks)))
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    said = f"this is a template: {len(marks)} value(s) must still be filled in ({shown}). Check the filled-in file."
    return Finding("DS009", "error", (), said)


def other_program(config: dict[str, Any]) -> Finding | None:
    """DS010 for a file for DeepSpeed's inference or its autotuner, and for a config nested under a key."""
    inner = config.get(WRAPPER)
    if isinstance(inner, dict) and not any(key in config for key in (*OF_TRAINING, "zero_optimization")):
        said = f"the config is inside {WRAPPER}, as in accelerate's YAML, but no engine looks there. Move it up."
        return Finding("DS010", "error", (WRAPPER,), said)
    trains = any(key in config for key in OF_TRAINING)
    of_inference = [key for key in OF_INFERENCE if key in config]
    if of_inference and not trains and "zero_optimization" not in config:
        said = f"{of_inference[0]} is for deepspeed.init_inference: this is a config for inference, not for training."
        return Finding("DS010", "error", (of_inference[0],), said)
    zero = schema()["properties"]["zero_optimization"]["properties"]
    lists = [
        key
        for key, value in Config(config).section("zero_optimization").items()
        if isinstance(value, list) and (key == "stage" or WITHOUT_LISTS & {*zero.get(key, {}).get("type", [])})
    ]
    if len(lists) > 1 or (lists and "autotuning" in config):
        said = (
            f"zero_optimization.{lists[0]} is a list of values to try: this is a template of DeepSpeed's autotuner, "
            "which no engine reads. Check the configs that it writes."
        )
        return Finding("DS010", "error", ("zero_optimization", lists[0]), said)
    return None


def _text_keys(part: dict[str, Any]) -> Iterator[str]:
    """The keys whose values are free text."""
    for key, inner in part.get("properties", {}).items():
        kinds = inner.get("type", [])
        if kinds in ("string", ["string", "null"]) and key != "type":
            yield key
        yield from _text_keys(inner)
