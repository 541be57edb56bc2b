"""The flags of gradient compression, and their checks before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.errors import RequestError
from finetune.run.flag import AT_LEAST_ONE, Range, flag
from finetune.run.launch import accelerate_uses_fsdp
from finetune.run.on_resume import NEVER

if TYPE_CHECKING:
    from finetune.run.run import Run

HOOKS = ("none", "fp16", "bf16", "powersgd", "onebit_adam")
# Flags that the Trainer passes only to DistributedDataParallel (transformers 5.23, trainer.py,
# create_accelerator_and_...).
OF_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
KEEPS_ERRORS = ("powersgd", "onebit_adam")  # between steps; they compress only from some step on

# A fraction of all steps. PowerSGD: as torch advises (powerSGD_hook.py, PowerSGDState). 1-bit Adam: the paper froze the
# variance after 15% to 20% of 150,000 steps; in shorter runs it settles later (docs/compression.md).
START = {"powersgd": 0.1, "onebit_adam": 0.5}
FIRST_START = 2  # torch's PowerSGD refuses smaller values


@dataclass
class CompressionArguments:
    """How ranks exchange gradients."""

    ddp_comm_hook: str = flag(
        "none", f"compress gradients between ranks: {', '.join(HOOKS)} (docs/compression.md)", NEVER, choices=HOOKS
    )
    comm_hook_start_steps: float | None = flag(
        None,
        "steps without compression at the start; below 1, a fraction of all steps. For onebit_adam, the paper's "
        f"freeze_step. Default: {', '.join(f'{name} {share}' for name, share in START.items())}",
        NEVER,
        range=Range(least=0, share=True),
    )
    powersgd_rank: int = flag(4, "rank of PowerSGD's approximation of a gradient", NEVER, range=AT_LEAST_ONE)

    @property
    def is_on(self) -> bool:
        return self.ddp_comm_hook != "none"

    @property
    def keeps_errors(self) -> bool:
        return self.ddp_comm_hook in KEEPS_ERRORS

    def start_step(self, max_steps: int) -> int:
        """How many steps of a run of `max_steps` exchange uncompressed gradients."""
        if not self.keeps_errors:
            return 0
        asked = START[self.ddp_comm_hook] if self.comm_hook_start_steps is None else self.comm_hook_start_steps
        return max(FIRST_START, round(asked * max_steps) if asked < 1 else int(asked))


def check_comm_hook(run: Run, deepspeed: str | None, precision: dict[str, bool]) -> None:
    """Raises RequestError if --ddp_comm_hook cannot work in this run. `deepspeed` is the run's config, if any."""
    hook = run.value("ddp_comm_hook") or "none"
    said = run.said("ddp_comm_hook")
    if hook == "none":
        return
    _check_engine(run, said, deepspeed)
    if run.launch.world_size == 1:
        raise RequestError(
            f"{said}: a single process sends no gradients, so there is nothing to compress. Drop it, or launch with "
            "`torchrun --nproc_per_node N`."
        )
    if not run.value("do_train"):
        raise RequestError(f"{said}, which compresses gradients, but {run.said('do_train')}. Drop it.")
    if precision.get("fp16") and hook in KEEPS_ERRORS:
        raise RequestError(
            f"{said}, which carries what it did not send over to the next step, but with --fp16 the gradient "
            "scale changes from step to step, and one overflow would stay forever. Give --bf16 True."
        )
    if hook == "onebit_adam":
        _check_onebit(run)


def _check_engine(run: Run, said: str, deepspeed: str | None) -> None:
    if deepspeed:
        named = next((run.said(name) for name in ("deepspeed", "deepspeed_config") if run.given.get(name)), None)
        mend = "Replace it with --deepspeed none" if named else "Add --deepspeed none"
        if named is None:
            named = "the deepspeed launcher defaults to zero2" if deepspeed == "zero2" else f"DeepSpeed is {deepspeed}"
        raise RequestError(f"{said}, which is for DistributedDataParallel, but {named}. {mend}, or drop the hook.")
    if run.value("fsdp") or accelerate_uses_fsdp():
        fsdp = run.said("fsdp") if run.value("fsdp") else "accelerate uses FSDP"
        raise RequestError(f"{said}, which is for DistributedDataParallel, but {fsdp}. Drop one of the two.")
    if run.value("torch_compile"):
        raise RequestError(f"{said}, which does not work with {run.said('torch_compile')[2:]}. Drop one of the two.")


def _check_onebit(run: Run) -> None:
    if str(run.value("optim")) not in ("adamw_torch", "adamw_torch_fused"):
        raise RequestError(
            f"{run.said('ddp_comm_hook')}, which is also an optimizer, but {run.said('optim')}. Drop --optim, or use "
            "the hook powersgd, which works with any."
        )


def check_freeze(arguments: CompressionArguments, max_steps: int, warmup_steps: int) -> None:
    """Raises RequestError for compression that never starts, and for 1-bit Adam that freezes the variance too early: it
    has not settled while the rate still rises (arXiv 2102.02888, section 7.1)."""
    if not arguments.keeps_errors:
        return
    start, said = arguments.start_step(max_steps), f"--ddp_comm_hook {arguments.ddp_comm_hook}"
    if start >= max_steps:
        raise RequestError(
            f"{said} sends whole gradients for {start} steps, but the run has {max_steps}, so it would compress "
            f"nothing. Lower --comm_hook_start_steps (at least {FIRST_START}), train for more than {start} "
            "steps, or drop the hook."
        )
    if arguments.ddp_comm_hook == "onebit_adam" and start < warmup_steps:
        raise RequestError(
            f"{said} freezes its variance after {start} steps, but the learning rate rises until "
            f"step {warmup_steps}. Raise --comm_hook_start_steps to {warmup_steps} or more, or lower --warmup_steps."
        )
