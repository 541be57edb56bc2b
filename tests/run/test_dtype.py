"""What --dtype comes to: the precision that it has a run compute in, what weights are loaded as, what is refused."""

from __future__ import annotations

import pytest

from finetune.errors import RequestError
from finetune.run.facts import base_dtype, precision_flags
from finetune.run.launch import Launch
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.resolve import resolve
from finetune.run.run import Run

WHOLE = "--model_name_or_path gpt2"
LORA = f"{WHOLE} --use_peft True"


def run_of(words: str) -> Run:
    return resolve(CAUSAL_LM, words.split(), Launch(), is_here=False)


@pytest.mark.parametrize(
    ("words", "stated", "fastest", "deepspeed", "precision", "dtype"),
    [
        (LORA, {}, "bf16", False, "bf16", "bfloat16"),
        (LORA, {}, "fp32", False, "fp32", "float32"),
        (LORA, {}, "fp16", False, "fp16", "float32"),
        (f"{LORA} --bf16 False", {}, "bf16", False, "fp32", "float32"),
        (f"{LORA} --dtype bfloat16", {}, "fp32", False, "bf16", "bfloat16"),
        (f"{LORA} --dtype float16", {}, "bf16", False, "fp16", "float16"),
        (f"{LORA} --dtype float32", {}, "bf16", False, "bf16", "float32"),
        (f"{LORA} --dtype float32", {}, "bf16", True, "fp32", "float32"),
        (f"{LORA} --dtype bfloat16", {"bf16": True}, "fp16", True, "bf16", "bfloat16"),
        ("--model_name_or_path gpt2", {}, "bf16", False, "bf16", "float32"),
        ("--model_name_or_path gpt2 --dtype float32", {}, "bf16", True, "bf16", "float32"),
        ("--model_name_or_path gpt2 --do_train False --dtype bfloat16", {}, "fp32", False, "bf16", "bfloat16"),
        (f"{WHOLE} --dtype bfloat16 --optim stable_adamw", {}, "fp32", False, "bf16", "bfloat16"),
        (f"{WHOLE} --dtype pure_bfloat16", {}, "fp32", False, "bf16", "bfloat16"),
    ],
)
def test_the_base_is_kept_as_the_run_computes_and_what_is_trained_in_fp32(
    words: str, stated: dict[str, bool], fastest: str, deepspeed: bool, precision: str, dtype: str
) -> None:
    run = run_of(words)
    flags = precision_flags(run, stated, lambda: fastest, deepspeed)
    assert flags == {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    assert base_dtype(run, flags["bf16"]) == dtype


@pytest.mark.parametrize(
    ("words", "stated", "deepspeed", "said"),
    [
        ("--dtype bfloat16 --bf16 False", {}, False, r"--dtype is 'bfloat16' .* but the run computes in fp32"),
        ("--dtype bfloat16 --fp16 True", {}, False, "computes in fp16"),
        ("--dtype float16 --bf16 True", {}, False, "computes in bf16"),
        ("--dtype bfloat16", {"bf16": False}, True, "DeepSpeed keeps weights in that precision"),
        ("--dtype float32 --bf16 True", {}, True, "DeepSpeed keeps weights in that precision"),
    ],
)
def test_another_precision_than_the_runs_is_refused(
    words: str, stated: dict[str, bool], deepspeed: bool, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        precision_flags(run_of(f"{LORA} {words}"), stated, lambda: "fp32", deepspeed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{WHOLE} --dtype bfloat16", "most of its steps would round away in 16 bits. Use --optim stable_adamw"),
        (f"{WHOLE} --dtype bfloat16 --optim adafactor", "would round away"),
        (f"{WHOLE} --dtype float16 --optim stable_adamw", "its range is too small"),
        ("--dtype bfloat16 --optim stable_adamw", "a model from scratch is trained in fp32"),
        (f"{WHOLE} --dtype bfloat16 --optim stable_adamw --deepspeed zero2", "DeepSpeed keeps fp32 masters"),
        (f"{WHOLE} --dtype pure_bfloat16 --fsdp True", "accelerate's FSDP trains weights in fp32"),
        (f"{LORA} --dtype pure_bfloat16", "are not trained"),
    ],
)
def test_weights_are_trained_on_sixteen_bits_only_where_nothing_is_lost_unasked(words: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        run_of(words)
