"""Advice on a plan: notes on settings that do nothing or cost more than they give, and changes that make a plan fit or
lower its peak, the gentlest of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from finetune.dsconfig.rules.zero import reduce_buckets
from finetune.errors import RequestError
from finetune.plan.answers import flags_of, shared_by
from finetune.plan.from_run import job_of
from finetune.plan.job import DEEPSPEED, PIPELINE, TRAINER, Job
from finetune.plan.machine import TOLD
from finetune.plan.plan import Plan, plan
from finetune.plan.search import (
    LAYOUTS,
    MOST_RANKS,
    NVME,
    TRAINER_ALONE,
    Candidate,
    Found,
    Limits,
    goes_with,
    laid_out,
    search,
)
from finetune.plan.values import FP32_BYTES
from finetune.plan.zero import Zero
from finetune.run.run import Run

GIB = 2**30
MUCH = 0.1  # buckets of more than 1 / MUCH times the weights are reported
UNEVEN = 2.0  # times the mean: the load of a rank's experts that a note assumes
FEW_MICRO_BATCHES = 4  # per stage; with fewer, a fifth of a pipeline idles
MOST_MENDS = 4
MOST_OF_HOST = 0.9  # beyond it a plan warns
AS_FAST = 0.95  # times the fastest: no reason to change the config
CHECKPOINTING = "--activation_checkpoint_interval 1"
ADAPTERS = (("use_peft",), ("use_peft", "load_in_4bit"))  # flags that train less, the gentlest first
WITH_ADAPTERS = (TRAINER_ALONE, "zero1", "zero2", "zero3")  # without offload: adapters have few states


def notes(found: Plan) -> list[str]:
    job = found.job
    return [
        *_emulated(found), *_zero3(job), *_buckets(job), *_pipeline(job), *_quantized(job), *_disk(job),
        *_host(found), *_uneven(found),
    ]  # fmt: skip


def _emulated(found: Plan) -> Iterator[str]:
    if (precision := found.job.precision) not in found.machine.peak_flops:
        yield (
            f"the profile of {found.machine.name} has no {precision}: products are timed as in fp32, "
            f"but a CPU that emulates {precision} is several times slower."
        )


def _host(found: Plan) -> Iterator[str]:
    """Where a run may have only its GPUs' share of a node's memory, as in a cloud or under Slurm; and where it leaves
    little for all else."""
    filled = found.host_bytes / found.host_limit_bytes
    if found.job.device == "cpu" or filled > 1:
        return
    if filled > MOST_OF_HOST:
        yield f"this fills {filled:.0%} of a node's host memory; the system, Python and data loaders need some, too."
    here, on_node = min(found.job.world_size, found.job.ranks_per_node), found.machine.ranks_per_node
    share, is_told = found.host_limit_bytes * here // on_node, found.machine.sources.get("host_memory_bytes") == TOLD
    if not is_told and share < found.host_bytes:
        yield (
            f"this needs {found.host_bytes / GIB:,.2f} GiB of host memory. It fits if the run has all of the node's, "
            f"not only the {share / GIB:,.0f} GiB of {here} of its {on_node} GPUs; --host_memory GIB tells what it has."
        )


def _uneven(found: Plan) -> Iterator[str]:
    """What it costs if the experts of one rank get more tokens than those of others."""
    if found.job.expert_parallel_size > 1:
        more = plan(replace(found.job, expert_load=UNEVEN), found.machine)
        yield (
            f"experts are counted as evenly loaded. If those of one rank get {UNEVEN:g} times the mean of their group "
            f"in each layer, it needs {more.peak_bytes / GIB:,.2f} GiB, and all ranks wait for it: a step takes "
            f"{more.seconds.total / found.seconds.total:.2f} times as long."
        )


def _zero3(job: Job) -> Iterator[str]:
    if job.engine != DEEPSPEED or job.zero.stage != 3:
        return
    sizes = [tensor.elements for tensor in job.model.tensors]
    limit = job.zero.persistence_threshold
    whole = [size for size in sizes if size < limit]
    if sum(whole) > 0.5 * sum(sizes):
        yield (
            f"ZeRO-3 does not shard the weights of this model: {len(whole):,} of its {len(sizes):,} parameters, "
            f"{sum(whole) / sum(sizes):.0%} of the elements, are smaller than stage3_param_persistence_threshold "
            f"{limit:,} and stay whole on every rank. Lower it below {max(whole):,}, or use ZeRO-2."
        )
    elif 2 * sum(sizes) < job.zero.max_reuse_distance:
        yield (
            f"the weights that the forward pass gathers stay for the backward pass: all {sum(sizes):,} are used again "
            f"within stage3_max_reuse_distance {job.zero.max_reuse_distance:,}. Lower that and "
            "stage3_max_live_parameters, which also holds back the prefetch, to release them between."
        )


def _buckets(job: Job) -> Iterator[str]:
    if job.engine == TRAINER or job.zero.stage == 0:
        return
    many = bucket_count(job.zero, job.engine)
    size, whole = job.zero.reduce_bucket_size, job.model.parameters
    if size * MUCH > whole:
        yield (
            f"{many} reduce bucket(s) of {size:,} elements take {many * size * job.weight_bytes / GIB:.2f} GiB, and "
            f"the model has {whole:,} parameters. A reduce_bucket_size of {max(whole // 4, 1_000_000):,} does as well."
        )


def bucket_count(zero: Zero, engine: str) -> int:
    """A pipeline has a second one by mistake, see engines/zero12.py, Stage."""
    return 2 if engine == PIPELINE else reduce_buckets(zero.stage, zero.overlap_comm)


def _pipeline(job: Job) -> Iterator[str]:
    if job.stages > 1 and job.accumulation < FEW_MICRO_BATCHES * job.stages:
        idle = (job.stages - 1) / (job.accumulation + job.stages - 1)
        yield (
            f"{job.accumulation} micro-batches through {job.stages} stages leave {idle:.0%} of their time idle. "
            f"--gradient_accumulation_steps {8 * job.stages} or so fills them."
        )


def _quantized(job: Job) -> Iterator[str]:
    if job.zero.quantized_gradients and job.world_size <= job.ranks_per_node:
        yield "zero_quantized_gradients does nothing on one node (deepspeed 0.19.8, runtime/zero/stage3.py)."


def _disk(job: Job) -> Iterator[str]:
    """Per node: fp32 masters and both moments, and the weights in the precision of the computation."""
    share = min(job.ranks_per_node, job.world_size) / job.world_size
    states = 3 * FP32_BYTES * job.model.parameters * share if job.zero.offload_optimizer == "nvme" else 0
    weights = job.weight_bytes * job.model.parameters * share if job.zero.offload_param == "nvme" else 0
    if states or weights:
        yield f"NVMe offload needs {(states + weights) / GIB:,.2f} GiB of disk on each node."


# Changes


def mends(found: Plan) -> list[Candidate]:
    """Changes that make a plan fit: the gentlest sufficient one of each kind."""
    return list(islice(_gentlest(found, lambda tried: tried.fits), MOST_MENDS))


def limits_of(run: Run, job: Job, layouts: Sequence[str] = LAYOUTS) -> Limits:
    """What a search for layouts of a run's `job` may not change. Raises RequestError."""
    precisions = () if any(name in run.given for name in ("bf16", "fp16")) else ("fp32", "bf16", "fp16")
    if job.trains_half:  # 16-bit weights without masters: recipes refuse that --dtype with DeepSpeed
        if TRAINER_ALONE not in layouts:
            raise RequestError(
                f"{run.said('dtype')}, which DeepSpeed does not support. Add {TRAINER_ALONE} to --layouts."
            )
        layouts, precisions = (TRAINER_ALONE,), ()
    return Limits(job.global_batch or None, layouts, precisions, bool(run.value("nvme_path")))


