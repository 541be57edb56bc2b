"""What is planned: a model, a batch, a layout over ranks. Everything that memory and time of a step hang on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from finetune.plan.forward import build_tape
from finetune.plan.forward.listed import LISTED
from finetune.plan.forward.parts import Batch, Part
from finetune.plan.model import Model
from finetune.plan.optimizers import Optimizer
from finetune.plan.tape import Tape
from finetune.plan.values import FP32_BYTES, HALF_BYTES, Numbers
from finetune.plan.zero import Zero

TRAINER, FSDP, DEEPSPEED, PIPELINE = "trainer", "fsdp", "deepspeed", "pipeline"
SECOND, OWN_BASE = "second", "base"
NO_ZERO, ADAM = Zero(), Optimizer("adam")


@dataclass(frozen=True)
class Job:
    """`engine`: the Trainer alone (DDP on several ranks), DeepSpeed under the Trainer, or DeepSpeed's pipeline.
    `micro_batch` is in samples a rank, `tokens` in each sample (1 of what is no text); `image_size` in pixels.
    `targets`: tokens that are written of each, by an encoder with a decoder; None of others, and there as many.
    `eval_batch`: samples a rank of an evaluation; 0: there is none. `texts`: those of a sample of preferences, in one
    forward pass; with `baseline` (KTO) only the first is trained on, and the second asked before, without gradients."""

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
    optimizer: Optimizer = ADAM
    checkpoint_interval: int = 0
    attention: str = "sdpa"
    loss_chunk_tokens: int = 0
    device: str = "cuda"
    dtype: str = "float32"  # of weights under the Trainer alone, frozen ones or all; DeepSpeed has them as it computes
    teacher: Model | None = None  # a frozen model beside it, asked in each micro-batch
    teacher_dtype: str = "float32"  # likewise
    saves_beside_from: int | None = None  # bytes of a checkpoint, to be written while the training goes on; None: none
    reference: str = ""  # what `teacher` is to preferences: SECOND, a model of its own; OWN_BASE, this one's base
    texts: int = 1
    baseline: bool = False

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.stages

    @property
    def global_batch(self) -> int:
        """Samples a step, over all ranks."""
        return self.micro_batch * self.accumulation * self.data_parallel_size

    @property
    def sample_tokens(self) -> int:
        """Of a sample, what is read and what is written; of preferences both texts."""
        return self.texts * self.tokens + (self.targets or 0)

    @property
    def batch(self) -> Batch:
        rows = self.micro_batch * (1 if self.baseline else self.texts)
        return Batch(rows, self.tokens, self.image_size, self.targets)

    @property
    def uses_autocast(self) -> bool:
        """Half precision without DeepSpeed: weights stay in fp32 as a rule; FSDP gathers them in half precision."""
        return self.engine in (TRAINER, FSDP) and self.precision != "fp32"

    @property
    def trains_half(self) -> bool:
        """Whether trained weights, their gradients and states are in 16 bits, without masters (--dtype)."""
        is_half = self.precision != "fp32" and self.dtype != "float32"
        return is_half and self.engine == TRAINER and self.model.lora is None

    @property
    def stepping(self) -> Optimizer:
        """The optimizer, with states as precise as the weights that it steps."""
        return replace(self.optimizer, bytes_each=HALF_BYTES) if self.trains_half else self.optimizer

    @property
    def weight_bytes(self) -> int:
        is_whole = self.precision == "fp32" or (self.engine == TRAINER and not self.trains_half)
        return FP32_BYTES if is_whole else HALF_BYTES

    @property
    def frozen_bytes(self) -> int:
        is_half = self.model.lora is not None and self.uses_autocast and self.dtype != "float32"
        return HALF_BYTES if is_half else self.weight_bytes

    @property
    def of_teacher(self) -> Job:
        """A job of the teacher, of the same batches: one in 16 bits computes as DeepSpeed's engine does. A second model
        beside the Trainer is not in accelerate's autocast, and one in fp32 computes in it."""
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
        return Numbers(self.frozen_bytes, self.device, self.attention, self.uses_autocast, is_fp16, half_weights)


def tape_of(job: Job, part: Part | None = None) -> Tape:
    """A micro-batch of one rank, or of the stage that has `part` of a pipeline's layers."""
    return _tape(job.model, job.batch, job.numbers, job.checkpoint_interval, part, job.loss_chunk_tokens)


def layers_of(job: Job) -> Tape:
    """Of a pipeline's job, each entry of the flat list of layers as a segment of its own."""
    entries = Part(0, job.model.layers + sum(LISTED[job.model.family]))
    interval = min(job.checkpoint_interval, 1)  # groups of layers are recomputed whole, however large
    return _tape(job.model, job.batch, job.numbers, interval, entries, job.loss_chunk_tokens)


_tape = lru_cache(maxsize=128)(build_tape)
