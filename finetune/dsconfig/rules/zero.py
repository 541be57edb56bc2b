"""DS5xx: ZeRO's stages and sizes, also with expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Drop, Finding, Put, at, error, warning
from finetune.dsconfig.rules.optimizer import is_left_to_the_trainer

GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
GATHERS = ("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")  # other names of the key
THRESHOLD = "zero_optimization.stage3_param_persistence_threshold"
BUCKETS = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
)
BYTES_PER_ELEMENT = 2  # a gradient in bf16 or fp16
HALVES = ("fp16.enabled", "bf16.enabled", "bfloat16.enabled")
DEFAULT_THRESHOLD = 100_000
DEFAULT_BUCKET = 500_000_000  # elements (deepspeed 0.19.8, runtime/zero/config.py)
MUCH_MEMORY_BYTES = 1.5 * 2**30
FEW_ELEMENTS = 100_000  # 200 kB in bf16: a collective of that size is all latency
OF_NOTHING = {
    "sub_group_size": "every weight becomes a group with its own update",
    "stage3_max_live_parameters": "no weight is fetched before it is needed",
    "stage3_max_reuse_distance": "every weight is released after each use, and gathered again",
}
OF_STAGE_3 = ("stage3_", "sub_group_size")
# deepspeed 0.19.8: runtime/utils.py, clip_grad_norm_ (DeepSpeed issue 8475); runtime/engine.py,
# _raise_if_autoep_zero3_consolidated_export and the docs of AutoEP.
NOT_WITH_EXPERTS = {
    0: "without ZeRO, DeepSpeed clips fp32 gradients by an average of norms, as if all ranks had the same experts",
    3: "under ZeRO-3, DeepSpeed can neither export the experts nor load them in another layout",
}


def saved_model_is_whole(config: Config, run: Context) -> Iterator[Finding]:
    """DS501. Without it the Trainer saves DeepSpeed's checkpoint instead of the model's weights, and says so only in
    the log (transformers 5.23, trainer.py, save_model)."""
    if config.stage != 3 or config.is_on(GATHER):
        return
    if any(config.is_on(f"zero_optimization.{name}") for name in GATHERS) or run.engine == "deepspeed":
        return
    if config.is_auto(GATHER) and not run.has_trainer:
        said = (
            f'{GATHER} is "auto", which accelerate fills with its zero3_save_16bit_model, false by default: the model '
            "saved at the end then has no weights that from_pretrained opens. Set it to true."
        )
        yield warning("DS501", GATHER, said, Put(at(GATHER), True))
    else:
        state = '"auto", which the Trainer leaves off' if config.is_auto(GATHER) else "off"
        said = (
            f"{GATHER} is {state}, so the model saved at the end has no weights that from_pretrained opens, only "
            "DeepSpeed's shards. Set it to true."
        )
        yield error("DS501", GATHER, said, Put(at(GATHER), True))


def something_is_sharded(config: Config, run: Context) -> Iterator[Finding]:
    """DS502. Weights below the threshold stay whole on every rank: if all are below it, ZeRO-3 shards none."""
    threshold, weights = config.count(THRESHOLD), run.weights
    if config.is_auto(THRESHOLD) and weights and weights.hidden_size and run.engine != "deepspeed":
        threshold = 10 * weights.hidden_size  # transformers 5.23, integrations/deepspeed.py
    elif threshold is None:
        threshold = DEFAULT_THRESHOLD
    # Weights up to and including the threshold are not sharded (runtime/zero/partition_parameters.py).
    if config.stage != 3 or weights is None or threshold < weights.largest:
        return
    said = (
        f"{THRESHOLD} is {threshold:,}, but the largest weight of the model has {weights.largest:,} elements: every "
        f"weight stays whole on every rank, and ZeRO-3 shards nothing. Set it to {_nice(weights.largest / 10):,} or "
        "less, or use ZeRO-2."
    )
    yield error("DS502", THRESHOLD, said)


def buckets_fit_the_model(config: Config, run: Context) -> Iterator[Finding]:
    """DS503. A bucket far larger than the model wastes memory; with one far smaller, latency dominates every
    collective."""
    weights = run.weights
    for place in BUCKETS:
        size = config.count(place)
        if size is None or not config.stage or (config.stage < 3 and "stage3" in place):
            continue
        if size < FEW_ELEMENTS and (weights is None or weights.total > 20 * size) and "prefetch" not in place:
            said = (
                f"{place} is {size:,} elements: gradients are sent in pieces of {_bytes(size)}, each with the "
                "network's full latency. Set it to 5e7"
                + (f" ({weights.total:,} weights in all)." if weights else ", or to the size of a small model.")
            )
            yield warning("DS503", place, said)
        elif weights is not None and size > 4 * weights.total and size * BYTES_PER_ELEMENT > 2**28:
            said = (
                f"{place} is {size:,} elements, but the model has {weights.total:,} weights: up to {_bytes(size)} per "
                f"rank are wasted. Set it to {_nice(weights.total):,}."
            )
            yield warning("DS503", place, said)


def sizes_are_not_zero(config: Config, run: Context) -> Iterator[Finding]:
    """DS503. deepspeed 0.19.8, runtime/zero/stage3.py, _create_fp16_sub_groups; partitioned_param_coordinator.py."""
    for name, cost in OF_NOTHING.items():
        place = f"zero_optimization.{name}"
        if config.stage == 3 and config.count(place) == 0:
            yield warning("DS503", place, f"{place} is 0: {cost}. Delete it, and DeepSpeed uses 1e9.")


def overlap_fits_in_memory(config: Config, run: Context) -> Iterator[Finding]:
    """DS504. overlap_comm allocates the buffers that the file asks for, however small the model is."""
    place = "zero_optimization.overlap_comm"
    size = 0 if config.is_auto(BUCKETS[0]) else config.count(BUCKETS[0]) or DEFAULT_BUCKET
    many = reduce_buckets(config.stage, config.is_on(place))
    if many > 1 and config.stage and not config.is_off("zero_optimization.contiguous_gradients"):
        half = any(config.is_on(name) or config.is_auto(name) for name in HALVES)
        needed = many * size * (1 if half else 2)
        if needed * BYTES_PER_ELEMENT > MUCH_MEMORY_BYTES:
            said = (
                f"{place} with a reduce_bucket_size of {size:,} elements takes {_bytes(needed)} on each GPU for its "
                f"{many} buckets. Set reduce_bucket_size to 5e7, or overlap_comm to false."
            )
            yield warning("DS504", place, said)


def reduce_buckets(stage: int, overlaps: bool) -> int:
    """The number of buffers of `reduce_bucket_size` in an engine; `allgather_bucket_size` allocates none (deepspeed
    0.19.8, runtime/zero/stage_1_and_2.py, setup_buckets; runtime/utils.py, all_gather_dp_groups). `finetune plan` uses
    it, too."""
    return 2 if overlaps and stage < 3 else 1


def stage_reads_the_key(config: Config, run: Context) -> Iterator[Finding]:
    """DS505. ZeRO-3's keys do nothing below stage 3."""
    keys = config.section("zero_optimization")
    idle = [key for key in keys if key.startswith(OF_STAGE_3) and config.stage < 3]
    if idle:
        yield warning(
            "DS505",
            f"zero_optimization.{idle[0]}",
            f"zero_optimization.stage is {config.stage}, so {', '.join(idle)} {'do' if len(idle) > 1 else 'does'} "
            "nothing. Set the stage to 3, or delete them.",
            *(Drop(at(f"zero_optimization.{key}")) for key in idle if "stage" in keys),
        )


