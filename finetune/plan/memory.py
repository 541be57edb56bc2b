"""Memory of each rank of a job, by kind, and its peak: one step, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from finetune.plan.engines.fsdp import Fsdp
from finetune.plan.engines.resident import GATHERED, PIPE, Plain, Resident, Weights
from finetune.plan.engines.zero3 import Zero3
from finetune.plan.engines.zero12 import Bf16Stage, Stage, Zero12
from finetune.plan.families.parts import CLASSES, SPANS
from finetune.plan.job import FSDP, OWN_BASE, PIPELINE, TRAINER, Job, checkpoints_of, stage_weights, tape_of
from finetune.plan.machine import Machine
from finetune.plan.model import Model, Tensor
from finetune.plan.schedule import FORWARD, order_of
from finetune.plan.seconds import stage_bounds
from finetune.plan.step import Ledger, Moment, Pass
from finetune.plan.tape import Tape
from finetune.plan.values import FP32_BYTES, INT64_BYTES
from finetune.plan.zero import Zero

BESIDE_STEPS = ("evaluation", "saving")  # phases outside training steps
TEACHER, REFERENCE, COPIED, CHECKPOINTS = "teacher", "reference", "copy of a checkpoint", "activation checkpoints"
BATCH, WORKSPACE, BUFFERS, SAVED = "batch", "workspace", "model buffers", "weights being saved"
COLUMNS_OF_SHARED = 4  # of texts that ranks share: ids, positions, and labels twice (finetune/data/shares.py)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank by kind: `resident` between steps and `peaks` of each phase on the device; `host`: on the host.
    `timeline`: (phase, place, bytes) on the device."""

    rank: int
    resident: dict[str, int]
    peaks: dict[str, Moment]
    host: dict[str, int]
    timeline: tuple[tuple[str, str, int], ...]
    saving_host_bytes: int = 0  # on the host while weights are saved, on the rank that writes

    @property
    def resident_bytes(self) -> int:
        return sum(self.resident.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values()) + self.saving_host_bytes

    @property
    def step_peak(self) -> Moment:
        """The peak of training steps alone."""
        return max((m for phase, m in self.peaks.items() if phase not in BESIDE_STEPS), key=lambda moment: moment.bytes)

    @property
    def peak(self) -> Moment:
        return max(self.peaks.values(), key=lambda moment: moment.bytes)


def plan_memory(job: Job, machine: Machine, rank: int = 0, bounds: Sequence[int] | None = None) -> RankMemory:
    """The memory of one rank, or of that stage of the first pipeline, in any step but the first, which creates the
    optimizer states. `bounds`: the stages' layers, if they are known."""
    if job.engine == PIPELINE or job.zero.stage in (1, 2):  # the last rank's part may hold padding
        return _planned(job, machine, rank, tuple(bounds or ()))
    first = _planned(job, machine, 0, ())
    return replace(first, rank=rank, saving_host_bytes=0) if rank else first


