"""Write schema.json from the installed DeepSpeed: `python benchmarks/make_schema.py`.

DeepSpeed checks some sections with pydantic models; this script reads them field by field. It looks up all other keys
when it needs them and accepts unknown ones silently; they are listed here by the file that reads them. Every value may
also be "auto": what resolves it depends on the run, and is checked by the rules.
"""

from __future__ import annotations

import enum
import inspect
import json
import types
import typing
from importlib import metadata
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).resolve().parents[1] / "finetune/dsconfig/schema.json"
Schema = dict[str, Any]

BOOLEAN: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TEXT: Schema = {"type": "string"}
OPEN: Schema = {"additionalProperties": True}
CLOSED: Schema = {"additionalProperties": False}
ANY_OBJECT: Schema = {"type": "object"}
COUNT: Schema = {"type": "integer", "minimum": 1}
FROM_0: Schema = {"type": "number", "minimum": 0}
ABOVE_0: Schema = {"type": "number", "exclusiveMinimum": 0}
SHARE: Schema = FROM_0 | {"maximum": 1}
BELOW_1: Schema = FROM_0 | {"exclusiveMaximum": 1}
DTYPE: Schema = {"enum": ["fp32", "fp16", "bf16", "FP32", "FP16", "BF16", None]}


def make_schema() -> Schema:
    """The JSON Schema (draft 2020-12) of a DeepSpeed config."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime import config as runtime
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    typed = {
        "zero_optimization": of_model(DeepSpeedZeroConfig),
        "fp16": of_model(DeepSpeedFP16Config),
        "bf16": of_model(DeepSpeedBF16Config),
        "bfloat16": of_model(DeepSpeedBF16Config) | {"deprecated": True, "x-successor": "bf16"},
        "comms_logger": of_model(CommsLoggerConfig),
        "compile": of_model(CompileConfig),
        "hybrid_engine": of_model(runtime.HybridEngineConfig),
        "tensor_parallel": of_model(TPTrainingConfig),
        "timers": _section({"throughput": of_model(DeepSpeedThroughputTimerConfig)}),
        "weight_quantization": of_model(WeightQuantConfig),
        "tensorboard": of_model(monitor.TensorBoardConfig),
        "wandb": of_model(monitor.WandbConfig),
        "csv_monitor": of_model(monitor.CSVConfig),
        "comet": of_model(monitor.CometConfig),
    }
    typed["fp16"]["properties"]["loss_scale"] |= {"minimum": 0}  # by a validator of its own
    properties = {"$schema": TEXT, **_untyped(), **typed}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed configuration",
        "$comment": "made by python benchmarks/make_schema.py; do not edit",
        "x-deepspeed": metadata.version("deepspeed"),
        **_section({name: _or_null(name, properties[name]) for name in sorted(properties)}),
    }


def _or_null(name: str, schema: Schema) -> Schema:
    """With null, where DeepSpeed takes it for what is not given. Clipping compares it at the first step."""
    from deepspeed import DeepSpeedConfig

    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not kinds or "null" in kinds or name == "gradient_clipping":
        return schema
    try:
        DeepSpeedConfig({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, name: None})
    except Exception:
        return schema
    return schema | {"type": [*kinds, "null"]}


def of_model(model: type) -> Schema:
    """A pydantic model's fields, under their aliases too: DeepSpeed takes either name."""
    fields: Schema = {}
    for name, field in model.model_fields.items():  # type: ignore[attr-defined]
        schema = of_type(field.annotation) | _bounds(field.metadata)
        if isinstance(field.default, bool | int | float | str):
            # DeepSpeed's own kind of int, which prints as 5e8, becomes an int.
            schema["default"] = int(field.default) if schema.get("type") == "integer" else field.default
        extra = field.json_schema_extra or {}
        if extra.get("deprecated"):
            schema |= {"deprecated": True, "x-successor": extra["new_param"]}
        for key in dict.fromkeys((field.alias or name, name)):
            fields[key] = schema
    return _section(fields) | {"x-typed": True}


