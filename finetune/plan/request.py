"""From a recipe's YAML, a model and flags to a job: what the run would be."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.dsconfig.check import check, read
from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.formats import line
from finetune.dsconfig.load import find_config, resolve
from finetune.errors import RequestError
from finetune.plan.families import FAMILIES
from finetune.plan.families.parts import MOST, Sizes
from finetune.plan.flags import RECIPE_FLAGS
from finetune.plan.forward.losses import CHUNK_TOKENS, LARGE_VOCABULARY
from finetune.plan.job import DEEPSPEED, NO_TEXT, PIPELINE, TRAINER, Job
from finetune.plan.machine import Machine
from finetune.plan.model import Model, model_of, read_config, with_lora
from finetune.plan.named import find_model_config
from finetune.plan.optimizers import Optimizer
from finetune.plan.run_model import refuse_images
from finetune.plan.values import Lora
from finetune.plan.zero import read_zero

NOT_LINEAR = {"gate", "relative_attention_bias"}  # matrices of blocks that are no linear layers
CHARACTERS = 65  # of tiny Shakespeare, which the study of GPT-lite was trained on
BYTES = 256 + 1  # and one that ends a text
DEFAULT_TOKENS = {"causal_lm": 1024, "seq_cls": 256}  # the most that the recipes take unasked
DEFAULT_MICRO_BATCH = {"causal_lm": 16, "seq_cls": 16, "causal_lm_pipeline": 4}
DEFAULT_EVAL_BATCH = 32
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
METHODS = ("balanced", "uniform", "parameters")  # of cutting a pipeline; type:REGEX needs the layers' classes
OPTIMIZERS = {  # the Trainer's --optim to what is counted
    "adamw_torch": "adam_foreach",
    "adamw_torch_fused": "adam",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "adamw_8bit": "adam8bit",
    "adamw_bnb_8bit": "adam8bit",
    "paged_adamw_8bit": "adam8bit",
}
DS_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "onebitadam": "onebit_adam", "zerooneadam": "onebit_adam",
                 "sgd": "sgd", "lion": "momentum"}  # fmt: skip
GPTLITE_SIZES = "gptlite-"  # of the named models


@dataclass(frozen=True)
class Asked:
    """What the user said: `values` are a recipe's flags, from its YAML and the command line. `params_per_layer` is of a
    model whose family is not known."""

    values: Mapping[str, Any]
    world_size: int
    ranks_per_node: int
    params_per_layer: int | None = None


def job_of(asked: Asked, machine: Machine) -> tuple[Job, dict[str, Any] | None, list[str]]:
    """The job, the config that DeepSpeed would get, and what to say about both. Raises RequestError."""
    values, notes = asked.values, list[str]()
    model, kind = _model(asked, notes)
    lora = _lora(values, model)
    if lora is not None:
        model = with_lora(model, lora)
    notes += _unknown(values)
    if asked.params_per_layer is not None and asked.params_per_layer < 1:
        raise RequestError(f"--params_per_layer is {asked.params_per_layer}, but it must be 1 or more.")
    stages = _count(values, "pipeline_parallel_size", 1)
    if asked.world_size % stages:
        raise RequestError(
            f"--pipeline_parallel_size is {stages}, but {asked.world_size} ranks are no multiple of it. Give a divisor."
        )
    is_pipeline = "pipeline_parallel_size" in values
    if is_pipeline and model.family != "gptlite":
        raise RequestError(
            f"--pipeline_parallel_size: the pipeline recipe trains GPT-lites, and this is a {model.family}. Drop it; "
            "ZeRO-3 shards any model."
        )
    precision, clip = _precision(values, machine), _number(values, "max_grad_norm", 1.0)
    attention = str(values.get("attn_implementation") or "sdpa")
    if attention not in ATTENTIONS:
        raise RequestError(
            f"--attn_implementation {attention}: its memory is not known. Known: {', '.join(ATTENTIONS)}."
        )
    method = str(values.get("partition_method", METHODS[0]))
    if method not in METHODS:
        raise RequestError(f"--partition_method {method}: what it cuts is not known. Known: {', '.join(METHODS)}.")
    recipe = "causal_lm_pipeline" if is_pipeline else kind
    job = Job(
        model=model,
        engine=TRAINER,
        world_size=asked.world_size,
        ranks_per_node=asked.ranks_per_node,
        stages=stages,
        partition_method=method,
        micro_batch=_count(values, "per_device_train_batch_size", DEFAULT_MICRO_BATCH.get(recipe, 8)),
        tokens=_tokens(values, model, kind),
        image_size=_count(values, "image_size", 224),
        accumulation=_count(values, "gradient_accumulation_steps", 8 if is_pipeline else 1),
        precision=precision,
        eval_batch=_count(values, "per_device_eval_batch_size", DEFAULT_EVAL_BATCH, least=0),
        checkpoint_interval=_count(values, "activation_checkpoint_interval", 0, least=0),
        attention=attention,
        loss_chunk_tokens=_chunk(values, model, machine, is_pipeline),
        lora=lora,
        device="cpu" if machine.device == "cpu" else "cuda",
    )
    named = values.get("deepspeed") or values.get("deepspeed_config") or ("pipeline" if is_pipeline else None)
    if named in (None, "none"):
        return replace(job, optimizer=_optimizer(values, None)), None, notes
    config = _config(str(named), job, values, machine, notes)
    zero = read_zero(Config(config), model.hidden_size, clip, precision)
    engine = PIPELINE if is_pipeline else DEEPSPEED
    return replace(job, engine=engine, zero=zero, optimizer=_optimizer(values, config)), config, notes


def _unknown(values: Mapping[str, Any]) -> list[str]:
    """Keys of a YAML that look like a flag which counts here, and are none."""
    notes = []
    for name in values:
        near = difflib.get_close_matches(str(name), RECIPE_FLAGS, 1, cutoff=0.85)
        if near and name not in RECIPE_FLAGS:
            notes.append(f"{name} is no flag that a plan knows, and is left out. Is {near[0]} meant?")
    return notes


def _model(asked: Asked, notes: list[str]) -> tuple[Model, str]:
    """And the recipe that would train it: "causal_lm" or "seq_cls"."""
    values = asked.values
    given = values.get("model_name_or_path")
    if given and (shape := next((name for name in ("model_size", "config_overrides") if values.get(name)), None)):
        raise RequestError(f"--{shape} shapes a model from scratch, and {given} has its shape. Drop one.")
    wants_classes = "max_seq_length" in values or values.get("task") is not None
    if given:
        path = Path(str(given)).expanduser()
        config = read_config(path) if path.exists() else find_model_config(str(given))
        if str(config.get("model_type")) not in FAMILIES:
            config = _alike(config, str(given), asked.params_per_layer, notes)
        model = model_of(config, str(given))
        if wants_classes and model.head != "sequence_classification":
            model = model_of(config, str(given), head="sequence_classification")
        return model, "seq_cls" if model.head == "sequence_classification" else "causal_lm"
    refuse_images(values)
    config = find_model_config(GPTLITE_SIZES + str(values.get("model_size", "tiny")))
    for part in filter(None, str(values.get("config_overrides") or "").split(",")):
        name, _, text = part.partition("=")
        try:
            config[name.strip()] = json.loads(text.lower())
        except ValueError:
            config[name.strip()] = text
    kind = str(values.get("tokenizer", "char"))
    sizes = {"char": CHARACTERS, "byte": BYTES, "bpe": _count(values, "bpe_vocab_size", 8192)}
    if kind not in sizes:
        raise RequestError(f"tokenizer is {kind!r}, but it must be one of {', '.join(sizes)}.")
    config["vocab_size"] = sizes[kind]
    if kind == "char":
        notes.append(f"a vocabulary of {CHARACTERS} characters is taken for granted; the text decides")
    return model_of(config, "the model from scratch"), "causal_lm"


def _lora(values: Mapping[str, Any], model: Model) -> Lora | None:
    """As finetune.models.adapters: on all linear layers of the blocks, unless some are named."""
    if values.get("use_peft") is not True:
        return None
    if not values.get("model_name_or_path"):
        raise RequestError("--use_peft adapts a trained model, and none is named. Add --model_name_or_path.")
    named = values.get("lora_target_modules")
    inside = [tensor.name.split(".") for tensor in model.tensors if tensor.layer is not None and len(tensor.shape) == 2]
    every = sorted({parts[-2] for parts in inside} - NOT_LINEAR)
    targets = tuple(named) if isinstance(named, list) else tuple(named.split()) if named else tuple(every)
    return Lora(_count(values, "lora_r", 16), targets, _number(values, "lora_dropout", 0.0))


def _alike(config: dict[str, Any], where: str, params_per_layer: int | None, notes: list[str]) -> dict[str, Any]:
    """Of a family that is not known: a Llama of the same width and depth, whose feed-forward part is as wide as the
    layer's parameters ask for."""
    kind = config.get("model_type")
    if params_per_layer is None:
        raise RequestError(
            f"{where}: model_type is {kind!r}, but those known are {', '.join(sorted(FAMILIES))}. Give "
            "--params_per_layer N, the parameters of one of its layers: it is then taken for a Llama of that size, by "
            "its hidden_size, num_hidden_layers, num_attention_heads and vocab_size."
        )
    sizes = Sizes(config, where)
    hidden, heads = sizes("hidden_size", "n_embd", "d_model"), sizes("num_attention_heads", "n_head", "num_heads")
    inner = (params_per_layer - 4 * hidden**2 - 2 * hidden) // (3 * hidden)
    if inner < 1:
        raise RequestError(
            f"--params_per_layer {params_per_layer}: attention of width {hidden} has {4 * hidden**2:,}. Give more."
        )
    notes.append(f"a {kind} is not known, and is taken for a Llama whose layers have {params_per_layer:,} parameters")
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": sizes("num_hidden_layers", "n_layer", "num_layers"),
        "intermediate_size": inner,
        "vocab_size": sizes("vocab_size"),
        "tie_word_embeddings": sizes.is_on("tie_word_embeddings", False),
    }


