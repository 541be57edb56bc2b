"""Mixtures of experts under the Trainer: the routers' loss over the global batch, and the load of each expert."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from finetune.data.numbered import NUMBER
from finetune.data.packing import REAL_TOKENS
from finetune.errors import RequestError
from finetune.models.experts import ASKED, WATCHED, Experts, Mixture, mixture_of, router_coefficient
from finetune.report.png import write_png
from finetune.report.run_pictures import load_picture
from finetune.report.shapes import WIDE
from finetune.run.files import EXPERT_LOAD, EXPERT_PICTURE
from finetune.run.flags.experts import ExpertArguments, unsupported
from finetune.safe_read import read_json_object
from finetune.training.expert_parallel import layers_of
from finetune.training.run_folder import write_json
from finetune.training.start import Session

LOAD = "expert_load_max"  # in logs
NOT_READ_AHEAD = ("labels", "shift_labels", NUMBER)


def coefficient_for(session: Session, base: Any) -> float:
    """The weight of the routers' loss in this run; 0 for none. Raises RequestError for a model or flags without it."""
    weight = router_coefficient(base, session[ExpertArguments].router_aux_loss_coef)
    if weight and (fault := unsupported(session.run)):
        raise RequestError(fault)
    return weight


def watch_experts(session: Session, base: Any, model: Any, weight: float) -> None:
    """Count the load of the experts of `model`, if it has some, and add the routers' loss; `RoutedMixin` finds them.
    `model` is what the Trainer gets, and `base` the model inside."""
    mixture = mixture_of(base)
    if mixture is None:
        return
    if session.training.torch_compile:  # a compiled graph has no place for hooks; `coefficient_for` refuses a weight
        if hasattr(base, "router_aux_loss_coef"):
            base.router_aux_loss_coef = 0.0  # otherwise the model adds a loss of its own to each micro-batch
        return
    setattr(model, WATCHED, Experts(base, model, mixture, weight))
    session.say(describe_mixture(session, base.config.get_text_config(), mixture, weight, base))


def describe_mixture(session: Session, config: Any, mixture: Mixture, weight: float, base: Any = None) -> str:
    """The line that a run says about its experts at the start. `base` is the model; None for a pipeline."""
    each = f"{mixture.experts} experts in each of {len(mixture.modules)} layers, {mixture.chosen} per token"
    if not session.training.do_train:  # an evaluation has no router loss and does not count the load
        return each
    unseen = "" if sees_choices(mixture) else "; their load is not counted, as they do not see the router's choices"
    return f"{each}; {_of_loss(session, config, weight, base)}{unseen}"


def sees_choices(mixture: Mixture) -> bool:
    """Whether experts get tokens, choices and shares, as most do in transformers 5; Llama 4's get tokens alone, and
    JetMoe's the number of tokens of each expert."""
    given = len(("tokens", "choices", "shares"))
    return all(len(signature(module.forward).parameters) >= given for module in mixture.modules.values())


def _of_loss(session: Session, config: Any, weight: float, base: Any) -> str:
    if not weight and base is not None and not hasattr(base, "router_aux_loss_coef"):
        return "no router loss: transformers has none for this model"
    if not weight and (session[ExpertArguments].router_aux_loss_coef is not None or getattr(config, ASKED, False)):
        return "no router loss: its weight is 0"
    if not weight:
        usual = getattr(config, "router_aux_loss_coef", None) or 0.001
        return f"no router loss, as {ASKED} is false in the model's config: --router_aux_loss_coef {usual:g} adds it"
    said = f"router loss of the global batch x {weight:g}"
    if session.training.gradient_accumulation_steps > 1 or base is None:
        said += (
            "; each step begins with a forward pass of its micro-batches without gradients, as the loss needs the load "
            "of all of them (a larger --per_device_train_batch_size without accumulation saves it)"
        )
    return said