def of_type(annotation: Any) -> Schema:
    """What a value of a Python type looks like in JSON."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _union([of_type(part) for part in typing.get_args(annotation)])
    if typing.get_origin(annotation) is typing.Literal:
        return {"enum": list(typing.get_args(annotation))}
    if not isinstance(annotation, type):
        containers: dict[Any, Schema] = {list: {"type": "array"}, dict: ANY_OBJECT}
        return dict(containers.get(typing.get_origin(annotation), {}))
    if issubclass(annotation, enum.Enum):
        # An IntEnum may give one number two names.
        return {"enum": list(dict.fromkeys(member.value for member in annotation))}
    if hasattr(annotation, "model_fields"):
        return of_model(annotation)
    plain = {bool: BOOLEAN, int: INTEGER, float: NUMBER, str: TEXT, Path: TEXT, type(None): {"type": "null"}}
    return dict({**plain, list: {"type": "array"}, dict: ANY_OBJECT}.get(annotation, {}))


def _union(parts: list[Schema]) -> Schema:
    names = [part["type"] for part in parts if set(part) == {"type"}]
    if len(names) == len(parts):
        return {"type": names if len(names) > 1 else names[0]}
    objects = [part for part in parts if "properties" in part]
    if len(objects) == 1 and len(names) == len(parts) - 1:
        return objects[0] | {"type": ["object", *names]}
    return {} if any(part == {} for part in parts) else {"anyOf": parts}


def _bounds(metadata: list[Any]) -> Schema:
    words = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    return {words[name]: getattr(bound, name) for bound in metadata for name in words if hasattr(bound, name)}


def _section(fields: Schema) -> Schema:
    return {"type": "object", "properties": {name: _or_auto(field) for name, field in fields.items()}} | CLOSED


def _or_auto(schema: Schema) -> Schema:
    """The bounds of a schema hold for numbers and its pattern for texts, so that one form serves both."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], "auto"]}
    if {"integer", "number", "boolean"} & {*kinds}:
        return schema if "string" in kinds else schema | {"type": [*kinds, "string"], "pattern": "^auto$"}
    return schema


def _untyped() -> Schema:
    """What DeepSpeed reads with `get_scalar_param` or `dict.get`, by the file that does."""
    return {**_values(), **_optimization(), **_engines(), **_memory_and_profiles()}


def _values() -> Schema:
    return {
        # runtime/config.py
        "train_batch_size": COUNT,
        "train_micro_batch_size_per_gpu": COUNT,
        "gradient_accumulation_steps": COUNT,
        "managed_gradient_accumulation": BOOLEAN,
        "gradient_clipping": {"type": "number", "minimum": 0, "default": 1.0},
        "gradient_predivide_factor": NUMBER,
        "gradient_allreduce_op": {"enum": ["mean", "sum", "MEAN", "SUM"]},
        "prescale_gradients": BOOLEAN,
        "communication_data_type": DTYPE,
        "seq_parallel_communication_data_type": DTYPE,
        "sequence_parallel_size": COUNT,
        "steps_per_print": {"type": ["integer", "null", "string"]},  # accelerate writes "inf" over it
        "wall_clock_breakdown": BOOLEAN,
        "memory_breakdown": BOOLEAN,
        "dump_state": BOOLEAN,
        "disable_allgather": BOOLEAN,
        "disable_python_gc": BOOLEAN,
        "dataloader_drop_last": BOOLEAN,
        "use_data_before_expert_parallelism": BOOLEAN,
        "zero_allow_untested_optimizer": BOOLEAN,
        "zero_force_ds_cpu_optimizer": BOOLEAN,
        "log_level": {"type": ["string", "null"]},
        "vocabulary_size": {"type": ["integer", "null"]},
    }


