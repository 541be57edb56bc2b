"""What a tape is made of: numbers, tensors, operators. `finetune.plan.tape` records them."""

from __future__ import annotations

from dataclasses import dataclass, field

FP32_BYTES = 4
HALF_BYTES = 2
INT64_BYTES = 8
FOREVER = 1 << 60
ATTENTION, FLASH_ATTENTION_2 = "attention", "flash_attention_2"  # fused, by torch or by the package of that name
CHUNKED_LOSS = "linear_cross_entropy"  # an operator that moves bytes beside its products


@dataclass(frozen=True)
class Numbers:
    """What floats are computed with. `bytes_each` of weights and activations: 4, or 2 in bf16 and fp16. With `autocast`
    trained weights stay in fp32, and torch.autocast makes matrix products half precise; `bytes_each` is then of
    frozen weights, 2 where --dtype keeps them so."""

    bytes_each: int = FP32_BYTES
    device: str = "cpu"  # or "cuda"
    attention: str = "sdpa"  # or "eager", "flash_attention_2"
    autocast: bool = False
    is_fp16: bool = False  # what is half precise is fp16, not bf16
    half_weights: bool = False  # under autocast trained weights too are half precise: gathered by FSDP, or kept so

    @property
    def is_half(self) -> bool:
        return self.bytes_each < FP32_BYTES

    @property
    def product_bytes(self) -> int:
        """Of what a matrix product makes."""
        return HALF_BYTES if self.autocast else self.bytes_each


@dataclass(frozen=True)
class Lora:
    """Adapters of `rank` on linear layers whose names end in a target; all else is frozen (arXiv 2106.09685, peft), but
    copies of the modules that are `saved`."""

    rank: int
    targets: tuple[str, ...]
    dropout: float = 0.0
    saved: tuple[str, ...] = ()
    is_dora: bool = False  # arXiv 2402.09353

    def adapts(self, module: str) -> bool:
        is_target = any(module == target or module.endswith(f".{target}") for target in self.targets)
        return is_target and not self.saves(module)

    def saves(self, module: str) -> bool:
        return any(f".{one}." in f".{module}." for one in self.saved)


@dataclass(frozen=True)
class Gemm:
    """A product of (m, k) and (k, n), `many` times."""

    m: int
    n: int
    k: int
    many: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.many

    @property
    def back(self) -> tuple[Gemm, Gemm]:
        """The gradients of both factors."""
        return Gemm(self.m, self.k, self.n, self.many), Gemm(self.k, self.n, self.m, self.many)


@dataclass(eq=False)
class Storage:
    """Bytes of memory that one or more tensors look at."""

    bytes: int
    last_use: int = -1  # the operator behind which the forward pass needs it no more


@dataclass(eq=False)
class Slot:
    """Where the gradient of a tensor adds up, its views' too."""


@dataclass(eq=False)
class Value:
    """A tensor of the pass. Views share `storage` and `slot`. `needs_grad`: a gradient flows to it."""

    elements: int
    bytes_each: int
    storage: Storage
    needs_grad: bool = True
    slot: Slot = field(default_factory=Slot)

    @property
    def bytes(self) -> int:
        return self.elements * self.bytes_each


@dataclass(eq=False)
class Op:
    """One operator. Bytes that it moves: `moved`, and `moved_back` in its backward pass. `weights` are the parameters
    that it uses; its backward pass makes the gradients of those that are trained."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    saved: tuple[Storage, ...] = ()
    weights: tuple[str, ...] = ()
    passes_on: bool = False  # its backward pass hands the gradient on as it is, to inputs as large as the output
    narrows: bool = False  # it hands views of the gradient on, as cat's does
    scratch: int = 0  # bytes that it takes for itself while its outputs are there
    scratch_back: int = 0  # the same of its backward pass, while the gradients that it makes are there
    gemms: tuple[Gemm, ...] = ()
    gemms_back: tuple[Gemm, ...] = ()
    moved: int = 0
    moved_back: int = 0
    kernels: int = 1
    kernels_back: int = 1
    module: str = ""  # of the weights, for ZeRO-3 gathers by module


@dataclass
class Segment:
    """Operators that belong together: a block, or what is before and behind the blocks. A `recomputed` one keeps its
    `entry` alone and runs again in the backward pass. `like` is the place of the segment that this one repeats."""

    name: str
    ops: list[Op] = field(default_factory=list)
    recomputed: bool = False
    layer: int | None = None
    entry: tuple[Value, ...] = ()
    start: int = 0  # the number of its first operator
    like: int | None = None