class RoutedMixin:
    """For a Trainer, before its class: the routers' loss and the load of experts, if `watch_experts` found some."""

    coming: Sequence[Any] = ()  # the micro-batches of a step that has not begun

    @property
    def experts(self: Any) -> Experts | None:
        return getattr(self.model, WATCHED, None)

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        self.coming = samples
        return samples, items

    def training_step(self: Any, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        experts = self.experts
        if experts is None:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        if self.coming:
            if self.expert_parallel and experts.logits is None:
                experts.watch_routers([(one.router, one.router.gate) for _, one in layers_of(experts.base)])
            experts.begin_step()
            if experts.weight and len(self.coming) > 1:
                self._look_ahead(model, experts)
            self.coming = ()
        experts.mask, experts.scale = mask_of(inputs), self._undone(num_items_in_batch)
        with experts.counting():
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]

    def _look_ahead(self: Any, model: Any, experts: Experts) -> None:
        """With the random numbers that the micro-batches will draw, so that dropout does not change the routing."""
        model.train()
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices), experts.looking_ahead():
            for batch in self.coming:
                experts.mask = mask_of(batch)
                read = self._prepare_inputs({k: value for k, value in batch.items() if k not in NOT_READ_AHEAD})
                self.sequence.begin(read, self.model)
                with self.compute_loss_context_manager():
                    model(**read, logits_to_keep=1)

    def _undone(self: Any, items: Any) -> float:
        """What the Trainer and the mean over ranks divide the loss by, unless it is a sum over the global batch
        (transformers 5.23, trainer.py, compute_loss and training_step)."""
        is_sum = self.model_accepts_loss_kwargs and items is not None
        divided = 1 if is_sum else self.current_gradient_accumulation_steps
        multiplied = self.accelerator.num_processes if is_sum and self.args.average_tokens_across_devices else 1
        return float(self.args.world_size * divided / multiplied)

    def log(self: Any, logs: dict[str, Any], start_time: float | None = None) -> None:
        if self.experts is not None and ("loss" in logs or ("train_runtime" in logs and not self._has_load())):
            loss, tokens = self.experts.window(self._sum_over_ranks, self.args.device)
            logs.update({} if loss is None else {"router_loss": loss})
            logs.update(load_figures(tokens))
            if self.is_world_process_zero() and bool(tokens.any()):
                names = list(self.experts.mixture.modules)
                write_load(Path(self.args.output_dir), self.state.global_step, names, tokens)
        if self.experts is not None and "train_runtime" in logs and self.is_world_process_zero():
            draw_load(Path(self.args.output_dir))
        super().log(logs, start_time)  # type: ignore[misc]

    def _has_load(self: Any) -> bool:
        """Not if the run ended before its first log."""
        return any(LOAD in row for row in self.state.log_history)


def mask_of(inputs: dict[str, Any]) -> torch.Tensor | None:
    """The tokens of a micro-batch that are no padding (B, T); None if all are."""
    mask: torch.Tensor | None = inputs.get("attention_mask")
    if mask is None and (sizes := inputs.get(REAL_TOKENS)) is not None:
        mask = torch.arange(inputs["input_ids"].shape[1], device=sizes.device)[None] < sizes[:, None]
    return mask


def load_figures(tokens: torch.Tensor) -> dict[str, float]:
    """`tokens` of each layer's experts (layers, E): the load of the busiest expert relative to the mean of its layer,
    which is 1 if all have the same, and the share of experts that no token reached. Nothing if none were counted."""
    total = tokens.double().mean(dim=1, keepdim=True)
    if not bool(total.sum() > 0):
        return {}
    shares = tokens / total.clamp(min=1e-9)
    return {LOAD: float(shares.max()), "experts_idle": float((tokens == 0).double().mean())}


def write_load(folder: Path, step: int, names: Sequence[str], tokens: torch.Tensor) -> None:
    """Write experts.json: the tokens of each layer's experts between the last two logs."""
    found = {"step": step, "layers": list(names), "tokens": [[int(one) for one in row] for row in tokens.tolist()]}
    write_json(folder / EXPERT_LOAD, found)


def draw_load(folder: Path) -> None:
    """Write experts.png from experts.json, if the run has one that fits into a picture."""
    file = folder / EXPERT_LOAD
    if file.is_file() and (picture := load_picture(read_json_object(file), WIDE)):
        write_png(folder / EXPERT_PICTURE, [picture])
