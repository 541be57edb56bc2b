"""The parts of a tape: number formats, tensors, operators. `finetune.plan.tape` records them."""

from __future__ import annotations

from dataclasses import dataclass, field

FP32_BYTES = 4
HALF_BYTES = 2
INT64_BYTES = 8
FOREVER = 1 << 60
ATTENTION, FLASH_ATTENTION_2 = "attention", "flash_attention_2"  # fused, by torch or by the package of that name
# Exchanges of neighbors: tokens for heads, if they share texts; tokens for what experts make of them.
SENT = ALL_TO_ALL, DISPATCH = "all_to_all", "dispatch"
TILED_MLP = "tiled_mlp"
CHUNKED_LOSS = "chunked_loss"  # an operator that moves bytes besides its products


@dataclass(frozen=True)
class Numbers:
    """Number formats. `bytes_each` of weights and activations: 4, or 2 in bf16 and fp16. With `autocast` trained
    weights stay in fp32 and torch.autocast computes matrix products in half precision; `bytes_each` is then that of
    frozen weights, 2 if --dtype stores them in half precision."""

    bytes_each: int = FP32_BYTES
    device: str = "cpu"  # or "cuda"
    attention: str = "sdpa"  # or "eager", "flash_attention_2"
    autocast: bool = False
    is_fp16: bool = False  # half precision is fp16, not bf16
    half_weights: bool = False  # under autocast trained weights are in half precision too: by FSDP or --dtype
    saves_inputs: bool = False  # linear layers save their input even if the weight is frozen, as ZeRO-3's own do

    @property
    def product_bytes(self) -> int:
        """Per element of a matrix product's output."""
        return HALF_BYTES if self.autocast else self.bytes_each


@dataclass(frozen=True)
class Lora:
    """Adapters of `rank` on linear layers whose names end in a target; all else is frozen (arXiv 2106.09685, peft),
    except copies of the modules that are `saved`."""

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

    def back(self, first: bool = True, second: bool = True) -> tuple[Gemm, ...]:
        """The products that make the gradients of its factors, of those that need one."""
        both = (Gemm(self.m, self.k, self.n, self.many), first), (Gemm(self.k, self.n, self.m, self.many), second)
        return tuple(gemm for gemm, is_needed in both if is_needed)


@dataclass(eq=False)
class Storage:
    """Memory that one or more tensors share."""

    bytes: int
    last_use: int = -1  # the last operator of the forward pass that needs it
    copies: int = 1  # that a backward pass needs: of a loop's iteration that stands for others, one of each


@dataclass(eq=False)
class Value:
    """A tensor of the pass. Views share `storage`. `needs_grad`: a gradient flows to it."""

    elements: int
    bytes_each: int
    storage: Storage
    needs_grad: bool = True

    @property
    def bytes(self) -> int:
        return self.elements * self.bytes_each


@dataclass(eq=False)
class Op:
    """One operator. `moved`: bytes that it moves; `moved_back`: in its backward pass. `weights`: the parameters that it
    uses; its backward pass makes the gradients of the trained ones."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    saved: tuple[Storage, ...] = ()
    weights: tuple[str, ...] = ()
    passes_on: bool = False  # its backward pass passes the same gradient on, to inputs as large as the output
    narrows: bool = False  # its backward pass passes on views of the gradient, as cat's does
    scratch: int = 0  # temporary bytes while its outputs exist
    scratch_back: int = 0  # temporary bytes of its backward pass, while the gradients that it makes exist
    gemms: tuple[Gemm, ...] = ()
    gemms_back: tuple[Gemm, ...] = ()
    gemms_again: tuple[Gemm, ...] = ()  # products that the backward pass computes again
    moved: int = 0
    moved_back: int = 0
    moved_ahead: int = 0  # by a kernel that makes a factor of its products, each time
    kernels: int = 1
    kernels_back: int = 1
    module: str = ""  # the weights' module, because ZeRO-3 gathers by module
    times: int = 1  # how often it runs, in a loop's iteration that stands for others


@dataclass
class Segment:
    """Operators that belong together: a block, or what comes before or after the blocks. A `recomputed` one saves only
    its `entry` and runs again in the backward pass. `like`: the index of the segment that this one repeats."""

    name: str
    ops: list[Op] = field(default_factory=list)
    recomputed: bool = False
    entry: tuple[Value, ...] = ()
    start: int = 0  # the index of its first operator
    like: int | None = None
