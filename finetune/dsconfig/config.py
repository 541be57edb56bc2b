"""A config as the rules see it: values by their dotted place, and what has the wrong kind reads as absent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from finetune.dsconfig.finding import KeyPath, named

FAR_TOO_LARGE = 1e300  # for any value of a config, and for what can be made of it


class Config:
    """A read-only view of parsed JSON. Wrong kinds are the schema's matter, so that no rule has to look for them."""

    def __init__(self, value: Any) -> None:
        self.value: dict[str, Any] = value if isinstance(value, dict) else {}

    def get(self, place: str) -> Any:
        """The value at "zero_optimization.stage", or None."""
        node: Any = self.value
        for key in place.split("."):
            if not isinstance(node, dict) or key not in node:
                return None
            node = node[key]
        return node

    def has(self, place: str) -> bool:
        """True where the key is there, whatever its value."""
        *above, key = place.split(".")
        return key in (self.section(".".join(above)) if above else self.value)

    def section(self, place: str) -> dict[str, Any]:
        """The object at `place`, or an empty one."""
        found = self.get(place)
        return found if isinstance(found, dict) else {}

    def number(self, place: str) -> float | None:
        """The number at `place`, and 1 for true, as for DeepSpeed. "auto" and text are none."""
        found = self.get(place)
        return found + 0 if isinstance(found, int | float) and abs(found) < FAR_TOO_LARGE else None

    def count(self, place: str) -> int | None:
        """The whole number at `place`; 5e8 is one."""
        found = self.number(place)
        return int(found) if found is not None and found == int(found) else None

    def is_on(self, place: str) -> bool:
        """True for true, and for 1 and "true", which DeepSpeed takes for it."""
        found = self.get(place)
        return found is True or found in ("true", "True") or (type(found) is int and found == 1)

    def is_off(self, place: str) -> bool:
        """True for false and for 0. What is absent is neither on nor off."""
        found = self.get(place)
        return found is False or (type(found) is int and found == 0)

    def is_auto(self, place: str) -> bool:
        return bool(self.get(place) == "auto")

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0, DeepSpeed's default, where there is none."""
        found = self.get("zero_optimization.stage")
        number = int(found) if found in ("0", "1", "2", "3") else self.count("zero_optimization.stage")
        return number if number in (1, 2, 3) else 0

    @property
    def stage_is_known(self) -> bool:
        """False for a stage that is there and is none, such as 4 or "auto"."""
        found = self.get("zero_optimization.stage")
        return found in ("0", "1", "2", "3") or found is None or self.count("zero_optimization.stage") in (0, 1, 2, 3)

    def offload(self, what: str) -> str:
        """The device of "offload_optimizer" or "offload_param": "none", "cpu" or "nvme". "auto" is none: accelerate
        fills it by its own flags."""
        found = self.get(f"zero_optimization.{what}.device")
        if found is None and self.get(f"zero_optimization.{'cpu_offload' if 'opt' in what else 'cpu_offload_param'}"):
            return "cpu"
        return found if found in ("cpu", "nvme") else "none"

    def texts(self) -> Iterator[tuple[KeyPath, str]]:
        """Every text, and its path."""
        yield from _texts(self.value, ())

    def autos(self) -> Iterator[str]:
        """The place of every "auto"."""
        return (named(path) for path, text in self.texts() if text == "auto")


def _texts(node: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _texts(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _texts(value, (*path, index))
    elif isinstance(node, str):
        yield path, node
