"""What a run has counted since its last log goes on from a checkpoint as if nothing had cut it, on any number of ranks:
the loss, and of a mixture of experts the routers' loss and the load. Also into a pipeline, and out of one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from transformers import MixtralConfig, MixtralForCausalLM, TrainerState

from finetune.models.experts import Experts, mixture_of
from finetune.run.files import STATE_FILE
from finetune.training.checkpoints.state import state_problems
from finetune.training.experts import load_figures
from finetune.training.pipeline.experts import StageExperts
from finetune.training.pipeline.resuming import _load, alike
from finetune.training.resuming import restore_callbacks
from finetune.training.running_loss import RunningLoss

CPU = torch.device("cpu")
SMALL = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
MODEL = MixtralForCausalLM(MixtralConfig(**SMALL, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2))
MIXTURE = mixture_of(MODEL)
WEIGHT = 0.5
# Of each step: the loss, the routers' loss, and the tokens of each layer's experts.
STEPS = [
    (4.0, 1.25, [[3, 5, 0, 4], [2, 2, 2, 6]]),
    (3.0, 1.5, [[7, 1, 0, 4], [0, 6, 5, 1]]),
    (2.5, 1.0, [[1, 1, 0, 10], [4, 4, 3, 1]]),
]
RUNS = [("trainer", 1), ("trainer", 2), ("trainer", 3), ("pipeline", 1), ("pipeline", 2)]


class Ranks:
    """The ranks of a run as threads, which exchange tensors."""

    def __init__(self, engine: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_pipeline, self.count = engine == "pipeline", count
        self.barrier, self.told, self.own = threading.Barrier(count, timeout=60), [CPU] * count, threading.local()
        self.running = [RunningLoss(self._experts()) for _ in range(count)]
        monkeypatch.setattr(distributed, "all_reduce", lambda tensor: tensor.copy_(self.gather(tensor[None]).sum(0)))

    def _experts(self) -> Any:
        assert MIXTURE is not None
        if not self.is_pipeline:
            return Experts(MODEL, MODEL, MIXTURE, WEIGHT)
        engine = SimpleNamespace(fp16_enabled=lambda: False, module=nn.Identity())
        model = SimpleNamespace(mixture=MIXTURE, router_weight=WEIGHT)
        trainer = SimpleNamespace(engine=engine, model=model, device=CPU, is_world_process_zero=lambda: False)
        return StageExperts(trainer, {})

    def all(self, do: Callable[[int, RunningLoss], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            self.own.rank = rank
            return do(rank, self.running[rank])

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(one, range(self.count)))

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        self.told[self.own.rank] = own
        self.barrier.wait()
        found = torch.cat(self.told)
        self.barrier.wait()
        return found

    def begin(self, step: int) -> None:
        for rank, running in enumerate(self.running):
            args = SimpleNamespace(process_index=rank, world_size=self.count, device=CPU)
            running.on_train_begin(args, SimpleNamespace(global_step=step), None)

    def take(self, step: int) -> None:
        """The ranks of a Trainer have different losses, whose mean is the step's, parts of the routers' loss, and
        tokens of all layers; stages have the same losses, and the tokens of their layers."""
        loss, of_routers, tokens = STEPS[step]
        for rank, running in enumerate(self.running):
            experts, apart = running.experts, rank - (self.count - 1) / 2
            experts.steps += 1
            experts.loss = experts.loss + (of_routers if self.is_pipeline else of_routers / self.count)
            running.add(torch.tensor(loss if self.is_pipeline else loss + apart), step, filters=False)
            for place, row in enumerate(torch.tensor(tokens)):
                split = row // self.count if rank else row - row // self.count * (self.count - 1)
                counts = split if not self.is_pipeline else row * (place % self.count == rank)
                experts.tokens[place] = experts.tokens.get(place, 0) + counts

    def save(self, folder: Path, step: int) -> None:
        self.all(lambda _, running: running.note(alike if self.is_pipeline else self.gather))
        state = TrainerState(global_step=step, stateful_callbacks={"RunningLoss": self.running[0].state()})
        state.save_to_json(str(folder / STATE_FILE))

    def resume(self, folder: Path, step: int) -> None:
        for running in self.running:
            if self.is_pipeline:
                args = SimpleNamespace(restore_callback_states_from_checkpoint=False)
                parts = SimpleNamespace(load_portable=lambda *_: None)
                handler = SimpleNamespace(callbacks=[running])
                trainer = SimpleNamespace(checkpoints=parts, handler=handler, args=args, running_loss=running)
                _load(trainer, folder, SimpleNamespace())  # type: ignore[arg-type]
            else:
                restore_callbacks([running], TrainerState.load_from_json(str(folder / STATE_FILE)), False)
        self.begin(step)

    def log(self, rank: int, running: RunningLoss) -> dict[str, float]:
        gather = alike if self.is_pipeline else self.gather
        found = {"loss": running.window(len(STEPS), gather)}
        if self.is_pipeline:
            return found | running.experts.window()
        loss, tokens = running.experts.window(lambda own: self.gather(own[None]).sum(0), CPU)
        return found | {"router_loss": loss} | load_figures(tokens)


@pytest.mark.parametrize(
    ("before", "after"), [*itertools.product(RUNS, RUNS)], ids=lambda run: f"{run[0]} of {run[1]}" if run else ""
)
def test_a_log_is_that_of_a_run_that_was_not_cut(
    before: tuple[str, int], after: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Ranks(*before, monkeypatch)
    cut.begin(0)
    cut.take(0)
    cut.take(1)
    cut.save(tmp_path, 2)
    assert state_problems(tmp_path, 2) == []
    resumed = Ranks(*after, monkeypatch)
    resumed.resume(tmp_path, 2)
    resumed.take(2)
    tokens = torch.tensor([row for *_, row in STEPS]).sum(0)
    expected = {"loss": 9.5 / 3, "router_loss": 3.75 / 3, **load_figures(tokens)}
    assert expected["experts_idle"] == 1 / 8
    assert resumed.all(resumed.log) == [pytest.approx(expected, rel=1e-6)] * after[1]
