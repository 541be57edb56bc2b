"""What a number may be, said once, at its flag."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Range:
    """`least` and `most` are in the range, `above` and `below` are not. `others` are numbers outside it, with what they
    stand for. A `share` is of all steps while it is less than 1, and a whole number from there on. What is `endless`
    may be infinite."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    others: Mapping[float, str] = field(default_factory=dict)
    share: bool = False
    endless: bool = False

    def holds(self, value: float) -> bool:
        if value in self.others:
            return True
        if math.isinf(value) and not self.endless:
            return False
        within = (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )
        return within and not (self.share and value > 1 and value % 1 != 0)  # which is NaN for infinity

    def __str__(self) -> str:
        """As it stands behind "it must be"."""
        words = [f"{self.least:g} or more"] if self.least is not None else []
        words += [f"more than {self.above:g}"] if self.above is not None else []
        words += [f"at most {self.most:g}"] if self.most is not None else []
        words += [f"less than {self.below:g}"] if self.below is not None else []
        whole = ["a whole number, or less than 1 for a share of all steps"] if self.share else []
        others = [f"or {value:g} {meaning}" for value, meaning in self.others.items()]
        return ", ".join([" and ".join(words), *whole, *others])


NOT_NEGATIVE, AT_LEAST_ONE, POSITIVE = Range(least=0), Range(least=1), Range(above=0)
PART = Range(above=0, below=1)  # of a whole, some on either side
RATE = Range(least=0, below=1)
TIMEOUT = Range(above=0, endless=True)
STEPS = Range(above=0, share=True)
