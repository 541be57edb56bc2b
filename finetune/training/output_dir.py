"""The run folder before a run: may it be written, what is deleted, and where a resumed run goes on from."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import distributed

from finetune.dsconfig.load import NVME_FOLDER
from finetune.errors import FinetuneError, NothingToDoError, RequestError
from finetune.training.arguments import Request

RUN_RECORD = "recipe.yaml"  # its presence says: this folder was written by a recipe
STATE_FILE = "trainer_state.json"  # what is written last into a checkpoint: without it, it was cut off
PIPELINE_RECORD = "pipeline.json"  # in a checkpoint of a pipeline
LAST_WRITTEN = "README.md"  # the model card: a run that was cut off has none, or one that is older than its checkpoint
INPUTS = (
    "model_name_or_path",
    "tokenizer_name",
    "dataset_name",
    "train_file",
    "validation_file",
    "test_file",
    "train_dir",
    "validation_dir",
    "test_dir",
    "cifar_dir",
    "config",
    "deepspeed",
)


def check_output_dir(request: Request) -> None:
    """Refuse a folder that cannot be written, or that holds a run which may not be overwritten. Only rank 0 calls it.

    Nothing is deleted yet: `open_output_dir` does that once the rest of the request has been found right.
    """
    folder = Path(request.values["output_dir"]).expanduser()
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"--output_dir {folder}: is a file. Give a folder.")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise RequestError(
            f"--output_dir {folder}: cannot be written ({error.strerror}). Give another folder."
        ) from error
    entries = [p.name for p in folder.iterdir() if p.name != "lost+found"] if folder.is_dir() else []
    resume = request.values.get("resume")
    if resume == "allow" and entries == [NVME_FOLDER]:
        return
    if not entries or (resume and (resume != "allow" or RUN_RECORD in entries)):
        return
    if not request.values.get("overwrite_output_dir"):
        raise RequestError(
            f"--output_dir {folder}: holds {len(entries)} files or folders already. Go on with it by --resume auto, "
            "delete it by --overwrite_output_dir True, or give another folder."
        )
    if RUN_RECORD not in entries:
        raise RequestError(
            f"--output_dir {folder}: holds {', '.join(sorted(entries)[:3])} but no {RUN_RECORD}, so it is no run of "
            "ours and is not deleted. Empty it by hand, or give another folder."
        )
    for name in INPUTS:
        given = Path(str(request.values.get(name) or "")).expanduser()
        if request.values.get(name) and given.exists() and given.resolve().is_relative_to(folder.resolve()):
            raise RequestError(
                f"--overwrite_output_dir would delete {folder}, which holds --{name} {given}. Give another "
                "--output_dir."
            )


def open_output_dir(request: Request) -> None:
    """Make the folder, without the run that --overwrite_output_dir gives up. Only rank 0, after `check_output_dir`."""
    folder = Path(request.values["output_dir"]).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    if request.values.get("overwrite_output_dir"):
        for path in folder.iterdir():
            if path.name == NVME_FOLDER:
                continue  # a model that is being built swaps its parameters there already
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def checkpoint_to_resume(request: Request) -> str | None:
    """The checkpoint folder that --resume means; None without it. Raises RequestError where there is none, unless it
    is `allow`: a job that a cluster starts again may have been cut off before its first checkpoint."""
    folder, resume = Path(request.values["output_dir"]).expanduser(), request.values.get("resume")
    if not resume:
        return None
    if resume in ("auto", "allow"):
        whole = [path for path in folder.glob("checkpoint-*") if (path / STATE_FILE).is_file()]
        if not whole and resume == "allow":
            return None
        if not whole:
            raise RequestError(
                f"--resume auto: {folder} holds no whole checkpoint. To start anew, put --overwrite_output_dir True in "
                "place of --resume."
            )
        newest = max(whole, key=lambda path: int(path.name.rsplit("-", 1)[-1]))
        _refuse_if_finished(request, newest, RequestError if resume == "auto" else NothingToDoError)
        _refuse_other_engine(request, newest)
        return str(newest)
    path = Path(resume).expanduser()
    if not (path / STATE_FILE).is_file():
        raise RequestError(
            f"--resume {resume}: is no checkpoint folder (no trainer_state.json in it). Give one, auto, or allow."
        )
    _refuse_other_engine(request, path)
    return str(path)


def check_same_checkpoint(checkpoint: str | None) -> None:
    """Every rank has looked by itself: on a disk that not all see, or not yet, some would start and others go on."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, checkpoint)
    other = next((rank for rank, found in enumerate(every) if found != every[0]), None)
    if other is not None:
        raise RequestError(
            f"--resume: rank 0 finds {every[0] or 'no checkpoint'}, rank {other} {every[other] or 'no checkpoint'}. "
            "Put --output_dir on a disk that all hosts see."
        )


def _refuse_other_engine(request: Request, checkpoint: Path) -> None:
    """The Trainer finds no optimizer in a pipeline's checkpoint, and would go on with a fresh one without a word."""
    of_pipeline = (checkpoint / PIPELINE_RECORD).is_file()
    if of_pipeline != (request.stages is not None):
        engine = "a pipeline" if of_pipeline else "the Trainer"
        raise RequestError(
            f"--resume: {checkpoint} is a checkpoint of {engine}, and this recipe has another engine. Go on with the "
            "recipe that wrote it, or start anew from its weights by --model_name_or_path."
        )


def check_same_model(checkpoint: str | None, config: Any) -> None:
    """Raises RequestError where a checkpoint is of a model with other labels or another vocabulary: the data have
    changed, or the flags."""
    path = Path(checkpoint or "") / "config.json"
    if not checkpoint or not path.is_file():
        return
    before, now = json.loads(path.read_text(encoding="utf-8")), json.loads(config.to_json_string(use_diff=False))
    shape = "model_type id2label vocab_size hidden_size hidden_sizes depths dim num_hidden_layers n_layers"
    for name in shape.split():
        if name in before and name in now and before[name] != now[name]:
            raise RequestError(
                f"--resume: {checkpoint} is of a model with {name} {before[name]}, but these data and flags make one "
                f"with {now[name]}. Resume with the flags in its recipe.yaml, or give another --output_dir."
            )


def _refuse_if_finished(request: Request, checkpoint: Path, kind: type[FinetuneError]) -> None:
    """A run that has had all its steps is not trained further, and its results are kept. For a cluster that starts it
    again that is no error."""
    state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    asked = request.value("max_steps")
    by_steps = asked > 0 and state["global_step"] >= asked
    by_epochs = asked <= 0 and state["global_step"] >= state["max_steps"]
    card = checkpoint.parent / LAST_WRITTEN
    if not card.is_file() or card.stat().st_mtime < (checkpoint / STATE_FILE).stat().st_mtime:
        return  # cut off after its last step: what comes after training is still to do
    if by_steps or (by_epochs and request.value("num_train_epochs") <= state["num_train_epochs"]):
        raise kind(
            f"--resume: the run ended at step {state['global_step']}, and nothing is left to do. To go on, ask "
            "for more by --num_train_epochs or --max_steps."
        )
