"""Peaks of memory as torch's profiler sees them: every block that the allocator hands out, in order.

A TorchDispatchMode (`finetune.measure.memory.Allocations`) would see the same tensors, but disturb them: it gives each
a Python object, whose reference keeps autograd from adding gradients in place (torch/csrc/autograd/input_buffer.cpp,
can_accumulate_inplace), and so one more tensor lives at each such place.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from finetune.training.kept_memory import M_MMAP_THRESHOLD

BACKWARD = "backward begins"
LARGE_BYTES = 2**16
# What allocates for others, so that a block belongs to the operator around it.
FACTORIES = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::zeros", "aten::new_zeros", "aten::ones_like")
# Kernels whose scratch, taken and given back inside, is the CPU's own (oneDNN's copies in bf16, for instance).
KERNELS = {
    "aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::scatter_add_", "aten::_grouped_mm",
    "aten::convolution", "aten::mkldnn_convolution", "aten::convolution_backward", "aten::native_batch_norm",
    "aten::native_batch_norm_backward", "aten::native_layer_norm_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip


def peaks(call: Callable[..., Any], batch: dict[str, Any], model: Any) -> dict[str, int]:
    """Bytes above what was there before, of one forward and one backward pass that starts without gradients.

    The profiler's events take a little of each freed block, which then is too small for the next tensor: a Mamba's 448
    tokens took 19 GiB in 56 MB of tensors. So larger blocks come from outside glibc's heap."""
    if "CS_GNU_LIBC_VERSION" in os.confstr_names:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    call(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = call(**batch).loss
        with record_function(BACKWARD):
            pass
        loss.backward()
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    begins = next(event.start_time_ns for event in roots if event.name == BACKWARD)
    live, most = 0, {"forward": 0, "backward": 0}
    for moment, size in _blocks(roots):
        live += size
        phase = "backward" if moment >= begins else "forward"
        most[phase] = max(most[phase], live)
    model.zero_grad(set_to_none=True)
    return most


def _blocks(roots: list[Any]) -> list[tuple[int, int]]:
    """(nanoseconds, bytes taken or, negative, given back), without kernels' scratch."""
    found: list[tuple[int, int, int, Any]] = []

    def walk(event: Any, around: Any) -> None:
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr, around))
            return
        if event.tag == _EventType.TorchOp and not event.name.startswith(FACTORIES):
            around = event if event.name in KERNELS else None
        for child in event.children:
            walk(child, around)

    for root in roots:
        walk(root, None)
    found.sort(key=lambda block: block[0])
    scratch, taken = set(), {}
    for at, (moment, size, pointer, _) in enumerate(found):
        if size > 0:
            taken[pointer] = at
        elif pointer in taken:
            begun = taken.pop(pointer)
            kernel = found[begun][3]
            if kernel is not None and moment <= kernel.end_time_ns:
                scratch |= {begun, at}
    return [(moment, size) for at, (moment, size, _, _) in enumerate(found) if at not in scratch]
