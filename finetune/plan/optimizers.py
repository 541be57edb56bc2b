"""What optimizers store for each parameter, and what memory and traffic their steps need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.dsconfig.load import wants_cpu_adam
from finetune.errors import RequestError
from finetune.plan.values import FP32_BYTES

BLOCK = 256  # elements that share a quantization constant (bitsandbytes 0.45, optim/optimizer.py, Optimizer2State)
SMALLEST_QUANTIZED = 4096  # elements, below which bitsandbytes keeps a state in fp32 (min_8bit_size)


@dataclass(frozen=True)
class Rule:
    """The cost of an optimizer per tensor: bytes moved per element, and operators of its loop. `loops`: over tensors,
    also on a GPU, where others take many in one kernel."""

    moved: int
    operators: int
    loops: bool = False


# Bytes per element, counted in torch 2.13's optim/adam.py and optim/sgd.py, and transformers 5.23's optimization.py, in
# fp32 except for MIXED: fused Adam reads weight, gradient and both moments and writes all but the gradient; the loop
# passes over them once per operator (mul_, lerp_, mul_, addcmul_, sqrt, div, add_, addcdiv_).
KINDS = {
    "adam": Rule(28, 1),
    "adam_foreach": Rule(80, 8),
    "cpu_adam": Rule(28, 1),
    "onebit_adam": Rule(60, 12),
    "sgd": Rule(12, 1),
    "momentum": Rule(32, 3),
    "adafactor": Rule(88, 25, loops=True),
    "adam8bit": Rule(16, 1),
    "kahan_adam": Rule(80, 16),  # in bf16 with Kahan summation (torch-optimi 0.3); with fp32 weights 104 and 11
}
MIXED = ("adam8bit", "kahan_adam")


@dataclass(frozen=True)
class Optimizer:
    """`kind` is one of KINDS. States have `bytes_each`, like the weights, except 8-bit ones."""

    kind: str
    bytes_each: int = FP32_BYTES

    @property
    def moved(self) -> float:
        """Bytes per element that a step reads and writes."""
        return KINDS[self.kind].moved * (1 if self.kind in MIXED else self.bytes_each / FP32_BYTES)

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        """For one parameter, or for one flat partition."""
        size, each = math.prod(shape), self.bytes_each
        if self.kind == "kahan_adam":
            # Moments, the square of epsilon, and for 16-bit weights the rounding error.
            return (2 + (each < FP32_BYTES)) * each * size + each
        if self.kind in ("adam", "adam_foreach", "cpu_adam", "onebit_adam"):
            # Moments, and a step counter. 1-bit Adam also keeps worker and server errors (arXiv 2102.02888, section 4).
            errors = 2 * FP32_BYTES * size if self.kind == "onebit_adam" else 0
            return 2 * each * size + FP32_BYTES + errors
        if self.kind == "sgd":
            return 0
        if self.kind == "momentum":
            return each * size
        if self.kind == "adafactor":
            # Shazeer and Stern, arXiv 1804.04235: row and column means of matrices, a full second moment of vectors.
            rows = math.prod(shape[:-1]) if len(shape) > 1 else size
            columns = math.prod((*shape[:-2], shape[-1])) if len(shape) > 1 else 0
            return each * (rows + columns + 1)  # and the root mean square of the weights
        assert self.kind == "adam8bit"
        if size < SMALLEST_QUANTIZED:
            return 2 * FP32_BYTES * size
        return 2 * (size + FP32_BYTES * math.ceil(size / BLOCK))

    def step_bytes(self, sizes: Sequence[int]) -> int:
        """Temporary bytes of a step, given the elements of each tensor that it updates: fused ones need none, the
        foreach one the roots of all second moments (torch/optim/adam.py, _multi_tensor_adam), Adafactor the update of
        one tensor (transformers, optimization.py, Adafactor.step: squares, then the update, each as large)."""
        if self.kind == "adam_foreach":
            return self.bytes_each * sum(sizes)
        if self.kind == "adafactor":
            return 3 * FP32_BYTES * max(sizes, default=0)
        if self.kind == "kahan_adam":  # the squared gradient, and the divisor
            return 2 * self.bytes_each * max(sizes, default=0)
        return 0


# The kind of each --optim of the Trainer; the first of a kind is used to start trials.
OPTIM = {
    "adamw_torch_fused": "adam",
    "adamw_torch": "adam_foreach",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "adamw_bnb_8bit": "adam8bit",
    "adamw_8bit": "adam8bit",
    "paged_adamw_8bit": "adam8bit",
    "stable_adamw": "kahan_adam",
}
# The kind of each type in a DeepSpeed config's optimizer section.
DEEPSPEED_TYPES = {
    "adam": "adam",
    "adamw": "adam",
    "onebitadam": "onebit_adam",
    "zerooneadam": "onebit_adam",
    "sgd": "sgd",
    "lion": "momentum",
}


def optimizer_of(optim: str, config: Mapping[str, Any] | None) -> Optimizer:
    """The optimizer that steps: the DeepSpeed config's, explicit or implied by offloading, else the Trainer's `optim`.
    Raises RequestError if its memory is not known."""
    section = (config or {}).get("optimizer")
    if isinstance(section, dict):
        return _of_section(section)
    if config is not None and wants_cpu_adam(dict(config)):
        return Optimizer("cpu_adam")
    if optim not in OPTIM:
        raise RequestError(f"--optim {optim}: its memory is not known. Known: {', '.join(OPTIM)}.")
    return Optimizer(OPTIM[optim])


def _of_section(section: Mapping[str, Any]) -> Optimizer:
    name, given = str(section.get("type", "AdamW")).lower(), section.get("params")
    params = given if isinstance(given, dict) else {}
    if name == "sgd" and params.get("momentum"):
        return Optimizer("momentum")
    if name in ("adam", "adamw") and params.get("torch_adam") is True:
        return Optimizer("adam_foreach")  # engine.py, _configure_basic_optimizer: torch's own, not fused
    if name not in DEEPSPEED_TYPES:
        raise RequestError(f"optimizer.type is {name!r}: its memory is not known. Known: {', '.join(DEEPSPEED_TYPES)}.")
    return Optimizer(DEEPSPEED_TYPES[name])


def optim_of(kind: str) -> str | None:
    """The Trainer's --optim of this kind; None if DeepSpeed makes it."""
    return next((optim for optim, counted in OPTIM.items() if counted == kind), None)
