"""The identity of a run, and whether a resumed run has the flags of its checkpoint, checked before anything heavy is
loaded. `same_run` checks rows, tokenizer and model before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, TrainingArguments

from finetune.run.files import IDENTITY, STATE_FILE
from finetune.run.run import Run
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.flags_of_before import changed_flags, compared_flags, refuse_changed
from finetune.training.checkpoints.identity import SHOWN, Identity, Stretch, new_id, read_identity, read_run, shown
from finetune.training.checkpoints.manifest import CHECKPOINT
from finetune.training.checkpoints.writing import by_first, of_first
from finetune.versions import versions


@dataclass(frozen=True)
class Course:
    """One launch of a run: the run's id, its flags, and if it resumes, what its checkpoint recorded. `before` is also
    None for a checkpoint without a record; `changed` maps flags to their values before and after."""

    run: str
    flags: Mapping[str, Any]
    checkpoint: str | None = None
    step: int = 0
    before: Identity | None = None
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def lineage(self, changed: Mapping[str, tuple[Any, Any]]) -> tuple[Stretch, ...]:
        """Which steps ran with which flags, including this launch's."""
        if self.before is None:
            return (Stretch(self.run, self.step),)
        past = tuple(s for s in self.before.lineage if s.from_step < self.step)
        is_new = changed or not past or past[-1].run != self.run
        return (*past, Stretch(self.run, self.step, changed)) if is_new else past


def course_of(run: Run, training: TrainingArguments, checkpoint: str | None) -> Course:
    """All ranks must call it, once they have agreed on the checkpoint. Raises RequestError for flags that differ from
    the checkpoint's and may not change."""
    flags = {**compared_flags(run), "bf16": bool(training.bf16), "fp16": bool(training.fp16)}
    folder = Path(run.value("output_dir")).expanduser()
    if checkpoint is None:
        return Course(of_first(new_id()), flags)
    own, before, step = by_first(lambda: _look(folder, checkpoint))
    in_folder = Path(checkpoint).expanduser().resolve().parent == folder.resolve()
    run_id = own or (before.run if before and in_folder else of_first(new_id()))
    name = Path(checkpoint).name
    if before is None:
        line = (
            f"resume: going on from {name}, step {step}. It has no {IDENTITY} (an older version saved it), so data and "
            "flags cannot be compared with its own; only the model's config is."
        )
        return Course(run_id, flags, checkpoint, step, notes=(line,))
    notes = [f"resume: going on from {name}, step {step} of run {before.run[:SHOWN]}{_newer(folder, name, in_folder)}"]
    if before.run != run_id:
        notes.append(f"resume: {folder.name} is run {run_id[:SHOWN]}, which continues from there with its own flags")
    changed = changed_flags(before, flags)
    refuse_changed(run, name, changed)
    notes += _said(changed, step)
    here = versions()
    others = [name for name in here if name != "finetune" and before.versions.get(name) not in (None, here[name])]
    if others:
        listed = ", ".join(f"{name} {before.versions[name]} -> {here[name]}" for name in others)
        notes.append(f"resume: other versions: {listed}; metrics may differ in their last digits")
    return Course(run_id, flags, checkpoint, step, before, changed, tuple(notes))


def tokenizer_of(checkpoint: str | None, run: Run) -> Any | None:
    """The tokenizer that belongs to the embeddings in a checkpoint of a model from scratch; otherwise None."""
    if checkpoint is None or run.value("model_name_or_path") or run.value("tokenizer_name"):
        return None
    if not (Path(checkpoint) / "tokenizer.json").is_file():
        return None
    return AutoTokenizer.from_pretrained(str(Path(checkpoint).expanduser()))


def _look(folder: Path, checkpoint: str) -> tuple[str | None, Identity | None, int]:
    own = read_run(folder)
    step = int(read_json_object(Path(checkpoint) / STATE_FILE)["global_step"])
    return own[0] if own else None, read_identity(Path(checkpoint)), step


def _newer(folder: Path, name: str, in_folder: bool) -> str:
    """The end of a line that names the run's checkpoints newer than this one; "" if there are none."""
    found = {int(m[1]): path.name for path in folder.glob("checkpoint-*") if (m := CHECKPOINT.fullmatch(path.name))}
    step = next((step for step, there in found.items() if there == name), None) if in_folder else None
    newer = [found[other] for other in sorted(found) if step is not None and other > step]
    return f"; newer checkpoints, not used: {', '.join(newer)}" if newer else ""


def _said(changed: Mapping[str, tuple[Any, Any]], step: int) -> list[str]:
    return [
        f"resume: --{flag} is {shown(now)} from step {step + 1} on (until then {shown(before)})"
        for flag, (before, now) in changed.items()
    ]
