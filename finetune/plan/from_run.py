"""From a run to a job: what a recipe would train, in the numbers that decide a step's memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.dsconfig.config import Config
from finetune.errors import RequestError
from finetune.plan.families.parts import CAUSAL, MOST, SEQ2SEQ
from finetune.plan.forward.stages import PIPELINED
from finetune.plan.job import DEEPSPEED, FSDP, OWN_BASE, PIPELINE, SECOND, TRAINER, Job
from finetune.plan.machine import Machine, machine_names
from finetune.plan.model import Model, in_4bit, read_config, with_lora
from finetune.plan.optimizers import optimizer_of
from finetune.plan.run_model import is_adapter, lora_of, model_of_run
from finetune.plan.shared_texts import check_shared, of_groups, with_deepspeed
from finetune.plan.zero import read_zero
from finetune.run import engine, facts
from finetune.run.files import SENTENCE_SIZES
from finetune.run.flags.experts import has_router_loss
from finetune.run.flags.guards import saves_beside_from
from finetune.run.reference import form_of_reference
from finetune.run.run import Run

ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
IN_HALF = (
    "trained weights, gradients and optimizer states are counted in 16 bits, without masters (--dtype); DeepSpeed's "
    "layouts have fp32 masters and do not accept this --dtype"
)
CAPPED = ("gemma2",)  # families with capped logits, whose loss is not computed in chunks
COUNTED = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "image_size")


def job_of(
    run: Run, machine: Machine, params_per_layer: int | None = None, subject: Job | None = None
) -> tuple[Job, dict[str, Any] | None, list[str]]:
    """The job, its DeepSpeed config, and notes. `subject` is for recipes that make up samples: a job with the model and
    the sizes of a sample. Raises RequestError."""
    notes = list[str]()
    _check_numbers(run, params_per_layer)
    subject = subject or _subject(run, machine, params_per_layer, notes)
    model, run = subject.model, engine.settle_engine(run)
    _check_engine(run, model)
    run = with_deepspeed(run, machine.device, notes)
    lora, asked = lora_of(run, model, notes), engine.deepspeed_config_of(run)
    flags = facts.precision_flags(run, engine.stated_precision(asked), lambda: _fastest(machine, notes), bool(asked))
    precision, device = _precision(run, flags, machine, asked), machine.torch_device
    notes += _not_counted(run)
    job = replace(
        subject,
        model=with_lora(_stored(model, run), lora) if lora else model,
        engine=FSDP if run.value("fsdp") else TRAINER,
        world_size=run.launch.world_size,
        ranks_per_node=run.launch.local_world_size,
        stages=run.stages or 1,
        partition_method=_one_of(run, "partition_method", ("balanced", "uniform", "parameters"), "balanced"),
        micro_batch=run.value("per_device_train_batch_size"),
        accumulation=run.value("gradient_accumulation_steps"),
        precision=precision,
        tf32=_tf32(run, machine, notes),
        checkpoint_interval=facts.checkpoint_interval(run),
        attention=_attention(run, subject.tokens, device, precision),
        device=device,
        dtype=facts.base_dtype(run, flags["bf16"]),
        saves_beside_from=_saves_beside_from(run, device),
        looks_ahead=has_router_loss(run, model.sizes.config),
        merges_adapter=bool(lora and run.value("merge_adapter")),
        looks_at_loss=run.value("logging_nan_inf_filter") or run.value("on_nan") not in (None, "off"),
        **of_groups(run),
        **_teacher(run, flags["bf16"], params_per_layer, notes),
        **({"eval_batch": facts.eval_batch_of(run)} | _preferences(run, model, flags["bf16"], notes)),
    )
    if not asked:
        return replace(job, optimizer=optimizer_of(run.value("optim"), None)), None, notes + [IN_HALF] * job.trains_half
    context = engine.context_of(run, flags, has_cuda=job.device == "cuda", is_here=False)
    loaded = engine.load_deepspeed(run, asked, context)
    config = Config(loaded.config)
    if config.is_on("bf16.bf16_master_weights_and_grads"):
        notes.append("bf16_master_weights_and_grads: masters and states are counted in fp32; the run takes less")
    job = _under_deepspeed(job, run, config)
    check_shared(run, job)
    return job, loaded.config, [*notes, *loaded.notes]


def _under_deepspeed(job: Job, run: Run, config: Config) -> Job:
    zero = read_zero(config, job.model.hidden_size, run.value("max_grad_norm"), job.precision)
    return replace(
        job,
        engine=DEEPSPEED if run.stages is None else PIPELINE,
        zero=zero,
        optimizer=optimizer_of(run.value("optim"), config.value),
        saves_beside_from=None if "nvme" in (zero.offload_optimizer, zero.offload_param) else job.saves_beside_from,
    )


def _saves_beside_from(run: Run, device: str) -> int | None:
    """Ignores what a run finds only when it starts: too little memory, or a tracker that uploads checkpoints."""
    if run.value("save_strategy") == "no" or run.value("save_on_each_node"):
        return None
    return saves_beside_from(run.value("async_save"), device, run.launch)


def _precision(run: Run, flags: dict[str, bool], machine: Machine, asked: str | None) -> str:
    precision = next((name for name in ("bf16", "fp16") if flags[name]), "fp32")
    is_emulated = machine.device == "cpu" and precision == "bf16"  # as any CPU does
    if precision not in machine.peak_flops and not is_emulated:
        said = run.said(precision) if precision in run.given else f"{precision} is asked for by {asked}"
        raise RequestError(f"{said}, but {machine.name} has no {precision}. Give another precision.")
    return precision


def _teacher(run: Run, bf16: bool, params_per_layer: int | None, notes: list[str]) -> dict[str, Any]:
    if not (run.value("teacher") and run.value("distill_alpha")):
        return {}
    if run.value("teacher_top_k"):
        notes.append("the teacher runs before training, next to the model's weights alone; that is not counted")
        return {}
    notes.append("the teacher's weights, activations and forward pass are counted, not what ZeRO-3 gathers for it")
    named = run.settled("--teacher", model_name_or_path=run.value("teacher"))
    model = model_of_run(named, params_per_layer, notes, "teacher")
    return {"teacher": model, "teacher_dtype": facts.base_dtype(run, bf16, has_adapter=True)}


def _preferences(run: Run, model: Model, bf16: bool, notes: list[str]) -> dict[str, Any]:
    """Both texts of a preference row, and the reference (finetune/training/preference.py)."""
    if "reference" not in run.recipe.flags:
        return {}
    loss, goes_on = run.value("loss"), is_adapter(run)
    form = form_of_reference(loss, run.value("reference"), bool(run.value("use_peft")) or goes_on, goes_on)
    if run.value("share_prompt"):
        notes.append("--share_prompt is not counted: a row is planned as two texts, each with its prompt")
    found: dict[str, Any] = {"texts": 2, "baseline": loss == "kto"}
    if form == "cached":
        notes.append(
            "the reference runs once, before the first step, and keeps nothing on the device; that pass is counted "
            "as an evaluation, but not its time"
        )
        return found | {"eval_batch": int(run.value("per_device_eval_batch_size"))}
    if form == "none":
        return found
    notes.append(
        "the reference's forward pass is counted, with an upper bound for activations; its gathers' time is not"
    )
    base = _stored(model, run)
    kind = SECOND if form == "online" else OWN_BASE
    return found | {"teacher": base, "teacher_dtype": facts.base_dtype(run, bf16), "reference": kind}


def _stored(model: Model, run: Run) -> Model:
    """With its weights as they are stored under an adapter."""
    return in_4bit(model, run.value("bnb_4bit_use_double_quant")) if run.value("load_in_4bit") else model


def _check_numbers(run: Run, params_per_layer: int | None) -> None:
    if wrong := next((name for name in COUNTED if (run.value(name) or 0) > MOST), None):
        raise RequestError(f"{run.said(wrong)}. Mistyped?")
    if params_per_layer is not None and params_per_layer < 1:
        raise RequestError(f"--params_per_layer is {params_per_layer}, but it must be 1 or more.")


def _check_engine(run: Run, model: Model) -> None:
    """Raises RequestError for what cannot be planned."""
    if run.value("fsdp") or engine.fsdp_by_accelerate(run):
        _check_fsdp(run, model)
    if run.stages is not None and model.family not in PIPELINED:
        raise RequestError(
            f"{run.said('pipeline_parallel_size')}: only pipelines of {' and '.join(PIPELINED)} are planned, and this "
            f"is a {model.family}. Drop it; ZeRO-3 shards any model."
        )


def _check_fsdp(run: Run, model: Model) -> None:
    """Only what recipes run with --fsdp True is planned: FSDP2, each layer a group."""
    facts.check_sharded(run)
    is_plain = str(run.value("fsdp")) in ("True", "full_shard", "full_shard auto_wrap") and not run.value("fsdp_config")
    why = (
        "it does not shard an encoder with a decoder"
        if model.head == SEQ2SEQ
        else f"it does not shard a {model.family}"
        if not model.reads_text
        else None
        if is_plain
        else "only --fsdp True is planned, without --fsdp_config"
    )
    if why:
        raise RequestError(f"{run.said('fsdp')}: {why}. --deepspeed zero3 shards the same way, and is planned.")


def _subject(run: Run, machine: Machine, params_per_layer: int | None, notes: list[str]) -> Job:
    if "pooling" in run.recipe.flags:
        notes.append(
            "a row is counted as one text: plan pairs with twice --per_device_train_batch_size, triplets with three "
            "times as many; with accumulation texts are embedded twice but counted once"
        )
    model = model_of_run(run, params_per_layer, notes)
    if not model.reads_text:
        return Job(model, tokens=1, image_size=_side(run, model, notes))
    tokens, chunk = _tokens(run, model, notes), _chunk(run, model, machine)
    return Job(model, tokens=tokens, loss_chunk_tokens=chunk, targets=_targets(run, model))


def _chunk(run: Run, model: Model, machine: Machine) -> int:
    asked = run.value("loss_chunk_tokens")
    adapted = [*(run.value("lora_modules_to_save") or ()), *(run.value("lora_target_modules") or ())]
    routers_add = model.sizes.is_on("output_router_logits", False) and "router_aux_loss_coef" not in run.recipe.flags
    does_more = model.family in CAPPED or routers_add  # finetune.models.chunked_loss inspects the model itself
    is_whole = "lm_head" in adapted or (not asked and does_more)
    if model.head != CAUSAL or is_whole:
        return 0
    return facts.loss_chunk_tokens(asked, model.vocab_size, machine.torch_device)


def _tokens(run: Run, model: Model, notes: list[str]) -> int:
    flag, given = facts.tokens_flag(run), run.value("model_name_or_path")
    if flag is None:
        raise RequestError(f"{run.said('model_name_or_path')}: {run.recipe.script} does not train text models.")
    otherwise = "." if given else (
        ". Or name the model with --model_name_or_path if the recipe starts from one: none was named, so this is a "
        "small one from scratch."
    )  # fmt: skip
    most, folder = facts.NO_LIMIT, Path(str(given)).expanduser()
    file, key = folder / "tokenizer_config.json", "model_max_length"
    if "pooling" in run.recipe.flags and (folder / SENTENCE_SIZES).is_file():
        file, key = folder / SENTENCE_SIZES, "max_seq_length"
    if flag != "block_size" and given and file.is_file():
        said = read_config(file).get(key)
        most = said if isinstance(said, int) and 0 < said < facts.NO_LIMIT else facts.NO_LIMIT
    positions, source = facts.positions_of(model.sizes.config.get), f" ({run.source(flag)})"
    found = facts.tokens_of(flag, run.value(flag), positions, most, otherwise, source)
    if flag != "block_size":
        notes.append(f"samples are counted as {found} tokens, the maximum; batches of shorter texts take less")
    return found


def _targets(run: Run, model: Model) -> int | None:
    flag = "max_target_length"
    if flag not in run.recipe.flags:
        return None
    positions = facts.positions_of(model.sizes.config.get)
    return facts.tokens_of(flag, run.value(flag), positions, source=f" ({run.source(flag)})")


def _side(run: Run, model: Model, notes: list[str]) -> int:
    """The side of an image in pixels: the model's own, or as finetune.data.images chooses it."""
    if model.trace is not None:
        return model.sizes("image_size")
    if run.value("image_size"):
        return int(run.value("image_size"))
    if not run.value("model_name_or_path") and not run.value("train_dir") and not run.value("dataset_name"):
        return facts.LEAST_SIDE  # the built-in digits and CIFAR-10 are this small
    notes.append(f"images are counted as {facts.MOST_SIDE} pixels a side; --image_size changes that")
    return facts.MOST_SIDE


