"""`finetune check`: find mistakes in DeepSpeed configs, for the run that the flags describe."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.dsconfig.check import Placed, check, difference, mended, read
from finetune.dsconfig.context import GPU_CAPABILITY, Context, Weights, release
from finetune.dsconfig.formats import written
from finetune.dsconfig.load import find_config
from finetune.errors import RequestError, RunError
from finetune.run.checks import group_faults
from finetune.run.choose import candidates, is_told
from finetune.run.engine import context_of
from finetune.run.flags.groups import GROUPS
from finetune.run.launch import Launch
from finetune.run.parse import COMMAND_LINE
from finetune.run.recipe import ENGINE_FLAG
from finetune.run.resolve import refuse, resolve
from finetune.run.run import Run
from finetune.shipped import DS_CONFIGS, is_recipes_yaml

SIZES = (ENGINE_FLAG, *GROUPS)


def run(asked: argparse.Namespace) -> int:
    """The exit status: 0 without errors, 2 with."""
    texts, context, disabled = wanted(asked)
    findings: list[tuple[str, Placed]] = []
    for path, before in texts.items():
        text = mended(before, context, disabled) if asked.fix else before
        if text != before:
            if DS_CONFIGS in path.resolve().parents:
                raise RequestError(
                    f"{path} is shipped, and --fix would change it for every run. Copy it, and fix the copy."
                )
            shown = difference(before, text, str(path))
            print(shown, end="", file=sys.stdout if asked.format == "text" else sys.stderr)
            _write(path, text)
        findings += [(str(path), placed) for placed in check(text, context, disabled).found]
    if said := written(findings, asked.format):
        print(said)
    errors = sum(placed.is_error for _, placed in findings)
    if asked.format == "text":
        print(summary(len(texts), errors, [placed for _, placed in findings], context))
    return 2 if errors else 0


def wanted(asked: argparse.Namespace) -> tuple[dict[Path, str], Context, list[str]]:
    """The texts to check, all read before any is fixed; the run that they are for; and the disabled codes. Raises
    RequestError."""
    yamls = [name for name in asked.files if is_recipes_yaml(name)]
    if yamls and (asked.config or len(asked.files) > 1):
        raise RequestError(f"{yamls[0]}: is a recipe's YAML, not a DeepSpeed config. Give it alone, or with --config.")
    if yamls:
        asked.files, asked.config = [], yamls[0]
    planned = _run(asked) if asked.config else None
    named = [planned.value(name) for name in ("deepspeed", "deepspeed_config")] if planned else []
    files = asked.files or [name for name in named if name]
    if not files or files == ["none"]:
        where = (
            f"{asked.config}: a recipe's YAML that names no DeepSpeed config" if asked.config else "no file is given"
        )
        raise RequestError(f"{where}. Give a path, or a shipped name such as zero2.")
    context, disabled = described(asked, planned), codes(asked.disable)
    return {path: read(path) for path in map(find_config, files)}, context, disabled


def summary(files: int, errors: int, found: list[Placed], run: Context) -> str:
    fixable = sum(placed.mendable for placed in found)
    ranks = "" if run.world_size is None else f" for {_many(run.world_size, 'rank')}"
    hint = f"; --fix repairs {fixable}" if fixable else ""
    counts = f"{_many(errors, 'error')}, {_many(len(found) - errors, 'warning')}"
    return f"{counts} in {_many(files, 'file')}{ranks}{hint}"


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _run(asked: argparse.Namespace) -> Run:
    """The run of --config, with the recipe that it is for."""
    sizes = {name: size for name in SIZES if (size := getattr(asked, name)) is not None}
    argv = ["--config", asked.config, *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]
    ranks = asked.world_size or asked.pipeline_parallel_size or 1
    return resolve(candidates(argv)[0], argv, Launch(world_size=ranks), is_here=False)


def described(asked: argparse.Namespace, planned: Run | None) -> Context:
    """The run that the options, and the YAML's flags in `planned`, describe. Raises RequestError."""
    stages = planned.stages if planned else asked.pipeline_parallel_size
    sizes = [planned.value(name) if planned else getattr(asked, name) for name in GROUPS]
    ranks, per_node = asked.world_size, asked.ranks_per_node
    for name, size in zip(("world_size", *SIZES), (ranks, stages, *sizes), strict=True):
        if size is not None and size < 1:
            raise RequestError(f"--{name} is {size}, but it must be 1 or more.")
    if ranks is not None and ranks % (stages or 1):
        raise RequestError(f"--world_size {ranks} is not a multiple of {stages or 1} stage(s). Change one of them.")
    for name, size in zip(GROUPS, sizes, strict=True):
        if (size or 1) > 1 and stages is not None:
            raise RequestError(f"--{name} {size} cannot be combined with --pipeline_parallel_size {stages}. Drop one.")
        if ranks is not None and ranks % (size or 1):
            raise RequestError(f"--world_size {ranks} is not a multiple of --{name} {size}. Change one of them.")
    if per_node is not None and ranks is None:
        raise RequestError(f"--ranks_per_node {per_node} needs --world_size: how many ranks there are in all.")
    if per_node is not None and (per_node < 1 or ranks % per_node):
        raise RequestError(f"--ranks_per_node {per_node} does not divide --world_size {ranks}. Change one of them.")
    gpu = (asked.gpu_name or "").upper()
    if gpu and gpu not in GPU_CAPABILITY:
        raise RequestError(
            f"--gpu_name {asked.gpu_name} is not known. Give one of {', '.join(GPU_CAPABILITY)}, or --gpu."
        )
    weights = _weights(asked.model) if asked.model else None
    _refuse_groups(asked, planned)
    has_cuda = False if asked.cpu else True if asked.gpu or gpu else None
    known: dict[str, Any] = {
        "world_size": ranks,
        "ranks_per_node": per_node or ranks,
        "pipeline_parallel_size": stages,
        **{name: size or 1 for name, size in zip(GROUPS, sizes, strict=True)},
        "engine": asked.engine,
        "gpu_capability": GPU_CAPABILITY.get(gpu),
        "weights": weights,
        "is_here": False,
        "versions": _versions(asked.versions),
    }
    if planned is None:
        return Context(has_cuda=has_cuda, output_dir="run", arguments={}, **known)
    precision: dict[str, bool] = {name: planned.given[name] for name in ("bf16", "fp16") if name in planned.given}
    found = context_of(planned, precision, has_cuda, **known)
    if is_told(["--config", asked.config]):
        return found
    # The recipe, and so its defaults, are unknown.
    return replace(found, arguments={name: one for name, one in found.arguments.items() if name in planned.given})


