"""The allowed range of a flag's number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Range:
    """`least` and `most` are inclusive, `above` and `below` exclusive bounds. `others` are allowed numbers outside the
    range, with their meaning. With `share`, a number less than 1 is a fraction of all steps, and others are whole
    numbers. With `endless`, infinity is allowed."""

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
        return within and not (self.share and value > 1 and value % 1 != 0)  # the remainder is NaN for infinity

    def __str__(self) -> str:
        """The range as words that follow "it must be"."""
        words = [f"{self.least:g} or more"] if self.least is not None else []
        words += [f"more than {self.above:g}"] if self.above is not None else []
        words += [f"at most {self.most:g}"] if self.most is not None else []
        words += [f"less than {self.below:g}"] if self.below is not None else []
        whole = ["a whole number, or less than 1 for a fraction of all steps"] if self.share else []
        others = [f"or {value:g} {meaning}" for value, meaning in self.others.items()]
        return ", ".join([" and ".join(words), *whole, *others])


NOT_NEGATIVE, AT_LEAST_ONE, POSITIVE = Range(least=0), Range(least=1), Range(above=0)
PART = Range(above=0, below=1)  # a proper fraction: something remains on either side
RATE = Range(least=0, below=1)
TIMEOUT = Range(above=0, endless=True)
STEPS = Range(above=0, share=True)
