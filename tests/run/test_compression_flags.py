"""What gradient compression cannot do is refused before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
from asked import run_of

from finetune.errors import RequestError
from finetune.run.engine import deepspeed_config_of
from finetune.run.flags.compression import (
    HOOKS,
    KEEPS_ERRORS,
    CompressionArguments,
    check_comm_hook,
    check_freeze,
)
from finetune.run.launch import Launch


def check(*argv: str, launcher: str = "torchrun", ranks: int = 2, fp16: bool = False) -> None:
    launch = Launch(launcher=launcher, world_size=ranks, local_world_size=ranks)
    run = run_of(*argv, groups=(CompressionArguments,), launch=launch, do_train=True)
    check_comm_hook(run, deepspeed_config_of(run), {"fp16": fp16, "bf16": False})


@pytest.fixture(autouse=True)
def _no_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_taken(hook: str) -> None:
    check("--ddp_comm_hook", hook)
    check("--ddp_comm_hook", hook, "--deepspeed", "none", launcher="deepspeed")


@pytest.mark.parametrize(
    ("argv", "how", "said"),
    [
        (
            ["--ddp_comm_hook", "1bit"],
            {},
            r"is '1bit' \(command line\), but it must be one of none, fp16, bf16, powersgd, onebit_adam",
        ),
        (
            ["--ddp_comm_hook", "powersgd"],
            {"launcher": "deepspeed"},
            r"launcher defaults to zero2.* --deepspeed none",
        ),
        (
            ["--ddp_comm_hook", "powersgd", "--deepspeed", "zero1"],
            {},
            r"--deepspeed is 'zero1' \(command line\)",
        ),
        (["--ddp_comm_hook", "powersgd", "--fsdp", "True"], {}, r"--fsdp is 'True' \(command line\)"),
        (["--ddp_comm_hook", "powersgd", "--torch_compile", "True"], {}, r"torch_compile is True \(command line\)"),
        (["--ddp_comm_hook", "powersgd"], {"ranks": 1}, "nothing to compress.*torchrun --nproc_per_node N"),
        (["--ddp_comm_hook", "powersgd", "--do_train", "False"], {}, "--do_train is False"),
        (
            ["--ddp_comm_hook", "powersgd", "--deepspeed_config", "zero1"],
            {"launcher": "deepspeed"},
            "_config is 'zero1'",
        ),
        (["--ddp_comm_hook", "onebit_adam"], {"fp16": True}, "one overflow would stay forever. Give --bf16 True"),
        (["--ddp_comm_hook", "onebit_adam", "--optim", "sgd"], {}, r"--optim is 'sgd' \(command line\)"),
        (
            ["--ddp_comm_hook", "fp16", "--comm_hook_start_steps", "9"],
            {},
            "nothing: --ddp_comm_hook is 'fp16'",
        ),
        (["--comm_hook_start_steps", "9"], {}, r"--ddp_comm_hook is 'none' \(default\)"),
        (["--ddp_comm_hook", "powersgd", "--comm_hook_start_steps", "-1"], {}, "is -1.0 .*must be 0 or more"),
        (["--topk_ratio", "0.1"], {}, "no such flag. Top-k was removed: --ddp_comm_hook powersgd sends less"),
        (["--ddp_comm_hook", "powersgd", "--powersgd_rank", "0"], {}, "powersgd_rank is 0 .*must be 1 or more"),
    ],
)
def test_what_cannot_be_is_refused_with_its_mend(argv: list[str], how: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        check(*argv, **how)


def test_a_pipeline_refuses_the_flag() -> None:
    launch = Launch(launcher="deepspeed", world_size=2, local_world_size=2)
    with pytest.raises(RequestError, match=r"--ddp_comm_hook \(command line\): DeepSpeed sends a pipeline's gradients"):
        run_of("--ddp_comm_hook", "powersgd", launch=launch, pipeline=True)


def test_half_precision_goes_with_loss_scaling() -> None:
    check("--ddp_comm_hook", "fp16", fp16=True)
    check("--ddp_comm_hook", "bf16", fp16=True)


@pytest.mark.parametrize(
    ("hook", "asked", "steps", "start"),
    [
        ("onebit_adam", None, 400, 200),
        ("powersgd", None, 400, 40),
        ("onebit_adam", 0.25, 400, 100),
        ("onebit_adam", 30, 400, 30),
        ("powersgd", 0, 400, 2),
        ("fp16", None, 400, 0),
    ],
    ids=["a half", "a tenth", "a share", "a number", "not before the buckets are settled", "at once"],
)
def test_the_first_steps_are_a_share_or_a_number(hook: str, asked: float | None, steps: int, start: int) -> None:
    assert CompressionArguments(hook, asked).start_step(steps) == start


def test_the_variance_does_not_freeze_while_the_rate_rises() -> None:
    onebit = CompressionArguments("onebit_adam", 50)
    check_freeze(onebit, max_steps=1000, warmup_steps=50)
    with pytest.raises(RequestError, match=r"rises until step 51. Raise --comm_hook_start_steps to 51 or more"):
        check_freeze(onebit, max_steps=1000, warmup_steps=51)
    check_freeze(CompressionArguments("powersgd", 2), max_steps=1000, warmup_steps=51)


@pytest.mark.parametrize("hook", KEEPS_ERRORS)
def test_compression_that_never_comes_is_refused(hook: str) -> None:
    said = rf"{hook} sends whole gradients for 500 steps, but the run has 100.*Lower --comm_hook_start_steps.*than 500"
    with pytest.raises(RequestError, match=said):
        check_freeze(CompressionArguments(hook, 500), max_steps=100, warmup_steps=0)
    with pytest.raises(RequestError, match="for 100 steps, but the run has 100"):
        check_freeze(CompressionArguments(hook, 100), max_steps=100, warmup_steps=0)
    check_freeze(CompressionArguments(hook, 99), max_steps=100, warmup_steps=0)
    check_freeze(CompressionArguments("bf16"), max_steps=1, warmup_steps=0)
