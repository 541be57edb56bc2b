"""Mixtures of experts: which modules are experts, how many tokens each one gets, and the routers' loss.

The routers' loss (Switch Transformer, arXiv 2101.03961, equations 4 to 6) is E sum_e f_e P_e over E experts: f_e is the
number of times that expert e was chosen, P_e the sum of its probabilities, both divided by the number of tokens times
layers. f_e has no gradient. `Experts` takes all three over the global batch, so that a step has the loss and the
gradient of one process that sees it at once, on any number of ranks and with any accumulation.

transformers 5.23 takes them over each micro-batch and adds the result to a loss that the Trainer then multiplies by the
number of ranks and does not divide by the accumulation steps: with 2 ranks and 2 steps, a router's gradient is 4 times
too large (huggingface/transformers issue 48690; models/mixtral/modeling_mixtral.py, load_balancing_loss_func;
trainer.py, compute_loss).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed, nn

from finetune.errors import RequestError
from finetune.models.probes import small_copy, tried

PROBE_TOKENS = 16
ASKED = "output_router_logits"  # transformers' name in configs and forward passes
# Changes to the config of a small copy whose only layer is to have experts.
ALL_SPARSE = {"mlp_only_layers": [], "decoder_sparse_step": 1, "first_k_dense_replace": 0}
CHOSEN = ("num_experts_per_tok", "top_k_experts")  # the second in Gemma 4
WATCHED = "watched_experts"  # the attribute of a model that has its `Experts`


@dataclass(frozen=True)
class Mixture:
    """The experts of a model: the modules that hold them, by name, their number in each, and how many a token gets."""

    modules: dict[str, nn.Module]
    experts: int
    chosen: int

    def table(self, tokens: Mapping[int, torch.Tensor], device: torch.device) -> torch.Tensor:
        """Counts of each layer's experts (layers, E), from those (E,) of some layers; the others have none."""
        zeros = torch.zeros(self.experts, dtype=torch.int64, device=device)
        return torch.stack([tokens.get(place, zeros) for place in range(len(self.modules))])


def mixture_of(model: Any) -> Mixture | None:
    """The experts of `model`, as transformers 5 stores them: all of a layer in tensors of three dimensions. None for a
    model without."""
    found = {name: module for name, module in model.named_modules() if _experts_in(module)}
    if not found:
        return None
    config = model.config.get_text_config()
    most = max(_experts_in(module) for module in found.values())
    chosen = next((getattr(config, name) for name in CHOSEN if getattr(config, name, None)), 1)
    return Mixture(found, most, int(chosen))


def _experts_in(module: Any) -> int:
    """The number of experts that a module holds; 0 if it holds none. ZeRO-3 keeps the shapes of what it shards."""
    count = getattr(module, "num_experts", None)
    shapes = [getattr(one, "ds_shape", one.shape) for one in module.parameters(recurse=False)]
    is_experts = isinstance(count, int) and any(len(shape) == 3 and shape[0] == count for shape in shapes)
    return int(count or 0) if is_experts else 0


def router_coefficient(model: Any, asked: float | None) -> float:
    """The weight of the routers' loss: what is asked for, else what the model's config says; 0 for none. Raises
    RequestError if it is asked for, and the model has no such loss or one that cannot be computed exactly here."""
    config = model.config.get_text_config()
    if asked is None and not getattr(config, ASKED, False):
        return 0.0
    weight = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0) if asked is None else asked
    reason = tried(model, refusal) if weight else None
    if reason and asked is None:
        raise RequestError(f"the model's config has {ASKED}, but {reason}. Give --router_aux_loss_coef 0.")
    if reason:
        raise RequestError(f"--router_aux_loss_coef {asked:g}: {reason}. Drop it.")
    return weight


def refusal(model: Any) -> str | None:
    """Why the routers' loss of `model` cannot be computed here; None if it can. A small copy is tried: the loss must
    be that of transformers, and `model` must add nothing of its own to the loss of its tokens."""
    name = type(model).__name__
    if mixture_of(model) is None:
        return f"{name} has no experts"
    if ASKED not in inspect.signature(model.forward).parameters or not hasattr(model, "router_aux_loss_coef"):
        return f"{name} has no router loss in transformers"
    ids = torch.arange(PROBE_TOKENS).reshape(2, -1)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    changes = {name: value for name, value in ALL_SPARSE.items() if hasattr(model.config, name)}
    with torch.no_grad():
        twin = small_copy(model, PROBE_TOKENS, changes)
        twin.router_aux_loss_coef = 0.0
        given = twin(input_ids=ids, attention_mask=mask, labels=ids, **{ASKED: True})
        plain = twin(input_ids=ids, attention_mask=mask, labels=ids, **{ASKED: False}).loss
        chosen = int(twin.config.get_text_config().num_experts_per_tok)
        counts, sums, rows = balance(given.router_logits, chosen, mask)
    if not torch.isclose(given.aux_loss, router_loss(counts, sums, rows), rtol=1e-4):
        return f"{name} computes its router loss in its own way"
    return None if torch.isclose(given.loss, plain) else f"{name} adds its router loss in its own way"


