"""What happens to each key of a DeepSpeed config that has changed since the checkpoint was saved. As for flags
(on_resume.py): continues exactly, applied and reported, or refused. A test checks that each key is in one class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.errors import RequestError

# In the sections in `WITHIN`, each key has its own class; any other section has one class as a whole.
WITHIN = ("zero_optimization", "fp16", "bf16", "data_types")
OTHER_NAMES = {"bfloat16": "bf16"}
# Where and how state is distributed, bucketed, stored, watched. Flags settle batch sizes (reshard/batch.py); optimizer
# and scheduler sections that differ from the flags are compared in training/same_run.py.
GOES_ON = frozenset(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    activation_checkpointing aio autotuning checkpoint comet comms_logger compile csv_monitor data_efficiency
    dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state expert_parallel flops_profiler
    hybrid_engine log_level memory_breakdown pipeline sequence_parallel_size steps_per_print tensor_parallel tensorboard
    timers use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer $schema
    fp16.enabled bf16.enabled data_types.buffer_dtype
    """.split()
    + [
        f"zero_optimization.{name}"
        for name in """
    allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients cpu_offload
    cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
    gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear model_persistence_threshold
    module_granularity_threshold offload_optimizer offload_param overlap_comm override_module_apply
    param_persistence_threshold parameter_alignment pipeline_loading_checkpoint prefetch_bucket_size reduce_bucket_size
    reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters
    stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold
    stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params
    sub_group_size use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zero_hpz_partition_size
    """.split()
    ]
)
# This run's config holds from the checkpoint's step on: what gradients are rounded to, and when.
APPLIED = frozenset(
    """
    communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor
    gradient_allreduce_op gradient_clipping torch_autocast
    data_types.grad_accum_dtype data_types.param_dtype data_types.keep_in_fp32_modules fp16.auto_cast
    bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states bf16.immediate_grad_update bf16.check_grad_overflow
    fp16.fp16_master_weights_and_grads
    zero_optimization.zenflow zero_optimization.zero_quantized_gradients
    zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zero_quantized_weights
    """.split()
)
# The checkpoint's loss scaler is loaded whole, so the run would ignore these values (deepspeed 0.19.8,
# zero/stage_1_and_2.py, zero/stage3.py, _rigid_load_state_dict).
REFUSED = frozenset(
    """
    fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis fp16.consecutive_hysteresis
    fp16.min_loss_scale
    """.split()
)
HALVES = ("fp16", "bf16")  # sections without effect unless they are enabled
ELSEWHERE = frozenset({"optimizer", "scheduler"})  # training/same_run.py, _compare
CLASSES = {
    "continues exactly": GOES_ON,
    "applied, and reported": APPLIED,
    "refused": REFUSED,
    "as a section": ELSEWHERE,
}
# DeepSpeed's defaults, equal to leaving the key out (0.19.8, runtime/config.py, constants.py, precision_config.py).
DEFAULTS = {
    "gradient_predivide_factor": 1.0,
    "prescale_gradients": False,
    "gradient_allreduce_op": "mean",
    "seq_parallel_communication_data_type": "fp32",
    "torch_autocast": {"enabled": False},
    "bf16.check_grad_overflow": True,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
}


def arithmetic_of(config: Mapping[str, Any], max_grad_norm: float) -> dict[str, Any]:
    """By path, each value of a config that affects what is computed and differs from the default and the flags."""
    sections = {new: config.get(old) for old, new in OTHER_NAMES.items() if old in config}
    sections = {**config, **sections}
    on = {half for half in HALVES if (sections.get(half) or {}).get("enabled") is True}
    found: dict[str, Any] = {f"{half}.enabled": True for half in on}
    for place in sorted(APPLIED | REFUSED):
        section, _, name = place.partition(".")
        value = (sections.get(section) or {}).get(name) if name else sections.get(section)
        default = max_grad_norm if place == "gradient_clipping" else DEFAULTS.get(place)
        is_said = not (value in (None, "auto", default) or value is (default or False) or value == {})
        if is_said and (section not in HALVES or section in on):
            found[place] = value
    return found


def changed_arithmetic(
    name: str, before: Mapping[str, Any] | None, now: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """By path, the value before and now; `name` is the checkpoint's name, and `before` is None if an older version
    wrote it. Raises RequestError for changes that are refused."""
    if before is None:
        return {}
    both = {one: (before.get(one), now.get(one)) for one in sorted({*before, *now})}
    changed = {one: values for one, values in both.items() if values[0] != values[1]}
    for half in HALVES:
        if changed.pop(f"{half}.enabled", None):  # reported as --fp16 or --bf16; on one side its section has no effect
            changed = {one: values for one, values in changed.items() if not one.startswith(f"{half}.")}
    if refused := [one for one in changed if one in REFUSED]:
        lines = "; ".join(f"{one} was {_shown(changed[one][0])}, and is {_shown(changed[one][1])}" for one in refused)
        raise RequestError(
            f"--resume: in DeepSpeed's config {lines}, but {name} has its own loss scaler, which is loaded. Restore "
            "the old values, or give another --output_dir."
        )
    return changed


def _shown(value: Any) -> str:
    return "DeepSpeed's default" if value is None else str(value)[:60]