def _optimization() -> Schema:
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DtypeEnum

    any_dtype = {"enum": [word for dtype in DtypeEnum for word in dtype._all_values[1:]] + [None]}
    switches = ("torch_adam", "adam_w_mode", "bias_correction", "amsgrad", "fp32_optimizer_states")
    return {
        "optimizer": _section(
            {
                "type": TEXT | {"examples": sorted(DEEPSPEED_OPTIMIZERS)},
                # Any optimizer of torch may be named, with parameters of its own.
                "params": _section({**_of_optimizers(), **dict.fromkeys(switches, BOOLEAN)}) | OPEN,
                "legacy_fusion": BOOLEAN,
            }
        )
        | _optimizer_parameters(),
        "scheduler": _section(
            {
                "type": TEXT
                | {
                    "examples": list(lr_schedules.VALID_LR_SCHEDULES)
                    # Any class of torch.optim.lr_scheduler may be named.
                },
                "params": _section(_of_schedules()) | OPEN,
            }
        )
        | _schedule_parameters(),
        "torch_autocast": _section(
            {"enabled": BOOLEAN, "dtype": any_dtype, "lower_precision_safe_modules": {"type": "array"}}
        ),
        "data_types": _section(
            {
                **dict.fromkeys(("grad_accum_dtype", "param_dtype", "buffer_dtype"), any_dtype),
                "keep_in_fp32_modules": {"type": ["array", "string"]},
            }
        ),
    }


def _engines() -> Schema:
    modes = ("ignore", "warn", "fail")
    return {
        # Any key is kept there, for the user's own code to read.
        "pipeline": _section(
            {
                "partition": TEXT,
                "stages": INTEGER,
                "seed_layers": BOOLEAN,
                "activation_checkpoint_interval": {"type": "integer", "minimum": 0},
                "pipe_partitioned": BOOLEAN,
                "grad_partitioned": BOOLEAN,
                "use_reentrant": BOOLEAN,
            }
        )
        | OPEN,
        "checkpoint": _section(
            {
                "tag_validation": {
                    "enum": [case(name) for name in modes for case in (str.title, str.upper, str.lower)]
                },
                "load_universal": BOOLEAN,
                "use_node_local_storage": BOOLEAN,
                "parallel_write": _section({"pipeline_stage": BOOLEAN}),
                "checkpoint_serialization": BOOLEAN,
                "writer": {"type": ["object", "null"]},
            }
        ),
    }


def _memory_and_profiles() -> Schema:
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    return {
        # runtime/activation_checkpointing/config.py, runtime/swap_tensor/aio_config.py
        "activation_checkpointing": _section(
            {
                name: BOOLEAN if isinstance(default, bool) else {"type": ["integer", "null"]}
                for name, default in ACT_CHKPT_DEFAULT.items()
            }
        ),
        "aio": _section(
            {
                name: (BOOLEAN if isinstance(default, bool) else COUNT) | {"default": default}
                for name, default in AIO_DEFAULT_DICT.items()
            }
        ),
        # profiling/config.py
        "flops_profiler": _section(
            {
                "enabled": BOOLEAN,
                "recompute_fwd_factor": NUMBER,
                "profile_step": INTEGER,
                "module_depth": INTEGER,
                "top_modules": INTEGER,
                "detailed": BOOLEAN,
                "output_file": {"type": ["string", "null"]},
            }
        ),
        # With readers and checks of their own, far from a fine-tuning run.
        **{name: {} for name in ("autotuning", "data_efficiency", "expert_parallel", "datastates_ckpt")},
    }


def _of_optimizers() -> Schema:
    """The ranges that torch.optim's constructors keep. DeepSpeed's own take any number, and train uphill or to NaN."""
    betas = {"type": ["array", "string"], "pattern": "^auto$", "items": BELOW_1}
    from_0 = ("lr", "muon_lr", "adam_lr", "weight_decay", "max_coeff", "min_coeff", "max_grad_norm")
    return {**dict.fromkeys(from_0, FROM_0), "eps": _each(FROM_0), "momentum": BELOW_1, "betas": betas}


