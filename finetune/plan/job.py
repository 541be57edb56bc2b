"""What is planned: a model, a batch, a layout over ranks. Everything that decides a step's memory and time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile

from finetune.plan.exchange import SharedTape
from finetune.plan.forward.expert_parallel import held_by_rank
from finetune.plan.forward.parts import Batch, Setting
from finetune.plan.forward.resnet import resnet
from finetune.plan.forward.stages import entries_of, stage
from finetune.plan.forward.traced import tape_of_trace
from finetune.plan.model import Model, Tensor
from finetune.plan.optimizers import Optimizer
from finetune.plan.tape import Tape
from finetune.plan.tiles import tiled
from finetune.plan.values import FP32_BYTES, HALF_BYTES, Numbers
from finetune.plan.zero import Zero

TRAINER, FSDP, DEEPSPEED, PIPELINE = "trainer", "fsdp", "deepspeed", "pipeline"
SECOND, OWN_BASE = "second", "base"
NO_ZERO, ADAM = Zero(), Optimizer("adam")


@dataclass(frozen=True)
class Job:
    """`engine`: the Trainer alone (DDP on several ranks), FSDP, DeepSpeed under the Trainer, or DeepSpeed's pipeline.
    `micro_batch`: samples per rank; `tokens`: per sample (1 if not text); `image_size`: in pixels. `targets`: target
    tokens per sample of an encoder-decoder; None: as many as `tokens`, or another kind of model. `eval_batch`:
    samples per rank in an evaluation; 0: no evaluation. `texts`: per preference sample, in one forward pass; with
    `baseline` (KTO) only the first is trained on, and the second runs before it, without gradients."""

    model: Model
    engine: str = TRAINER
    zero: Zero = NO_ZERO
    world_size: int = 1
    ranks_per_node: int = 8
    stages: int = 1
    partition_method: str = "balanced"
    micro_batch: int = 1
    tokens: int = 512
    targets: int | None = None
    image_size: int = 224
    accumulation: int = 1
    eval_batch: int = 0
    precision: str = "fp32"
    tf32: bool | None = None  # whether products in fp32 are rounded to TF32; None: convolutions alone
    optimizer: Optimizer = ADAM
    checkpoint_interval: int = 0
    attention: str = "sdpa"
    loss_chunk_tokens: int = 0
    device: str = "cuda"
    dtype: str = "float32"  # of weights under the Trainer alone, frozen or all; DeepSpeed uses its own
    teacher: Model | None = None  # a frozen second model, run in each micro-batch
    teacher_dtype: str = "float32"  # likewise
    saves_beside_from: int | None = None  # the least bytes of a checkpoint that is saved asynchronously; None: none is
    merges_adapter: bool = False  # at the end of the run, into a copy of the model in fp32 on the host
    reference: str = ""  # what `teacher` is in preferences: SECOND, a separate model; OWN_BASE, this model's base
    texts: int = 1
    baseline: bool = False
    document_mask: bool = False  # documents in a text do not attend to one another
    looks_ahead: bool = False  # with accumulation, the Trainer runs each micro-batch before the step, for a router loss
    sequence_parallel_size: int = 1  # ranks that share each text
    expert_parallel_size: int = 1  # ranks that hold the experts of each layer together
    expert_load: float = 1.0  # tokens for the experts of the rank that is planned, relative to the mean of its group
    checkpoints_on_host: bool = False  # with `checkpoint_interval`: what recomputed layers save lies on the host
    tiled_mlp_num_shards: int = 0  # parts of the tokens on which each MLP is computed in turn; 0: it is not tiled
    looks_at_loss: bool = True  # in each step, before the optimizer's: logging_nan_inf_filter, or --on_nan

    @property
    def data_parallel_size(self) -> int:
        """Ranks with the same layers, over which ZeRO shards."""
        return self.world_size // self.stages

    @property
    def readers(self) -> int:
        """Ranks, or groups of ranks that share texts, that read different samples."""
        return self.data_parallel_size // self.sequence_parallel_size

    @property
    def group(self) -> int:
        """Neighbors that share texts or experts, or both."""
        return math.lcm(self.sequence_parallel_size, self.expert_parallel_size)

    @property
    def held(self) -> Model:
        """The model as one rank holds it: with its part of the experts."""
        size = self.expert_parallel_size
        return held_by_rank(self.model, size) if size > 1 else self.model

    @property
    def global_batch(self) -> int:
        """Samples per step, over all ranks."""
        return self.micro_batch * self.accumulation * self.readers

    @property
    def sample_tokens(self) -> int:
        """Input and target tokens of a sample; for preferences, those of both texts."""
        return self.texts * self.tokens + (self.targets or 0)

    @property
    def batch(self) -> Batch:
        rows = self.micro_batch * (1 if self.baseline else self.texts)
        sharing = self.sequence_parallel_size
        own = self.tokens // sharing
        return Batch(rows, own, self.image_size, self.targets, sharing, self.expert_load, self.document_mask)

    @property
    def uses_autocast(self) -> bool:
        """Half precision without DeepSpeed: weights usually stay in fp32; FSDP gathers them in half precision."""
        return self.engine in (TRAINER, FSDP) and self.precision != "fp32"

    @property
    def trains_half(self) -> bool:
        """Whether trained weights, their gradients and states are in 16 bits, without masters (--dtype)."""
        is_half = self.precision != "fp32" and self.dtype != "float32"
        return is_half and self.engine == TRAINER and self.model.lora is None

    @property
    def stepping(self) -> Optimizer:
        """The optimizer, with states in the precision of its weights."""
        return replace(self.optimizer, bytes_each=HALF_BYTES) if self.trains_half else self.optimizer

    @property
    def runs_ahead(self) -> bool:
        """Whether the host launches the end of a step while the device still computes its passes. DeepSpeed and the
        loss scaler of fp16 wait for them anyway (torch 2.13, amp/grad_scaler.py, _maybe_opt_step)."""
        return not self.looks_at_loss and self.engine in (TRAINER, FSDP) and self.precision != "fp16"

    @property
    def weight_bytes(self) -> int:
        is_whole = self.precision == "fp32" or (self.engine == TRAINER and not self.trains_half)
        return FP32_BYTES if is_whole else HALF_BYTES

    @property
    def frozen_bytes(self) -> int:
        """Of frozen weights, as they are held."""
        if not self.uses_autocast:
            return self.weight_bytes
        return FP32_BYTES if self.dtype == "float32" else HALF_BYTES

    @property
    def of_teacher(self) -> Job:
        """The teacher's job, on the same batches. In 16 bits it computes as DeepSpeed's engine does. A second model
        beside the Trainer is outside accelerate's autocast, so in fp32 it computes in fp32."""
        assert self.teacher is not None
        is_half = self.precision != "fp32" and (self.engine == DEEPSPEED or self.teacher_dtype != "float32")
        model = replace(self.teacher, tensors=tuple(replace(one, trains=False) for one in self.teacher.tensors))
        engine = DEEPSPEED if is_half else TRAINER
        precision = "fp32" if self.reference == SECOND and not is_half else self.precision
        return replace(
            self, model=model, teacher=None, engine=engine, precision=precision, dtype=self.teacher_dtype,
            checkpoint_interval=0,
        )  # fmt: skip

    @property
    def numbers(self) -> Numbers:
        is_fp16, half_weights = self.precision == "fp16", self.engine == FSDP or self.trains_half
        frozen = self.weight_bytes if self.engine == FSDP else self.frozen_bytes  # FSDP gathers all in one precision
        saves_inputs = self.engine == DEEPSPEED and self.zero.stage == 3  # deepspeed 0.19.8, runtime/zero/linear.py
        return Numbers(frozen, self.device, self.attention, self.uses_autocast, is_fp16, half_weights, saves_inputs)