def _tokens(values: Mapping[str, Any], model: Model, kind: str) -> int:
    if model.family in NO_TEXT:
        return 1
    name = "max_seq_length" if kind == "seq_cls" else "block_size"
    most = next(
        (model.sizes.config[n] for n in ("max_position_embeddings", "n_positions") if model.sizes.config.get(n)), None
    )
    found = _count(values, name, min(most or DEFAULT_TOKENS[kind], DEFAULT_TOKENS[kind]))
    if most is not None and found > most:
        scratch = "" if values.get("model_name_or_path") else (
            " Or name the model, by --model_name_or_path, if the recipe goes on from one: none was named, and this is "
            "a small one from scratch."
        )  # fmt: skip
        raise RequestError(f"--{name} is {found}, but the model has {most} positions. Give at most those.{scratch}")
    return found


def _count(values: Mapping[str, Any], name: str, default: int, least: int = 1) -> int:
    found = values.get(name)
    if found is None:
        return default
    if isinstance(found, bool) or not isinstance(found, int) or found < least:
        raise RequestError(f"--{name} is {found!r}, but it must be a whole number of {least} or more.")
    if found > MOST:
        raise RequestError(f"--{name} is {found:,}. Mistyped?")
    return found


def _number(values: Mapping[str, Any], name: str, default: float) -> float:
    found = values.get(name)
    if found is None:
        return default
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < float("inf"):
        raise RequestError(f"--{name} is {found!r}, but it must be a number of 0 or more.")
    return float(found)


