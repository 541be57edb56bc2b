"""DeepSpeed's engine for one stage, with the Trainer's optimizer and schedule."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer

from finetune.training.pipeline.stages import Cut, weight_names
from finetune.training.resuming import keep_off_triton
from finetune.training.runtime import leave_muon_uncompiled
from finetune.training.schedules import make_schedule

UNUSED = "unused"  # a weight that fills an empty group of the optimizer
Named = dict[str, torch.nn.Parameter]


@dataclass(frozen=True)
class Built:
    """One rank's engine and its parts: `groups` are the optimizer's, `named` are all of the stage's parameters, and
    `buffers` its other saved tensors, under their names in the whole model."""

    engine: Any
    optimizer: Any
    scheduler: Any
    groups: list[Named]
    named: Named
    buffers: dict[str, torch.Tensor]


def build_engine(module: Any, parts: Cut, args: Any, ds_config: dict[str, Any], max_steps: int) -> Built:
    """The engine for a PipelineModule; `ds_config` has no "auto" left."""
    import deepspeed  # not at the top of the file: on import it chooses its device

    named, buffers = weight_names(parts, module)
    optimizer, groups = _optimizer(module, named, args)
    scheduler = make_schedule(args, optimizer, max_steps)
    leave_muon_uncompiled(ds_config)
    with contextlib.redirect_stdout(io.StringIO()):  # BF16_Optimizer prints the memory six times
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config=ds_config)
    return Built(engine, optimizer, scheduler, groups, named, buffers)


def _optimizer(module: Any, named: Named, args: Any) -> tuple[Any, list[Named]]:
    """The Trainer's optimizer with its two groups (biases and norms are not decayed), and the weights of each by name.

    DeepSpeed reduces the gradient norm over stages once per group (0.19.8, runtime/zero/stage_1_and_2.py,
    scaled_global_norm), so all stages must have both groups, or they deadlock: if a stage has no weight for a group,
    it gets an unused one-element parameter."""
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    names = set(Trainer.get_decay_parameter_names(None, module))  # it does not use `self`
    decayed = {id(p) for name, p in module.named_parameters() if name in names}
    groups = [{name: p for name, p in named.items() if (id(p) in decayed) == decays} for decays in (True, False)]
    rates = (args.weight_decay, 0.0)
    given = []
    for group, rate in zip(groups, rates, strict=True):
        if not group:
            group[UNUSED] = torch.nn.Parameter(torch.zeros(1, device=args.device))
            module.register_parameter(UNUSED, group[UNUSED])
        given.append({"params": list(group.values()), "weight_decay": rate})
    optimizer = kind(given, **settings)
    keep_off_triton(optimizer)
    return optimizer, groups
