"""A run's compression: the hook is registered, what it sends is counted, and its state is in the checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from finetune.run.flags.compression import CompressionArguments
from finetune.training.comm_hooks.hook import exchange_gradients
from finetune.training.comm_hooks.onebit_adam import Exchange, Lengths, OneBitAdam
from finetune.training.comm_hooks.power_sgd import PowerSGD
from finetune.training.comm_hooks.top_k import TopK
from finetune.training.comm_hooks.wire import Wire, done

HALF_BYTES = 2


class Compression:
    """The hook of one model. Of `onebit_adam` the optimizer must be an OneBitAdam; of the others any will do."""

    def __init__(
        self,
        arguments: CompressionArguments,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        max_steps: int,
    ) -> None:
        self.arguments, self.optimizer = arguments, optimizer
        self.start = arguments.start_step(max_steps)
        self.steps = self._first = 0  # optimizer steps done, and those that the checkpoint had
        self.wire = Wire()
        self.lengths = Lengths(self.wire.world_size)
        self.device = next(model.parameters()).device
        self._counted = (0.0, 0.0, 0)  # at the last log
        self._compressed = (0.0, 0.0, 0)  # of steps after the start
        parameters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        names = {id(parameter): name for name, parameter in parameters.items()}
        self.keeper = self._build(parameters, names)
        model.register_comm_hook(self, exchange_gradients)

    def _build(self, parameters: dict[str, torch.Tensor], names: dict[int, str]) -> TopK | PowerSGD | Exchange | None:
        """What keeps errors between steps."""
        arguments = self.arguments
        if arguments.ddp_comm_hook == "topk":
            return TopK(self.wire, names, arguments.topk_ratio)
        if arguments.ddp_comm_hook == "powersgd":
            return PowerSGD(self.wire, parameters, arguments.powersgd_rank, self.start)
        if arguments.ddp_comm_hook != "onebit_adam":
            return None
        assert isinstance(self.optimizer, OneBitAdam)
        keeper = Exchange(self.wire)
        self.optimizer.exchange = keeper.mean
        if self.optimizer.is_frozen:  # in the checkpoint, which the Trainer has loaded
            self.start = int(self.optimizer.freeze_step or 0)
        self.optimizer.freeze_step = self.start
        return keeper

    def exchange(self, bucket: distributed.GradBucket) -> Any:
        """A future of what takes the place of the bucket's gradients."""
        hook, buffer = self.arguments.ddp_comm_hook, bucket.buffer()
        if hook == "onebit_adam" and isinstance(self.optimizer, OneBitAdam) and self.optimizer.is_frozen:
            return done(buffer.div_(self.optimizer.longer))  # this rank's own; OneBitAdam.step exchanges
        self.wire.count(buffer.numel())
        if hook == "onebit_adam":
            return self.lengths.measure(buffer, self.wire.mean)
        if hook in ("fp16", "bf16"):
            self.wire.count_all_reduce(buffer.numel() * HALF_BYTES)
            return (fp16_compress_hook if hook == "fp16" else bf16_compress_hook)(distributed.group.WORLD, bucket)
        if isinstance(self.keeper, PowerSGD):
            return self.keeper.exchange(bucket)  # torch's hook sends the first steps whole by itself
        if isinstance(self.keeper, TopK) and self.steps >= self.start:
            return self.keeper.exchange(bucket)
        return self.wire.mean(buffer)

    def end_step(self) -> None:
        """Once the optimizer has stepped."""
        self.steps += 1
        self.lengths.end_step()
        if isinstance(self.optimizer, OneBitAdam) and self.optimizer.is_frozen and self.lengths.ratio is not None:
            self.optimizer.longer = self.lengths.ratio
        if self.steps == self.start:
            self._compressed = (self.wire.sent_bytes, self.wire.whole_bytes, self.steps)

    def window(self) -> dict[str, float]:
        """What a rank has sent since the last call."""
        figures = self._since(self._counted)
        self._counted = (self.wire.sent_bytes, self.wire.whole_bytes, self.steps)
        return figures

    def summary(self) -> dict[str, float]:
        """What a rank has sent in the whole run, and, by `comm_compressed_…`, in the steps after the start."""
        figures = self._since((0.0, 0.0, self._first))
        if self.steps > max(self.start, self._first):
            later = self._since(self._compressed)
            figures |= {name.replace("comm_", "comm_compressed_"): value for name, value in later.items()}
        return figures

    def _since(self, before: tuple[float, float, int]) -> dict[str, float]:
        sent, whole, steps = self.wire.sent_bytes - before[0], self.wire.whole_bytes - before[1], self.steps - before[2]
        if not steps or not whole:
            return {}
        return {"comm_bytes_per_step": sent / steps, "comm_share_of_fp32": sent / whole}

    def opening_line(self) -> str:
        """What the run does, in a line."""
        arguments = self.arguments
        forms = {
            "powersgd": f"as matrices of rank {arguments.powersgd_rank}",
            "topk": f"{arguments.topk_ratio:.3g} of their elements",
            "onebit_adam": "momentum in one bit an element, over the variance of then",
        }
        form = forms.get(arguments.ddp_comm_hook, arguments.ddp_comm_hook)
        first = f"whole until step {self.start}, then " if arguments.keeps_errors else ""
        return f"gradients: {first}{form} (--ddp_comm_hook {arguments.ddp_comm_hook})"

    def save(self, checkpoint: Path) -> None:
        """Each rank its own file, whole or not at all: no two ranks have the same errors."""
        if self.keeper is None:
            return
        ratio = None if self.lengths.ratio is None else float(self.lengths.ratio)
        content = {**self._mark(), "start": self.start, "longer": ratio, "state": self.keeper.state()}
        checkpoint.mkdir(parents=True, exist_ok=True)
        path = checkpoint / file_name(self.wire.rank)
        unfinished = path.with_name(path.name + ".unfinished")
        torch.save(content, unfinished)
        os.replace(unfinished, path)

    def restore(self, checkpoint: Path, step: int) -> str | None:
        """Go on at `step` as the checkpoint has it. Returns what is to be said where that cannot be: all ranks then
        begin without errors, for one that did not would step elsewhere."""
        self.steps = self._first = step
        self._counted = (0.0, 0.0, step)
        self._compressed = (0.0, 0.0, max(step, self.start))
        if self.keeper is None:
            return None
        path = checkpoint / file_name(self.wire.rank)
        content = torch.load(path, weights_only=True, map_location="cpu") if path.is_file() else {}
        mine = {key: content.get(key) for key in self._mark()}
        every: list[Any] = [None] * self.wire.world_size
        distributed.all_gather_object(every, mine)
        if any(one != self._mark() for one in every):
            if isinstance(self.optimizer, OneBitAdam) and not self.optimizer.is_frozen:
                self._start_at(max(self.start, step))  # the variance was not frozen until now
            if isinstance(self.keeper, PowerSGD):
                self.keeper.torch.iter = step
            return f"{checkpoint} has no errors of {self._named()}: what earlier steps did not send is left out."
        if content["start"] <= step:
            self._start_at(content["start"])  # compressed already, however many steps there are now
        self.keeper.restore(content["state"], self.device)
        if content["longer"] is not None:
            self.lengths.ratio = torch.tensor(content["longer"], device=self.device)
            if isinstance(self.optimizer, OneBitAdam) and self.optimizer.is_frozen:
                self.optimizer.longer = self.lengths.ratio
        return None

    def _start_at(self, step: int) -> None:
        self.start = step
        if isinstance(self.optimizer, OneBitAdam):
            self.optimizer.freeze_step = step
        if isinstance(self.keeper, PowerSGD):
            self.keeper.torch.start_powerSGD_iter = step

    def _mark(self) -> dict[str, Any]:
        """What a saved state must share with this run."""
        arguments = self.arguments
        rank = arguments.powersgd_rank if arguments.ddp_comm_hook == "powersgd" else None
        return {"hook": arguments.ddp_comm_hook, "world_size": self.wire.world_size, "powersgd_rank": rank}

    def _named(self) -> str:
        return f"--ddp_comm_hook {self.arguments.ddp_comm_hook} on {self.wire.world_size} ranks"


def file_name(rank: int) -> str:
    return f"comm_hook_{rank}.pt"
