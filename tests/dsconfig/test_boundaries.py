"""Where each rule begins and ends: at the number that is still right, and at the one beside it that is not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from check_cases import ARGUMENTS, BASE, CLIP, GPU, LOOP, PIPELINE, PLAIN, SIZES, TRAINER, TWO_NODES, asked, zero
from check_cases import run_of as a_run

from finetune.dsconfig.check import check, mended
from finetune.dsconfig.rules.batch import TWINS
from finetune.dsconfig.rules.leftovers import PROFILERS

E, W = "error", "warning"
Case = tuple[str, str | None, dict[str, Any], dict[str, Any]]  # code, its severity or None for silence, config, run


def sizes(total: int, largest: int, hidden: int | None = 64) -> dict[str, Any]:
    return {"weights": {"total": total, "largest": largest, "hidden_size": hidden}}


def older(deepspeed: str = "0.19.8", transformers: str = "5.23.0") -> dict[str, Any]:
    return {"versions": {"deepspeed": deepspeed, "transformers": transformers}}


def optimizer(kind: str, stage: int = 0, **keys: Any) -> dict[str, Any]:
    return {**zero(stage, **keys), "optimizer": {"type": kind, "params": {"lr": 5e-5}}}


def warmup(steps: Any, total: Any = None, kind: str = "WarmupLR") -> dict[str, Any]:
    params = {"warmup_num_steps": steps} | ({} if total is None else {"total_num_steps": total})
    return {**BASE, "scheduler": {"type": kind, "params": params}}


def scheduled(kind: str, **params: Any) -> dict[str, Any]:
    return {**BASE, "scheduler": {"type": kind, "params": params}}


def half(**keys: Any) -> dict[str, Any]:
    return {**zero(2, **keys), "bf16": {"enabled": "auto"}}


MICRO, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
THRESHOLD, BUCKET = "stage3_param_persistence_threshold", "reduce_bucket_size"
ADAM_OFF = {"offload_optimizer": {"device": "cpu"}}
NVME = {"device": "nvme", "nvme_path": "/tmp"}
FOUR = {"world_size": 4, "ranks_per_node": 4}

BATCH: list[Case] = [
    *(("DS201", severity, {**BASE, "train_batch_size": total}, FOUR) for total, severity in
      ((64, None), (63, E), (65, E), (32, E))),
    ("DS201", None, {**BASE, "train_batch_size": 8, MICRO: 8}, {**asked(gradient_accumulation_steps=1)}),
    ("DS201", None, {"train_batch_size": 8, MICRO: 8, **CLIP}, LOOP),
    ("DS201", E, {"train_batch_size": 16, MICRO: 8, **CLIP}, LOOP),
    ("DS201", E, {**BASE, "train_batch_size": 9, "sequence_parallel_size": 0}, {}),
    ("DS201", None, {**BASE, "train_batch_size": 9, "sequence_parallel_size": 2}, {"world_size": 2}),
    ("DS201", E, {**BASE, "sequence_parallel_size": 2}, {"world_size": 3}),
    ("DS201", None, {**BASE, "train_batch_size": 9, "tensor_parallel": {"autotp_size": 2}}, {}),
    ("DS201", None, {**zero(1), "train_batch_size": 32}, {**PIPELINE, **FOUR}),
    ("DS201", E, {**zero(1), "train_batch_size": 64}, {**PIPELINE, **FOUR}),
    ("DS201", None, {"train_batch_size": 15, MICRO: 3}, PLAIN),
    ("DS201", E, {"train_batch_size": 15, MICRO: 2}, PLAIN),
    ("DS201", None, {"train_batch_size": 15, ACCUMULATION: 5}, PLAIN),
    ("DS201", E, {"train_batch_size": 15, ACCUMULATION: 4}, PLAIN),
    ("DS202", None, {"train_batch_size": 4}, PLAIN),
    ("DS202", None, {MICRO: 4}, PLAIN),
    ("DS202", E, {ACCUMULATION: 4}, PLAIN),
    ("DS202", E, {"train_batch_size": "auto"}, LOOP),
    ("DS202", None, {"train_batch_size": "auto"}, TRAINER),
    ("DS202", E, {}, TRAINER),
    ("DS202", None, {}, {}),
    *(("DS208", severity, {MICRO: "auto", **CLIP}, {**TRAINER, **asked(gradient_accumulation_steps=steps)})
      for steps, severity in ((1, None), (2, E))),
    ("DS208", None, {MICRO: "auto", **CLIP}, {}),
    ("DS208", None, {MICRO: "auto", **CLIP}, LOOP),
    *(("DS208", E, {**BASE, ACCUMULATION: None}, run) for run in (TRAINER, LOOP)),
    ("DS208", None, {**BASE, ACCUMULATION: None}, {}),
    ("DS203", None, warmup(10), {**TRAINER, **asked(warmup_steps=0.1)}),
    ("DS203", E, warmup(11), {**TRAINER, **asked(warmup_steps=0.1)}),
    ("DS203", None, warmup(10), {**TRAINER, **asked(warmup_steps=0.1, max_steps=91)}),
    ("DS203", None, warmup(1), {**TRAINER, **asked(warmup_steps=0.001, max_steps=5)}),
    ("DS203", None, warmup(1), {**TRAINER, **asked(warmup_steps=0)}),
    ("DS203", E, warmup(2), {**TRAINER, **asked(warmup_steps=0)}),
    ("DS203", None, warmup(1), {**TRAINER, **asked(warmup_steps=1)}),
    ("DS203", None, warmup(3), {**TRAINER, **asked(warmup_steps=3)}),
    ("DS203", E, warmup(3), {**TRAINER, **asked(warmup_steps=0.5, max_steps=-1)}),
    ("DS203", None, warmup(3, 7), {**TRAINER, **asked(warmup_steps=3, max_steps=-1)}),
    ("DS203", None, {**BASE, "bf16": {"enabled": True}}, {**TRAINER, **asked(bf16_full_eval=True)}),
    ("DS203", E, {**BASE, "bf16": {"enabled": True}}, {**TRAINER, **asked(fp16_full_eval=True)}),
    *(("DS203", severity, {**BASE, "optimizer": {"type": "AdamW", "params": {"betas": betas}}}, TRAINER)
      for betas, severity in (([0.9, 0.999], None), ([0.8, 0.999], E), ([0.9, 0.99], E), ([0.9], None))),
    ("DS203", None, {**BASE, "gradient_clipping": 0.5}, LOOP),
    *(("DS206", severity, SIZES, {**TRAINER, **asked(max_grad_norm=norm), **older(version)})
      for norm, version, severity in ((1.0, "0.19.3", W), (1.0, "0.19.2", E), (0.0, "0.19.3", E), (0.0, "0.19.2", W),
                                      (0.99, "0.19.3", E))),
    ("DS206", None, SIZES, LOOP),
    ("DS206", None, {**SIZES, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, TRAINER),
    *(("DS207", severity, zero(stage), {**older(deepspeed, transformers), **asked(gradient_accumulation_steps=steps)})
      for stage, deepspeed, transformers, steps, severity in (
          (2, "0.16.0", "4.46.0", 2, E), (3, "0.16.0", "4.46.0", 2, E), (1, "0.16.0", "4.46.0", 2, None),
          (2, "0.15.9", "4.46.0", 2, None), (2, "0.16.0", "4.45.9", 2, None), (2, "0.16.1", "4.47.9", 2, E),
          (2, "0.16.0", "4.48.0", 2, None), (2, "0.16.0", "4.46.0", 1, None))),
    ("DS207", None, zero(2), {**older("0.16.0", "4.46.0"), **LOOP}),
    ("DS204", E, {MICRO: 4, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "auto"}}}, PLAIN),
    ("DS205", W, {MICRO: 4, "zero_optimization": {"stage": 2, "overlap_comm": "auto"}}, PLAIN),
    ("DS204", None, {MICRO: 4, "zero_optimization": {"stage": 2, "overlap_comm": "auto"}}, PLAIN),
    ("DS204", E, {MICRO: 4, "communication_data_type": "auto"}, PLAIN),
    ("DS204", None, zero(3, zero_hpz_partition_size="auto"), {}),
    ("DS204", None, {MICRO: 4, "pipeline": {"stages": "auto"}}, PLAIN),
    ("DS204", E, {**BASE, "pipeline": {"stages": "auto"}}, {}),
    ("DS204", W, {**BASE, "data_types": {"grad_accum_dtype": "auto"}}, {"is_here": False}),
    ("DS204", E, {**BASE, "data_types": {"grad_accum_dtype": "auto"}}, {}),
]  # fmt: skip

OPTIMIZER: list[Case] = [
    ("DS301", E, {**BASE, "optimizer": {"params": {"lr": 1e-4}}}, {}),
    ("DS301", None, {**BASE, "optimizer": {"params": {}}}, {}),
    *(("DS301", None, optimizer(kind), {}) for kind in ("Adam", "LION", "SGD", "RMSprop")),
    *(("DS301", E, optimizer(kind), {}) for kind in ("sgd", "FusedAdam", "OneBit")),
    *(("DS302", severity, optimizer("OneBitAdam", stage), older(version))
      for version, stage, severity in (("0.19.7", 0, E), ("0.19.6", 0, None), ("0.19.6", 1, None), ("0.19.6", 2, E))),
    *(("DS303", severity, optimizer(kind, stage), {}) for kind, stage, severity in (
        ("SGD", 0, None), ("SGD", 1, E), ("Lamb", 2, E), ("AdamW", 2, None), ("Muon", 2, None), ("LION", 2, None),
        ("OneBitAdam", 2, None), ("FusedAdam", 2, None))),
    ("DS303", None, {**optimizer("SGD", 2), "zero_allow_untested_optimizer": True}, {}),
    ("DS304", None, optimizer("AdamW", 2, **ADAM_OFF), {}),
    ("DS304", W, optimizer("Lamb", 2, **ADAM_OFF), {}),
    ("DS304", W, optimizer("Lamb", 3, offload_optimizer=NVME), {}),
    ("DS304", None, optimizer("FusedAdam", 2, **ADAM_OFF), {}),
    *(("DS304", severity, optimizer("OneBitAdam", 1, **ADAM_OFF), older(version))
      for version, severity in (("0.19.7", None), ("0.19.6", W))),
    ("DS304", None, optimizer("Lamb", 0, **ADAM_OFF), {}),
    ("DS304", None, optimizer("Lamb", 2), {}),
    ("DS304", W, {MICRO: 4, "zero_optimization": {"stage": 2, **ADAM_OFF}}, PLAIN),
    ("DS304", None, {MICRO: 4, "zero_optimization": {"stage": 2, **ADAM_OFF}}, LOOP),
    ("DS304", None,
     {MICRO: 4, "zero_optimization": {"stage": 2, **ADAM_OFF}, "zero_force_ds_cpu_optimizer": False}, PLAIN),
    ("DS304", None, zero(2, **ADAM_OFF), asked(optim="adamw_torch_fused")),
    ("DS304", E, zero(2, **ADAM_OFF), asked(optim="lion_32bit")),
    ("DS304", None, {**zero(2, **ADAM_OFF), "zero_force_ds_cpu_optimizer": False}, asked(optim="lion_32bit")),
    ("DS304", None, zero(2, **ADAM_OFF), {}),
    *(("DS305", severity, optimizer(kind), {**TRAINER, **asked(optim=optim)}) for kind, optim, severity in (
        ("AdamW", "adamw_torch", None), ("Adam", "adamw_torch", None), ("AdamW", "adafactor", E), ("Lion", "sgd", E),
        ("AdmaW", "sgd", None))),
    ("DS305", None, {**BASE, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, asked(optim="sgd")),
    ("DS306", None, {**BASE, "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}}}, {}),
    *(("DS311", severity, {**BASE, "optimizer": {"type": kind, "params": {name: 1}}}, {})
      for kind, name, severity in (("AdamW", "eps", None), ("Adam", "betta", E), ("SGD", "betta", E),
                                   ("AdamW", "fused", E), ("AdamW", "max_grad_norm", None), ("MuAdam", "betta", None),
                                   ("AdmaW", "betta", None), ("Muon", "muon_lr", None), ("Muon", "nesterov", E),
                                   ("Lion", "set_grad_none", None), ("LION", "eps", E), ("Lamb", "max_coeff", None),
                                   ("Adagrad", "lr_decay", None), ("SGD", "dampening", None),
                                   ("NAdam", "decoupled_weight_decay", None))),
    *(("DS311", severity, {**zero(2, **off), "optimizer": {"type": kind, "params": {"lr": 1, name: value}}}, {})
      for kind, off, name, value, severity in (
          ("Lion", ADAM_OFF, "set_grad_none", True, E), ("Lion", ADAM_OFF, "fp32_optimizer_states", True, None),
          ("Lion", {}, "fp32_optimizer_states", True, E), ("Adagrad", ADAM_OFF, "lr_decay", 0, E),
          ("AdamW", ADAM_OFF, "adamw_mode", True, E), ("AdamW", ADAM_OFF, "adam_w_mode", True, None),
          ("AdamW", {}, "set_grad_none", True, None), ("AdamW", ADAM_OFF, "set_grad_none", True, E),
          ("AdamW", {}, "amsgrad", True, E), ("AdamW", {}, "amsgrad", False, None), ("Lamb", {}, "amsgrad", True, E))),
    *(("DS311", severity,
       {**BASE, "optimizer": {"type": kind, "params": {"lr": 1, "torch_adam": True, name: True}}}, {})
      for kind, name, severity in (
          ("AdamW", "fused", None), ("AdamW", "amsgrad", None), ("Adam", "foreach", None), ("Lion", "set_grad_none", E),
          ("AdamW", "bias_correction", E))),
    *(("DS312", severity, {**BASE, "optimizer": {"type": kind, "params": {name: value}}}, run)
      for kind, name, value, run, severity in (
          ("Lion", "betas", [0.9], TRAINER, E), ("Lion", "betas", [0.9, 0.99], TRAINER, None),
          ("AdamW", "betas", [0.9, 0.99, 0.999], LOOP, E), ("AdamW", "betas", "auto", TRAINER, None),
          ("AdamW", "eps", [1e-8, 1e-3], PLAIN, E), ("Adafactor", "eps", [None, 1e-3], PLAIN, None),
          ("Adafactor", "eps", 1e-3, PLAIN, E), ("Adafactor", "eps", "auto", TRAINER, E),
          ("AdamW", "eps", "auto", TRAINER, None), ("Muon", "betas", [0.9], PLAIN, E))),
    *(("DS312", severity, {**BASE, "optimizer": {"type": kind, "params": {name: value}}}, run)
      for run in (TRAINER, PLAIN, LOOP) for kind, name, value, severity in (
          ("Lion", "lr", -1e-9, E), ("Lion", "lr", 0, None), ("SGD", "weight_decay", -0.1, E), ("Lamb", "eps", -1, E),
          ("NAdam", "betas", [0.9, 1.0], E), ("NAdam", "betas", [0.0, 0.99], None), ("SGD", "momentum", 1.0, E),
          ("RMSprop", "momentum", 0.99, None))),
]  # fmt: skip

SCHEDULE: list[Case] = [
    *(("DS307", severity, warmup(10, 100 if "Decay" in kind else None, kind),
       {**TRAINER, **asked(lr_scheduler_type=flag, warmup_steps=10)}) for kind, flag, severity in (
        ("WarmupDecayLR", "linear", None), ("WarmupLR", "constant_with_warmup", None),
        ("WarmupCosineLR", "cosine", None), ("WarmupLR", "linear", E), ("WarmupDecayLR", "cosine", E),
        ("WarmupLR", "constant", E), ("OneCycle", "polynomial", E), ("OneCycle", "one_cycle", E))),
    *(("DS307", severity, warmup("auto"), asked(lr_scheduler_type=flag)) for flag, severity in (
        ("linear", W), ("constant", None), ("constant_with_warmup", None))),
    ("DS307", None, warmup("auto", "auto", "WarmupDecayLR"), asked(lr_scheduler_type="cosine")),
    ("DS307", None, warmup(10), {}),
    ("DS308", None, {**warmup(10), "optimizer": {"type": "AdamW", "params": {}}}, LOOP),
    ("DS308", None, {**warmup(10), "optimizer": {"type": "AdamW", "params": {}}}, TRAINER),
    ("DS308", None, optimizer("AdamW"), TRAINER),
    ("DS308", None, warmup(10), LOOP),
    *(("DS309", severity, warmup(steps), PLAIN) for steps, severity in (
        (0, E), (1, None), (-1, E), (10.0, E), (10.5, None), (2, None))),
    *(("DS309", severity, warmup(steps, 10), PLAIN) for steps, severity in ((10, None), (11, E))),
    *(("DS309", severity, warmup("auto"), {**TRAINER, **asked(warmup_steps=steps)}) for steps, severity in (
        (100, None), (101, W))),
    *(("DS309", severity, warmup("auto", 10), asked(warmup_steps=steps)) for steps, severity in ((10, None), (11, W))),
    ("DS309", None, warmup("auto"), {**TRAINER, **asked(warmup_steps=101, max_steps=0)}),
    ("DS309", W, warmup(101), {**TRAINER, **asked(warmup_steps=101)}),
    *(("DS309", severity, scheduled(kind, **{name: value}), PLAIN) for kind, name, value, severity in (
        ("LRRangeTest", "lr_range_test_step_size", 200.0, E), ("LRRangeTest", "lr_range_test_step_size", 200, None),
        ("OneCycle", "cycle_first_step_size", 200.0, None), ("CosineAnnealingWarmRestarts", "T_0", 10.0, E))),
    *(("DS312", severity, scheduled(kind, **{name: value}), run) for run in (TRAINER, PLAIN, LOOP)
      for kind, name, value, severity in (
        ("WarmupCosineLR", "warmup_min_ratio", 1.01, E), ("WarmupCosineLR", "warmup_min_ratio", 1, None),
        ("WarmupCosineLR", "cos_min_ratio", -0.01, E), ("WarmupDecayLR", "total_num_steps", 0, E),
        ("WarmupDecayLR", "total_num_steps", 1, None), ("OneCycle", "cycle_first_step_size", 0, E),
        ("OneCycle", "cycle_second_step_size", 0, None), ("OneCycle", "cycle_max_mom", 1, E),
        ("OneCycle", "decay_step_size", -1, E), ("LRRangeTest", "lr_range_test_step_size", 0, E),
        ("WarmupLR", "warmup_min_lr", [-1], E), ("CosineAnnealingLR", "T_max", 0, E), ("StepLR", "step_size", 0, E))),
    *(("DS312", severity, scheduled(kind, **params), run) for kind, params, run, severity in (
        ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": 5e-5}, PLAIN, E),
        ("WarmupLR", {"warmup_min_lr": 5e-5, "warmup_max_lr": 5e-5}, PLAIN, None),
        ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": "auto"}, TRAINER, E),
        ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": "auto"}, {}, E),
        ("WarmupLR", {"warmup_min_lr": 1e-5, "warmup_max_lr": "auto"}, TRAINER, None),
        ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": "auto"}, LOOP, None),
        ("WarmupLR", {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}, {}, None),
        ("WarmupLR", {"warmup_min_lr": 1e-4}, TRAINER, E), ("WarmupLR", {"warmup_min_lr": 1e-4}, PLAIN, None),
        ("WarmupDecayLR", {"warmup_min_lr": 0.002, "total_num_steps": 9}, PLAIN, E),
        ("WarmupLR", {"warmup_min_lr": [0, 1e-3], "warmup_max_lr": [1e-4, 1e-4]}, PLAIN, E),
        ("WarmupLR", {"warmup_min_lr": [0, 1e-4], "warmup_max_lr": 1e-4}, PLAIN, None),
        ("WarmupLR", {"warmup_min_lr": [0, 1e-3, 1], "warmup_max_lr": [1e-4, 1e-4]}, PLAIN, None),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.01}, PLAIN, E),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_min_mom": 0.95}, PLAIN, E),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "decay_lr_rate": 0.1}, PLAIN, W),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "decay_lr_rate": 0.1, "decay_step_size": 5}, PLAIN, None),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.01}, PLAIN, E))),
    ("DS310", E, warmup(10, None, "WarmupDecayLR"), PLAIN),
    ("DS310", E, warmup(10, None, "WarmupCosineLR"), PLAIN),
    ("DS310", None, warmup(10, 20, "WarmupDecayLR"), PLAIN),
    ("DS310", None, warmup(10), PLAIN),
    ("DS311", E, {**BASE, "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}}, PLAIN),
    ("DS311", E, {**BASE, "scheduler": {"type": "OneCycle", "params": {}}}, PLAIN),
    ("DS311", None, warmup(10, None, "WarmupDecayLR"), PLAIN),
    ("DS311", None, {**BASE, "scheduler": {"type": "auto", "params": {"a": 1}}}, PLAIN),
    ("DS311", E, {**BASE, "scheduler": {"type": "WarmupRL", "params": {}}}, PLAIN),
]  # fmt: skip

FP16, BF16 = {"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}
PRECISION: list[Case] = [
    ("DS401", None, {**BASE, **FP16}, GPU),
    ("DS401", None, {**BASE, **BF16}, GPU),
    ("DS401", E, {**BASE, **FP16, "bfloat16": {"enabled": True}}, GPU),
    *(("DS402", severity, {**BASE, **FP16}, {"has_cuda": cuda}) for cuda, severity in
      ((True, None), (None, None), (False, E))),
    ("DS402", E, BASE, asked(fp16=True)),
    ("DS402", None, BASE, {**LOOP, "arguments": {"fp16": True}}),
    *(("DS403", severity, {**BASE, **BF16}, {**GPU, **asked(bf16=True), "gpu_capability": capability})
      for capability, severity in (((7, 5), E), ((7, 9), E), ((8, 0), None), ((9, 0), None), (None, None))),
    ("DS403", E, {**BASE, "bf16": {"enabled": "auto"}}, {**GPU, **asked(bf16=True), "gpu_capability": (7, 0)}),
    ("DS403", None, {**BASE, "bf16": {"enabled": "auto"}}, {**GPU, "gpu_capability": (7, 0)}),
    ("DS403", E, {**BASE, "bfloat16": {"enabled": True}}, {**GPU, **asked(bf16=True), "gpu_capability": (7, 0)}),
    *(("DS404", severity, {**BASE, "fp16": {"enabled": on, "loss_scale": scale, **fields}}, {})
      for on, scale, fields, severity in (
          ("auto", 0, {"hysteresis": 2}, None), ("auto", 1, {"hysteresis": 2}, W), ("auto", 128, {}, None),
          (False, 0, {}, None), (False, 128, {}, W), (False, 0, {"min_loss_scale": 1}, W))),
    *(("DS405", severity, {**zero(stage), "bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True}}, {})
      for stage, severity in ((0, E), (1, None), (2, None))),
    ("DS405", None, {**zero(1), "bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}, {}),
    ("DS405", E, {**zero(0), "fp16": {"enabled": "auto", "fp16_master_weights_and_grads": True}}, {}),
    ("DS406", None, {**BASE, "torch_autocast": {"enabled": True}}, {}),
    *(("DS407", severity, {**BASE, "fp16": {"enabled": on, name: value, "loss_scale": scale}},
       {**run, **GPU, "arguments": {**run.get("arguments", ARGUMENTS), "fp16": flag}})
      for name, value, on, scale, flag, run, severity in (
        ("loss_scale_window", 0, True, 0, True, {}, E), ("loss_scale_window", 1, True, 0, True, {}, None),
        ("min_loss_scale", 0, "auto", 0, True, TRAINER, E), ("min_loss_scale", 0, "auto", 0, False, TRAINER, None),
        ("hysteresis", 0, True, 0, None, PLAIN, E), ("hysteresis", 0, "auto", 0, None, LOOP, W),
        ("hysteresis", 0, "auto", 0, None, PLAIN, None), ("hysteresis", 0, False, 0, None, LOOP, None),
        ("loss_scale_window", 0, True, 128, True, {}, None))),
    *(("DS408", severity, {**BASE, name: section}, run) for name, section, run, severity in (
        ("bf16", {"check_grad_overflow": True}, {}, E), ("fp16", {"loss_scale": 0}, LOOP, E),
        ("bf16", {"check_grad_overflow": True}, PLAIN, E), ("bf16", {}, {}, None),
        ("fp16", {"enabled": False, "hysteresis": 2}, {}, None))),
    ("DS406", None, {**BASE, **BF16, "torch_autocast": {"enabled": False}}, {}),
    ("DS406", W, {**BASE, **FP16, "torch_autocast": {"enabled": True}}, GPU),
]  # fmt: skip

THIRD = {"stage": 3}
ZERO: list[Case] = [
    ("DS501", None, zero(3), {}),
    ("DS501", None, zero(2), {}),
    ("DS501", None, {**BASE, "zero_optimization": THIRD}, PLAIN),
    ("DS501", W, {**BASE, "zero_optimization": {**THIRD, "stage3_gather_16bit_weights_on_model_save": "auto"}}, LOOP),
    ("DS501", E, {**BASE, "zero_optimization": THIRD}, LOOP),
    ("DS501", None,
     {**BASE, "zero_optimization": {**THIRD, "stage3_gather_fp16_weights_on_model_save": True}}, TRAINER),
    *(("DS502", severity, zero(stage, **{THRESHOLD: threshold}), sizes(10**6, 5000)) for stage, threshold, severity in (
        (3, 4999, None), (3, 5000, E), (3, 5001, E), (2, 5001, None), (3, 0, None))),
    *(("DS502", severity, zero(3), sizes(10**6, largest)) for largest, severity in (
        (100_000, E), (100_001, None), (99_999, E))),
    *(("DS502", severity, zero(3, **{THRESHOLD: "auto"}), sizes(10**6, largest)) for largest, severity in (
        (640, E), (641, None))),
    ("DS502", E, zero(3, **{THRESHOLD: "auto"}), {**PLAIN, **sizes(10**6, 641)}),
    ("DS502", E, zero(3, **{THRESHOLD: "auto"}), sizes(10**6, 641, None)),
    ("DS502", None, zero(3), {}),
    *(("DS503", severity, zero(stage, **{BUCKET: size}), {}) for stage, size, severity in (
        (2, 99_999, W), (2, 100_000, None), (0, 99_999, None), (3, 99_999, W))),
    *(("DS503", severity, zero(1, **{BUCKET: 1000}), sizes(total, 10)) for total, severity in (
        (20_001, W), (20_000, None))),
    ("DS503", None, zero(3, stage3_prefetch_bucket_size=10), {}),
    ("DS503", None, zero(2, stage3_prefetch_bucket_size=10**9), sizes(1000, 10)),
    ("DS503", W, zero(3, stage3_prefetch_bucket_size=10**9), sizes(10**6, 10**6)),
    ("DS503", W, zero(2, allgather_bucket_size=10**9), sizes(10**6, 10**6)),
    *(("DS503", severity, zero(2, **{BUCKET: size}), sizes(40_000_000, 10**6)) for size, severity in (
        (160_000_000, None), (160_000_001, W))),
    *(("DS503", severity, zero(2, **{BUCKET: size}), sizes(10**6, 10**6)) for size, severity in (
        (2**27, None), (2**27 + 1, W))),
    *(("DS503", severity, zero(stage, sub_group_size=size), {}) for stage, size, severity in (
        (3, 0, W), (3, 1, None), (2, 0, None))),
    *(("DS504", severity, half(overlap_comm=overlap, **{BUCKET: size}), {}) for overlap, size, severity in (
        (True, 402_653_184, None), (True, 402_653_185, W), (False, 10**9, None), ("auto", 10**9, None))),
    *(("DS504", severity, zero(2, overlap_comm=True, **{BUCKET: size}), {}) for size, severity in (
        (201_326_592, None), (201_326_593, W), ("auto", None))),
    ("DS504", W, zero(1, overlap_comm=True), {}),
    ("DS504", None, zero(3, overlap_comm=True), {}),
    ("DS504", None, zero(0, overlap_comm=True), {}),
    ("DS504", None, zero(2, overlap_comm=True, contiguous_gradients=False), {}),
    ("DS505", None, zero(3, sub_group_size=10**9), {}),
    *(("DS505", W, zero(stage, sub_group_size=10**9), {}) for stage in (0, 1, 2)),
    ("DS505", W, zero(2, stage3_max_live_parameters=10**9), {}),
    ("DS506", None, zero(2), {**TRAINER, **asked(save_only_model=True)}),
    ("DS506", None, zero(2), {**TRAINER, **asked(load_best_model_at_end=True)}),
    ("DS507", None, {**zero(2), "gradient_allreduce_op": "sum"}, {}),
    ("DS507", None, {**zero(3), "gradient_allreduce_op": "avg"}, {}),
    *(("DS507", severity, {**zero(stage, **more), **keys}, {}) for stage, more, keys, severity in (
        (3, {}, {"prescale_gradients": True}, E), (2, {}, {"prescale_gradients": True}, None),
        (3, {"reduce_scatter": False}, {"prescale_gradients": True}, None),
        (3, {}, {"gradient_predivide_factor": 2.0}, E), (3, {}, {"gradient_predivide_factor": 1.0}, None),
        (2, {}, {"gradient_predivide_factor": 2.0}, None))),
    *(("DS507", severity, zero(stage, compute_grad_norm=norm), {}) for stage, norm, severity in (
        (0, False, E), (1, False, None), (2, False, None), (3, False, E), (3, True, None))),
    ("DS507", E, zero(1, legacy_stage1=True), {}),
    ("DS507", None, zero(1, legacy_stage1=False), {}),
    *(("DS507", severity, zero(stage, offload_optimizer={"device": "cpu", "ratio": ratio}), {})
      for stage, ratio, severity in ((2, 1.0, None), (2, 0.99, E), (3, 0.99, None))),
    ("DS508", None, {**CLIP, MICRO: 4}, PLAIN),
    ("DS508", E, {**CLIP, MICRO: 4}, LOOP),
    ("DS508", None, CLIP, PIPELINE),
    *(("DS509", severity, zero(stage), {**FOUR, "expert_parallel_size": size}) for stage, size, severity in (
        (0, 2, E), (1, 2, None), (2, 4, None), (3, 2, E), (3, 1, None))),
    *(("DS509", severity, {**zero(2), "optimizer": {"type": "AdamW", "params": {"lr": rate}}},
       {**FOUR, "expert_parallel_size": 2}) for rate, severity in (("auto", None), (5e-5, E))),
    ("DS509", None, zero(2, offload_optimizer={"device": "cpu"}), {**FOUR, "expert_parallel_size": 2}),
    *(("DS509", severity, {**zero(stage), "bf16": {"enabled": "auto"}, "data_types": {"grad_accum_dtype": kind}},
       {**FOUR, **asked(bf16=bf16), "expert_parallel_size": 2}) for stage, kind, bf16, severity in (
        (1, "fp32", True, E), (1, "fp32", False, None), (1, "bf16", True, None), (2, "fp32", True, None))),
]  # fmt: skip

OFFLOAD: list[Case] = [
    ("DS601", E, zero(2, offload_param=NVME), {}),
    ("DS602", E, zero(0, offload_optimizer=NVME), {}),
    *(("DS602", severity, zero(stage, offload_optimizer=NVME), {}) for stage, severity in ((1, E), (2, E), (3, None))),
    ("DS602", None, zero(0, offload_optimizer={"device": "none"}), {}),
    *(("DS601", severity, zero(stage, offload_param={"device": device}), {}) for stage, device, severity in (
        (3, "cpu", None), (2, "cpu", E), (2, "none", None))),
    *(("DS602", severity, zero(stage, **ADAM_OFF), {}) for stage, severity in ((0, E), (1, None), (3, None))),
    *(("DS609", severity, zero(3, **{what: section}), run) for run in ({}, TRAINER, LOOP, PLAIN)
      for what, section, severity in (
        ("offload_optimizer", {"pin_memory": True}, E), ("offload_param", {}, E), ("offload_param", None, None),
        ("offload_optimizer", {"device": "none", "pin_memory": True}, None),
        ("offload_param", {"device": "cpu"}, None))),
    ("DS603", None, zero(3, offload_param={"device": "nvme"}), {}),
    ("DS603", E, zero(3, offload_optimizer={"device": "nvme"}), PLAIN),
    ("DS603", None, zero(3, offload_optimizer={"device": "cpu"}), PLAIN),
    ("DS604", None, zero(3, offload_param=NVME), {}),
    ("DS604", W, zero(3, offload_param={**NVME, "nvme_path": "/dev/null/x"}), {"is_here": False}),
    ("DS604", E, zero(3, offload_param={"device": "nvme"}), {"nvme_path": "/dev/null/x"}),
    ("DS604", None, zero(3, offload_param={"device": "nvme"}), {"nvme_path": "/dev/null/x", **TRAINER}),
    *(("DS606", severity, {**zero(3, offload_param=NVME), "aio": {"block_size": size}}, {}) for size, severity in (
        (4096, None), (4095, W), (4097, W), (1_048_576, None))),
    *(("DS608", severity, zero(3, offload_param={**NVME, "buffer_size": size}), {**FOUR, **sizes(10**6, 100_001)})
      for size, severity in ((25_001, None), (25_000, E))),
    *(("DS608", severity, zero(3, offload_param=NVME), sizes(10**9, largest)) for largest, severity in (
        (100_000_000, None), (100_000_001, E))),
    ("DS608", None, zero(3, offload_param={"device": "cpu", "buffer_size": 1}), sizes(10**6, 10**6)),
]  # fmt: skip

HPZ, QWZ, QGZ = "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"
QUANTIZED: list[Case] = [
    *(("DS701", severity, zero(3, **{HPZ: size}), TWO_NODES) for size, severity in (
        (1, None), (2, None), (3, E), (8, None), (16, E), (32, E))),
    ("DS701", None, zero(3, **{HPZ: 3}), {**TWO_NODES, "world_size": None}),
    ("DS701", None, zero(3, **{HPZ: 16}), {**TWO_NODES, "ranks_per_node": None}),
    *(("DS702", severity, zero(stage, **{key: value}), TWO_NODES) for stage, key, value, severity in (
        (2, HPZ, 1, None), (2, HPZ, 2, E), (3, HPZ, 2, None), (2, QWZ, True, E), (3, QWZ, True, None),
        (2, QGZ, False, None))),
    *(("DS703", severity, zero(3, **{key: True}), {"world_size": ranks, "ranks_per_node": 8, "has_cuda": cuda})
      for key, ranks, cuda, severity in (
          (QWZ, 8, False, E), (QWZ, 8, True, None), (QWZ, 8, None, None), (QGZ, 8, False, None), (QGZ, 16, False, E),
          (QGZ, 16, True, None))),
    *(("DS704", severity, zero(stage, **{QGZ: True}), {"world_size": ranks, "ranks_per_node": 8, **GPU})
      for stage, ranks, severity in ((3, 8, W), (3, 16, None), (2, 8, None), (3, None, None))),
    *(("DS705", severity, zero(3, **{key: value}), {**TWO_NODES, "sequence_parallel_size": size})
      for key, value, size, severity in ((QWZ, True, 2, E), (QGZ, True, 2, E), (HPZ, 8, 2, None), (QWZ, True, 1, None),
                                         (QWZ, False, 2, None))),
]  # fmt: skip

PIPELINES: list[Case] = [
    *(("DS801", severity, zero(stage), PIPELINE) for stage, severity in ((0, E), (1, None), (2, E), (3, E))),
    *(("DS801", None, zero(stage), {}) for stage in (0, 2, 3)),
    ("DS802", E, zero(1, **ADAM_OFF), PIPELINE),
    ("DS802", None, zero(1, **ADAM_OFF), {}),
    ("DS802", None, zero(1, offload_optimizer={"device": "none"}), PIPELINE),
    ("DS803", None, optimizer("AdamW", 1), {}),
    ("DS803", E, optimizer("AdamW", 1), PIPELINE),
    ("DS803", None, {**zero(1), "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, PIPELINE),
    ("DS803", E, {**zero(1), "scheduler": warmup(10)["scheduler"]}, PIPELINE),
    *(("DS804", severity, {**zero(1), "fp16": {"enabled": on}, "data_types": {"grad_accum_dtype": kind}},
       {**run, **GPU, **asked(fp16=flag)}) for on, kind, run, flag, severity in (
        (True, "fp32", PIPELINE, False, E), (True, "fp16", PIPELINE, False, None), (True, "fp32", {}, False, None),
        ("auto", "fp32", PIPELINE, True, E), ("auto", "fp32", PIPELINE, False, None))),
    *(("DS805", severity, zero(1, **{name: value}), run) for name, value, run, severity in (
        ("round_robin_gradients", True, PIPELINE, E), ("round_robin_gradients", False, PIPELINE, None),
        ("round_robin_gradients", True, {}, None))),
    *(("DS806", severity, {**zero(1), name: {"enabled": on}}, run) for name, on, run, severity in (
        ("wandb", True, PIPELINE, E), ("comet", False, PIPELINE, None), ("tensorboard", True, {}, None))),
    ("DS807", None, zero(1, reduce_bucket_size="auto"), {}),
    ("DS807", None, {**zero(1), "data_types": {"grad_accum_dtype": "auto"}}, PIPELINE),
    *(("DS808", severity, {**zero(1), "activation_checkpointing": {name: value}}, run)
      for name, value, run, severity in (
        ("partition_activations", True, PIPELINE, E), ("cpu_checkpointing", True, PIPELINE, E),
        ("contiguous_memory_optimization", True, PIPELINE, E), ("number_checkpoints", 4, PIPELINE, E),
        ("partition_activations", False, PIPELINE, None), ("number_checkpoints", None, PIPELINE, None),
        ("cpu_checkpointing", True, {}, None), ("cpu_checkpointing", True, LOOP, None))),
]  # fmt: skip

LEFTOVERS: list[Case] = [
    *(("DS906", severity, {**BASE, "steps_per_print": value}, run) for value, run, severity in (
        (0, PLAIN, E), ("inf", PLAIN, E), (0, PIPELINE, E), (0, TRAINER, W), ("inf", LOOP, W), (0, {}, W),
        (1, PLAIN, None), (None, PLAIN, None), ("auto", PLAIN, None), (10.0, PLAIN, None))),
    *(("DS907", severity, {**BASE, "wandb": section}, {}) for section, severity in (
        ({"team": "us"}, W), ({"enabled": False, "team": "us"}, None), ({}, None))),
    *(("DS101", severity, {**BASE, "aio": aio}, {}) for aio, severity in (
        ({"thread_count": 1}, W), ({"thread_count": 2}, E), ({"thread_count": 2, "intra_op_parallelism": 2}, W),
        ({"thread_count": 1, "intra_op_parallelism": 2}, E))),
    *(("DS901", severity, {**zero(1), "activation_checkpointing": {"partition_activations": on}}, run)
      for on, run, severity in ((True, {}, W), (False, {}, None), (None, {}, None), (True, PIPELINE, None),
                                (True, LOOP, None), (0, {}, None))),
    *(("DS903", severity, {**BASE, name: {"enabled": on}}, asked(report_to=to)) for name, on, to, severity in (
        ("wandb", True, ["wandb"], W), ("wandb", True, ["tensorboard"], None), ("wandb", False, ["wandb"], None),
        ("comet", True, ["comet_ml"], W), ("tensorboard", True, "tensorboard", W))),
    ("DS903", None, {**BASE, "wandb": {"enabled": True}}, {**LOOP, "arguments": {"report_to": ["wandb"]}}),
    *(("DS905", severity, {**zero(1), "sequence_parallel_size": size}, run) for size, run, severity in (
        (1, {}, None), (2, {}, E), (2, TRAINER, None))),
    *(("DS905", severity, {**zero(1), "tensor_parallel": {"autotp_size": size}}, {}) for size, severity in (
        (0, None), (1, None), (2, E))),
    ("DS905", E, {**zero(1), "checkpoint": {"load_universal": True}}, {}),
    ("DS905", None, {**zero(1), "checkpoint": {"load_universal": False}}, {}),
    ("DS905", None, {**zero(1), "autotuning": {"enabled": False}}, TRAINER),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "severity", "config", "run"),
    [*BATCH, *OPTIMIZER, *SCHEDULE, *PRECISION, *ZERO, *OFFLOAD, *QUANTIZED, *PIPELINES, *LEFTOVERS],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_rule_begins_where_it_begins(
    code: str, severity: str | None, config: dict[str, Any], run: dict[str, Any]
) -> None:
    found = [placed.finding for placed in check(json.dumps(config), a_run(**run)).found]
    assert {finding.severity for finding in found if finding.code == code} == ({severity} if severity else set())


@pytest.mark.parametrize(("place", "name"), TWINS)
def test_each_value_of_the_trainer_is_compared_with_its_twin(place: str, name: str) -> None:
    asked_for = {**ARGUMENTS, "warmup_steps": 10, "weight_decay": 0.1}
    right = asked_for[name]
    wrong = (not right) if isinstance(right, bool) else right * 2
    for value, differs in ((right, False), (wrong, True)):
        config: dict[str, Any] = json.loads(json.dumps(BASE))
        *above, key = place.split(".")
        section = config
        for part in above:
            section = section.setdefault(part, {})
        section[key] = value
        found = [placed.finding for placed in check(json.dumps(config), a_run(arguments=asked_for, **TRAINER)).found]
        assert (("DS203", tuple(place.split("."))) in [(one.code, one.path) for one in found]) is differs


@pytest.mark.parametrize("place", PROFILERS)
def test_each_profiler_is_named_when_it_is_on_and_switched_off(place: str) -> None:
    for on in (True, False):
        config: dict[str, Any] = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
        *above, key = place.split(".")
        (config.setdefault(above[0], {}) if above else config)[key] = on
        text = json.dumps(config)
        found = [placed.finding for placed in check(text, a_run(engine="deepspeed", arguments={})).found]
        assert ("DS902" in [finding.code for finding in found]) is on
        after = json.loads(mended(text, a_run(engine="deepspeed", arguments={})))
        assert (after[above[0]] if above else after)[key] is False


SAID = [
    ("DS201", "The nearest is 15", {"train_batch_size": 16, MICRO: 3}, PLAIN),
    ("DS201", "The nearest is 18", {"train_batch_size": 17, MICRO: 3}, PLAIN),
    ("DS201", "The nearest is 3", {"train_batch_size": 1, MICRO: 3}, PLAIN),
    ("DS201", "8 x 2 x 4 = 64", {**BASE, "train_batch_size": 65}, FOUR),
    ("DS203", r"the run asks for 0\.5 of its steps", warmup(3), {**TRAINER, **asked(warmup_steps=0.5, max_steps=-1)}),
    ("DS206", "does not clip and ignores --max_grad_norm 1.0", SIZES, {**TRAINER, **older("0.19.2")}),
    ("DS302", r"Use Lamb, or DeepSpeed 0\.19\.6\.$", optimizer("OneBitLamb"), {}),
    ("DS301", "Use SGD", optimizer("sgd"), {}),
    ("DS301", "Use AdamW: DeepSpeed picks the fast version", optimizer("FusedAdam"), {}),
    ("DS309", "reads as 2", warmup(0), {**PLAIN, **older("0.19.2")}),
    ("DS309", "refuses", warmup(0), {**PLAIN, **older("0.19.3")}),
    ("DS309", "Lower --warmup_steps", {**BASE, "scheduler": {"type": "WarmupLR", "params": {}}},
     {**TRAINER, **asked(warmup_steps=101)}),
    ("DS403", r"capability 7\.5,", {**BASE, **BF16}, {**GPU, **asked(bf16=True), "gpu_capability": (7, 5)}),
    ("DS404", r"fp16\.loss_scale is 128, a fixed scale, so hysteresis does nothing",
     {**BASE, "fp16": {"enabled": "auto", "loss_scale": 128, "hysteresis": 2}}, {}),
    ("DS502", "Set it to 10,000 or less", zero(3), sizes(10**6, 100_000)),
    ("DS502", "Set it to 700 or less", zero(3), sizes(10**6, 7_390)),
    ("DS502", "Set it to 1 or less", zero(3), sizes(10, 5)),
    ("DS503", r"in pieces of 97\.7 KiB|in pieces of 100,000 bytes", zero(1, **{BUCKET: 50_000}), {}),
    ("DS503", r"\(2,000,000 weights in all\)", zero(1, **{BUCKET: 50_000}), sizes(2_000_000, 10)),
    ("DS503", r"up to 953\.7 MiB per rank are wasted\. Set it to 3,000,000\.", zero(2, **{BUCKET: 500_000_000}),
     sizes(3_456_789, 10)),
    ("DS503", r"up to 1\.0 GiB per rank", zero(2, **{BUCKET: 2**29}), sizes(3_456_789, 10)),
    ("DS504", r"takes 1\.9 GiB on each GPU for its 2 buckets", half(overlap_comm=True), {}),
    ("DS606", "Set it to 8,192", {**zero(3, offload_param=NVME), "aio": {"block_size": 6145}}, {}),
    ("DS606", "Set it to 4,096", {**zero(3, offload_param=NVME), "aio": {"block_size": 100}}, {}),
    ("DS608", "has 25,001. Raise it to 25,001", zero(3, offload_param={**NVME, "buffer_size": 5}),
     {**FOUR, **sizes(10**6, 100_001)}),
    ("DS701", "Set it to the ranks of one node, 8", zero(3, **{HPZ: 3}), TWO_NODES),
    ("DS208", r"the run asks for 2 \(--gradient_accumulation_steps\)", {MICRO: "auto", **CLIP}, TRAINER),
]  # fmt: skip


@pytest.mark.parametrize(("code", "says", "config", "run"), SAID, ids=[f"{row[0]}: {row[1]}" for row in SAID])
def test_the_numbers_of_a_message_are_right(code: str, says: str, config: dict[str, Any], run: dict[str, Any]) -> None:
    found = [placed.finding for placed in check(json.dumps(config), a_run(**run)).found]
    said = [finding.message for finding in found if finding.code == code]
    assert any(re.search(says, message) for message in said), said
