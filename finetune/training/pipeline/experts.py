"""Mixtures of experts in a pipeline: the routers' loss over the global batch, and the load of each expert.

The loss (finetune/models/experts.py) depends on how often each expert is chosen in the whole global batch, in all
layers and hence on all stages. So each step begins with a forward pass of its micro-batches, after which every stage
knows the loss and its own part of it. It adds the gradient of this part at its own routers, in the backward pass of its
layers; between stages, only activations and their gradients travel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback

from finetune.errors import RequestError
from finetune.models.experts import balance, router_loss
from finetune.models.gptlite_mlp import GPTLiteMixture
from finetune.training.experts import draw_load, load_figures, mask_of, write_load
from finetune.training.pipeline.evaluation import forward


class _WithLoss(torch.autograd.Function):
    """`x` as it is; in the backward pass, the gradient of `loss` (0-d) is added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.one = loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return gradient[0], ctx.one


class StageExperts(TrainerCallback):
    """The experts of one stage of a PipelineTrainer, whose engine is built; nothing, if its model has none. All ranks
    must call `begin` and `window`. Raises RequestError for fp16 with a router loss: its loss scale is unknown here."""

    def __init__(self, trainer: Any, names: dict[int, str]) -> None:
        """`names` are those of this stage's weights in the whole model, by the weights' id."""
        self.trainer, self.mixture, self.weight = trainer, trainer.model.mixture, trainer.model.router_weight
        if self.weight and trainer.engine.fp16_enabled():
            raise RequestError(
                "--fp16: a pipeline has no router loss in fp16. Use --bf16, or --router_aux_loss_coef 0."
            )
        self.is_ahead = self.is_forward = False  # not when activations are recomputed
        self.tokens: dict[int, torch.Tensor] = {}  # by layer, for each expert, since the last log
        self.loss, self.steps = 0.0, 0  # of the steps since the last log, without its weight
        self.before: tuple[dict[int, torch.Tensor], float] = {}, 0.0  # tokens and loss at the start of the step
        if self.mixture is None:
            return
        module, layers = trainer.engine.module, list(self.mixture.modules)
        module.register_forward_pre_hook(self._begin_forward)
        module.register_forward_hook(self._end_forward)
        for part in module.modules():
            if isinstance(part, GPTLiteMixture):
                place = layers.index(names[id(part.experts.up_proj)].rpartition(".")[0])
                part.gate.register_forward_hook(self._routed(place))

    def begin(self, batches: list[dict[str, Any]]) -> float:
        """Call it before each step with its micro-batches, which stages between the first and the last do not have.
        Returns the routers' loss of the global batch times its weight."""
        if self.mixture is None:
            return 0.0
        self.real, self.steps = self._real_tokens(batches), self.steps + 1
        loss = self._look_ahead(batches) if self.weight else 0.0
        self.calls: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        self.before = dict(self.tokens), self.loss
        self.loss += loss
        return float(self.weight * loss)

    def forget_step(self) -> None:
        """Drop what the last step has added, because it was not taken."""
        if self.mixture is not None:
            (self.tokens, self.loss), self.steps = self.before, self.steps - 1

    def window(self) -> dict[str, float]:
        """For the log: the figures since the last call. Rank 0 also writes experts.json."""
        if self.mixture is None or not self.steps:
            return {}
        layers, tokens = list(self.mixture.modules), self._tokens()
        logs = {"router_loss": self.loss / self.steps} if self.weight else {}
        self.tokens, self.loss, self.steps = {}, 0.0, 0
        if self.trainer.is_world_process_zero() and bool(tokens.any()):
            write_load(Path(self.trainer.args.output_dir), self.trainer.state.global_step, layers, tokens)
        return logs | load_figures(tokens)

    def noted(self, gather: Any, device: Any) -> dict[str, Any]:
        """For a checkpoint: what `window` would tell now. All ranks must call it."""
        if self.mixture is None:
            return {}
        return {"tokens": self._tokens().tolist(), "losses": [self.loss], "steps": self.steps}

    def restore(self, kept: Mapping[str, Any], rank: int, ranks: int, device: Any) -> None:
        """Go on from what `noted` returned."""
        self.loss, self.steps = sum(kept["losses"]), kept["steps"]
        self.tokens = {} if rank else dict(enumerate(torch.tensor(kept["tokens"], device=device)))

    def _tokens(self) -> torch.Tensor:
        """Of each layer's experts (layers, E), over all ranks, since the last log."""
        tokens: torch.Tensor = self.mixture.table(self.tokens, self.trainer.device)
        distributed.all_reduce(tokens)
        return tokens.cpu()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.mixture is not None and state.is_world_process_zero:
            draw_load(Path(args.output_dir))

    def _real_tokens(self, batches: list[dict[str, Any]]) -> torch.Tensor:
        """The tokens of each row that are no padding, for each micro-batch of this pipeline: (micro-batches, B). The
        first stage tells the others."""
        trainer = self.trainer
        shape = trainer.pipelines, trainer.micro_batches, trainer.args.train_batch_size
        real = torch.zeros(shape, dtype=torch.int64, device=trainer.device)
        if trainer.is_first:
            for number, batch in enumerate(batches):
                mask = mask_of(batch)
                whole = batch["input_ids"].shape[1]
                real[trainer.pipeline, number] = whole if mask is None else mask.sum(dim=1).to(real)
        distributed.all_reduce(real)
        return real[trainer.pipeline]

    def _look_ahead(self, batches: list[dict[str, Any]]) -> float:
        experts = self.mixture.experts
        self.calls = {True: Counter(), False: Counter()}
        self.found = torch.zeros(2 * experts + 1, dtype=torch.float64, device=self.trainer.device)
        self.is_ahead = True
        try:
            forward(self.trainer, batches)
        finally:
            self.is_ahead = False
        distributed.all_reduce(self.found)
        counts, sums, rows = self.found.split([experts, experts, 1])
        self.of_step = counts, rows[0]
        return float(router_loss(counts, sums, rows[0]))

    def _begin_forward(self, *_: Any) -> None:
        self.is_forward = True

    def _end_forward(self, *_: Any) -> None:
        self.is_forward = False

    def _routed(self, place: int) -> Any:
        """A hook for the router of the layer at `place`. The k-th forward pass of a step is that of its k-th
        micro-batch; so is the k-th recomputation."""

        def see(gate: Any, args: Any, logits: torch.Tensor) -> torch.Tensor | None:
            if not (self.is_ahead or gate.training):
                return None
            real = self.real[self.calls[self.is_forward][place]]
            self.calls[self.is_forward][place] += 1
            mask = torch.arange(len(logits) // len(real), device=real.device)[None] < real[:, None]
            counts, sums, rows = balance((logits,), self.mixture.chosen, mask)
            if self.is_ahead:
                self.found += torch.cat([counts.double(), sums.double(), rows.double().reshape(1)])
                return None
            if self.is_forward:
                self.tokens[place] = self.tokens.get(place, 0) + counts
            if not self.weight:
                return None
            # DeepSpeed averages the gradients over pipelines, and adds up those of micro-batches.
            part = router_loss(self.of_step[0], sums, self.of_step[1])
            added: torch.Tensor = _WithLoss.apply(logits, self.weight * self.trainer.pipelines * part)
            return added

        return see
