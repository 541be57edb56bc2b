"""Measure this machine and write a profile that `finetune plan --gpu OUT.json` reads; takes about two minutes.

    python -m finetune.measure.calibrate OUT.json         # two ranks at a time, which share the machine as in a run
    python -m finetune.measure.calibrate OUT.json --ranks 1

On a CPU each rank gets its share of the cores, as in the recipes. What cannot be measured here, such as the network
between nodes, keeps the shipped profile's values, and `sources` says which is which.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.entry.main import run_main
from finetune.errors import RequestError, RunError
from finetune.host.hardware import cores_here, gpus_here
from finetune.measure.outcome import DONE
from finetune.measure.processes import TORCHRUN, run, started
from finetune.measure.start import attempt
from finetune.plan.job import Job
from finetune.plan.machine import Machine, find_machine, read_machine, shipped_machine, write_machine
from finetune.plan.model import model_of
from finetune.plan.named import find_model_config
from finetune.plan.search import laid_out, shipped
from finetune.plan.seconds import plan_seconds

QUICK = "--quick"
PATIENCE_SECONDS = 1800.0
MEASURED = "measured by finetune.measure.calibrate"
CONTEXT_SOURCE = (
    f"{MEASURED}: mem_get_info's total less free less torch's memory_reserved, of one process, before NCCL and any "
    "kernel but one; other programs on the GPU count, kernels that are loaded later do not"
)
UNKNOWN_GPU = "A100-40GB"  # supplies the values that are not measured for a GPU without a profile
# The reference runs. On a CPU operators take longer than their launches even in a small model. On a GPU a small one
# shows how long the host takes for launches, and a large one the GPU: on a slow host, 8 layers of width 1024 only show
# the host, so that all plans were too slow (docs/results/plan_gpu.md).
REFERENCE_LAYOUTS = ("none", "zero2")
REFERENCE_STEPS = 20
SMALL = {"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 6, "vocab_size": 1000,
         "max_position_embeddings": 96}  # fmt: skip
LARGE = {"num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 8000,
         "max_position_embeddings": 1024}  # fmt: skip
BATCH = 6


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(QUICK, action="store_true", help="measure only a few shapes, to see that it works")
    parser.add_argument("--nvme_path", type=Path, help="a folder on the disk for offloading, to measure that disk")
    asked = parser.parse_args(argv)
    run_it = _rank if "RANK" in os.environ else calibrate
    run_it(asked.out, asked.ranks, asked.quick, asked.nvme_path)


def calibrate(out: Path, ranks: int = 2, quick: bool = False, nvme_path: Path | None = None) -> None:
    """Start the ranks, and write `out`. Raises RequestError before anything is measured, RunError if a rank fails."""
    _check(out, ranks, nvme_path)
    with tempfile.TemporaryDirectory(prefix="finetune-calibrate-") as folder:
        found = Path(folder) / "machine.json"
        command = [*started(TORCHRUN, ranks), "-m", "finetune.measure.calibrate", str(found), "--ranks", str(ranks)]
        command += [QUICK] if quick else []
        command += ["--nvme_path", str(nvme_path)] if nvme_path else []
        ended = run(command, Path(folder) / "log.txt", PATIENCE_SECONDS)
        if ended.kind != DONE:
            raise RunError(f"the calibration failed: {ended.reason}")
        machine = read_machine(found)
    if not quick:
        machine = _as_in_runs(machine, ranks)
    write_machine(machine, out)


def _as_in_runs(machine: Machine, ranks: int) -> Machine:
    """The machine with what only runs show: a GPU's host is slower under the Trainer, and real steps take longer than
    planned from operators measured one by one, as caches are shared, and ranks wait for the slowest. Raises RunError if
    a reference run fails."""
    sources = {**machine.sources, "step_factor": f"{MEASURED}, on {len(REFERENCE_LAYOUTS)} reference runs"}
    if machine.device != "cpu":
        sources["launch_seconds"] = f"{MEASURED}, on a reference run of a small model"
        machine = replace(machine, launch_seconds=_launch_seconds(machine, ranks))
    return replace(machine, step_factor=_step_factor(machine, ranks), sources=sources)


def _launch_seconds(machine: Machine, ranks: int) -> float:
    """With which the steps of a small model last as long as planned; at least what a network alone has shown."""
    job, machine = reference(machine, ranks, SMALL), replace(machine, step_factor=1.0)
    seconds = _reference_seconds(job, "none")

    def is_too_short(launch: float) -> bool:
        return plan_seconds(job, replace(machine, launch_seconds=launch)).total < seconds

    low = high = machine.launch_seconds
    while is_too_short(high):
        low, high = high, 2 * high
    while high > 1.001 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_short(middle) else (low, middle)
    return high


def _check(out: Path, ranks: int, nvme_path: Path | None) -> None:
    if ranks < 1:
        raise RequestError(f"--ranks is {ranks}, but it must be 1 or more.")
    gpus, cores = gpus_here(), cores_here()
    if ranks > (gpus or cores):
        what = f"{gpus} GPU(s)" if gpus else f"{cores} core(s)"
        raise RequestError(f"--ranks is {ranks}, but this machine has {what}. Give --ranks {gpus or cores}, or less.")
    if nvme_path is not None and not nvme_path.is_dir():
        raise RequestError(f"--nvme_path {nvme_path}: there is no such folder. Make it, or leave it out.")
    is_new = not out.exists()
    try:
        with out.open("ab"):
            pass
        if is_new:
            out.unlink()
    except OSError as error:
        raise RequestError(f"{out}: cannot be written ({error}). Give another path.") from error


def _step_factor(machine: Machine, ranks: int) -> float:
    """How much longer the steps of reference runs take than planned: the geometric mean."""
    machine = replace(machine, step_factor=1.0)
    ratios = []
    for layout in REFERENCE_LAYOUTS:
        job = laid_out(reference(machine, ranks, SMALL if machine.device == "cpu" else LARGE), layout)
        ratios.append(_reference_seconds(job, layout) / plan_seconds(job, machine).total)
    return round(statistics.geometric_mean(ratios), 3)


def _reference_seconds(job: Job, layout: str) -> float:
    got = attempt(job, None if layout == "none" else shipped(layout), REFERENCE_STEPS)
    if isinstance(got, str):
        raise RunError(f"a reference run of the calibration ({layout}) ended: {got}.")
    return got.step_seconds


def reference(machine: Machine, ranks: int, shape: Mapping[str, int]) -> Job:
    halves = [kind for kind in ("bf16", "fp16") if kind in machine.peak_flops and machine.device != "cpu"]
    return Job(
        model_of({**find_model_config("gptlite-tiny"), **shape}),
        world_size=ranks,
        ranks_per_node=ranks,
        micro_batch=BATCH,
        tokens=shape["max_position_embeddings"],
        precision=next(iter(halves), "fp32"),
        device=machine.torch_device,
    )


def _rank(out: Path, ranks: int, quick: bool, nvme_path: Path | None) -> None:
    """What each of the started processes does; the first one writes `out`."""
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores_here() // ranks))  # read on importing torch; torchrun sets 1
    import torch
    from torch import distributed

    rank, is_gpu = int(os.environ["RANK"]), torch.cuda.is_available()
    found: dict[str, Any] = {}
    if is_gpu:
        torch.cuda.set_device(rank)
        found["context_bytes"] = _context_bytes()
    distributed.init_process_group("nccl" if is_gpu else "gloo")
    found |= measure(ranks, quick, nvme_path)
    if rank == 0:
        base = _base()
        kept = {name: source for name, source in base.sources.items() if name not in found}
        sources = kept | dict.fromkeys(found, MEASURED) | ({"context_bytes": CONTEXT_SOURCE} if is_gpu else {})
        write_machine(replace(base, **found, sources=sources), out)
    distributed.destroy_process_group()


def _context_bytes() -> int:
    """The CUDA context of this rank's GPU; call it before anything else runs there."""
    import torch

    torch.ones(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    return max(0, int(total - free - torch.cuda.memory_reserved()))


def measure(ranks: int, quick: bool, nvme_path: Path | None) -> dict[str, Any]:
    """Values of this machine's profile. Every rank runs the same measurements at the same time."""
    import torch
    from torch import distributed

    from finetune.measure import links, rates

    device = "cuda" if torch.cuda.is_available() else "cpu"
    budget = rates.Budget(0.002, 2**16, 1) if quick else rates.Budget()
    products = {kind: rates.product_rates(device, kind, budget) for kind in _precisions(device)}
    found: dict[str, Any] = {
        # The fastest layer stands for the peak, which is unknown.
        "peak_flops": {kind: max(flops) for kind, flops in products.items()},
        "gemm_efficiency": {kind: statistics.mean(flops) / max(flops) for kind, flops in products.items()},
        "memory_bandwidth": rates.stream_rate(device, budget),
        "memory_efficiency": 1.0,
        "launch_seconds": links.launch_seconds(device, budget.seconds),
        "host_link": links.host_link(device, budget.seconds),
        **_sizes(device, ranks),
    }
    if ranks > 1:
        found["intra_node"] = links.ring(device, 2**19 if quick else links.SIZES[-1])
    rate = None if quick else links.cpu_adam_rate(budget.elements, budget.seconds)
    if rate:
        found["cpu_adam_parameters_per_second"] = rate * ranks
    if nvme_path:
        disk = links.disk(nvme_path) if distributed.get_rank() == 0 else None  # one per node, not per rank
        distributed.barrier()
        found |= {"nvme": disk} if disk else {}
    return found


def _base() -> Machine:
    """The shipped profile of this device, for values that are not measured."""
    import torch

    if torch.cuda.is_available():
        return known_gpu(torch.cuda.get_device_name())
    return replace(find_machine("cpu"), name="this CPU")


def known_gpu(name: str) -> Machine:
    """The profile of the GPU that the driver calls `name`; for one without a profile, an assumed one, marked so."""
    try:
        return replace(shipped_machine(name), name=name)
    except RequestError:
        machine = shipped_machine(UNKNOWN_GPU)
        return replace(machine, name=name, sources=dict.fromkeys(machine.sources, f"assumed: as {UNKNOWN_GPU}"))


def _precisions(device: str) -> tuple[str, ...]:
    from transformers.utils import is_torch_tf32_available

    from finetune.training.runtime import choose_precision

    found = ("fp32", choose_precision(device != "cpu"))
    rounded = ("tf32",) if is_torch_tf32_available() else ()
    return tuple(dict.fromkeys(found if device == "cpu" else (*found, "fp16", *rounded)))


def _sizes(device: str, ranks: int) -> dict[str, Any]:
    import torch

    if device == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"memory_bytes": total // ranks, "host_memory_bytes": total, "ranks_per_node": ranks}
    count = torch.cuda.device_count()
    return {"memory_bytes": torch.cuda.get_device_properties(0).total_memory, "ranks_per_node": count}


if __name__ == "__main__":
    run_main(main)
