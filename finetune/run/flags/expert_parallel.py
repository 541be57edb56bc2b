"""The checks of --expert_parallel_size before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from finetune.errors import RequestError
from finetune.run.flags.groups import (
    drop_one,
    experts_in,
    group_faults_here,
    of_text,
    shape_shown,
    size_faults,
    size_to_give,
)

if TYPE_CHECKING:
    from finetune.run.run import Run

# Flags under which the engine would not find the layers that it replaces, or ranks would not make the same passes.
REFUSED = {
    "auto_find_batch_size": "a rank that runs out of memory would leave the others waiting for its tokens",
    "fsdp": "expert parallelism is DeepSpeed's",
    "streaming": "ranks whose streams end earlier would leave the others waiting for their tokens",
    "teacher": "distilling from a teacher with expert parallelism is untested here",
    "torch_compile": "compiled exchanges are untested here",
    "use_liger_kernel": "its layers are untested with expert parallelism",
    "use_peft": "adapters would be lost when the engine replaces the layers",
}


def expert_faults(run: Run) -> Iterator[str]:
    """Errors that show in the flags alone."""
    if run.expert_parallel_size > 1:
        yield from size_faults(run, "expert_parallel_size", splits_experts)
        yield from drop_one(run, "expert_parallel_size", REFUSED)


def expert_faults_here(run: Run, deepspeed: str | None) -> Iterator[str]:
    """Further errors in a run that is to start on this machine; `deepspeed` is its config, if any."""
    if run.expert_parallel_size > 1:
        yield from group_faults_here(run, "expert_parallel_size", "divides experts among ranks", deepspeed)


def look_at_experts(run: Run) -> None:
    """Raises RequestError if a folder's config.json, or the shape of a model from scratch, shows no experts, or a
    number of them that the ranks cannot share."""
    if run.expert_parallel_size > 1 and (shape := shape_shown(run)):
        check_experts(shape.get, run.expert_parallel_size, run.launch.world_size)


def splits_experts(read: Callable[[str], Any]) -> Callable[[int], bool]:
    """The test of `size_faults`."""
    count = experts_in(read) or 0
    return lambda size: count % size == 0


def check_experts(read: Callable[[str], Any], size: int, ranks: int = 1) -> None:
    """Raises RequestError if `size` of the `ranks` (1: unknown) cannot share a model's experts evenly; `read` returns
    the values of its config by name, None for missing ones."""
    count = experts_in(read)
    said = f"--expert_parallel_size {size}"
    if not count:
        raise RequestError(f"{said}, but the model has no experts. Drop it, or give a mixture (--model_size moe-tiny).")
    if count % size:
        mend = size_to_give(count, ranks if ranks > 1 else 0, splits_experts(read))
        raise RequestError(f"{said} does not divide the model's {count} experts. {mend}")
    if of_text(read)("router_jitter_noise"):
        raise RequestError(
            f"{said}: the model's router adds noise in training (router_jitter_noise), which DeepSpeed's does not. Set "
            "it to 0 in config.json, or drop the flag."
        )
