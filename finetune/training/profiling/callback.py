"""Traces the requested steps of a run with torch's profiler, and writes trace, table and picture to `profile/`; and
DeepSpeed's own profilers: flags add sections to its config, and their output goes to the run folder."""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from transformers import TrainerCallback

from finetune.run.flags.profiling import MONITORS, ProfileArguments, check_length, steps_done
from finetune.run.run import Run
from finetune.training.checkpoints.writing import every, rank
from finetune.training.profiling.parts import FORWARD_RANGE, NEW_START, spans_of, steps_of
from finetune.training.profiling.summary import RankProfile, by_part, page, plot_parts, record, shares_line, trace_name
from finetune.training.run_folder import write_json, write_text

FOLDER = "profile"
PROFILER_WARMUP_STEPS = 1  # traced and discarded: includes the profiler's own startup


def profiling(arguments: ProfileArguments) -> list[TrainerCallback]:
    """The callbacks that the flags ask for."""
    asked: list[TrainerCallback] = [StepProfile(arguments)] if arguments.profile else []
    if arguments.flops_profiler and not arguments.profile:
        asked.append(_FlopsStep(arguments.profile_first_step))
    return [*asked, CommsSummary()] if arguments.comms_logger else asked


class StepProfile(TrainerCallback):
    """A step lasts from the end of the previous one to its own end, so it includes the wait for data, and the logging
    after the previous step; an evaluation or a checkpoint in between is excluded."""

    def __init__(self, arguments: ProfileArguments) -> None:
        self.first, self.count = arguments.profile_first_step, arguments.profile
        self.step_seconds: list[float] = []  # all steps of this process, including those before the traced ones
        self._before = 0
        self._mark: float | None = None
        self._range: Any = None
        self._profiler: Any = None
        self._hooks: list[Any] = []
        self._folder: Path | None = None
        self._traced: tuple[RankProfile, ...] = ()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        check_length(self.first, self.count, state.max_steps, state.global_step)
        assert model is not None, "who calls the callbacks gives them the model"
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it logs each start and stop, on every rank
        self._before, self._folder = state.global_step, Path(args.output_dir) / FOLDER
        self._hooks = [
            model.register_forward_pre_hook(lambda *_: self._forward_begins()),
            model.register_forward_hook(lambda *_: self._forward_ends(), always_call=True),
        ]
        on_gpu, wait = torch.cuda.is_available(), self.first - 1 - PROFILER_WARMUP_STEPS
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=schedule(wait=wait, warmup=PROFILER_WARMUP_STEPS, active=self.count, repeat=1),
            on_trace_ready=self._keep,
        )
        self._profiler.start()

    def _forward_begins(self) -> None:
        self._range = record_function(FORWARD_RANGE)
        self._range.__enter__()

    def _forward_ends(self) -> None:
        self._range.__exit__(None, None, None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._mark is None:
            self._mark = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._profiler is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # so that a step includes its kernels
        now = time.perf_counter()
        if self._mark is not None:
            self.step_seconds.append(now - self._mark)
        self._profiler.step()
        self._mark = time.perf_counter()
        if state.global_step == self._before + self.first + self.count - 1:
            self._finish(state)

    def _not_of_the_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mark = None
        with record_function(NEW_START):
            pass

    on_evaluate = on_save = _not_of_the_step

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A run that stopped early ends here, with fewer traced steps or none."""
        if self._profiler is not None:
            self._finish(state)

    def _finish(self, state: Any) -> None:
        """Stop the profiler, which passes its trace to `_keep`, and combine the ranks' results."""
        self._profiler.stop()
        self._profiler = None
        for hook in self._hooks:
            hook.remove()
        ranks = [found for traced in every(self._traced) for found in traced]
        if not state.is_world_process_zero:
            return
        assert self._folder is not None
        if not ranks:
            print(
                f"profile: the run ended at step {state.global_step}, before step {self._before + self.first} was "
                "complete. There is no trace.",
                flush=True,
            )
            return
        write_json(self._folder / "summary.json", record(ranks))
        write_text(self._folder / "README.md", page(ranks))
        plot_parts(ranks, self._folder / "parts.png")
        print(f"{shares_line(ranks)}\n{by_part(ranks).plain}\ntrace: {self._folder / trace_name(0)}", flush=True)

    def _keep(self, profiler: Any) -> None:
        """Write this rank's trace to its file, and split its steps into parts."""
        begin = time.perf_counter()
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / trace_name(rank())
        profiler.export_chrome_trace(str(path))
        with gzip.open(path, "rt", encoding="utf-8") as file:
            steps = steps_of(spans_of(json.load(file)))
        whole = max(0, min(len(self.step_seconds) - self.first + 1, self.count))
        numbers = tuple(self._before + self.first + i for i in range(whole))
        # Without the first step, which does one-time setup, and without the profiler's warm-up.
        untraced = tuple(self.step_seconds[1 : self.first - 1 - PROFILER_WARMUP_STEPS])
        took = time.perf_counter() - begin
        if whole:
            on_gpu = torch.cuda.is_available()
            self._traced = (RankProfile(rank(), numbers, tuple(steps[:whole]), untraced, on_gpu, took),)


class _FlopsStep(TrainerCallback):
    """Checks the run's length: DeepSpeed silently writes nothing if the run ends before the profiled step."""

    def __init__(self, first: int) -> None:
        self.first = first

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_length(self.first, 1, state.max_steps, state.global_step)


FLOPS_FILE, MONITOR_FOLDER = "flops.txt", "monitor"


def with_profilers(config: dict[str, Any], run: Run, checkpoint: str | None) -> dict[str, Any]:
    """The config with the sections that the flags ask for; other keys in those sections are kept."""
    folder = Path(run.value("output_dir")).expanduser()
    sections: dict[str, dict[str, Any]] = {}
    if run.value("flops_profiler"):
        first = run.value("profile_first_step")
        # deepspeed 0.19.8, runtime/engine.py, forward: `global_steps` counts completed steps, also before a resume.
        step = steps_done(checkpoint) + first - 1
        sections["flops_profiler"] = {"profile_step": step, "output_file": str(folder / FLOPS_FILE)}
    if run.value("comms_logger"):
        sections["comms_logger"] = {"verbose": False, "prof_all": True}
    monitor = run.value("ds_monitor")
    if monitor:
        to_folder = {"output_path": str(folder / MONITOR_FOLDER), "job_name": monitor}
        sections[MONITORS[monitor]] = {"project": folder.name} if monitor == "wandb" else to_folder
    if monitor == "wandb":
        os.environ.setdefault("WANDB_DIR", str(folder))  # DeepSpeed does not set it
    config = copy.deepcopy(config)
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section, "enabled": True}
    return config


class CommsSummary(TrainerCallback):
    """Writes `comms.txt`, rank 0's table as DeepSpeed prints it, and `comms.json`, with every rank's numbers."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from deepspeed import comm  # not at the top of the file: on import it chooses its device

        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Without the stragglers: they take a collective per operation, and pipeline stages have different ones.
            own = comm.log_summary(return_dict=True)
        ranks = every(own["summary"])
        if state.is_world_process_zero:
            folder = Path(args.output_dir)
            write_text(folder / "comms.txt", printed.getvalue())
            write_json(folder / "comms.json", {"ranks": ranks})
            print(f"communication as counted by DeepSpeed: {folder / 'comms.txt'}", flush=True)