def _of_schedules() -> Schema:
    """What the constructors of deepspeed/runtime/lr_schedules.py and torch/optim/lr_scheduler.py refuse, what divides
    by 0 at a step, and what makes a rate negative."""
    rates = ("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr", "eta_min")
    ratios, moments = ("warmup_min_ratio", "cos_min_ratio", "pct_start"), ("cycle_min_mom", "cycle_max_mom")
    counts = ("total_num_steps", "lr_range_test_step_size", "T_0", "T_mult")
    from_0 = ("lr_range_test_step_rate", "cycle_first_stair_count", "decay_step_size", "decay_lr_rate", "gamma")
    return {
        **dict.fromkeys(rates, _each(FROM_0)),
        **dict.fromkeys(ratios, SHARE),
        **dict.fromkeys(moments, _each(BELOW_1)),
        **dict.fromkeys(counts, COUNT),
        **dict.fromkeys(from_0, FROM_0),
        **dict.fromkeys(("cycle_first_step_size", "T_max", "step_size"), ABOVE_0),
        "cycle_second_step_size": FROM_0 | {"type": ["number", "null"]},
        "cycle_second_stair_count": FROM_0 | {"type": ["number", "null"]},
        "total_steps": {"type": ["integer", "null"], "minimum": 1},
        "warmup_num_steps": INTEGER,  # a rule says more
        "warmup_type": {"enum": ["log", "linear"]},
    }


def _each(number: Schema) -> Schema:
    """Or a list, of one for each group of weights."""
    return number | {"type": ["number", "array"], "items": number | {"type": ["number", "null"]}}


def _optimizer_parameters() -> dict[str, dict[str, Schema]]:
    """Of torch's classes (`x-params`) and DeepSpeed's (`x-own-params`): what each takes, with the defaults."""
    import torch
    from deepspeed import DeepSpeedEngine
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    own = (FusedAdam, DeepSpeedCPUAdam, FusedLamb, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad)
    of_torch = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    kinds = [kind for kind in of_torch if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]
    # Muon's groups are built from these alone (runtime/engine.py, _muon_param_groups).
    muon = (*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS, "muon_lr", "adam_lr")
    return {
        "x-params": {kind.__name__: _defaults(kind) for kind in kinds},
        "x-own-params": {
            **{kind.__name__: _defaults(kind) for kind in own},
            "Muon": {**dict.fromkeys(muon), "betas": [0.9, 0.95]},
        },
    }


def _defaults(kind: type) -> Schema:
    """Of each parameter but the first; None without one."""
    every = list(inspect.signature(kind).parameters.values())[1:]
    return {one.name: None if one.default is one.empty else one.default for one in every}


def _schedule_parameters() -> dict[str, dict[str, Any]]:
    """Of DeepSpeed's schedules and torch's: what each takes (`x-params`, with the defaults) and must get
    (`x-required`), but for the optimizer."""
    from deepspeed.runtime import lr_schedules
    from torch.optim import lr_scheduler

    schedules = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    schedules |= {name: kind for name, kind in vars(lr_scheduler).items() if _is_schedule(kind)}
    taken = {name: list(inspect.signature(kind).parameters.values())[1:] for name, kind in sorted(schedules.items())}
    return {
        "x-params": {name: _defaults(kind) for name, kind in sorted(schedules.items())},
        "x-required": {name: _required(every) for name, every in taken.items()},
    }


def _is_schedule(kind: object) -> bool:
    from torch.optim.lr_scheduler import LRScheduler

    is_one = isinstance(kind, type) and issubclass(kind, LRScheduler) and kind is not LRScheduler
    return is_one and not kind.__name__.startswith("_")  # type: ignore[attr-defined]


def _required(parameters: list[inspect.Parameter]) -> list[str]:
    return [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]


def text() -> str:
    return json.dumps(make_schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text())
    print(f"{SCHEMA.name}: from DeepSpeed {json.loads(SCHEMA.read_text())['x-deepspeed']}")