def _refuse_groups(asked: argparse.Namespace, planned: Run | None) -> None:
    """Raises RequestError, as a recipe does, for what groups of ranks cannot share, also of --model."""
    sizes = {name: size for name in GROUPS if (size := getattr(asked, name)) is not None}
    run = planned or Run(
        candidates([f"--{name}" for name in sizes])[0], Launch(world_size=asked.world_size or 1), (), {}
    )
    if asked.model or planned is None:  # `planned` was checked with the model of its YAML
        run = run.settled(COMMAND_LINE, **sizes, model_name_or_path=asked.model, model_size=None)
        refuse([*dict.fromkeys(group_faults(run))])


def codes(text: str) -> list[str]:
    """The codes in --disable. Raises RequestError for anything else."""
    codes = [code for code in text.upper().split(",") if code]
    if wrong := [code for code in codes if not re.fullmatch(r"DS\d{3}", code)]:
        raise RequestError(f"--disable {wrong[0]}: is not a code such as DS902. docs/check.md lists them.")
    return codes


def _versions(text: str) -> dict[str, str]:
    pairs = [pair.partition("==") for pair in text.lower().split(",") if pair]
    for name, _, version in pairs:
        if not name or not release(version):
            raise RequestError(f"--versions {name or text}: give NAME==VERSION, like deepspeed==0.19.8.")
    return {name: version for name, _, version in pairs}


def _weights(model: str) -> Weights:
    from finetune.plan.weights import weights_of

    return weights_of(Path(model).expanduser())


def _write(path: Path, text: str) -> None:
    """Write atomically: to a temporary file beside `path`, flushed to disk, then moved into place."""
    target, new = path.resolve(), None
    try:
        with tempfile.NamedTemporaryFile("wb", dir=target.parent, prefix=f".{target.name}.", delete=False) as new:
            new.write(text.encode("utf-8"))
            new.flush()
            os.fsync(new.fileno())
        os.chmod(new.name, target.stat().st_mode & 0o7777)
        os.replace(new.name, target)
    except OSError as error:
        if new is not None:
            Path(new.name).unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written ({error.strerror}). The file is unchanged.") from error