def best_model_can_be_loaded(config: Config, run: Context) -> Iterator[Finding]:
    """DS506. --save_only_model omits DeepSpeed's states, without which its engine cannot load a checkpoint."""
    if run.has_trainer and run.arguments.get("save_only_model") and run.arguments.get("load_best_model_at_end"):
        said = (
            "--save_only_model with --load_best_model_at_end: the checkpoints hold no DeepSpeed states, but "
            "DeepSpeed cannot load a checkpoint without them. Drop one of the two."
        )
        yield error("DS506", "zero_optimization", said)


def stage_takes_the_key(config: Config, run: Context) -> Iterator[Finding]:
    """DS507. deepspeed 0.19.8: runtime/config.py, _do_error_check, and the validators of runtime/zero/config.py."""
    stage = config.stage
    if config.get("gradient_allreduce_op") == "sum" and stage == 3:
        words = 'gradient_allreduce_op is "sum", which DeepSpeed refuses under ZeRO-3. Delete it, or use ZeRO-2.'
        yield error("DS507", "gradient_allreduce_op", words)
    # runtime/zero/stage3.py, __init__: with reduce-scatter.
    scatters = stage == 3 and not config.is_off("zero_optimization.reduce_scatter")
    factor = config.number("gradient_predivide_factor")
    for place, wrong in (
        ("prescale_gradients", config.is_on("prescale_gradients")),
        ("gradient_predivide_factor", factor not in (None, 1)),
    ):
        if scatters and wrong:
            said = f"{place} is {config.get(place)}, which ZeRO-3 refuses with reduce_scatter"
            yield error("DS507", place, f"{said}. Delete it, or use ZeRO-2.")
    place = "zero_optimization.compute_grad_norm"
    if config.get(place) is False and stage not in (1, 2):
        yield error(
            "DS507", place, f"{place} may be false only at stages 1 and 2, but stage is {stage}.", Drop(at(place))
        )
    place = "zero_optimization.legacy_stage1"
    if config.is_on(place):
        yield error("DS507", place, f"{place} is on, which DeepSpeed removed in 0.5.9. Delete it.", Drop(at(place)))
    place = "zero_optimization.offload_optimizer.ratio"
    ratio = config.number(place)
    if ratio is not None and ratio < 1 and stage != 3:
        words = (
            f"{place} is {ratio:g}, but states are partly offloaded only at stage 3, and stage is {stage}. "
            "Delete it to offload all of them."
        )
        yield error("DS507", place, words, Drop(at(place)))


