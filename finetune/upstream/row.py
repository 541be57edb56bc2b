"""A row of the table, and the releases against which the table was written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["override", "call", "read", "write", "patch"]

# Those that the rows were read in and all tests were run on.
TESTED = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "datasets": "5.2.0",
    "evaluate": "0.4.6",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
    "trl": "1.16.0",
}
# Begin with an underscore, and are documented all the same.
DOCUMENTED = {"os._exit", "sys._current_frames", "output._replace", "evaluated._replace"}


@dataclass(frozen=True)
class Row:
    where: str  # our file, below finetune/
    name: str  # theirs: package.module:Class.name or package.module:name
    kind: Kind
    why: str
    source: str  # of what it mends: their file or issue
    lets_go: str  # what would
    signature: str = ""  # of what is called or overridden: a name that has a default ends in "="
    called_from: tuple[str, ...] = ()  # theirs, whose source must speak of it

    @property
    def package(self) -> str:
        return self.name.partition(".")[0].partition(":")[0]

    @property
    def attribute(self) -> str:
        return self.name.rpartition(":")[2].rpartition(".")[2]
