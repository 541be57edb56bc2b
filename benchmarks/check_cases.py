"""Configs with one fault each, which `finetune check` must report, and valid configs, on which it must report no error.

Tests check every case; `python benchmarks/check.py` runs DeepSpeed, accelerate and the Trainer on each fault.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from finetune.dsconfig.context import Context, Weights

ARGUMENTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "bf16": False,
    "fp16": False,
    "max_steps": 100,
    "warmup_steps": 0,
}
A_RUN: dict[str, Any] = {
    "world_size": 1,
    "ranks_per_node": 1,
    "has_cuda": False,
    "output_dir": "out",
    "arguments": ARGUMENTS,
}
CLIP = {"gradient_clipping": "auto"}
SIZES = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 0},
}
BASE = {**SIZES, **CLIP}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
GPU = {"has_cuda": True}
TRAINER = {"engine": "trainer"}
PLAIN = {"engine": "deepspeed", "arguments": {}}
LOOP = {"engine": "accelerate", "arguments": {}}
PIPELINE = {"pipeline_parallel_size": 2, "world_size": 2, "ranks_per_node": 2}
FOUR, EXPERTS = {"world_size": 4, "ranks_per_node": 4}, {"expert_parallel_size": 2}
TWO_NODES = {"world_size": 16, "ranks_per_node": 8, **GPU}


def run_of(**changes: Any) -> Context:
    """A_RUN with changes."""
    known = {**A_RUN, **changes}
    return Context(**{**known, "weights": Weights(**known["weights"]) if "weights" in known else None})


def asked(**arguments: Any) -> dict[str, Any]:
    """A run with other flags."""
    return {"arguments": {**ARGUMENTS, **arguments}}


def zero(stage: int | str, **keys: Any) -> dict[str, Any]:
    """A valid config for a stage, with more keys in its section."""
    gather = {"stage3_gather_16bit_weights_on_model_save": True} if stage in (3, "3") else {}
    return {**BASE, "zero_optimization": {"stage": stage, **gather, **keys}}


@dataclass(frozen=True)
class Fault:
    """`config` is a dict, or the text of the file. If DeepSpeed's engine starts nevertheless, the expression `shows`
    tells what it really uses."""

    name: str
    code: str
    says: str
    config: dict[str, Any] | str
    run: dict[str, Any] = field(default_factory=dict)
    severity: str = "error"
    shows: str = ""

    @property
    def text(self) -> str:
        return self.config if isinstance(self.config, str) else json.dumps(self.config, indent=2)


def _nvme(**keys: Any) -> dict[str, Any]:
    return zero(3, offload_param={"device": "nvme", "nvme_path": "/tmp", **keys})


READING = [
    Fault("cut off", "DS001", 'the file ends too early: "}" is missing', '{"zero_optimization": {"stage": 2}'),
    Fault("empty file", "DS001", "the file is empty", ""),
    Fault("a list", "DS001", "holds a list", "[1, 2]"),
    Fault(
        "comment",
        "DS002",
        "DeepSpeed alone would accept it",
        '{\n  // why\n  "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0\n}',
    ),
    Fault(
        "trailing comma", "DS003", "Delete the comma", '{"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0,}'
    ),
    Fault(
        "duplicate key",
        "DS004",
        "is given twice .* DeepSpeed alone does not",
        '{"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "gradient_clipping": 0.5}',
    ),
    Fault("single quotes", "DS005", "double quotes", "{'zero_optimization': {'stage': 2}, 'gradient_clipping': 1.0}"),
    Fault(
        "missing comma",
        "DS006",
        "a comma is missing",
        '{"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0\n "steps_per_print": 5}',
    ),
    Fault(
        "Python's True",
        "DS007",
        "True is Python",
        '{"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "wall_clock_breakdown": True}',
    ),
    Fault("NaN", "DS007", "not a JSON number", '{"zero_optimization": {"stage": 2}, "gradient_clipping": NaN}'),
]

SHAPE = [
    Fault(
        "misspelt key at the top",
        "DS101",
        'Did you mean "gradient_clipping"',
        {**SIZES, "gradient_cliping": 0.1},
        shows="engine.gradient_clipping()",
    ),
    Fault("misspelt key in a section", "DS101", 'Did you mean "overlap_comm"', zero(2, overlap_com=True)),
    Fault(
        "key at the wrong level",
        "DS101",
        "Its place is zero_optimization.stage",
        {**BASE, "stage": 2},
        shows="engine.zero_optimization_stage()",
    ),
    Fault(
        "old name of the disk's threads",
        "DS101",
        'Did you mean "intra_op_parallelism"',
        {**_nvme(), "aio": {"thread_count": 8}},
        shows="engine.aio_config()",
    ),
    Fault("section that is a number", "DS102", "must be an object", {**BASE, "zero_optimization": 2}),
    Fault("switch that is a list", "DS102", "must be true or false", zero(2, overlap_comm=[1])),
    Fault("stage 4", "DS103", "must be 0, 1, 2, 3", {**BASE, "zero_optimization": {"stage": 4}}),
    Fault("unknown device", "DS103", '"none", "cpu", "nvme"', zero(2, offload_optimizer={"device": "gpu"})),
    Fault("bucket of nothing", "DS103", "above 0", zero(2, reduce_bucket_size=0)),
    Fault(
        "unknown schedule",
        "DS311",
        "Did you mean WarmupCosineLR",
        {**BASE, "optimizer": ADAMW, "scheduler": {"type": "Cosine", "params": {}}},
    ),
    Fault(
        "stage as a text",
        "DS104",
        "Drop the quotes: 3",
        zero("3"),
        shows="__import__('transformers').integrations.is_deepspeed_zero3_enabled()",
    ),
    Fault("clipping as a text", "DS104", "Drop the quotes: 1.0", {**SIZES, "gradient_clipping": "1.0"}),
    Fault("old name of offload", "DS105", "Use offload_optimizer", zero(2, cpu_offload=True), severity="warning"),
    Fault("compression library", "DS106", "removed in DeepSpeed 0.19.7", {**BASE, "compression_training": {}}),
    Fault("MiCS", "DS106", "Use zero_hpz_partition_size", zero(3, mics_shard_size=4)),
]

BATCH = [
    Fault(
        "batch sizes do not multiply",
        "DS201",
        r"train_batch_size is 64, but .* 8 x 2 x 1 = 16",
        {**BASE, "train_batch_size": 64},
    ),
    Fault(
        "batch sizes of a pipeline",
        "DS201",
        r"data-parallel size \(ranks / stages\) = 8 x 2 x 2 = 32",
        {**zero(1), "train_batch_size": 64},
        {**PIPELINE, "world_size": 4, "ranks_per_node": 4},
    ),
    Fault(
        "batch that cannot be divided",
        "DS201",
        "not a multiple of micro-batch x world_size = 3 x 1 = 3",
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 3},
        PLAIN,
    ),
    Fault("no batch size", "DS202", "neither train_batch_size nor", {"gradient_clipping": 1.0}, PLAIN),
    Fault(
        "another micro-batch",
        "DS203",
        r"is 4, but the run asks for 8 \(--per_device_train_batch_size\)",
        {**BASE, "train_micro_batch_size_per_gpu": 4},
        TRAINER,
    ),
    Fault("another clipping", "DS203", "gradient_clipping is 0.5, but", {**SIZES, "gradient_clipping": 0.5}, TRAINER),
    Fault(
        "another learning rate",
        "DS203",
        "lr is 0.001, but the run asks for 5e-05",
        {**BASE, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}},
        TRAINER,
    ),
    Fault(
        "bf16 against the flag",
        "DS203",
        "bf16.enabled is True, but the run asks for False",
        {**BASE, "bf16": {"enabled": True}},
        TRAINER,
    ),
    Fault('"auto" for plain DeepSpeed', "DS204", "DeepSpeed does not fill", BASE, PLAIN),
    Fault(
        '"auto" precision for plain DeepSpeed',
        "DS204",
        'fp16.enabled is "auto", which DeepSpeed does not fill',
        {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}},
        PLAIN,
        shows="engine.fp16_enabled()",
    ),
    Fault(
        '"auto" that accelerate leaves',
        "DS204",
        'optimizer.params.eps is "auto", which accelerate does not fill',
        {**BASE, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto", "torch_adam": True}}},
        LOOP,
    ),
    Fault(
        "our own auto in another script",
        "DS204",
        'zero_hpz_partition_size is "auto", which the Trainer does not fill',
        zero(3, zero_hpz_partition_size="auto"),
        TRAINER,
    ),
    Fault(
        "auto that is a default",
        "DS205",
        "it uses its own default",
        {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2, "overlap_comm": "auto"}},
        PLAIN,
        severity="warning",
        shows="engine.zero_overlap_comm()",
    ),
    Fault(
        "clipping missing against the flag",
        "DS206",
        "clips at its own 1.0 and ignores --max_grad_norm 0.1",
        SIZES,
        {**TRAINER, **asked(max_grad_norm=0.1)},
        shows="engine.gradient_clipping()",
    ),
    Fault("clipping missing", "DS206", 'Add "gradient_clipping"', SIZES, TRAINER, severity="warning"),
    Fault(
        "accumulation with releases that cannot",
        "DS207",
        "Use transformers 4.48",
        zero(2),
        {"versions": {"deepspeed": "0.16.0", "transformers": "4.46.1"}},
    ),
]

BATCH += [
    Fault(
        "accumulation missing against the flag",
        "DS208",
        "after each micro-batch, but the run asks for 2",
        {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 0}, **CLIP},
        TRAINER,
        shows="engine.gradient_accumulation_steps()",
    ),
]

OPTIMIZER = [
    Fault(
        "optimizer that nobody has",
        "DS301",
        "neither an optimizer of DeepSpeed nor a class of torch.optim",
        {**BASE, "optimizer": {"type": "AdmaW", "params": {"lr": 5e-5}}},
    ),
    Fault(
        "1-bit Adam",
        "DS302",
        "The recipes have it without DeepSpeed: --deepspeed none --ddp_comm_hook onebit_adam",
        {**BASE, "optimizer": {"type": "OneBitAdam", "params": {"lr": 5e-5, "freeze_step": 100}}},
    ),
    Fault(
        "1-bit Adam of an older DeepSpeed with ZeRO-2",
        "DS302",
        "works up to ZeRO-1",
        {**zero(2), "optimizer": {"type": "OneBitAdam", "params": {"lr": 5e-5}}},
        {"versions": {"deepspeed": "0.18.0"}},
    ),
    Fault(
        "untested optimizer under ZeRO",
        "DS303",
        'Add "zero_allow_untested_optimizer": true',
        {**zero(2), "optimizer": {"type": "SGD", "params": {"lr": 5e-5}}},
        asked(optim="sgd"),
    ),
    Fault(
        "torch's Adam with offload",
        "DS304",
        "several times slower",
        {**zero(2, offload_optimizer={"device": "cpu"}), "optimizer": ADAMW},
        severity="warning",
        shows="type(engine.basic_optimizer).__module__",
    ),
    Fault(
        "another --optim with offload",
        "DS304",
        "Drop --optim",
        zero(2, offload_optimizer={"device": "cpu"}),
        asked(optim="adafactor"),
    ),
    Fault(
        "section against --optim",
        "DS305",
        "--optim adafactor, which would be ignored",
        {**BASE, "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "torch_adam": True}}},
        {**TRAINER, **asked(optim="adafactor")},
        shows="type(engine.basic_optimizer).__name__",
    ),
    Fault(
        "clipping in the optimizer",
        "DS306",
        'Use the key "gradient_clipping"',
        {**BASE, "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "max_grad_norm": 1.0}}},
    ),
    Fault(
        "another schedule",
        "DS307",
        "--lr_scheduler_type cosine, which DeepSpeed would ignore",
        {
            **BASE,
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        },
        {**TRAINER, **asked(lr_scheduler_type="cosine", warmup_steps=10)},
        shows="type(engine.lr_scheduler).__name__",
    ),
    Fault(
        "a schedule without numbers that a flag overrules",
        "DS307",
        "Give --lr_scheduler_type constant_with_warmup",
        {**BASE, "optimizer": ADAMW, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        asked(lr_scheduler_type="linear"),
        severity="warning",
    ),
    Fault(
        "optimizer without schedule for accelerate",
        "DS308",
        "Give both sections, or neither",
        {**BASE, "optimizer": ADAMW},
        LOOP,
        severity="warning",
    ),
    Fault(
        "schedule without optimizer for the Trainer",
        "DS308",
        "Give both sections, or neither",
        {**BASE, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        TRAINER,
        severity="warning",
        shows="type(engine.lr_scheduler).__name__",
    ),
    Fault(
        "warm-up of 0",
        "DS309",
        "which DeepSpeed refuses",
        {
            **BASE,
            "optimizer": ADAMW,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 0}},
        },
        TRAINER,
    ),
    Fault(
        "warm-up beyond the end",
        "DS309",
        "the full rate is never reached",
        {
            **BASE,
            "optimizer": ADAMW,
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
        },
        {**TRAINER, **asked(warmup_steps=500)},
        severity="warning",
    ),
    Fault(
        "decay without an end",
        "DS310",
        "needs total_num_steps",
        {**BASE, "optimizer": ADAMW, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}}},
        TRAINER,
    ),
]


def _scheduled(kind: str, **params: Any) -> dict[str, Any]:
    return {**BASE, "optimizer": ADAMW, "scheduler": {"type": kind, "params": params}}


def _optimized(kind: str, **params: Any) -> dict[str, Any]:
    return {**BASE, "optimizer": {"type": kind, "params": params}}


NUMBERS = [
    Fault(
        "warm-up from above",
        "DS312",
        r"warmup_min_lr is 0\.01, which is above warmup_max_lr, 5e-05 \(--learning_rate\)",
        _scheduled("WarmupLR", warmup_min_lr=0.01, warmup_max_lr="auto", warmup_num_steps=1),
        TRAINER,
    ),
    Fault(
        "ratio above 1",
        "DS312",
        "warmup_min_ratio is 3, but it must be a number at least 0 and at most 1",
        _scheduled("WarmupCosineLR", warmup_min_ratio=3, warmup_num_steps=1, total_num_steps=100),
        TRAINER,
    ),
    Fault(
        "cycle of no steps",
        "DS312",
        "cycle_first_step_size is 0, but it must be a number above 0",
        _scheduled("OneCycle", cycle_min_lr=1e-5, cycle_max_lr=5e-5, cycle_first_step_size=0),
        TRAINER,
    ),
    Fault(
        "decay that has no steps",
        "DS312",
        "so nothing decays",
        _scheduled("OneCycle", cycle_min_lr=1e-5, cycle_max_lr=5e-5, decay_lr_rate=0.1),
        TRAINER,
        severity="warning",
    ),
    Fault(
        "parameter of another optimizer",
        "DS311",
        r"eps is not a parameter of Lion \(FusedLion\)",
        _optimized("Lion", lr=5e-5, eps="auto"),
        TRAINER,
    ),
    Fault(
        "one beta of two",
        "DS312",
        r"takes a list of 2 numbers",
        _optimized("Lion", lr=5e-5, betas=[0.9]),
        TRAINER,
    ),
    Fault("negative rate", "DS312", "must be a number at least 0", _optimized("Lion", lr=-5e-5), TRAINER),
    Fault("offload without a device", "DS609", "nothing is offloaded", zero(2, offload_optimizer={"pin_memory": True})),
    Fault(
        "window of no steps",
        "DS407",
        "loss_scale_window is 0, which DeepSpeed refuses",
        {**BASE, "fp16": {"enabled": True, "loss_scale_window": 0}},
        {**GPU, **asked(fp16=True)},
    ),
    Fault(
        "precision without its switch",
        "DS408",
        "bf16 has no enabled",
        {**BASE, "bf16": {"check_grad_overflow": True}},
        {**TRAINER, **asked(bf16=True)},
        shows="engine.bfloat16_enabled()",
    ),
    Fault("a line every 0 steps", "DS906", "cannot be divided", {**BASE, "steps_per_print": 0}, PLAIN),
    Fault(
        "monitor without its switch",
        "DS907",
        "it does nothing",
        {**BASE, "csv_monitor": {"output_path": "logs"}},
        severity="warning",
        shows="engine.monitor.enabled",
    ),
    Fault(
        "old name with the new one's default",
        "DS101",
        'Did you mean "intra_op_parallelism"',
        {**_nvme(), "aio": {"thread_count": 1}},
        severity="warning",
        shows="engine.aio_config()",
    ),
]

PRECISION = [
    Fault("fp16 and bf16", "DS401", "both true", {**BASE, "fp16": {"enabled": True}, "bf16": {"enabled": True}}),
    Fault("fp16 without a GPU", "DS402", "does not train on a CPU", {**BASE, "fp16": {"enabled": True}}),
    Fault(
        "bf16 on an old GPU",
        "DS403",
        "compute capability 7.0",
        {**BASE, "bf16": {"enabled": True}},
        {**GPU, **asked(bf16=True), "gpu_capability": (7, 0)},
    ),
    Fault(
        "fixed scale with dynamic fields",
        "DS404",
        "hysteresis do nothing",
        {**BASE, "fp16": {"enabled": "auto", "loss_scale": 128, "loss_scale_window": 100, "hysteresis": 2}},
        severity="warning",
    ),
    Fault(
        "loss scale with fp16 off",
        "DS404",
        "fp16.enabled is false, so initial_scale_power does nothing",
        {**BASE, "fp16": {"enabled": False, "initial_scale_power": 8}},
        severity="warning",
    ),
    Fault(
        "bf16 masters without ZeRO",
        "DS405",
        "needs ZeRO stage 1 to 3",
        {**BASE, "bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True}},
    ),
    Fault(
        "bf16 states without bf16 masters",
        "DS405",
        "also needs bf16_master_weights_and_grads",
        {**zero(2), "bf16": {"enabled": "auto", "bf16_optimizer_states": True}},
    ),
    Fault(
        "autocast over bf16",
        "DS406",
        "Keep one",
        {**BASE, "bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {**TRAINER, **asked(bf16=True)},
        severity="warning",
    ),
]

SMALL = {"weights": {"total": 5_000_000, "largest": 100_000, "hidden_size": 64}}
ZERO = [
    Fault(
        "ZeRO-3 that saves nothing",
        "DS501",
        "no weights that from_pretrained opens",
        {**BASE, "zero_optimization": {"stage": 3}},
        shows="engine.zero_gather_16bit_weights_on_model_save()",
    ),
    Fault(
        "gathering left to accelerate",
        "DS501",
        "which the Trainer leaves off",
        {**BASE, "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto"}},
        TRAINER,
        shows="engine.zero_gather_16bit_weights_on_model_save()",
    ),
    Fault(
        "threshold above every weight",
        "DS502",
        "ZeRO-3 shards nothing",
        zero(3, stage3_param_persistence_threshold=1_000_000),
        SMALL,
        shows="sum(p.ds_persist for p in engine.module.parameters()), len(list(engine.module.parameters()))",
    ),
    Fault(
        "buckets of the deep benchmark",
        "DS503",
        "the network's full latency",
        zero(1, reduce_bucket_size=50_000, allgather_bucket_size=50_000),
        severity="warning",
    ),
    Fault(
        "bucket far above the model",
        "DS503",
        "are wasted",
        zero(2, reduce_bucket_size=500_000_000),
        SMALL,
        severity="warning",
    ),
    Fault(
        "overlap with large buckets",
        "DS504",
        "takes 3.7 GiB on each GPU for its 2 buckets",
        zero(2, overlap_comm=True, reduce_bucket_size=5e8, allgather_bucket_size=5e8),
        GPU,
        severity="warning",
    ),
    Fault(
        "keys of ZeRO-3 at stage 2",
        "DS505",
        "do nothing",
        zero(2, stage3_max_live_parameters=1e9, stage3_prefetch_bucket_size=1e7),
        severity="warning",
    ),
    Fault(
        "checkpoints of weights alone, to be resumed",
        "DS506",
        "DeepSpeed cannot load a checkpoint without them",
        zero(2),
        {**TRAINER, **asked(save_only_model=True, load_best_model_at_end=True)},
    ),
    Fault(
        "a part of the states offloaded at stage 2",
        "DS507",
        "only at stage 3",
        zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
    ),
    Fault("norm switched off at stage 3", "DS507", "only at stages 1 and 2", zero(3, compute_grad_norm=False)),
    Fault("no ZeRO section", "DS508", 'Add "zero_optimization"', {"gradient_clipping": "auto"}, TRAINER),
    Fault("experts apart under ZeRO-3", "DS509", "can neither export the experts nor", zero(3), {**FOUR, **EXPERTS}),
    Fault("sums under ZeRO-3", "DS507", "refuses under ZeRO-3", {**zero(3), "gradient_allreduce_op": "sum"}),
]

OFFLOAD = [
    Fault("weights offloaded at stage 2", "DS601", "needs stage 3", zero(2, offload_param={"device": "cpu"})),
    Fault(
        "optimizer offloaded at stage 0",
        "DS602",
        "needs stage 1 to 3",
        zero(0, offload_optimizer={"device": "cpu"}),
        shows="engine.zero_use_cpu_optimizer(), type(engine.optimizer).__name__",
    ),
    Fault(
        "NVMe without a path",
        "DS603",
        "nvme_path is not given",
        zero(3, offload_param={"device": "nvme"}),
        TRAINER,
    ),
    Fault("NVMe path that cannot be", "DS604", "is not writable here", _nvme(nvme_path="/dev/null/nvme")),
    Fault("NVMe path in memory", "DS605", "which is memory", _nvme(nvme_path="/dev/shm"), severity="warning"),
    Fault(
        "block that is no sector",
        "DS606",
        "multiples of 4,096",
        {**_nvme(), "aio": {"block_size": 1_000_000}},
        severity="warning",
    ),
    Fault("queue of nothing", "DS103", "at least 1", {**_nvme(), "aio": {"queue_depth": 0}}),
    Fault(
        "buffer below the largest weight",
        "DS608",
        "Raise it to 100,000",
        _nvme(buffer_size=1000),
        SMALL,
    ),
]

QUANTIZED = [
    Fault(
        "hpZ that does not divide the ranks",
        "DS701",
        "must divide the 16 ranks",
        zero(3, zero_hpz_partition_size=3),
        TWO_NODES,
    ),
    Fault("hpZ across nodes", "DS701", "a node has 8 ranks", zero(3, zero_hpz_partition_size=16), TWO_NODES),
    Fault("qgZ at stage 2", "DS702", "needs stage 3", zero(2, zero_quantized_gradients=True), GPU),
    Fault("qwZ without a GPU", "DS703", "no CPU build", zero(3, zero_quantized_weights=True)),
    Fault(
        "qgZ on one node",
        "DS704",
        "does nothing on one node",
        zero(3, zero_quantized_gradients=True),
        GPU,
        severity="warning",
        shows="engine.zero_quantized_gradients()",
    ),
    Fault(
        "quantized weights of ranks that share texts",
        "DS705",
        "sequence_parallel_size is 2, which is untested",
        zero(3, zero_quantized_weights=True),
        {**TWO_NODES, "sequence_parallel_size": 2},
    ),
]

PIPELINES = [
    Fault("ZeRO-2 under a pipeline", "DS801", "takes at most 1. Use --deepspeed pipeline", zero(2), PIPELINE),
    Fault("no ZeRO under a pipeline", "DS801", "discards the gradient norm", zero(0), PIPELINE),
    Fault(
        "NVMe under a pipeline",
        "DS802",
        "device is nvme, but a pipeline run keeps its states on the device",
        zero(1, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}),
        PIPELINE,
    ),
    Fault(
        "optimizer of a pipeline",
        "DS803",
        "optimizer sets values, but a pipeline run builds it from the Trainer's flags",
        {**zero(1), "optimizer": {"type": "Adam", "params": {"lr": 5e-5}}},
        PIPELINE,
    ),
    Fault(
        "fp16 pipeline that adds up in fp32",
        "DS804",
        "does not sum tied gradients",
        {**zero(1), "fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        {**PIPELINE, **GPU, **asked(fp16=True)},
    ),
    Fault(
        "weights in another order",
        "DS805",
        "checkpoints do not support",
        zero(1, round_robin_gradients=True),
        PIPELINE,
    ),
    Fault("DeepSpeed's monitors", "DS806", "Use --report_to", {**zero(1), "csv_monitor": {"enabled": True}}, PIPELINE),
    Fault(
        "auto that nobody fills",
        "DS807",
        'reduce_bucket_size is "auto", which nothing fills',
        zero(1, reduce_bucket_size="auto"),
        PIPELINE,
    ),
    Fault(
        "checkpointing section in a pipeline",
        "DS808",
        "never reads it",
        {**zero(1), "activation_checkpointing": {"cpu_checkpointing": True}},
        PIPELINE,
    ),
    Fault(
        "auto of a pipeline without one",
        "DS204",
        "a pipeline run fills it",
        {**zero(1), "data_types": {"grad_accum_dtype": "auto"}},
    ),
]

PURPOSE = [
    Fault(
        "a template",
        "DS009",
        "a template: 3 value",
        '{"train_batch_size": GLOBAL_BATCH, "zero_optimization": {"stage": ${STAGE}}, "aio": "{{ aio }}"}',
    ),
    Fault("a config of inference", "DS010", "init_inference", {"replace_with_kernel_inject": True, "dtype": "fp16"}),
    Fault(
        "a template of the autotuner",
        "DS010",
        "DeepSpeed's autotuner",
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": [5e7, 5e8], "overlap_comm": [True, False]}},
    ),
]

REFUSED = [
    Fault("tensor parallelism", "DS905", "tensor_parallel is on", {**zero(1), "tensor_parallel": {"autotp_size": 2}}),
    Fault("curricula", "DS905", "data_efficiency is on", {**zero(1), "data_efficiency": {"enabled": True}}),
    Fault("sequence parallelism", "DS905", "sequence_parallel_size is on", {**zero(1), "sequence_parallel_size": 2}),
    Fault("ZenFlow", "DS905", "zenflow is on", zero(2, zenflow={"topk_ratio": 0.1})),
    Fault(
        "the autotuner's section in a script of its own",
        "DS905",
        "deepspeed --autotuning",
        {**zero(1), "autotuning": {"enabled": True}},
        TRAINER,
        severity="warning",
    ),
]

LEFTOVERS = [
    Fault(
        "checkpointing section under the Trainer",
        "DS901",
        "does nothing under the Trainer",
        {**BASE, "activation_checkpointing": {"partition_activations": True}},
        severity="warning",
    ),
    Fault(
        "profiler left on",
        "DS902",
        "profiles a step",
        {**BASE, "flops_profiler": {"enabled": True, "profile_step": 5}},
        severity="warning",
        shows="engine.wall_clock_breakdown()",
    ),
    Fault(
        "breakdown left on",
        "DS902",
        "times every part",
        {**BASE, "wall_clock_breakdown": True},
        severity="warning",
        shows="engine.wall_clock_breakdown()",
    ),
    Fault(
        "logged twice",
        "DS903",
        "the run is logged twice",
        {**BASE, "wandb": {"enabled": True}},
        asked(report_to=["wandb"]),
        severity="warning",
    ),
    Fault(
        "token in the file",
        "DS904",
        "looks like a secret",
        {**BASE, "wandb": {"enabled": False, "team": "hf_" + "a1B2" * 8}},
        shows="'hf_a1B2' in str(engine._config._param_dict)",
    ),
]

FAULTS = [
    *READING,
    *SHAPE,
    *BATCH,
    *OPTIMIZER,
    *NUMBERS,
    *PRECISION,
    *ZERO,
    *OFFLOAD,
    *QUANTIZED,
    *PIPELINES,
    *LEFTOVERS,
    *PURPOSE,
    *REFUSED,
]


@dataclass(frozen=True)
class Good:
    """A config that is valid for its run: no error may be reported."""

    name: str
    config: dict[str, Any]
    run: dict[str, Any] = field(default_factory=dict)


ALL_AUTO = {"train_batch_size": "auto", **BASE}
OPTIMIZED = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    },
}
SCALING = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
CPU = {"device": "cpu", "pin_memory": True}
STAGE3 = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
HERE = {**TRAINER, **GPU}
ALONE = {**PLAIN, **GPU}
# Configs as in transformers' tests and guide, accelerate's templates, and DeepSpeed's tutorials and tests.
GOOD = [
    Good("nothing but auto", ALL_AUTO, HERE),
    Good("Trainer: ZeRO-1", {**ALL_AUTO, "zero_optimization": {"stage": 1}}, HERE),
    Good("Trainer: ZeRO-2 with both sections", {**ALL_AUTO, **OPTIMIZED, **zero(2), "fp16": SCALING}, HERE),
    Good(
        "Trainer: ZeRO-2 with buckets",
        {
            **ALL_AUTO,
            **zero(
                2,
                allgather_partitions=True,
                allgather_bucket_size=2e8,
                overlap_comm=True,
                reduce_scatter=True,
                reduce_bucket_size=2e8,
                contiguous_gradients=True,
            ),
            "bf16": {"enabled": "auto"},
            "fp16": SCALING,
        },
        HERE,
    ),
    Good("Trainer: ZeRO-2 offload", {**ALL_AUTO, **OPTIMIZED, **zero(2, offload_optimizer=CPU)}, HERE),
    Good("Trainer: ZeRO-2, round robin", {**ALL_AUTO, **zero(2, round_robin_gradients=True)}, HERE),
    Good("Trainer: ZeRO-3", {**ALL_AUTO, **OPTIMIZED, **zero(3, **STAGE3), "fp16": SCALING}, HERE),
    Good("Trainer: ZeRO-3 offload", {**ALL_AUTO, **zero(3, **STAGE3, offload_optimizer=CPU, offload_param=CPU)}, HERE),
    Good(
        "Trainer: ZeRO-3 on a disk",
        {
            **ALL_AUTO,
            **zero(
                3,
                **STAGE3,
                offload_optimizer={"device": "nvme", "nvme_path": "/tmp", "buffer_count": 4, "fast_init": False},
                offload_param={"device": "nvme", "nvme_path": "/tmp", "buffer_count": 5, "buffer_size": 1e8},
            ),
            "aio": {"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False},
        },
        HERE,
    ),
    Good("Trainer: schedule with decay", {**ALL_AUTO, "optimizer": OPTIMIZED["optimizer"], "scheduler": DECAY}, HERE),
    Good("Trainer: numbers that agree", {**BASE, "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0}, HERE),
    Good("Trainer: batch written out", {**BASE, "train_batch_size": 16}, HERE),
    Good(
        "Trainer: fixed loss scale",
        {**ALL_AUTO, "fp16": {"enabled": True, "loss_scale": 128}},
        {**HERE, **asked(fp16=True)},
    ),
    Good("Trainer: bf16 by flag", {**ALL_AUTO, **zero(2), "bf16": {"enabled": True}}, {**HERE, **asked(bf16=True)}),
    Good("Trainer: gradients in fp32", {**ALL_AUTO, "communication_data_type": "fp32"}, HERE),
    Good("Trainer: steps_per_print", {**ALL_AUTO, "steps_per_print": 2000, "wall_clock_breakdown": False}, HERE),
    Good("Trainer: universal checkpoint", {**ALL_AUTO, "checkpoint": {"load_universal": True}}, HERE),
    Good("Trainer: node-local checkpoints", {**ALL_AUTO, "checkpoint": {"use_node_local_storage": True}}, HERE),
    Good("Trainer: hpZ of a node", zero(3, **STAGE3, zero_hpz_partition_size=8), {**TRAINER, **TWO_NODES}),
    Good(
        "Trainer: ZeRO++ on two nodes",
        zero(3, zero_hpz_partition_size=8, zero_quantized_weights=True, zero_quantized_gradients=True),
        {**TRAINER, **TWO_NODES},
    ),
    Good(
        "Trainer: Lamb",
        {**ALL_AUTO, "optimizer": {"type": "Lamb", "params": {"lr": 5e-5}}},
        HERE,
    ),
    Good(
        "Trainer: SGD of torch, allowed",
        {**zero(2), "zero_allow_untested_optimizer": True, "optimizer": {"type": "SGD", "params": {"lr": 5e-5}}},
        {**HERE, **asked(optim="sgd")},
    ),
    Good("accelerate: ZeRO-2", {**ALL_AUTO, **zero(2, offload_optimizer={"device": "cpu"})}, {**LOOP, **GPU}),
    Good(
        "accelerate: both sections",
        {
            **ALL_AUTO,
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
            "scheduler": DECAY,
        },
        {**LOOP, **GPU},
    ),
    Good("accelerate: ZeRO-3", {**ALL_AUTO, **zero(3, **STAGE3)}, {**LOOP, **GPU}),
    Good(
        "DeepSpeed alone: the tutorial's",
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
            "fp16": {"enabled": True},
        },
        ALONE,
    ),
    Good(
        "DeepSpeed alone: schedule and clipping",
        {
            "train_batch_size": 16,
            "steps_per_print": 2000,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
            },
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "bf16": {"enabled": True},
            "wall_clock_breakdown": False,
            "zero_optimization": {"stage": 0},
        },
        ALONE,
    ),
    Good(
        "DeepSpeed alone: one cycle",
        {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
            "scheduler": {
                "type": "OneCycle",
                "params": {"cycle_first_step_size": 1000, "cycle_min_lr": 0.0001, "cycle_max_lr": 0.001},
            },
        },
        ALONE,
    ),
    Good(
        "DeepSpeed alone: ZeRO-3 with thresholds",
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero(3)["zero_optimization"]},
        ALONE,
    ),
    Good(
        "DeepSpeed alone: monitor",
        {"train_batch_size": 4, "tensorboard": {"enabled": True, "output_path": "logs"}},
        ALONE,
    ),
    Good("DeepSpeed alone: comms logger off", {"train_batch_size": 4, "comms_logger": {"enabled": False}}, ALONE),
    Good(
        "DeepSpeed alone: autocast",
        {"train_batch_size": 4, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        ALONE,
    ),
    Good(
        "DeepSpeed alone: activation checkpointing",
        {"train_batch_size": 4, "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4}},
        ALONE,
    ),
    Good(
        "Trainer: Lion with what it takes",
        {
            **ALL_AUTO,
            **zero(2, offload_optimizer=CPU),
            "optimizer": {"type": "Lion", "params": {"lr": "auto", "betas": "auto", "fp32_optimizer_states": True}},
        },
        HERE,
    ),
    Good(
        "DeepSpeed alone: Adafactor of torch, with its two eps",
        {
            "train_batch_size": 4,
            "optimizer": {"type": "Adafactor", "params": {"lr": 0.01, "eps": [None, 1e-3], "d": 1.0}},
        },
        ALONE,
    ),
    Good(
        "DeepSpeed alone: a flat cycle that decays",
        {
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "weight_decay": 0, "betas": [0, 0.99]}},
            "scheduler": {
                "type": "OneCycle",
                "params": {
                    "cycle_min_lr": 1e-4,
                    "cycle_max_lr": 1e-4,
                    "cycle_second_step_size": None,
                    "cycle_first_step_size": 10.5,
                    "decay_step_size": 5,
                    "decay_lr_rate": 0.1,
                },
            },
        },
        ALONE,
    ),
    Good(
        "DeepSpeed alone: fields of a dynamic scale under a fixed one",
        {"train_batch_size": 4, "fp16": {"enabled": True, "loss_scale": 128, "min_loss_scale": 0}},
        ALONE,
    ),
    Good(
        "DeepSpeed alone: Muon", {"train_batch_size": 4, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}}, ALONE
    ),
    Good("DeepSpeed alone: data types", {"train_batch_size": 4, "data_types": {"grad_accum_dtype": "fp32"}}, ALONE),
    Good("recipe: hpZ by itself", zero(3, zero_hpz_partition_size="auto"), GPU),
    Good("recipe: a disk by itself", zero(3, offload_param={"device": "nvme", "nvme_path": "auto"}), GPU),
    Good("pipeline: ZeRO-1", {**ALL_AUTO, **zero(1)}, {**PIPELINE, **GPU}),
    Good(
        "pipeline: accumulation in bf16", {**zero(1), "data_types": {"grad_accum_dtype": "bf16"}}, {**PIPELINE, **GPU}
    ),
]