def _precision(values: Mapping[str, Any], machine: Machine) -> str:
    """As a recipe chooses: what is asked, else the fastest of the machine that trains well."""
    for name in ("bf16", "fp16"):
        if values.get(name) not in (None, True, False):
            raise RequestError(f"--{name} is {values[name]!r}, but it must be True or False.")
    if values.get("bf16") and values.get("fp16"):
        raise RequestError("--bf16 and --fp16 are both True. Keep one.")
    for name in ("bf16", "fp16"):
        if values.get(name) is True:
            if name not in machine.peak_flops:
                raise RequestError(f"--{name}: {machine.name} has no {name}. Give another precision.")
            return name
    if "bf16" in values or "fp16" in values:
        return "fp32"
    if machine.device == "cpu":  # a profile has bf16 where --calibrate found that the CPU computes with it
        return "bf16" if "bf16" in machine.peak_flops else "fp32"
    return next((name for name in ("bf16", "fp16") if name in machine.peak_flops), "fp32")


def _chunk(values: Mapping[str, Any], model: Model, machine: Machine, is_pipeline: bool) -> int:
    """As finetune.models.chunked_loss chooses: a large vocabulary's loss is computed in chunks."""
    given = values.get("loss_chunk_tokens")
    if given is not None:
        return _count(values, "loss_chunk_tokens", 0, least=0)
    if (
        is_pipeline
        or model.head != "causal_lm"
        or model.vocab_size < LARGE_VOCABULARY
        or model.family in ("gemma2", "mixtral", "qwen3_moe")
    ):
        return 0
    return CHUNK_TOKENS["cpu" if machine.device == "cpu" else "cuda"]


