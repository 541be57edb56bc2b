"""What a row of tests/upstream claims, held against the installed releases; and what our code leans on."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from upstream.row import DOCUMENTED, Row

import finetune

ROOT = Path(finetune.__file__).parent
Hit = tuple[str, str]  # our file, and a name of theirs
ASKS = ("getattr", "hasattr", "setattr", "delattr")


def resolve(name: str) -> Any:
    """Raises AttributeError for what instances alone have."""
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def faults(row: Row) -> Iterator[str]:
    """What of it is not so."""
    if find_spec(row.package) is None or (row.only_if and not resolve(row.only_if)()):
        return
    try:
        found = resolve(row.name)
    except (AttributeError, ImportError):
        found = None
        if not _is_set_on_instances(row.name):
            yield f"{row.name} is not there"
    if row.signature and found is not None and signature_of(found) != row.signature:
        yield f"{row.name} takes ({signature_of(found)}), not ({row.signature})"
    if inspect.isfunction(found) and row.kind in ("override", "call") and not row.signature:
        yield f"{row.name}: its row has no signature"
    for caller in row.called_from:
        if row.attribute not in set(_spoken_of(_parsed(resolve(caller)))):
            yield f"{caller} does not speak of {row.attribute}"


def signature_of(found: Any) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(found).parameters.values()
    return ", ".join(stars.get(p.kind, "") + p.name + "=" * (p.default is not p.empty) for p in parameters)


def _parsed(found: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(found)))


def _is_set_on_instances(name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    try:
        found = resolve(owner)
        classes = inspect.getmro(found) if inspect.isclass(found) else (found,)  # a function may set it, too
    except (AttributeError, ImportError, ValueError):
        return False
    return any(
        isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Store)
        for one in classes
        if one.__module__ != "builtins"
        for node in ast.walk(_parsed(one))
    )


def _spoken_of(tree: ast.AST) -> Iterator[str]:
    """Attributes, bare names, imports, definitions, and what `getattr` and its like ask for; no comments, no texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (part for one in node.names for part in [*(node.module or "").split("."), one.name])
        elif isinstance(node, ast.Import):
            yield from (part for one in node.names for part in one.name.split("."))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKS:
            yield from (one.value for one in node.args[1:2] if isinstance(one, ast.Constant))


@cache
def trees() -> dict[str, ast.Module]:
    files = sorted(ROOT.rglob("*.py"))
    return {str(f.relative_to(ROOT)): ast.parse(f.read_text()) for f in files}


def is_private(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


@cache
def hits() -> frozenset[Hit]:
    """Every private name of theirs that our code uses or replaces, and every method of the Trainer that it replaces."""
    found = set(_overridden())
    own = _members_of_our_classes()
    for file, tree in trees().items():
        ours = own | {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)} | _assigned(tree)
        imported = {
            one.asname or one.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("finetune")
            for one in node.names
        }
        documented = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node) in DOCUMENTED
        }
        found |= {(file, n) for n in _spoken_of(tree) if is_private(n) and n not in ours | imported | documented}
    return frozenset(found)


def _members_of_our_classes() -> set[str]:
    found: set[str] = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found |= _defined(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    return found


def _defined(kind: ast.ClassDef) -> set[str]:
    """In its body."""
    found = {one.name for one in kind.body if isinstance(one, ast.FunctionDef)}
    found |= {one.target.id for one in kind.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    targets = [target for one in kind.body if isinstance(one, ast.Assign) for target in one.targets]
    return found | {target.id for target in targets if isinstance(target, ast.Name)}


def _assigned(tree: ast.Module) -> set[str]:
    """Variables and arguments, among them `_`."""
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}


def _overridden() -> Iterator[Hit]:
    from transformers import Trainer

    classes = list(_our_classes())
    for kind in classes:
        for heir in classes:
            if kind not in heir.__mro__:
                continue
            for base in heir.__mro__:
                if base.__module__.startswith("finetune") or base is object:
                    continue
                file = str(Path(inspect.getfile(kind)).relative_to(ROOT))
                names = [name for name in _body_of(file, kind) if name in vars(base) and not name.startswith("__")]
                yield from ((file, name) for name in names if is_private(name) or base is Trainer)


@cache
def _body_of(file: str, kind: type) -> set[str]:
    """What its source defines, without what Python adds."""
    bodies = [n for n in ast.walk(trees()[file]) if isinstance(n, ast.ClassDef) and n.name == kind.__name__]
    return {name for body in bodies for name in _defined(body)}


def _our_classes() -> Iterator[type]:
    for module in pkgutil.walk_packages([str(ROOT)], "finetune."):
        if not module.name.endswith("__main__"):
            loaded = importlib.import_module(module.name)
            yield from (k for k in vars(loaded).values() if inspect.isclass(k) and k.__module__ == module.name)


def without_a_row(rows: tuple[Row, ...]) -> set[Hit]:
    held = {(row.where, part) for row in rows for part in re.split("[.:]", row.name)}
    return {hit for hit in hits() if hit not in held}


def without_a_hit(rows: tuple[Row, ...]) -> set[Hit]:
    """Rows whose name our file does not speak of."""
    spoken = {file: set(_spoken_of(tree)) | _body_names(tree) for file, tree in trees().items()}
    return {(row.where, row.attribute) for row in rows if row.attribute not in spoken.get(row.where, set())}


def _body_names(tree: ast.Module) -> set[str]:
    return {name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for name in _defined(node)}
