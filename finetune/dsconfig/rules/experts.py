"""DS509: configs that are incompatible with --expert_parallel_size."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Finding, error
from finetune.dsconfig.rules.optimizer import is_left_to_the_trainer

# deepspeed 0.19.8: runtime/utils.py, clip_grad_norm_ (DeepSpeed issue 8475); runtime/engine.py,
# _raise_if_autoep_zero3_consolidated_export and the docs of AutoEP.
STAGES = {
    0: "without ZeRO, DeepSpeed clips fp32 gradients by an average of norms, as if all ranks had the same experts",
    3: "under ZeRO-3, DeepSpeed can neither export the experts nor load them in another layout",
}


def experts_can_be_spread(config: Config, run: Context) -> Iterator[Finding]:
    """DS509."""
    if run.expert_parallel_size == 1:
        return
    said = f"--expert_parallel_size is {run.expert_parallel_size}"
    if config.stage in STAGES:
        why = STAGES[config.stage]
        yield error("DS509", "zero_optimization.stage", f"{said}, but stage is {config.stage}: {why}. Set it to 2.")
    for what in ("offload_optimizer", "offload_param"):
        if config.offload(what) != "none":
            place = f"zero_optimization.{what}"
            yield error("DS509", place, f"{said}, which is untested with offload. Delete {what}, or drop the flag.")
    in_bf16 = config.is_on("bf16.enabled") or (config.is_auto("bf16.enabled") and run.arguments.get("bf16"))
    place = "data_types.grad_accum_dtype"
    if config.stage == 1 and in_bf16 and config.get(place) in ("fp32", "float32"):
        why = "DeepSpeed then trains bf16 under ZeRO-1 by BF16_Optimizer, which is untested with spread experts"
        yield error("DS509", place, f"{said}, but {place} is {config.get(place)}: {why}. Delete it, or set stage to 2.")
    if config.has("optimizer") and not is_left_to_the_trainer(config.section("optimizer")):
        why = "experts need a group of their own in the optimizer, which the Trainer makes"
        yield error("DS509", "optimizer", f"{said}, but the optimizer is DeepSpeed's: {why}. Delete the section.")
