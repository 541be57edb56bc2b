"""DS2xx: batch sizes, who fills an "auto", and agreement with the Trainer's arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Drop, Finding, Put, at, error, warning
from finetune.dsconfig.rules.optimizer import is_left_to_the_trainer

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

# The Trainer's name for a value of the config (transformers 5.23, integrations/deepspeed.py, trainer_config_process).
TWINS = (
    ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ("gradient_clipping", "max_grad_norm"),
    ("optimizer.params.lr", "learning_rate"),
    ("optimizer.params.eps", "adam_epsilon"),
    ("optimizer.params.weight_decay", "weight_decay"),
    ("scheduler.params.warmup_max_lr", "learning_rate"),
    ("scheduler.params.warmup_num_steps", "warmup_steps"),
    ("scheduler.params.total_num_steps", "max_steps"),
    ("bf16.enabled", "bf16"),
    ("fp16.enabled", "fp16"),
)

BY_ACCELERATE = (  # accelerate 1.15, accelerator.py, _prepare_deepspeed, and utils/dataclasses.py
    *SIZES,
    "gradient_clipping",
    "steps_per_print",
    "fp16.enabled",
    "bf16.enabled",
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
    "zero_optimization.stage",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path",
)
# Keys for which DeepSpeed itself accepts "auto".
OWN_AUTO = (
    "data_types.keep_in_fp32_modules",
    "pipeline.stages",
    "zero_optimization.zenflow.select_strategy",
    "zero_optimization.zenflow.select_interval",
    "zero_optimization.zenflow.update_interval",
)
BY_TRAINER = (*BY_ACCELERATE, "optimizer.params.betas", "optimizer.params.eps")
BY_RECIPE = (*BY_TRAINER, "zero_optimization.zero_hpz_partition_size")
FILLED = {"recipe": BY_RECIPE, "trainer": BY_TRAINER, "accelerate": BY_ACCELERATE, "deepspeed": ()}
CLIPS_SINCE = (0, 19, 3)  # runtime/constants.py, GRADIENT_CLIPPING_DEFAULT
# DeepSpeed drops an "auto" from these sections and uses its own default (runtime/config_utils.py).
TYPED = (
    "zero_optimization fp16 bf16 bfloat16 comms_logger compile hybrid_engine tensor_parallel timers tensorboard "
    "wandb csv_monitor comet"
).split()


def sizes_multiply(config: Config, run: Context) -> Iterator[Finding]:
    """DS201. train_batch_size = micro-batch x accumulation x data-parallel ranks."""
    total = config.count("train_batch_size")
    micro = _size(config, run, "train_micro_batch_size_per_gpu", "per_device_train_batch_size")
    steps = _size(config, run, "gradient_accumulation_steps", "gradient_accumulation_steps")
    if run.engine in ("trainer", "accelerate") and not config.has(SIZES[2]):
        steps = 1  # accelerate sets it
    shared = config.count("sequence_parallel_size")
    if shared and run.world_size and run.world_size % shared:  # DeepSpeed would compute with a fraction of a rank
        said = f"sequence_parallel_size is {shared}, which does not divide the run's ranks, {run.world_size}."
        yield error("DS201", "sequence_parallel_size", said)
    if total is None or shared or config.count("tensor_parallel.autotp_size"):
        return  # the ranks that share samples count once, and how many share them is up to the script
    ranks = run.data_parallel_size
    shares = "ranks that share a text" if run.sequence_parallel_size > 1 else "stages"
    is_all = run.pipeline_parallel_size is None and run.sequence_parallel_size == 1
    what = "world_size" if is_all else f"data-parallel size (ranks / {shares})"
    if micro and steps and ranks and total != micro * steps * ranks:
        product = micro * steps * ranks
        yield error(
            "DS201",
            "train_batch_size",
            f"train_batch_size is {total}, but train_micro_batch_size_per_gpu x gradient_accumulation_steps x {what} = "
            f'{micro} x {steps} x {ranks} = {product}. Write "auto", or set it to {product}, or change '
            "--per_device_train_batch_size.",
            *([Put(at("train_batch_size"), "auto")] if run.has_trainer else []),
        )
        return
    # DeepSpeed divides by the known factors and rounds down, and then its own check fails (runtime/config.py).
    known = {"micro-batch": micro, "accumulation steps": steps, what: ranks}
    factors = {name: factor for name, factor in known.items() if factor}
    unit = math.prod(factors.values())
    if total % unit:
        words = " x ".join(factors), " x ".join(map(str, factors.values()))
        equation = f"{words[0]} = {words[1]} = {unit}" if len(factors) > 1 else f"{words[0]} = {unit}"
        text = (
            f"train_batch_size is {total}, which is not a multiple of {equation}. The nearest is "
            f"{max(1, round(total / unit)) * unit}."
        )
        yield error("DS201", "train_batch_size", text)


def a_size_is_given(config: Config, run: Context) -> Iterator[Finding]:
    """DS202. DeepSpeed must find one in the file (runtime/config.py, _set_batch_related_parameters). The Trainer and
    accelerate fill an existing "auto", but do not add one, as our recipes do."""
    missing = (None, "auto") if run.engine == "accelerate" else (None,)  # it computes it from the micro-batch
    if run.engine != "recipe" and config.get(SIZES[1]) is None and config.get(SIZES[0]) in missing:
        place, auto = SIZES[1], run.engine != "deepspeed"
        said = "neither train_batch_size nor train_micro_batch_size_per_gpu is given, and DeepSpeed needs one. Add " + (
            f'"{place}": "auto".' if auto else f'"{place}".'
        )
        yield error("DS202", place if config.has(place) else "", said, *([Put(at(place), "auto")] if auto else []))


def accumulation_is_stated(config: Config, run: Context) -> Iterator[Finding]:
    """DS208. accelerate 1.15, utils/dataclasses.py, DeepSpeedPlugin: without the key it uses 1, and it keeps null."""
    place, asked = SIZES[2], run.arguments.get(SIZES[2])
    mend = Put(at(place), "auto")
    if run.engine in ("trainer", "accelerate") and config.has(place) and config.get(place) is None:
        yield error("DS208", place, f'{place} is null, which accelerate cannot use. Write "auto".', mend)
    elif run.engine == "trainer" and not config.has(place) and isinstance(asked, int) and asked > 1:
        said = (
            f"{place} is missing, so DeepSpeed updates after each micro-batch, but the run asks for {asked} (--{place})"
        )
        yield error("DS208", place, f'{said}. Add "{place}": "auto".', mend)


def values_agree_with_the_trainer(config: Config, run: Context) -> Iterator[Finding]:
    """DS203. All mismatches at once: the Trainer reports them after loading the model, and some never."""
    if not run.has_trainer:
        return
    wanted = [(place, name, _of_trainer(run, name)) for place, name in TWINS]
    betas = [run.arguments.get("adam_beta1"), run.arguments.get("adam_beta2")]
    found = config.get("optimizer.params.betas")
    if isinstance(found, list) and len(found) == 2 and betas != [None, None]:
        both = [mine if mine is not None else theirs for mine, theirs in zip(betas, found, strict=True)]
        wanted.append(("optimizer.params.betas", "adam_beta1, --adam_beta2", both))
    for place, name, value in wanted:
        found = config.get(place)
        if found is None or isinstance(found, str | dict) or value is None or found == value:
            continue
        said = f'{place} is {found}, but the run asks for {value} (--{name}). Write "auto", or make them agree.'
        yield error("DS203", place, said, Put(at(place), "auto"))


def auto_is_filled(config: Config, run: Context) -> Iterator[Finding]:
    """DS204. accelerate, and so the Trainer, ends the run at an "auto" that it does not fill (utils/dataclasses.py,
    fill_match); DeepSpeed alone reads it as a string. DS205: or, in sections with a class, as its own default."""
    if run.pipeline_parallel_size is not None:
        return  # DS8xx: a pipeline has its own list
    who = {"recipe": "our recipes do", "trainer": "the Trainer does", "accelerate": "accelerate does"}
    alone = run.engine == "deepspeed"
    for place in config.autos():
        filled = place in (OWN_AUTO if alone else FILLED[run.engine])
        if filled or (run.engine == "recipe" and _is_filled_by_recipe(place, config)):
            continue
        key = place.split(".")[-1].split("[")[0]
        has_default = place.split(".")[0] in TYPED and key not in ("enabled", "stage", "device", "nvme_path")
        subject = f'{place} is "auto", which {who.get(run.engine, "DeepSpeed does")} not fill'
        if place == "data_types.grad_accum_dtype":
            mend = "Use zero1, or give --pipeline_parallel_size: a pipeline run fills it."
            yield (error if run.is_here else warning)("DS204", place, f"{subject}. {mend}")
        elif has_default and alone:
            said = f"{subject}: it uses its own default. Write a value, or delete it."
            yield warning("DS205", place, said, Drop(at(place)))
        else:
            mends = [Drop(at(place))] if has_default else []
            yield error("DS204", place, f"{subject}. Write a value{'' if key in SIZES else ', or delete it'}.", *mends)


def clipping_is_stated(config: Config, run: Context) -> Iterator[Finding]:
    """DS206. Without the key DeepSpeed clips at its own default, whatever the Trainer says.

    deepspeed 0.19.8, runtime/constants.py, GRADIENT_CLIPPING_DEFAULT; it used to be 0, which means no clipping
    (axolotl#1381).
    """
    said_of_another = ("max_grad_norm", "optimizer.params.max_grad_norm")  # reported by DS101 and DS306
    if any(map(config.has, ("gradient_clipping", *said_of_another))) or not run.has_trainer:
        return
    wanted = run.arguments.get("max_grad_norm", 1.0)
    clips_at = 1.0 if (run.version("deepspeed") or CLIPS_SINCE) >= CLIPS_SINCE else 0.0
    mend = Put(at("gradient_clipping"), "auto")
    if wanted != clips_at:
        said = (
            f"gradient_clipping is missing, so DeepSpeed {'clips at its own 1.0' if clips_at else 'does not clip'} and "
            f'ignores --max_grad_norm {wanted}. Add "gradient_clipping": "auto".'
        )
        yield error("DS206", "gradient_clipping", said, mend)
    else:
        said = (
            f"gradient_clipping is missing. This run is not affected, because --max_grad_norm is {wanted}, as in "
            f"DeepSpeed without the key. But another --max_grad_norm would have no effect, and DeepSpeed before "
            f'{".".join(map(str, CLIPS_SINCE))} does not clip. Add "gradient_clipping": "auto".'
        )
        yield warning("DS206", "gradient_clipping", said, mend)


def accumulation_can_skip_syncing(config: Config, run: Context) -> Iterator[Finding]:
    """DS207. transformers#34984, fixed by #35157: DeepSpeed 0.16 refuses `no_sync` under ZeRO-2 and 3."""
    deepspeed, transformers = run.version("deepspeed"), run.version("transformers")
    steps = _size(config, run, "gradient_accumulation_steps", "gradient_accumulation_steps") or 1
    if not run.has_trainer or config.stage < 2 or steps < 2 or not deepspeed or not transformers:
        return
    if deepspeed >= (0, 16) and (4, 46) <= transformers < (4, 48):
        said = (
            f"gradient_accumulation_steps is {steps} under ZeRO-{config.stage}, which transformers "
            f"{'.'.join(map(str, transformers))} and DeepSpeed {'.'.join(map(str, deepspeed))} cannot do together "
            "(transformers issue 34984). Use transformers 4.48 or later."
        )
        yield error("DS207", "gradient_accumulation_steps", said)


def _size(config: Config, run: Context, place: str, name: str) -> int | None:
    found = config.count(place)
    if found is not None or not run.has_trainer:
        return found
    value = run.arguments.get(name)
    return value if isinstance(value, int) else None


def _of_trainer(run: Context, name: str) -> object:
    """The value that the Trainer compares with; None for a count that it has not computed yet."""
    value = run.arguments.get(name)
    if name in ("bf16", "fp16") and value is not None:
        return bool(value or run.arguments.get(f"{name}_full_eval"))
    if name == "max_steps":
        return value if isinstance(value, int) and value > 0 else None
    if name == "warmup_steps" and isinstance(value, int | float):
        return _warmup_steps(value, _of_trainer(run, "max_steps"))
    return value


def _warmup_steps(asked: float, steps: object) -> int | str:
    """The Trainer's warmup steps, which it compares with the config: at least 1; a value below 1 is a fraction of all
    steps (transformers 5.23, training_args.py, get_warmup_steps), whose number may not be known yet."""
    if 0 < asked < 1:
        return max(1, math.ceil(steps * asked)) if isinstance(steps, int) else f"{asked:g} of its steps"
    return max(1, int(asked))


def _is_filled_by_recipe(place: str, config: Config) -> bool:
    """A recipe drops the sections that it leaves to the Trainer, and fills the paths of disk offload."""
    left = [name for name in ("optimizer", "scheduler") if is_left_to_the_trainer(config.section(name))]
    return place.split(".")[0] in left or place.endswith(".nvme_path")