def build_tape(model: Model, batch: Batch, numbers: Numbers, checkpoint_interval: int = 0, part: range | None = None,
               loss_chunk_tokens: int = 0, shards: int = 0, offloads: bool = False) -> Tape:  # fmt: skip
    """The tape of one micro-batch on one rank. `part`: a pipeline stage, for families that support it; `shards`: of a
    tiled MLP; `offloads`: what recomputed layers save lies on the host."""
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    packed = frozenset(tensor.name for tensor in model.tensors if tensor.is_packed)
    given = numbers, shapes, model.lora, packed, bool(checkpoint_interval)
    tape = Tape(*given) if batch.sharing == 1 else SharedTape(*given, sharing=batch.sharing, rows=batch.rows)
    tape.offloads = offloads
    ahead = {tensor.layer for tensor in takewhile(lambda tensor: tensor.layer != 0, model.tensors)} - {None}
    setting = Setting(
        tape, model.sizes, batch, model.family, model.head, checkpoint_interval, loss_chunk_tokens, len(ahead)
    )
    if model.trace is None:
        tape.result = resnet(setting)
    else:
        trace = model.trace.of(batch.tokens)
        if trace.in_fp32 and numbers.bytes_each == FP32_BYTES and not numbers.autocast:
            trace = trace.in_fp32
        tape.result = stage(trace, setting, part) if part else tape_of_trace(trace, setting)
    return tiled(tape, shards)


_tape = lru_cache(maxsize=128)(build_tape)


def tape_of(job: Job, part: range | None = None, drops: bool = True) -> Tape:
    """A micro-batch of one rank, or of the pipeline stage with the layers `part`. `drops`: with dropout."""
    return _tape(job.held, replace(job.batch, drops=drops), job.numbers, job.checkpoint_interval, part,
                 job.loss_chunk_tokens, job.tiled_mlp_num_shards, job.checkpoints_on_host)  # fmt: skip


def checkpoints_of(job: Job, part: range | None = None) -> tuple[int, ...]:
    """Bytes of the hidden states of a micro-batch that each recomputed layer, of a stage those in `part`, saves on the
    host; empty if it saves them on the device."""
    segments = tape_of(job, part).segments if job.checkpoints_on_host else ()
    return tuple(segment.entry[0].bytes for segment in segments if segment.recomputed)


def layers_of(job: Job) -> Tape:
    """For a pipeline: each entry of the flat list of layers as its own segment."""
    assert job.model.trace is not None
    entries = range(len(entries_of(job.model.trace)))
    interval = min(job.checkpoint_interval, 1)  # groups of layers are recomputed whole, whatever their size
    return tape_of(replace(job, checkpoint_interval=interval), entries)


def stage_weights(job: Job, part: range) -> tuple[Tensor, ...]:
    """The weights that a pipeline stage uses."""
    segments = layers_of(job).segments[part.start : part.stop]
    used = {name for segment in segments for op in segment.ops for name in op.weights}
    return tuple(tensor for tensor in job.model.tensors if tensor.name in used)