def ways_out(found: Plan, searched: Found | None, run: Run, limits: Limits) -> list[Candidate]:
    """The mends of a plan of `run` that does not fit. The best layout of a search comes first, and then only those
    gentle changes that are faster than it. If it finds nothing on these ranks, adapters come first. Without a search
    (`searched` None) none is made for adapters either."""
    gentle = mends(found)
    if searched is not None and searched.fitting:
        best = _best(searched.fitting, found.job)
        faster = [one for one in gentle if one.samples_per_second > best.samples_per_second]
        return [_chosen(best, found, limits), *faster]
    if searched is None or any(one.plan.job.world_size == found.job.world_size for one in gentle):
        return gentle
    return [*_adapters(found, run, limits), *gentle]


def _best(fitting: Sequence[Candidate], job: Job) -> Candidate:
    """The fastest, or one that keeps the run's own config if it is `AS_FAST`."""
    least = AS_FAST * fitting[0].samples_per_second
    own = (job.engine, job.zero, job.precision)
    kept = (one for one in fitting if (one.plan.job.engine, one.plan.job.zero, one.plan.job.precision) == own)
    return next((one for one in kept if one.samples_per_second >= least), fitting[0])


def _adapters(found: Plan, run: Run, limits: Limits) -> Iterator[Candidate]:
    """The fastest layout with adapters, on weights in 16 and in 4 bits, for a pretrained model."""
    limits = replace(limits, layouts=[name for name in limits.layouts if name in WITH_ADAPTERS], precisions=())
    for names in ADAPTERS:
        is_new = not all(run.value(name) for name in names)
        if is_new and run.value("model_name_or_path") and run.recipe.flags.keys() >= {*names}:
            with suppress(RequestError):  # what this run cannot be combined with, is no way out
                job, _, _ = job_of(run.settled("adapters", **dict.fromkeys(names, True)), found.machine)
                if fitting := search(job, found.machine, limits).fitting:
                    yield _chosen(fitting[0], found, limits, "".join(f"--{name} True " for name in names))


