"""DS7xx: ZeRO++, which sends fewer and smaller messages between nodes."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Finding, Put, at, error, warning

HPZ = "zero_optimization.zero_hpz_partition_size"
QWZ = "zero_optimization.zero_quantized_weights"
QGZ = "zero_optimization.zero_quantized_gradients"


def hpz_divides_the_node(config: Config, run: Context) -> Iterator[Finding]:
    """DS701. The secondary copy of the weights is sharded over this many neighboring ranks."""
    size = config.count(HPZ)
    if size is None or size <= 1 or run.world_size is None:
        return
    auto = [Put(at(HPZ), "auto")] if run.engine == "recipe" else []
    if run.world_size % size:
        said = (
            f"{HPZ} is {size}, but it must divide the {run.world_size} ranks of this run. Set it to the ranks of one "
            f"node, {run.ranks_per_node}."
        )
        yield error("DS701", HPZ, said, *auto)
    elif run.ranks_per_node is not None and run.ranks_per_node % size:
        said = (
            f"{HPZ} is {size}, but a node has {run.ranks_per_node} ranks: weights would be gathered across nodes, "
            f"which it is meant to avoid. Set it to {run.ranks_per_node}, or a divisor."
        )
        yield error("DS701", HPZ, said, *auto)


def quantized_has_its_stage(config: Config, run: Context) -> Iterator[Finding]:
    """DS702."""
    if config.stage == 3:
        return
    wanted = [place for place in (QWZ, QGZ) if config.is_on(place)]
    if (config.count(HPZ) or 1) > 1:
        wanted.append(HPZ)
    for place in wanted:
        yield error("DS702", place, f"{place} needs stage 3, but stage is {config.stage}.")


def quantizer_can_run(config: Config, run: Context) -> Iterator[Finding]:
    """DS703. deepspeed 0.19.8 has no quantizer for the CPU."""
    nodes = 1 if run.world_size is None else run.world_size // (run.ranks_per_node or run.world_size)
    for place in [QWZ, *([QGZ] if nodes > 1 else [])]:  # on one node the gradients are not quantized
        if config.is_on(place) and run.has_cuda is False:
            said = (
                f"{place} needs a GPU: DeepSpeed's quantizer has no CPU build. Set it to false in a copy of the "
                "file, or use zero3."
            )
            yield error("DS703", place, said)


def quantized_gradients_do_something(config: Config, run: Context) -> Iterator[Finding]:
    """DS704. deepspeed 0.19.8, runtime/zero/stage3.py, uses the quantized path only across nodes."""
    one_node = run.world_size is not None and run.world_size == run.ranks_per_node
    if config.is_on(QGZ) and config.stage == 3 and one_node:
        yield warning("DS704", QGZ, f"{QGZ} does nothing on one node: DeepSpeed ignores it.")


def quantized_is_for_whole_texts(config: Config, run: Context) -> Iterator[Finding]:
    """DS705. It takes several GPUs to try."""
    for place in (QWZ, QGZ):
        if run.sequence_parallel_size > 1 and config.is_on(place):
            said = f"--sequence_parallel_size is {run.sequence_parallel_size}, which is untested with {place}"
            yield error("DS705", place, f"{said}. Set it to false in a copy of the file, or drop the flag.")
