"""The mutants of benchmarks/mutants.py: the parts of the code (rooms) with their tests, and cosmic-ray's changes."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
DROPPED = "DropCall"  # ours; all others are cosmic-ray's
# Equivalent to the original in Python, or only slower.
EQUIVALENT = ("Eq_Is", "NotEq_IsNot", "Is_Eq", "IsNot_NotEq", "RemoveDecorator")
UNIT = "tests/training"
OF_PLANS = "zero12 update traffic zero schedule partition collectives optimizers pipelines memory seconds fsdp".split()
OF_CHECKPOINTS = "atomic_folder manifest space rotation choice best opened lock identity run_folder".split()


@dataclass(frozen=True)
class Room:
    """Files and their quick tests: first `tests`; if those pass, `then`, which start processes."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    then: tuple[str, ...] = ()


ROOMS = {
    "data": Room(("finetune/data/*.py",), ("tests/data",)),
    "sampling": Room(("finetune/data/sampling.py",), ("tests/data/test_sampling.py", "tests/data/test_mixtures.py")),
    "loss": Room(
        ("finetune/training/loss.py", "finetune/training/contrast.py"),
        (f"{UNIT}/test_loss.py", f"{UNIT}/test_contrast.py"),
    ),
    "checkpoints": Room(
        ("finetune/training/checkpoints/*.py",),
        tuple(f"{UNIT}/test_{name}.py" for name in OF_CHECKPOINTS),
        (f"{UNIT}/test_together.py", "tests/security/test_fuzz.py", "tests/commands/test_checkpoint.py"),
    ),
    "reshard": Room(
        ("finetune/training/reshard/*.py",),
        (f"{UNIT}/test_reshard.py", f"{UNIT}/test_reshard_forms.py"),
        ("tests/runs/test_reshard_runs.py",),
    ),
    "guards": Room(("finetune/training/guards/*.py",), (f"{UNIT}/guards",), ("tests/runs/test_mid_run_faults.py",)),
    "dsconfig rules": Room(("finetune/dsconfig/rules/*.py",), ("tests/dsconfig",), ("tests/run",)),
    "plan formulas": Room(
        (
            *("finetune/plan/collectives.py", "finetune/plan/kernels.py", "finetune/plan/memory.py"),
            *("finetune/plan/optimizers.py", "finetune/plan/partition.py", "finetune/plan/schedule.py"),
            *("finetune/plan/seconds.py", "finetune/plan/traffic.py", "finetune/plan/update.py"),
            *("finetune/plan/zero.py", "finetune/plan/engines/*.py"),
        ),
        tuple(f"tests/plan/test_{name}.py" for name in OF_PLANS),
        ("tests/plan/test_faster_chips.py", "tests/plan/test_search.py", "tests/plan/test_forward.py"),
    ),
    "pipeline": Room(
        ("finetune/training/pipeline/*.py",),
        (f"{UNIT}/test_pipeline_cut.py", f"{UNIT}/test_pipeline_parts.py", "tests/models/test_mlp_pipeline.py"),
        (
            *("tests/models/test_gptlite_pipeline.py", "tests/models/test_alexnet.py", "tests/runs/test_pipeline.py"),
            "tests/runs/test_mid_run_faults.py",
        ),
    ),
}


class DropCall:
    """An operator for cosmic-ray that removes a statement that is only a call, such as `file.flush()`."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        is_call = node.type == "atom_expr" and node.children[-1].get_code().startswith("(")
        if is_call and node.parent.type == "simple_stmt":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        from parso.python.tree import Keyword

        return Keyword("pass", node.start_pos, node.get_first_leaf().prefix)


@dataclass(frozen=True)
class Mutant:
    """Occurrence `number` of an operator in a file; its room has `of` places. `was` and `became` are the line before
    and after."""

    room: str
    file: str
    operator: str
    number: int
    line: int
    of: int
    was: str = ""
    became: str = ""
    outcome: str = ""
    by: str = ""  # the test that failed
    seconds: float = 0.0
    because: str = ""
    mended: bool = False  # it survived at first, and a test was written

    @property
    def id(self) -> str:
        return f"{Path(self.file).stem}:{self.line}:{self.operator}:{self.number}"


def files_of(room: Room) -> list[str]:
    found = sorted({path for pattern in room.files for path in REPO.glob(pattern)})
    return [path.relative_to(REPO).as_posix() for path in found if path.name != "__init__.py"]


def text_of(file: str) -> str:
    return (REPO / file).read_text(encoding="utf-8")


def operator_of(name: str) -> Any:
    from cosmic_ray.plugins import get_operator

    return DropCall() if name == DROPPED else get_operator(f"core/{name}")()


def families() -> dict[str, list[str]]:
    """Operators that change the same kind of place, by that kind."""
    from cosmic_ray.plugins import get_operator, operator_names

    found: dict[str, list[str]] = {DROPPED: [DROPPED]}
    for name in (name.removeprefix("core/") for name in operator_names()):
        if not get_operator(f"core/{name}").arguments() and not name.endswith(EQUIVALENT):
            family = "_".join(name.split("_")[:2]) if name.startswith("Replace") and "_" in name else name
            found.setdefault(family, []).append(name)
    return found


def every_mutant(room: str) -> list[list[Mutant]]:
    """Places in the room's files, each with all its possible mutants."""
    from cosmic_ray.ast import ast_nodes, get_ast

    places: dict[tuple[str, str, Any], list[Mutant]] = {}
    kinds = families()
    for file in files_of(ROOMS[room]):
        nodes = list(ast_nodes(get_ast(text_of(file))))
        for family, names in kinds.items():
            for name in names:
                change = operator_of(name)
                positions = (position for node in nodes for position in change.mutation_positions(node))
                for number, (start, _) in enumerate(positions):
                    places.setdefault((file, family, start), []).append(Mutant(room, file, name, number, start[0], 0))
    return [[replace(one, of=len(places)) for one in places[key]] for key in sorted(places)]


def mutated(mutant: Mutant) -> tuple[Mutant, str] | None:
    """The mutant and the changed text of its file; None if the meaning is the same, for example in an annotation."""
    from cosmic_ray.mutating import mutate_code

    before = text_of(mutant.file)
    after = mutate_code(before, operator_of(mutant.operator), mutant.number)
    if after is None:
        return None
    try:
        if _meaning(after) == _meaning(before):
            return None
    except SyntaxError:
        return None
    old, new = before.splitlines(), after.splitlines()
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), mutant.line - 1)
    return replace(mutant, was=old[at].strip(), became=new[at].strip()), after


def _meaning(text: str) -> str:
    """The syntax tree without annotations, which are never evaluated here, and without messages of assertions."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        if isinstance(node, ast.Assert):
            node.msg = None
    return ast.dump(tree)


def sampled(room: str, count: int, seed: str, known: set[tuple[str, str, str]]) -> Iterator[tuple[Mutant, str]]:
    """One mutant at each of `count` random places of the room, without those that are `known`."""
    choice = random.Random(f"{seed} {room}")
    places = every_mutant(room)
    choice.shuffle(places)
    left = count
    for place in places:
        if not left:
            return
        found = mutated(choice.choice(place))
        if found is not None and key_of(found[0]) not in known:
            left -= 1
            yield found


def key_of(row: Mutant) -> tuple[str, str, str]:
    """A key that does not change when lines are added or removed above it."""
    return row.file, row.was, row.became