def _chosen(best: Candidate, found: Plan, limits: Limits, ahead: str = "") -> Candidate:
    """A layout of a search, named by the flags that select it."""
    job, shared = best.plan.job, shared_by(found.job, best.plan.job)
    also = [name for name in ("eval_batch", "precision") if getattr(best, name) is not None]
    flags = flags_of(job, best.layout, limits.has_disk, shared, also)
    if found.job.checkpoint_interval and not job.checkpoint_interval:
        flags += " without --activation_checkpoint_interval"
    return Candidate(ahead + flags, best.plan)


def cheaper(found: Plan) -> list[Candidate]:
    """Changes that lower a plan's peak by a tenth, whether or not it fits: the gentlest sufficient one of each kind,
    and of those the three fastest."""
    kept = _gentlest(found, lambda tried: tried.peak_bytes <= 0.9 * found.peak_bytes)
    return sorted(kept, key=lambda one: one.plan.seconds.total)[:3]


def _gentlest(found: Plan, does: Callable[[Plan], bool]) -> Iterator[Candidate]:
    """Of each kind the first that `does`, named by its flags; none that takes as much time and memory as an earlier
    one."""
    kept = list[Candidate]()
    for kind in _changes(found.job):
        tried = (Candidate(words, plan(changed, found.machine)) for words, changed in kind)
        for one in islice((one for one in tried if does(one.plan)), 1):
            if not any(_is_no_better(one.plan, other.plan) for other in kept):
                kept.append(one)
                yield one


def _is_no_better(one: Plan, other: Plan) -> bool:
    is_slower = one.seconds.samples_per_second <= other.seconds.samples_per_second
    return is_slower and one.peak_bytes >= other.peak_bytes and one.host_bytes >= other.host_bytes


def _changes(job: Job) -> Iterator[list[tuple[str, Job]]]:
    again = replace(job, checkpoint_interval=1)
    if not job.checkpoint_interval:
        yield [(CHECKPOINTING, again)]
    halves = [job.eval_batch >> halvings for halvings in range(1, job.eval_batch.bit_length())]
    yield [(f"--per_device_eval_batch_size {batch}", replace(job, eval_batch=batch)) for batch in halves]
    smaller = []
    for micro in (job.micro_batch >> halvings for halvings in range(1, job.micro_batch.bit_length())):
        steps = job.accumulation * job.micro_batch // micro
        flags = f"--per_device_train_batch_size {micro} --gradient_accumulation_steps {steps}"
        smaller.append((flags, replace(job, micro_batch=micro, accumulation=steps)))
    yield smaller
    if job.engine != PIPELINE and not job.trains_half:  # whose recipes refuse other configs
        away = ("zero2_offload", "zero3_offload", NVME)
        kinds = [(("zero1", "zero2", "zero3"), job), (away, job), (("zero2", "zero3", *away), again)]
        is_new = "nvme" not in (job.zero.offload_optimizer, job.zero.offload_param)  # else the run names a folder
        for names, kind in kinds:
            words = "--deepspeed {}{}" if kind is job else f"--deepspeed {{}}{{}} {CHECKPOINTING}"
            disk = {NVME: " --nvme_path FOLDER"} if is_new else {}
            yield [
                (words.format(name, disk.get(name, "")), laid_out(kind, name)) for name in names if goes_with(job, name)
            ]
        most = "zero3" if goes_with(job, "zero3") else "zero2"
        more = [job.world_size << doublings for doublings in range(1, 13)]
        yield [
            (
                f"--nodes {ranks // job.ranks_per_node} --gpus_per_node {job.ranks_per_node} --deepspeed {most} "
                f"{CHECKPOINTING}",
                replace(laid_out(again, most), world_size=ranks),
            )
            for ranks in more
            if ranks <= MOST_RANKS
        ]