@lru_cache(maxsize=128)
def _planned(job: Job, machine: Machine, rank: int, bounds: tuple[int, ...]) -> RankMemory:
    device = Ledger()
    host, tied = device if job.device == "cpu" else Ledger(), set[Tensor]()
    part, flying = None, 1
    if job.engine == PIPELINE:
        cut = bounds or stage_bounds(job, machine)
        part, flying = range(cut[rank], cut[rank + 1]), min(job.stages - rank, job.accumulation)
        tensors = stage_weights(job, part)
        tied = {*tensors} & {*stage_weights(job, range(cut[1]))} if rank else tied
        layout = _layout(job, tensors, 0, host)
    else:
        layout = _layout(job, job.held.tensors, rank, host)
    tape = tape_of(job, part)
    layout.trace(tape)
    layout.hold(device)
    if sizes := checkpoints_of(job, part):
        # Pinned memory comes in powers of two (ATen/core/CachingHostAllocator.h, allocate).
        host.take(CHECKPOINTS, flying * sum(1 << (size - 1).bit_length() for size in sizes))
    device.take(BATCH, batch_bytes(job))
    if job.teacher is not None and job.reference != OWN_BASE:
        ranks = job.world_size if job.zero.stage == 3 else 1
        held = sum(-(-one.elements // ranks) for one in job.teacher.tensors) * job.of_teacher.weight_bytes
        device.take(REFERENCE if job.reference else TEACHER, held)
        device.take(BUFFERS, _buffer_bytes(job, job.teacher) if job.reference else 0)
    if job.engine == PIPELINE:
        device.take(PIPE, _pipe_bytes(job, rank))
    if buffers := _buffer_bytes(job, job.held):
        device.take(BUFFERS, buffers)
    if job.device != "cpu":
        # torch's handle pool gives the backward pass's thread its own cuBLAS workspace
        # (aten/src/ATen/cuda/CublasHandlePool.cpp).
        device.take(WORKSPACE, 2 * machine.workspace_bytes)
    device.peaks.clear()
    resident = dict(device.live)
    if job.engine == PIPELINE:
        _pipeline_step(job, tape, layout, device, rank)
    else:
        _step(job, tape, layout, device)
    layout.step(device)
    device.mark("step")
    if job.eval_batch and job.engine != PIPELINE:
        _evaluate(job, layout, device)
    saved = _save(job, layout, device, tied)
    away = {} if host is device else dict(host.live)
    return RankMemory(rank, resident, device.peaks, away, tuple(device.timeline), 0 if host is device else saved)


def _buffer_bytes(job: Job, model: Model) -> int:
    return sum(buffer.bytes(job.weight_bytes) for buffer in model.buffers)


def _evaluate(job: Job, layout: Resident, device: Ledger) -> None:
    """One evaluation batch, with ids and labels, of whole texts. Logits are reduced on the device, batch by batch, as
    the recipes do (preprocess_logits_for_metrics)."""
    asked = replace(job, micro_batch=job.eval_batch, checkpoint_interval=0, baseline=False, sequence_parallel_size=1)
    tape = tape_of(asked, drops=False)
    size = batch_bytes(replace(asked, accumulation=1))
    device.phase = "evaluation"
    device.take(BATCH, size, "batch")
    layout.trace(tape)
    layout.begin(True, True)
    Pass(tape, device, layout).evaluate()
    layout.after_forward(device)
    if job.teacher is not None and job.reference:
        _ask_teacher(asked, device)
    device.give(BATCH, size)


def _save(job: Job, layout: Resident, device: Ledger, tied: set[Tensor]) -> int:
    """Bytes on the host of the rank that writes the weights. ZeRO-3 gathers them module by module on all ranks
    (deepspeed 0.19.8, runtime/engine.py, _zero3_consolidated_16bit_state_dict); the others write what they hold."""
    device.phase = "saving"
    if isinstance(layout, Zero3):
        largest = max(sum(layout.elements[name] for name in names) for names in layout.modules.values())
        device.passing(GATHERED, 2 * largest * layout.weights.bytes_each, "the largest module")
    weights = layout.weights
    if job.expert_parallel_size > 1:  # finetune/training/expert_parallel.py, whole: gathered, and joined
        largest = max(tensor.elements * tensor.holders for tensor in weights.tensors if tensor.holders > 1)
        device.passing(GATHERED, 2 * largest * weights.bytes_each, "the largest tensor of experts")
        weights = replace(weights, tensors=job.model.tensors)
    return _saved_bytes(job, weights, tied, isinstance(layout, Zero3)) if layout.rank == 0 else 0


def _saved_bytes(job: Job, weights: Weights, tied: set[Tensor], gathers: bool) -> int:
    """A pipeline's stages write fp32, without weights `tied` to the first (finetune/training/pipeline/checkpoint.py,
    whole_weights); --merge_adapter also writes fp32, at the end (finetune/models/adapters.py, write_merged). Of a model
    with an adapter, the Trainer alone and ZeRO-3 copy only what is trained; other engines copy all weights before peft
    selects these (transformers 5.23, Trainer.save_model; accelerate 1.15, accelerator.py, get_state_dict)."""
    if job.engine == PIPELINE or job.merges_adapter:
        return FP32_BYTES * (weights.elements - sum(tensor.elements for tensor in tied))
    if job.model.lora is not None and (job.engine == TRAINER or gathers):
        return weights.trained_elements * weights.bytes_each
    return weights.bytes


def _step(job: Job, tape: Tape, layout: Resident, device: Ledger) -> None:
    """Micro-batches in sequence; the second stands for all between the first and the last. A reference runs between the
    forward and the backward pass (finetune/training/preference.py) and yields one number per text."""
    many = min(job.accumulation, 3)
    for micro in range(many):
        answer = _ask_teacher(job, device) if job.teacher is not None and not job.reference else 0
        layout.begin(micro == 0, micro == many - 1)
        passed = Pass(tape, device, layout)
        passed.forward()
        layout.after_forward(device)
        if job.teacher is not None and job.reference:
            _ask_teacher(job, device)
        passed.backward()
        layout.end(device)
        if answer:
            device.give(TEACHER, answer)


def _ask_teacher(job: Job, device: Ledger) -> int:
    """Runs the teacher's forward pass before the student's. Returns the bytes kept for the loss (finetune/training/
    distilling.py): hidden states if it is computed in chunks, else logits, and log-probabilities of both."""
    asked = job.of_teacher
    tape = tape_of(asked, drops=False)
    given = (Weights(asked.model.tensors, asked.weight_bytes), Zero(stage=3), job.stepping, job.world_size, 0, Ledger())
    layout = Zero3(*given) if job.zero.stage == 3 else Plain(*given, buckets=False, is_engine=False)
    if isinstance(layout, Zero3):
        layout.trace(tape, goes_back=False)
    layout.begin(True, True)
    before = device.live.get(GATHERED, 0)
    Pass(tape, device, layout).evaluate(REFERENCE if job.reference else TEACHER)
    device.give(GATHERED, device.live.setdefault(GATHERED, 0) - before)  # the few persistent parameters are not counted
    if job.reference:
        return 0
    if job.model.head == CLASSES:
        kept = job.micro_batch * job.model.sizes.labels * asked.weight_bytes
    elif job.loss_chunk_tokens:
        kept = job.batch.positions * asked.model.hidden_size * asked.weight_bytes
    else:
        kept = job.batch.positions * asked.model.vocab_size * (asked.weight_bytes + 2 * FP32_BYTES)
    device.take(TEACHER, kept, "the teacher's output")
    return kept


def _pipeline_step(job: Job, tape: Tape, layout: Resident, device: Ledger, stage: int) -> None:
    """Micro-batches, several of them in flight, in the order of DeepSpeed's schedule."""
    last = job.accumulation - 1
    flying: dict[int, Pass] = {}
    for kind, micro in order_of(stage, job.stages, job.accumulation):
        if kind == FORWARD:
            flying[micro] = Pass(tape, device, layout)
            flying[micro].forward()
            continue
        layout.begin(micro == 0, micro == last)
        flying.pop(micro).backward()
    layout.end(device)


def _pipe_bytes(job: Job, stage: int) -> int:
    """Buffers that the pipeline engine keeps between steps (runtime/pipe/engine.py): one to receive from each
    neighbour, as large as the hidden state; a copy of each input in flight, and its gradient; on the last stage also
    its output of each, the logits or, if the loss makes them in chunks, hidden states."""
    hidden = job.batch.positions * job.model.hidden_size * job.weight_bytes
    logits = job.batch.positions * (job.model.vocab_size or job.model.sizes.labels) * job.weight_bytes
    output = hidden if job.loss_chunk_tokens else logits
    flying = min(max(2, min(job.stages - stage, job.accumulation)), job.accumulation)
    neighbours = (stage > 0) + (stage < job.stages - 1)
    copies = 2 * hidden if stage > 0 else 0
    return neighbours * hidden + flying * (copies + (output if stage == job.stages - 1 else 0))


def _layout(job: Job, tensors: tuple[Tensor, ...], rank: int, host: Ledger) -> Resident:
    zero = job.zero
    weights = Weights(tensors, job.weight_bytes, job.frozen_bytes)
    given = (weights, zero, job.stepping, job.data_parallel_size, rank, host)
    if job.engine == FSDP:
        return Fsdp(*given)
    if job.engine == TRAINER:
        return Plain(*given, buckets=job.world_size > 1, is_engine=False)
    if zero.stage == 0 and job.engine != PIPELINE:
        return Plain(*given, buckets=False, is_engine=True)
    if job.precision == "bf16" and zero.stage == 1 and zero.accumulates_in_fp32 and zero.offload_optimizer == "none":
        return Bf16Stage(*given)
    if job.engine == PIPELINE:
        return Stage(*given)
    return Zero3(*given) if zero.stage == 3 else Zero12(*given)


def batch_bytes(job: Job) -> int:
    """Token ids and labels of all micro-batches of a step: the Trainer loads them before the first runs
    (transformers 5.23, Trainer.get_batch_samples). One more is prefetched by accelerate and stays on the host (1.15,
    data_loader.py, DataLoaderShard.__iter__). MLPs and ResNets read floats."""
    rows = job.micro_batch * (job.accumulation + (job.device == "cpu"))
    if not job.model.reads_text:
        pixels = job.model.sizes("num_channels", default=3) * job.image_size**2
        numbers = job.model.hidden_size if job.model.family == "mlp" else pixels
        return rows * (numbers * FP32_BYTES + INT64_BYTES)
    if job.texts > 1:  # per text ids, mask, targets and a place, per row labels (finetune/data/preference_batches.py)
        return rows * (INT64_BYTES * (job.texts * (3 * job.tokens + 1) + 2) + 1)
    documents = rows * job.tokens * INT64_BYTES if job.document_mask else 0  # positions
    if (sharing := job.sequence_parallel_size) > 1:
        # Ranks that share a text make its mask before the forward pass, and keep it until they make the next.
        documents += job.micro_batch * job.tokens**2 if documents and job.attention == "sdpa" else 0
        return INT64_BYTES * rows * COLUMNS_OF_SHARED * (job.tokens // sharing) + documents
    labels = {CLASSES: 1, SPANS: 2}.get(job.model.head, job.tokens)
    labels = labels if job.targets is None else 2 * job.targets  # and the decoder's inputs: the labels, shifted
    return INT64_BYTES * rows * (job.tokens + labels) + documents
