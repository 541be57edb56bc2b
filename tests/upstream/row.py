"""A row of the table: what of other packages we lean on that they do not promise to keep. A test holds every row
against the installed releases, and every such name in our code against the rows.

    override    a method of theirs that we replace, or a class attribute: `called_from` must go on calling it
    call, read, write    what it says, of a private name, or of one inside an engine
    patch       an object of theirs that we change
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["override", "call", "read", "write", "patch"]

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
    only_if: str = ""  # theirs, a function: where it gives False, the name may be missing

    @property
    def package(self) -> str:
        return self.name.partition(".")[0].partition(":")[0]

    @property
    def attribute(self) -> str:
        return self.name.rpartition(":")[2].rpartition(".")[2]
