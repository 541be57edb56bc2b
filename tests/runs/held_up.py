"""Run by test_pipeline.py and test_async_saves.py: the pipeline recipe, whose writer processes are held up at each save
until something has happened to what was copied, or to themselves. $HAPPENS is

    spoil   all weights, masters and optimizer states become 0
    kill    the writer of checkpoint-8 is killed
    full    checkpoint-8 finds a disk that takes no more
    lack    nothing is held up, but rank 1 lacks memory for the first save
    unread  nothing is held up, but rank 1 cannot read the checkpoint that it resumes from
"""

import errno
import os
import resource
import runpy
import signal
import sys

import torch

from finetune.training.checkpoints import saves
from finetune.training.pipeline import checkpoint
from finetune.training.pipeline import trainer as pipelines
from finetune.training.pipeline.trainer import PipelineTrainer

RECIPE = "recipes/causal_lm_pipeline.py"
happens, save = os.environ["HAPPENS"], pipelines.save_checkpoint


def spoil(trainer: PipelineTrainer) -> None:
    groups, states = trainer.optimizer.param_groups, trainer.optimizer.state.values()
    tensors = [*trainer.engine.module.parameters(), *(p for group in groups for p in group["params"])]
    for tensor in [*tensors, *(part for state in states for part in state.values() if torch.is_tensor(part))]:
        tensor.data.zero_()


def held_up(trainer: PipelineTrainer) -> None:
    if trainer.state.global_step > 8 or happens == "lack":
        save(trainer)
        return
    trainer.saves.beside.finish()
    writer = trainer.saves.beside.writer
    assert writer is not None
    pid, is_last = writer.process.pid, trainer.state.global_step == 8
    if happens == "full" and is_last:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, 1000))
    os.kill(pid, signal.SIGSTOP)
    save(trainer)
    if happens == "spoil":
        spoil(trainer)
    if happens == "kill" and is_last:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # on a busy machine dying can take longer than a few steps
    else:
        os.kill(pid, signal.SIGCONT)


def unread(places: object, name: str) -> torch.Tensor:
    raise OSError(errno.EIO, os.strerror(errno.EIO), name)


pipelines.save_checkpoint = held_up
if happens == "unread" and os.environ["RANK"] == "1":
    checkpoint.read_tensor = unread
if happens == "lack" and os.environ["RANK"] == "1":
    reasons = iter(["rank 1 lacks it"])
    saves.lacking = lambda needed, held: next(reasons, None)
sys.argv[0] = RECIPE
runpy.run_path(RECIPE, run_name="__main__")
