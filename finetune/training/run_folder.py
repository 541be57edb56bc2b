"""The run folder: its lock, what is deleted before a run, and what a run writes there besides weights and checkpoints.
Rank 0 writes. finetune.run.output_dir checks whether a run may use the folder."""

from __future__ import annotations

import copy
import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainerCallback
from transformers.trainer import TRAINING_ARGS_NAME

from finetune.dsconfig.context import NVME_FOLDER
from finetune.errors import FinetuneError, RunError, disk_is_full, first_line
from finetune.privacy import hidden, names_a_secret, shown, without_home
from finetune.run.files import FAILURE, LABELS, LOCK, RUN_RECORD
from finetune.run.launch import Launch, own_rank
from finetune.run.parse import RECIPE_KEY
from finetune.run.run import Run
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.lock import (
    RESUMED_WAITS_SECONDS,
    gone,
    is_missing,
    keep_locked,
    lock_run_folder,
    refuse_supervised,
)
from finetune.training.checkpoints.writing import clear_leftovers, flush, write_durably
from finetune.training.guards.memory import is_out_of_memory, out_of_memory
from finetune.training.progress import metrics_of
from finetune.versions import versions

ONCE = ("config", "resume", "resume_changed", "overwrite_output_dir")  # flags that a second run must not repeat
FULL_DISK_BYTES = 16 * 2**20
OF_CONFIGS = ("transformers.integrations.deepspeed", "accelerate.utils.dataclasses")  # they hold the DeepSpeed config
DEEPEST = 4  # levels of nested configs
LONGEST_FAILURE = 2000  # characters
KEPT_ROWS = 250  # of the log, in trainer_state.json and in memory; metrics.jsonl has all. 1,000 take a save 30 ms


def lock_output_dir(run: Run) -> str | None:
    """Lock the folder against other runs. Returns a message to print, if any. Raises RequestError if another run, or a
    supervisor of one, has it. Only rank 0, after `check_output_dir`."""
    folder = Path(run.values["output_dir"]).expanduser()
    wait = RESUMED_WAITS_SECONDS if run.value("resume") else 0.0
    refuse_supervised(folder)
    return lock_run_folder(folder, command_line(run.argv, run.launch), wait)


def open_output_dir(run: Run) -> None:
    """Create the folder; delete the old run with --overwrite_output_dir, and half-written files of an interrupted run.
    Only rank 0, after `check_output_dir`."""
    folder = Path(run.values["output_dir"]).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    lock_output_dir(run)  # a new folder could not be locked earlier
    clear_leftovers(folder)
    (folder / FAILURE).unlink(missing_ok=True)
    if run.value("overwrite_output_dir"):
        for path in folder.iterdir():
            if path.name in (NVME_FOLDER, LOCK):
                continue  # the model being built already offloads parameters there; the lock is ours
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def forget_results(folder: Path) -> None:
    """Delete the results of an earlier run in the folder: they are those of other weights. Only rank 0, before the
    first results of this run are saved; the Trainer adds to what is there (transformers 5.23, save_metrics)."""
    for path in folder.glob("*_results.json"):
        path.unlink(missing_ok=True)