def _not_counted(run: Run) -> list[str]:
    said = "--use_liger_kernel: its fused kernels and its loss without logits are not counted; a run takes less"
    return [said] if run.value("use_liger_kernel") else []


def _tf32(run: Run, machine: Machine, notes: list[str]) -> bool | None:
    found: bool | None = run.value("tf32")
    if found and "tf32" not in machine.peak_flops:
        if machine.name in machine_names():
            raise RequestError(f"{run.said('tf32')}, but {machine.name} has no TF32. Leave it out.")
        notes.append(
            f"--tf32 is not counted, because the profile of {machine.name} has no rate for it; `finetune plan "
            "--calibrate FILE` measures it on GPUs that have it"
        )
    return found


def _fastest(machine: Machine, notes: list[str]) -> str:
    """The precision that a recipe chooses by itself. A CPU's profile has bf16 only if it computes in bf16."""
    halves = ("bf16",) if machine.device == "cpu" else ("bf16", "fp16")
    found = next((name for name in halves if name in machine.peak_flops), "fp32")
    if machine.name == "cpu" and found == "fp32":
        notes.append(
            "fp32 is assumed, as for any CPU; a run uses bf16 on one that computes in it. `finetune plan --calibrate "
            "FILE` measures this one, and --gpu FILE plans with the result"
        )
    return found


def _attention(run: Run, tokens: int, device: str, precision: str) -> str:
    is_eager = facts.tokens_flag(run) and tokens <= facts.SHORT_TOKENS and facts.mixes_attention(run, device, precision)
    return _one_of(run, "attn_implementation", ATTENTIONS, "eager" if is_eager else "sdpa")


def _one_of(run: Run, name: str, known: Sequence[str], default: str) -> str:
    found = str(run.value(name) or default)
    if found not in known:
        raise RequestError(f"{run.said(name)}: its memory is not known. Known: {', '.join(known)}.")
    return found
