"""Releases that are known to go wrong, alone or together (last looked through on 2026-11-21)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Version = tuple[int, ...]


@dataclass(frozen=True)
class Known:
    """Every package of `between` has a release from the first (included) to the second (left out)."""

    between: Mapping[str, tuple[Version, Version]]
    what: str
    mend: str
    source: str


KNOWN = (
    Known(
        {"deepspeed": ((0,), (0, 19, 4))},
        "gradients of a pipeline are divided by the accumulation steps at every stage",
        "Take DeepSpeed 0.19.4 or later.",
        "deepspeedai/DeepSpeed#8152",
    ),
    Known(
        {"deepspeed": ((0, 17, 6), (0, 18, 3))},
        "gradients under ZeRO-2 are wrong",
        "Take DeepSpeed 0.18.3 or later.",
        "deepspeedai/DeepSpeed#7718",
    ),
    Known(
        {"deepspeed": ((0, 16), (99,)), "transformers": ((4, 46), (4, 48))},
        "gradient accumulation under ZeRO-2 and 3 ends in an assertion",
        "Take transformers 4.48 or later.",
        "huggingface/transformers#34984",
    ),
    Known(
        {"transformers": ((4, 51), (4, 51, 1))},
        "models cannot be loaded under ZeRO-3",
        "Take another release of transformers.",
        "huggingface/transformers#37300",
    ),
)


def known_faults(installed: Mapping[str, Version]) -> Iterator[Known]:
    """Those that the installed releases have."""
    for known in KNOWN:
        if all(
            name in installed and least <= installed[name] < beyond for name, (least, beyond) in known.between.items()
        ):
            yield known
