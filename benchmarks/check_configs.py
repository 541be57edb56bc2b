"""Generates valid and faulty configs as people write them, from a seed: benchmarks/check_truth.py tests `finetune
check` with them.

Each starts from a valid base and gets up to three changes, most of them harmless.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
Change = Callable[[random.Random, Json], None]
ADAM = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
SCHEDULES: dict[str, list[Json]] = {
    "WarmupLR": [{"warmup_num_steps": 10}, {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 100}],
    "WarmupDecayLR": [{"total_num_steps": 100, "warmup_num_steps": 10}, {"warmup_num_steps": 10}],
    "WarmupCosineLR": [{"total_num_steps": 100}, {"total_num_steps": 100, "warmup_min_ratio": 0.1}],
    "OneCycle": [{"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}, {"cycle_max_lr": 1e-3}],
    "LRRangeTest": [{"lr_range_test_min_lr": 1e-5}, {"lr_range_test_steps": 5}],
    "CosineAnnealingLR": [{"T_max": 100}, {"total_num_steps": 100}],
    "cosine": [{}],
}
AT_THE_TOP: dict[str, list[Any]] = {
    "steps_per_print": [10, "auto", 2000, None, float(10)],
    "wall_clock_breakdown": [False, True, 0, 1, None, "false"],
    "gradient_clipping": [0.5, 1.0, "auto", 0, None, "1.0", True],
    "prescale_gradients": [True, False],
    "communication_data_type": ["fp16", "fp32", "half", None, "auto"],
    "zero_allow_untested_optimizer": [True, False, "true"],
    "zero_force_ds_cpu_optimizer": [True, False],
    "gradient_accumulation_steps": [1, 2, 4, "auto", 0, None, "2", 1.0],
    "train_batch_size": [8, 16, 32, "auto", 12, 0, None, 16.0],
    "train_micro_batch_size_per_gpu": [1, 4, 8, "auto", None, "8", -1],
    "activation_checkpointing": [
        {"partition_activations": True, "number_checkpoints": None},
        {"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": 4},
        {"contiguous_memory_optimisation": True},
        None,
    ],
    "aio": [{"block_size": 1048576, "queue_depth": 8}, {"block_size": 1000}, {"thread_count": 2}, None],
    "flops_profiler": [{"enabled": False}, {"enabled": True, "profile_step": 1, "top_modules": 1}, {"enable": True}],
    "tensorboard": [{"enabled": False}, {"enabled": True, "output_path": "logs"}, {"enable": True}],
    "wandb": [{"enabled": False, "team": "a", "project": "b"}, {"enabled": 0}, {"name": "x"}],
    "csv_monitor": [{"enabled": False, "output_path": "a", "job_name": "b"}],
    "comms_logger": [{"enabled": False, "verbose": True, "prof_all": False}, {"log": True}],
    "comms_config": [{"comms_logger_enabled": False}],
    "monitor_config": [{"enabled": False}],
    "data_types": [{"grad_accum_dtype": "fp32"}, {"grad_accum_dtype": None}, {"grad_accum_dtype": "fp23"}, {}],
    "checkpoint": [
        {"tag_validation": "Warn"},
        {"tag_validation": "loud"},
        {"load_universal": False},
        {"parallel_write": {"pipeline_stage": True}},
        {"use_node_local_storage": True},
    ],
    "torch_autocast": [{"enabled": False}, {"enabled": True, "dtype": "bfloat16"}, {"enabled": True, "dtype": "bf61"}],
    "compile": [{"deepcompile": False}, {"disable": True, "backend": "inductor"}, {}],
    "timers": [{"throughput": {"enabled": False, "synchronized": True}}, {"throughput": {"enable": True}}],
    "amp": [{"enabled": False}, {"enabled": True}],
    "elasticity": [{"enabled": False}],
    "sparse_attention": [{"mode": "fixed"}],
    "curriculum_learning": [{"enabled": False}],
    "data_efficiency": [{"enabled": False}],
    "autotuning": [{"enabled": False}],
    "hybrid_engine": [{"enabled": False}, {"max_out_tokens": 0}],
    "log_level": ["warning", None],
    "dump_state": [False, True],
    "memory_breakdown": [False, True],
    "gradient_predivide_factor": [1.0, 2],
    "gradient_allreduce_op": ["mean", "sum", "max", "MEAN"],
    "dataloader_drop_last": [True],
    "disable_allgather": [False],
    "seq_parallel_communication_data_type": ["fp32", "bf32"],
    "gradient_cliping": [1.0],
    "train_micro_batch_size": [4],
    "_comment": ["ZeRO by hand"],
    "model_parallel_size": [1],
    "vocabulary_size": [50257, None],
    "pipeline": [{"seed_layers": True, "own_key": 3}, {}],
    "use_data_before_expert_parallelism": [False],
    "managed_gradient_accumulation": [True],
    "cuda_visible_devices": ["0,1"],
}
IN_ZERO: dict[str, list[Any]] = {
    "overlap_comm": [True, False, 1, "true", "auto", None],
    "reduce_scatter": [True, False, 0],
    "contiguous_gradients": [True, False],
    "reduce_bucket_size": [5e8, 5e7, "auto", 2e8, 0, "5e8", 200000000, 5.5],
    "allgather_bucket_size": [5e8, 2e8, "auto", 0, -1],
    "allgather_partitions": [True, False],
    "round_robin_gradients": [True, False],
    "ignore_unused_parameters": [True, False],
    "sub_group_size": [1e9, 1e14, 1000],
    "stage3_prefetch_bucket_size": [5e7, "auto", 0],
    "stage3_param_persistence_threshold": [1e4, "auto", 1e5, "1e5"],
    "stage3_max_live_parameters": [1e9, 3e7],
    "stage3_max_reuse_distance": [1e9, 3e7],
    "stage3_gather_fp16_weights_on_model_save": [True, False],
    "stage3_gather_16bit_weights_on_model_save": [True, False, "auto", 1],
    "gather_16bit_weights_on_model_save": [True],
    "cpu_offload": [True, False],
    "offload_optimizer": [
        {"device": "none"},
        {"device": "cpu"},
        {"device": "cpu", "ratio": 0.5},
        None,
        {"device": None},
    ],
    "offload_param": [{"device": "none"}, {"device": "cpu", "pin_memory": True}, None, {"devise": "cpu"}],
    "zero_quantized_gradients": [False],
    "zero_hpz_partition_size": [1, "auto", 0],
    "elastic_checkpoint": [True, False],
    "legacy_stage1": [True, False],
    "compute_grad_norm": [True, False],
    "load_from_fp32_weights": [True, False],
    "mics_shard_size": [2],
    "memory_efficient_linear": [True, False],
    "overlap_com": [True],
    "offload_optimizer_device": ["cpu"],
    "leaf_module": [{"names": ["Block"]}],
    "prefetch_bucket_size": [5e7],
    "stage": ["2", "auto", 4, True, 2.0, None],
}
IN_FP16: dict[str, list[Any]] = {
    "loss_scale": [0, 128, "dynamic", -1],
    "initial_scale_power": [16, 32, "16"],
    "loss_scale_window": [1000, 500.0],
    "hysteresis": [2],
    "min_loss_scale": [1, 1e-8],
    "auto_cast": [True],
    "consecutive_hysteresis": [False],
    "fp16_master_weights_and_grads": [False],
    "opt_level": ["O2"],
    "enabled": ["auto", False, 0, "false", None],
}
OPTIMIZERS: list[Json] = [
    {"type": "AdamW", "params": ADAM},
    {"type": "Adam", "params": {**ADAM, "torch_adam": True}},
    {"type": "adamw", "params": {"lr": 5e-5, "adam_w_mode": True}},
    {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    {"type": "AdamW", "params": {"lr": 5e-5, "max_grad_norm": 0.5}},
    {"type": "AdamW", "params": {"lr": 5e-5, "beta": [0.9, 0.99]}},
    {"type": "SGD", "params": {"lr": 5e-5, "momentum": 0.9}},
    {"type": "OneBitAdam", "params": {"lr": 5e-5, "freeze_step": 100}},
    {"type": "Lion", "params": {"lr": 5e-5}},
    {"type": "Lamb", "params": {"lr": 5e-5}},
    {"type": "Adagrad", "params": {"lr": 5e-5}},
    {"type": "Adafactor", "params": {"lr": 5e-5}},
    {"type": "FusedAdam", "params": {"lr": 5e-5}},
    {"type": "AdamW"},
    {"params": {"lr": 5e-5}},
    {},
]


def configs(count: int, seed: int) -> dict[str, str]:
    """The generated texts by file name. The same seed gives the same texts."""
    chance = random.Random(seed)
    return {f"generated_{number:03}.json": _text(chance, number) for number in range(count)}


def _text(chance: random.Random, number: int) -> str:
    config = _base(chance)
    for _ in range(chance.choice((0, 1, 1, 2, 2, 3))):
        chance.choice(CHANGES)(chance, config)
    text = json.dumps(config, indent=chance.choice((2, 4, None)))
    return SLIPS[number % len(SLIPS)](text) if number % 9 == 0 else text


def _base(chance: random.Random) -> Json:
    """A valid config, with numbers, as DeepSpeed alone needs them, or with "auto", which the others resolve."""
    auto, stage = chance.random() < 0.5, chance.choice((0, 1, 2, 2, 3, 3))
    config: Json = {
        "train_micro_batch_size_per_gpu": "auto" if auto else 8,
        "gradient_accumulation_steps": "auto" if auto else 2,
        "gradient_clipping": "auto" if auto else 1.0,
        "zero_optimization": {"stage": stage},
    }
    if stage == 3:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if chance.random() < 0.4:
        config["train_batch_size"] = "auto" if auto else 16
    if chance.random() < 0.3:
        config["fp16"] = {"enabled": "auto" if auto else False, "loss_scale": 0, "initial_scale_power": 16}
        config["bf16"] = {"enabled": "auto" if auto else False}
    return config


def _at_the_top(chance: random.Random, config: Json) -> None:
    _set(chance, config, AT_THE_TOP)


def _in_zero(chance: random.Random, config: Json) -> None:
    if isinstance(config.get("zero_optimization"), dict):
        _set(chance, config["zero_optimization"], IN_ZERO)


def _in_precision(chance: random.Random, config: Json) -> None:
    name = chance.choice(("fp16", "fp16", "bf16"))
    section = config.setdefault(name, {"enabled": False})
    if isinstance(section, dict):
        _set(chance, section, IN_FP16)


def _set(chance: random.Random, section: Json, values: dict[str, list[Any]]) -> None:
    key = chance.choice(list(values))
    section[key] = chance.choice(values[key])


def _optimizer(chance: random.Random, config: Json) -> None:
    config["optimizer"] = json.loads(json.dumps(chance.choice(OPTIMIZERS)))
    if chance.random() < 0.5:
        _scheduler(chance, config)


def _scheduler(chance: random.Random, config: Json) -> None:
    kind = chance.choice(list(SCHEDULES))
    params = dict(chance.choice(SCHEDULES[kind]))
    if chance.random() < 0.3:
        params[chance.choice(("warmup_type", "warmup_steps", "last_batch_iteration"))] = chance.choice(("log", -1))
    config["scheduler"] = {"type": kind, "params": params}


def _without(chance: random.Random, config: Json) -> None:
    config.pop(chance.choice(list(config)), None)


def _of_another_kind(chance: random.Random, config: Json) -> None:
    if config:
        config[chance.choice(list(config))] = chance.choice((None, [], 3, "yes", True, {}))


CHANGES: tuple[Change, ...] = (
    *(_at_the_top, _at_the_top, _at_the_top, _in_zero, _in_zero, _in_zero, _in_precision, _optimizer, _scheduler),
    *(_without, _of_another_kind),
)
SLIPS: tuple[Callable[[str], str], ...] = (
    lambda text: text.replace("{", "{ // why\n", 1),
    lambda text: text[:-1].rstrip() + ",\n}",
    lambda text: text.replace('"', "'"),
    lambda text: text.replace('"auto"', "auto"),
    lambda text: text.replace('"auto"', "auto\n"),
    lambda text: text.replace("false", "False").replace("true", "True"),
    lambda text: text[:-2],
)
