"""What --sequence_parallel_size and --expert_parallel_size have in common: groups of ranks, which DeepSpeed makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.safe_read import read_json_object

if TYPE_CHECKING:
    from finetune.run.run import Run

GROUPS = ("sequence_parallel_size", "expert_parallel_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # their number in configs
NOTHING = ("none", "false", "0", "0.0", "")  # values with which a flag does nothing, in lower case


def is_on(run: Run, name: str) -> bool:
    """Whether the flag `name` does anything; a group of one rank does not."""
    return str(run.value(name)).lower() not in (*NOTHING, *(("1",) if name in GROUPS else ()))


def shape_shown(run: Run) -> Mapping[str, Any] | None:
    """The config of the run's model, if its folder's config.json or --model_size shows it."""
    from finetune.run.sizes import causal_shape

    name, size = run.value("model_name_or_path"), run.value("model_size")
    file = Path(str(name)).expanduser() / "config.json"
    if not (file.is_file() if name else size):
        return None
    said = f"--config_overrides ({run.source('config_overrides')})"
    return read_json_object(file) if name else causal_shape(size, run.value("config_overrides"), said)


def experts_in(read: Callable[[str], Any]) -> int | None:
    """The number of experts in a layer, None if the model is not known to have any; `read` returns the values of its
    config by name, None for missing ones."""
    read = of_text(read)
    return next((read(name) for name in EXPERTS if isinstance(read(name), int)), None)


def of_text(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """`read`, or that of the text part's config in a model of several parts."""
    inner = read("text_config")
    return inner.get if isinstance(inner, dict) else read


def drop_one(run: Run, name: str, others: Mapping[str, str]) -> Iterator[str]:
    """An error for each of the `others` that is on, with the reason why it does not go with the flag `name`."""
    for other, why in others.items():
        if is_on(run, other):
            yield f"{run.said(other)}, but {run.said(name)}: {why}. Drop one of the two."


def size_faults(run: Run, name: str, splits: Callable[[Callable[[str], Any]], Callable[[int], bool]]) -> Iterator[str]:
    """An error if the run's ranks cannot form groups of the size that the flag `name` gives. `splits` turns a model's
    config into the test of a size: whether that many ranks can share the model."""
    size, world = run.value(name), run.launch.world_size
    if world > 1 and world % size:
        shape = shape_shown(run) or {}
        fits = splits(shape.get)
        mends = [f"launch with {size * -(-world // size)} ranks"] if fits(size) else []
        yield (
            f"{run.said(name)}, but this run has {world} ranks, which is not a multiple of {size}. "
            f"{size_to_give(world, world, fits, *mends)}"
        )


def size_to_give(most: int, ranks: int, fits: Callable[[int], bool], *others: str) -> str:
    """The end of an error: the sizes of a group, up to `most`, that divide the `ranks` (0: unknown) and pass `fits`;
    or the `others`."""
    sizes = [str(size) for size in range(2, most + 1) if not ranks % size and fits(size)]
    given = [f"give {' or '.join(filter(None, (', '.join(sizes[:-1]), sizes[-1])))}"] if sizes else []
    mends = ", or ".join((*given, *others)) or "drop it"
    return f"{mends[0].upper()}{mends[1:]}."


def group_faults_here(run: Run, name: str, does: str, deepspeed: str | None) -> Iterator[str]:
    """An error in a run that is to start on this machine; `does` is what the flag `name` does in training, and
    `deepspeed` the run's config, if any."""
    said = run.said(name)
    if not run.value("do_train"):
        yield f"{said}, which {does} in training, but {run.said('do_train')}. Drop it."
    elif run.launch.world_size == 1:
        yield f"{said}, but this is one rank. Launch with `deepspeed --num_gpus {run.value(name)}` or more, or drop it."
    elif not deepspeed:
        yield f"{said}, which needs DeepSpeed, but this run does not use it. Add --deepspeed zero2, for instance."