class MetricsFile(TrainerCallback):
    """Appends every log of the Trainer to `metrics.jsonl`, one JSON object per line with `step` and `epoch`."""

    kept_at_end: Sequence[dict[str, float]] = ()  # evaluations at the last step, of a run resumed there

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop rows that a resumed run logs again: those after its checkpoint, and the closing ones."""
        path = Path(args.output_dir) / "metrics.jsonl"
        if state.is_world_process_zero and path.is_file():
            before = takewhile(lambda row: "train_runtime" not in row, read_metrics(path.parent))
            kept = [row for row in before if row["step"] <= state.global_step]
            write_durably(path, "".join(json.dumps(row) + "\n" for row in kept))
            if state.global_step >= state.max_steps:  # the closing evaluation runs again; its row may exist
                self.kept_at_end = [metrics_of(row) for row in kept if row["step"] == state.global_step]

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Flush, so that after a power failure the rows up to the checkpoint are there too."""
        path = Path(args.output_dir) / "metrics.jsonl"
        if state.is_world_process_zero and path.is_file():
            flush(path)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        del state.log_history[:-KEPT_ROWS]  # every save writes it, so it must not grow with the run
        if state.is_world_process_zero and logs:
            row = _finite({"step": state.global_step, **logs, "time": round(time.time(), 3)})
            if (found := metrics_of(row)) and any(_alike(found, kept) for kept in self.kept_at_end):
                return
            keep_locked(Path(args.output_dir))
            with (Path(args.output_dir) / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _alike(one: dict[str, float], other: dict[str, float]) -> bool:
    """The same metrics, up to what another number of ranks rounds differently."""
    return one.keys() == other.keys() and all(math.isclose(one[k], other[k], rel_tol=1e-5) for k in one)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`; a last line that a kill left incomplete is skipped."""
    rows = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return rows


def write_records(folder: Path, run: Run, lineage: Sequence[str] = ()) -> None:
    """Write `recipe.yaml`, with which `--config` repeats the run, and `environment.json`. If flags changed when the run
    was resumed, comments in `recipe.yaml` say which steps ran with which."""
    kept = {k: v for k, v in sorted(run.values.items()) if v is not None and not names_a_secret(k) and k not in ONCE}
    if kept.get("deepspeed"):  # the resolved config, whichever flag gave it
        kept.pop("deepspeed_config", None)
    plain = json.loads(json.dumps({RECIPE_KEY: run.recipe.name, **kept}, default=str))
    flags = yaml.safe_dump(without_home(plain), sort_keys=True)
    comments = "".join(f"# {json.dumps(line, ensure_ascii=False)[1:-1]}\n" for line in lineage)
    write_text(folder / RUN_RECORD, comments + flags)
    packages = versions()
    record = {
        "command": command_line(run.argv, run.launch),
        "python": packages.pop("python"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "packages": packages,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_text(folder / "environment.json", json.dumps(record, indent=2) + "\n")


def command_line(argv: Sequence[str], launch: Launch) -> str:
    """The command line of the recipe, without the values of flags whose name suggests a secret."""
    starts = {
        "deepspeed": ["deepspeed", "--num_gpus", str(launch.local_world_size)],
        "torchrun": ["torchrun", "--nproc_per_node", str(launch.local_world_size)],
        "accelerate": ["accelerate", "launch", "--num_processes", str(launch.world_size)],
    }
    script = Path(sys.argv[0])
    words, hide = [*starts.get(launch.launcher, ["python"]), f"{script.parent.name}/{script.name}"], False
    for word in argv:
        if word.startswith(("--local_rank", "--local-rank")):
            continue
        name = word.split("=")[0]
        secret = word.startswith("--") and names_a_secret(name)
        words.append("***" if hide else f"{name}=***" if secret and "=" in word else word)
        hide = secret and "=" not in word
    return shlex.join([without_home(word) for word in words])


def write_arguments(folder: Path, arguments: Any) -> None:
    """Overwrite the Trainer's training_args.bin (transformers 5.23, Trainer._save), a record that no code reads back,
    with "~" for the home folder and without its one secret, `hub_token`, which here comes from the environment."""
    copied = _copied(arguments, 0)
    copied.hub_token = None
    torch.save(copied, folder / TRAINING_ARGS_NAME)


def _copied(holder: Any, level: int) -> Any:
    """A copy without the home folder in its strings, nor in those of the configs that it holds."""
    made = copy.copy(holder)
    for name, value in vars(holder).items():
        is_config = type(value).__module__ in OF_CONFIGS and hasattr(value, "__dict__") and level < DEEPEST
        vars(made)[name] = _copied(value, level + 1) if is_config else without_home(value)
    return made


def write_ds_config(folder: Path, trainer: Any) -> None:
    """Write `ds_config.json` as the engine got it, with every "auto" filled; nothing for a run without DeepSpeed. Also
    delete what NVMe offload left in the run folder, as no other run can use it."""
    if trainer.is_deepspeed_enabled:
        own = getattr(trainer, "ds_config", None)  # a pipeline's
        plugin = None if own is not None else trainer.accelerator.state.deepspeed_plugin
        write_json(folder / "ds_config.json", without_home(own if plugin is None else plugin.deepspeed_config))
    shutil.rmtree(folder / NVME_FOLDER, ignore_errors=True)


def write_json(path: Path, content: Any) -> None:
    """Write standard JSON: a number that is not finite becomes null."""
    write_text(path, json.dumps(_finite(content), indent=2) + "\n")


def add_to_config(folder: Path, name: str, value: Any) -> None:
    """Add an entry to the saved config.json, and to the labels.json of an adapter. Only rank 0."""
    for saved in (folder / "config.json", folder / LABELS):
        if saved.is_file():
            write_json(saved, {**read_json_object(saved), name: value})


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(path.name + ".unfinished")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_whole(path: Path, save: Callable[[Any], None]) -> None:
    """Write a file atomically; `save` writes its content to an open file. It is not flushed to the disk. If two runs
    write it at the same time, the later one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.unfinished")  # hosts may have the same process ids
    try:
        with unfinished.open("wb") as file:
            save(file)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def kept_failure(folder: Path) -> Iterator[None]:
    """Keep the error that ends a run, for `finetune report`: of several ranks that of the first to fail, since others
    often fail because of it. A disk that cannot be written must not hide the error itself."""
    try:
        yield
    except BaseException as error:
        said = str(error) if isinstance(error, FinetuneError) else f"{type(error).__name__}: {error}".removesuffix(": ")
        with suppress(OSError), (folder / FAILURE).open("x", encoding="utf-8") as file:
            json.dump({"rank": own_rank(), "error": hidden(shown(said))[:LONGEST_FAILURE]}, file)
        raise


@contextmanager
def explained_disk_errors(folder: Path, launch: Launch | None = None) -> Iterator[None]:
    """Turn any library's error about a full or unwritable disk, or about memory, into one message. Earlier saves
    remain. `launch` is the run's, if this is a run."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(error, folder, launch) from None  # the traceback would keep the memory in use
        if _is_of(folder, error) and is_missing(folder, error):
            raise gone(folder) from error
        if _is_of(folder, error):
            raise RunError(
                f"{folder} cannot be written: {first_line(error)}. Earlier checkpoints are whole. Fix that, then "
                "--resume allow."
            ) from error
        if not disk_is_full(error) and not _torch_met_a_full_disk(error, folder):
            raise
        free = shutil.disk_usage(folder).free / 2**20
        raise RunError(
            f"the disk of {folder} is full ({free:.0f} MiB free), and saving failed. Earlier checkpoints are whole. "
            "Make room, keep fewer with --save_total_limit, or leave out optimizer states with --save_only_model True; "
            "then --resume allow."
        ) from error


def _is_of(folder: Path, error: Exception) -> bool:
    """Whether the error is about a file of the run folder, but not a full disk."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str | bytes) or disk_is_full(error):
        return False
    return Path(os.fsdecode(error.filename)).absolute().is_relative_to(folder.absolute())


def _torch_met_a_full_disk(error: BaseException, folder: Path) -> bool:
    """torch.save reports no errno (torch, caffe2/serialize/inline_container.cc and the C++ streams beneath it)."""
    if not os.access(folder, os.W_OK):
        return False  # read-only, however little space is free
    is_torchs = any(word in str(error) for word in ("inline_container", "basic_ios"))
    return is_torchs and shutil.disk_usage(folder).free < FULL_DISK_BYTES


def _finite(value: Any) -> Any:
    """`value` as JSON holds it, with null for numbers that are not finite."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)