def _optimizer(values: Mapping[str, Any], config: Mapping[str, Any] | None) -> Optimizer:
    section = (config or {}).get("optimizer")
    if isinstance(section, dict):
        name = str(section.get("type", "AdamW")).lower()
        given = section.get("params")
        params = given if isinstance(given, dict) else {}
        if name == "sgd" and params.get("momentum"):
            return Optimizer("momentum")
        if name in ("adam", "adamw") and params.get("torch_adam") is True:
            return Optimizer("adam_foreach")  # engine.py, _configure_basic_optimizer: torch's own, not fused
        if name not in DS_OPTIMIZERS:
            raise RequestError(
                f"optimizer.type is {name!r}: its memory is not known. Known: {', '.join(DS_OPTIMIZERS)}."
            )
        return Optimizer(DS_OPTIMIZERS[name])
    if config is not None and Config(dict(config)).offload("offload_optimizer") != "none":
        return Optimizer("cpu_adam")
    name = str(values.get("optim", "adamw_torch_fused"))
    if name not in OPTIMIZERS:
        raise RequestError(f"--optim {name}: its memory is not known. Known: {', '.join(OPTIMIZERS)}.")
    return Optimizer(OPTIMIZERS[name])


def _config(named: str, job: Job, values: Mapping[str, Any], machine: Machine, notes: list[str]) -> dict[str, Any]:
    """Checked as the run would check it. Raises RequestError with every error."""
    path = find_config(named)
    halves = {"bf16": job.precision == "bf16", "fp16": job.precision == "fp16"}
    run = Context(
        world_size=job.world_size,
        ranks_per_node=job.ranks_per_node,
        has_cuda=machine.device != "cpu",
        output_dir=str(values.get("output_dir", "run")),
        arguments={
            "per_device_train_batch_size": job.micro_batch,
            "gradient_accumulation_steps": job.accumulation,
            "max_grad_norm": values.get("max_grad_norm", 1.0),
            **halves,
        },
        nvme_path=values.get("nvme_path"),
        pipeline_parallel_size=job.stages if "pipeline_parallel_size" in values else None,
        is_here=False,
    )
    report = check(read(path), run)
    if report.errors:
        raise RequestError("\n".join(line(path.name, placed) for placed in report.errors))
    notes.extend(line(path.name, placed) for placed in report.found)
    assert isinstance(report.value, dict)
    return resolve(report.value, run)