def section_is_there(config: Config, run: Context) -> Iterator[Finding]:
    """DS508. accelerate 1.15, utils/dataclasses.py, and so the Trainer, refuses a config without the section."""
    if run.engine != "deepspeed" and run.pipeline_parallel_size is None and not config.has("zero_optimization"):
        said = (
            "zero_optimization is missing, and the Trainer and accelerate refuse a config without it. Add "
            '"zero_optimization": {"stage": 2}; stage 0 is DeepSpeed without ZeRO.'
        )
        yield error("DS508", "", said, Put(at("zero_optimization"), {"stage": 0}))


def expert_parallelism_fits(config: Config, run: Context) -> Iterator[Finding]:
    """DS509: --expert_parallel_size."""
    if run.expert_parallel_size == 1:
        return
    said = f"--expert_parallel_size is {run.expert_parallel_size}"
    if config.stage in NOT_WITH_EXPERTS:
        why = NOT_WITH_EXPERTS[config.stage]
        yield error("DS509", "zero_optimization.stage", f"{said}, but stage is {config.stage}: {why}. Set it to 2.")
    in_bf16 = config.is_on("bf16.enabled") or (config.is_auto("bf16.enabled") and run.arguments.get("bf16"))
    place = "data_types.grad_accum_dtype"
    if config.stage == 1 and in_bf16 and config.get(place) in ("fp32", "float32"):
        why = "DeepSpeed then trains bf16 under ZeRO-1 by BF16_Optimizer, which is untested with expert parallelism"
        yield error("DS509", place, f"{said}, but {place} is {config.get(place)}: {why}. Delete it, or set stage to 2.")
    if config.has("optimizer") and not is_left_to_the_trainer(config.section("optimizer")):
        why = "experts need a group of their own in the optimizer, which the Trainer makes"
        yield error("DS509", "optimizer", f"{said}, but the optimizer is DeepSpeed's: {why}. Delete the section.")


def _nice(number: float) -> int:
    """The number rounded down to one significant digit."""
    power: int = 10 ** (len(str(int(max(number, 1)))) - 1)
    return max(1, int(number / power)) * power


def _bytes(elements: float) -> str:
    size = elements * BYTES_PER_ELEMENT
    return (
        f"{size / 2**30:.1f} GiB"
        if size >= 2**30
        else f"{size / 2**20:.1f} MiB"
        if size >= 2**20
        else f"{size:,.0f} bytes"
    )
