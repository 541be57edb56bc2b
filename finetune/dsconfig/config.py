"""A config as the rules see it: values by dotted path, where a value of the wrong type reads as absent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from finetune.dsconfig.finding import KeyPath, named

FAR_TOO_LARGE = 1e300  # for any value of a config, and for products of values


class Config:
    """A read-only view of parsed JSON. The schema reports wrong types, so the rules need not check for them."""

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
        """Whether the key is present, whatever its value."""
        *above, key = place.split(".")
        return key in (self.section(".".join(above)) if above else self.value)

    def section(self, place: str) -> dict[str, Any]:
        """The object at `place`, or an empty one."""
        found = self.get(place)
        return found if isinstance(found, dict) else {}

    def number(self, place: str) -> float | None:
        """The number at `place`, or None; true counts as 1, as for DeepSpeed."""
        found = self.get(place)
        return found + 0 if isinstance(found, int | float) and abs(found) < FAR_TOO_LARGE else None

    def count(self, place: str) -> int | None:
        """The whole number at `place`, or None; 5e8 counts as whole."""
        found = self.number(place)
        return int(found) if found is not None and found == int(found) else None

    def is_on(self, place: str) -> bool:
        """True for true, and for 1 and "true", which DeepSpeed reads as true."""
        found = self.get(place)
        return found is True or found in ("true", "True") or (type(found) is int and found == 1)

    def is_off(self, place: str) -> bool:
        """True for false and for 0. An absent value is neither on nor off."""
        found = self.get(place)
        return found is False or (type(found) is int and found == 0)

    def is_auto(self, place: str) -> bool:
        return bool(self.get(place) == "auto")

    @property
    def stage(self) -> int:
        """The ZeRO stage; DeepSpeed's default, 0, if the config has none."""
        found = self.get("zero_optimization.stage")
        number = int(found) if found in ("0", "1", "2", "3") else self.count("zero_optimization.stage")
        return number if number in (1, 2, 3) else 0

    @property
    def stage_is_known(self) -> bool:
        """False for an invalid stage, such as 4 or "auto"."""
        found = self.get("zero_optimization.stage")
        return found in ("0", "1", "2", "3") or found is None or self.count("zero_optimization.stage") in (0, 1, 2, 3)

    def offload(self, what: str) -> str:
        """The device of "offload_optimizer" or "offload_param": "none", "cpu" or "nvme". "auto" counts as none, because
        accelerate fills it from its own flags."""
        found = self.get(f"zero_optimization.{what}.device")
        if found is None and self.get(f"zero_optimization.{'cpu_offload' if 'opt' in what else 'cpu_offload_param'}"):
            return "cpu"
        return found if found in ("cpu", "nvme") else "none"

    def texts(self) -> Iterator[tuple[KeyPath, str]]:
        """Every string, with its path."""
        yield from _texts(self.value, ())

    def autos(self) -> Iterator[str]:
        """The path of every "auto"."""
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
