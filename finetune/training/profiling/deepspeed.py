"""DeepSpeed's own profilers: flags add sections to its config, and their output goes to the run folder."""

from __future__ import annotations

import contextlib
import copy
import io
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from finetune.run.flags.profiling import MONITORS, steps_done
from finetune.run.run import Run
from finetune.training.checkpoints.writing import every
from finetune.training.run_folder import write_json, write_text

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