def balance(
    logits: tuple[torch.Tensor, ...], chosen: int, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Over the tokens in `mask` (B, T), None for all, and all layers: how often each expert was chosen (E,), the sums
    of its probabilities (E,), which have a gradient, and the number of tokens times layers. `logits` are those of each
    layer's router (B T, E)."""
    device, experts = logits[0].device, logits[0].shape[-1]
    counts = torch.zeros(experts, dtype=torch.int64, device=device)
    sums, rows = torch.zeros(experts, device=device), torch.zeros((), device=device)
    for layer in logits:
        kept = mask_over(mask, layer)
        chances = layer.float().softmax(dim=-1)
        best = chances.detach().topk(chosen, dim=-1).indices
        counts = counts + count(best, experts, kept)
        sums = sums + (chances * kept[:, None]).sum(dim=0)
        rows = rows + kept.sum()
    return counts, sums, rows


def mask_over(mask: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """`mask` (B, T) over `rows` (B T, ...), as numbers; ones without a mask."""
    if mask is None or mask.numel() != len(rows):
        return torch.ones(len(rows), device=rows.device)
    return mask.reshape(-1).to(rows.device, torch.float32)


def count(best: torch.Tensor, experts: int, kept: torch.Tensor) -> torch.Tensor:
    """How often each expert occurs in `best` (N, k), over the rows that are 1 in `kept` (N,): (E,), whole numbers. An
    index of E or more stands for no expert."""
    each = kept.to(torch.int64).repeat_interleave(best.shape[-1])
    total = torch.zeros(experts + 1, dtype=torch.int64, device=best.device)
    return total.scatter_add_(0, best.reshape(-1).clamp(max=experts), each)[:experts]


def router_loss(counts: torch.Tensor, sums: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """E sum_e f_e P_e, where `counts` and `rows` are of the global batch, and `sums` of any part of it: the losses of
    its parts add up to its loss."""
    total = rows.clamp(min=1)
    return len(counts) * ((counts / total) * (sums / total)).sum()


class Experts:
    """Counts the tokens of each expert in training and, with a `weight`, adds the routers' loss to that of the tokens.

    `model` is what the Trainer gets, with its adapter and its chunked loss, and `base` the model inside. Each
    micro-batch adds its part of the loss of the global batch, for which it must know how often each expert is chosen
    in the whole of it: ranks add up their counts, and where a step has several micro-batches, these go through the
    model once more, before, without gradients (`looking_ahead`)."""

    def __init__(self, base: Any, model: Any, mixture: Mixture, weight: float) -> None:
        self.base, self.mixture, self.weight = base, mixture, weight
        self.takes_question = ASKED in inspect.signature(base.forward).parameters
        if weight:
            base.router_aux_loss_coef = 0.0  # the model's own, of a micro-batch
        self.logits: list[torch.Tensor] | None = None  # of the current forward pass, if `watch_routers` records them
        self.mask: torch.Tensor | None = None  # the tokens of the current micro-batch that are no padding (B, T)
        self.scale = 1.0  # undoes what the Trainer does to a loss that is no sum over the tokens of the global batch
        self.of_step: tuple[torch.Tensor, torch.Tensor] | None = None  # counts and rows of the global batch
        self.is_ahead = self.is_counting = False
        self.is_forward = False  # not when activations are recomputed
        self.tokens: dict[int, torch.Tensor] = {}  # by layer, for each expert, since the last log
        self.loss: Any = 0.0  # of the steps since the last log, without its weight
        self.steps = 0
        self.before: Any = ({}, 0.0, 0)  # the last three at the start of the step
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        for place, module in enumerate(mixture.modules.values()):
            module.register_forward_pre_hook(self._counter(place), with_kwargs=True)

    def watch_routers(self, routers: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        """Watch these instead of the model's experts, which have been replaced: for each layer, in order, a module that
        returns the chosen experts (B T, k), and one inside that returns the logits (B T, E)."""
        self.logits = []  # the model's own recorders would find no router
        choices = [choice for choice, _ in routers]
        # Without a reference, the replaced experts are freed.
        self.mixture = replace(self.mixture, modules=dict(zip(self.mixture.modules, choices, strict=True)))
        for place, (choice, gate) in enumerate(routers):
            see = self._counter(place)
            choice.register_forward_hook(lambda module, args, output, see=see: see(module, output, {}))
            gate.register_forward_hook(self._record)

    def _record(self, module: Any, args: Any, output: torch.Tensor) -> None:
        if self.is_forward and self.logits is not None:
            self.logits.append(output)

    def begin_step(self) -> None:
        """Call it before the first micro-batch of a step."""
        self.before = dict(self.tokens), self.loss, self.steps
        self.of_step, self.steps = None, self.steps + 1

    def forget_step(self) -> None:
        """Drop what the current step has added: it is not taken."""
        self.tokens, self.loss, self.steps = self.before

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Around a micro-batch that is trained on; of no other forward pass tokens are counted."""
        self.is_counting = True
        try:
            yield
        finally:
            self.is_counting = False

    @contextlib.contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """Around forward passes of all micro-batches of a step, without gradients and labels, on every rank."""
        self.is_ahead = True
        try:
            yield
        finally:
            self.is_ahead = False
        assert self.of_step is not None
        self.of_step = _summed(*self.of_step)

    def window(
        self, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> tuple[float | None, torch.Tensor]:
        """Since the last call, over all ranks: the mean loss of a step, without its weight, None without that loss;
        and the tokens of each layer's experts (layers, E). Every rank must call it, with its `device`."""
        tokens = sum_over_ranks(self.mixture.table(self.tokens, device)).cpu()
        loss = sum_over_ranks(torch.as_tensor(self.loss, device=device)) if self.weight else None
        steps, self.tokens, self.loss, self.steps = max(self.steps, 1), {}, 0.0, 0
        return None if loss is None else float(loss) / steps, tokens

    def noted(self, gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> dict[str, Any]:
        """For a checkpoint: what `window` would tell now, with each rank's loss. Every rank must call it."""
        tokens = gather(self.mixture.table(self.tokens, device)[None]).sum(0)
        losses = gather(torch.as_tensor(self.loss, dtype=torch.float64, device=device).reshape(1))
        return {"tokens": tokens.tolist(), "losses": losses.tolist(), "steps": self.steps}

    def restore(self, kept: Mapping[str, Any], rank: int, ranks: int, device: torch.device) -> None:
        """Go on from what `noted` returned."""
        losses, self.steps = kept["losses"], kept["steps"]
        self.loss = losses[rank] if len(losses) == ranks else sum(losses) / ranks
        self.tokens = {} if rank else dict(enumerate(torch.tensor(kept["tokens"], device=device)))

    def _before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.is_forward = True
        if self.logits is not None:
            self.logits.clear()
        asked = self._asks(module) and self.logits is None
        return args, {**kwargs, ASKED: asked} if self.takes_question else kwargs

    def _asks(self, module: Any) -> bool:
        return bool(self.weight) and module.training and (torch.is_grad_enabled() or self.is_ahead)

    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        self.is_forward = False
        if output is None or not self._asks(module):
            return None
        logits = output.router_logits if self.logits is None else tuple(self.logits)
        counts, sums, rows = balance(logits, self.mixture.chosen, self.mask)
        if self.is_ahead:
            before = self.of_step or (0, 0)
            self.of_step = before[0] + counts, before[1] + rows
            return None
        if self.of_step is None:
            self.of_step = _summed(counts, rows)
        part = router_loss(self.of_step[0], sums, self.of_step[1])
        if self.is_counting:
            self.loss = self.loss + part.detach()
        # Nothing else that has a gradient: DeepSpeed hooks all that an engine returns (runtime/engine.py, forward).
        kept = {name: value for name, value in output.items() if name not in ("router_logits", "aux_loss")}
        return type(output)(**{**kept, "loss": output.loss + self.weight * self.scale * part})

    def _counter(self, place: int) -> Callable[..., None]:
        def see(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            chosen = [one for one in (*args, *kwargs.values()) if _are_indices(one)]
            if self.is_counting and self.is_forward and chosen:
                with torch.no_grad():
                    found = count(chosen[0], self.mixture.experts, mask_over(self.mask, chosen[0]))
                    self.tokens[place] = self.tokens.get(place, 0) + found

        return see


def _are_indices(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.dim() == 2 and not one.is_floating_point()


def _summed(counts: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both over all ranks."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return counts, rows
    both = torch.cat([counts.double(), rows.double().reshape(1)])
    distributed.all_reduce(both)
    return both[:-1], both[-1]
