"""Resuming from another layout, with the Trainer or in a pipeline."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from finetune.errors import RequestError
from finetune.models.expert_layers import whole_names
from finetune.run.files import STATE_FILE
from finetune.run.launch import accelerate_uses_fsdp
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.writing import by_first, leads, read_together, together
from finetune.training.fsdp import clean, named_weights
from finetune.training.reshard.expert_shards import fit_schedule, regrouped
from finetune.training.reshard.links import Links
from finetune.training.reshard.loading import load_everything, load_weights
from finetune.training.reshard.one_file import Names
from finetune.training.reshard.portable import Group, Portable, load_pickle, settings_of
from finetune.training.reshard.reading import SCHEDULE, read_any
from finetune.training.reshard.sharding import Sharding, can_load_as_it_stands, of_config, sharding_of
from finetune.training.resuming import innermost
from finetune.training.run_folder import write_json

WEIGHT_FILES = ("model", "adapter_model")  # how the names of files begin in which the Trainer finds weights
ADAM = {"exp_avg", "exp_avg_sq"}  # the only states for which ZeRO is known to have flat tensors


class Reshard(TrainerCallback):
    """For a run that resumes: `folder` is where the Trainer finds its state, the checkpoint itself or links to it. What
    another layout wrote, `load` puts into the engine."""

    def __init__(self, trainer: Any, checkpoint: Path) -> None:
        self.trainer, self.folder, self.checkpoint = trainer, checkpoint, checkpoint
        self.portable: Portable | None = None
        here, written = here_of(trainer), read_together(checkpoint, lambda: sharding_of(checkpoint))
        self.links = Links(checkpoint, Path(trainer.args.output_dir), here.ranks)
        together(self._clear)
        stands = can_load_as_it_stands(written, here)
        if stands and written.ranks == here.ranks:
            return
        if not stands:
            self.names = names_of(trainer)
            self.portable = read_together(checkpoint, lambda: self._read(written, here))
        self.folder = self.links.folder
        by_first(lambda: self._link(written))

    @property
    def moves(self) -> bool:
        """Whether `load` replaces the Trainer's own loading of weights and optimizer."""
        return self.portable is not None

    def _read(self, written: Sharding, here: Sharding) -> Portable:
        portable = read_any(self.checkpoint, written, self.names)
        if here.zero_stage and set(portable.keys) != ADAM:
            raise RequestError(
                f"--resume: {self.checkpoint} holds the optimizer states {', '.join(portable.keys) or 'none'}, but "
                f"only Adam's ({', '.join(sorted(ADAM))}) can be moved into ZeRO's. Resume with {written}."
            )
        if not written.expert_ranks == here.expert_ranks == 1:
            portable = regrouped(portable, self.names.expert_groups or self.names.groups)
        say_move(self.checkpoint, portable, written, here)
        return portable

    def _link(self, written: Sharding) -> None:
        self.links.make(random_states=written.engine != "pipeline")
        if written.engine == "pipeline":
            _complete_state(self.folder, self.trainer)

    def load(self) -> None:
        """Load weights, optimizer and schedule. All ranks call it once, when the engine is built."""
        trainer, portable = self.trainer, self.portable
        assert portable is not None
        start = time.monotonic()
        engine, schedule = trainer.model_wrapped if trainer.is_deepspeed_enabled else None, portable.schedule
        by_engine = engine is not None and engine.lr_scheduler is not None
        if by_engine != (schedule is not None) or not (by_engine or (self.folder / SCHEDULE).is_file()):
            raise RequestError(
                "--resume: of the checkpoint's schedule of learning rates and this run's, one is of a DeepSpeed config "
                "(`scheduler`), and the other one of flags. Take both from the same."
            )
        load_everything(trainer, trainer.expert_parallel.as_here(portable) if trainer.expert_parallel else portable)
        if not by_engine:
            own = read_together(self.checkpoint, lambda: load_pickle(self.folder / SCHEDULE))
            schedule = fit_schedule(own, len(innermost(trainer.optimizer).param_groups))
        trainer.lr_scheduler.load_state_dict(schedule)
        if leads():
            print(f"resume: moved in {time.monotonic() - start:.1f} s", flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clean up: every rank has read all that it needs, including random states, before the first step."""
        if self.folder != self.checkpoint:
            self.portable, self.folder = None, self.checkpoint
            self._clear()

    on_train_end = on_step_end  # for a run that has no steps left

    def _clear(self) -> None:
        if leads():
            self.links.clear()


def say_move(checkpoint: Path, portable: Portable, written: Sharding, here: Sharding) -> None:
    if leads():
        print(
            f"resume: {checkpoint.name} was written by {written}, this run has {here}: moving "
            f"{len(portable.shapes)} weights with their optimizer states ({portable.bytes / 2**20:,.1f} MiB)",
            flush=True,
        )


def load_best(trainer: Any, checkpoint: Path) -> bool:
    """Load the best checkpoint's weights if another layout than this run's wrote it, and the Trainer would not find
    them; else return False."""
    shards = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    is_found = not shards and any(next(checkpoint.glob(f"{name}*.safetensors"), None) for name in WEIGHT_FILES)
    if is_found or trainer.args.save_only_model or not checkpoint.is_dir():
        return False
    written = read_together(checkpoint, lambda: sharding_of(checkpoint))
    if can_load_as_it_stands(written, here_of(trainer)):
        return False
    names = names_of(trainer)
    portable = read_together(checkpoint, lambda: read_any(checkpoint, written, names))
    load_weights(trainer.model, trainer.expert_parallel.as_here(portable) if trainer.expert_parallel else portable)
    return True


def _complete_state(folder: Path, trainer: Any) -> None:
    """Add the callbacks that a pipeline lacks: a resumed run's state must list every callback that has a state
    (transformers 5.23, trainer.py, _save_checkpoint)."""
    path = folder / STATE_FILE
    record = read_json_object(path)
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            record["stateful_callbacks"].setdefault(type(callback).__name__, callback.state())
    path.unlink()  # a link to the checkpoint's file, which stays unchanged
    write_json(path, record)


def here_of(trainer: Any) -> Sharding:
    """The layout of this run."""
    ranks = trainer.args.world_size
    if trainer.is_deepspeed_enabled:
        return of_config(trainer.accelerator.state.deepspeed_plugin.deepspeed_config, ranks)
    return Sharding("fsdp" if trainer.args.fsdp or accelerate_uses_fsdp() else "ddp", ranks)


def names_of(trainer: Any) -> Names:
    """The weights' names, grouped as `Trainer.create_optimizer` will group them."""
    model = trainer.model
    decayed = clean(dict.fromkeys(trainer.get_decay_parameter_names(model)))
    decays = {name: name in decayed for name, p in named_weights(model).items() if p.requires_grad}
    if trainer.expert_parallel:  # its engine renames them
        decays = {name: decays[parts[0]] for name, parts in whole_names(list(decays)).items()}
    choice = trainer.optimizer_cls_and_kwargs or Trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
    groups = groups_of(choice, decays, trainer.args.weight_decay)
    first = {id(p): name for name, p in named_weights(model).items()}
    every = named_weights(model, every=True)
    others = {name: first[id(p)] for name, p in every.items() if first[id(p)] != name} | names_in_adapter(model)
    return Names(groups, others, trainer.expert_parallel.split_names(groups) if trainer.expert_parallel else None)


def names_in_adapter(model: Any) -> dict[str, str]:
    """The model's names of the weights in an adapter's file, by those in the file."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft import get_peft_model_state_dict

    stand_ins = {name: torch.empty(0, device="meta") for name in named_weights(model, every=True)}
    name_of = {id(stand_in): name for name, stand_in in stand_ins.items()}
    saved = get_peft_model_state_dict(model, stand_ins, save_embedding_layers=False)
    return {in_file: name_of[id(stand_in)] for in_file, stand_in in saved.items()}


def groups_of(choice: tuple[Any, dict[str, Any]], decays: Mapping[str, bool], decay: float) -> tuple[Group, ...]:
    """The groups with and without weight decay, with all settings, including the optimizer's defaults. `choice` is the
    optimizer's class and its arguments."""
    kind, given = choice
    settings = settings_of(kind([torch.nn.Parameter(torch.zeros(1))], **given).param_groups[0])
    return tuple(
        Group(tuple(name for name in decays if decays[name] == wanted), {**settings, "weight_decay": rate})
        for wanted, rate in ((True, decay), (False, 0.0))
    )


def read_for_pipeline(checkpoint: Path, trainer: Any) -> Portable | None:
    """What another engine saved in `checkpoint`; None if a pipeline did. All ranks must call it."""
    here, written = (
        Sharding("pipeline", trainer.launch.world_size),
        read_together(checkpoint, lambda: sharding_of(checkpoint)),
    )
    if can_load_as_it_stands(written, here):
        return None
    portable = read_together(checkpoint, lambda: read_any(checkpoint, written, names_in_pipeline(trainer)))
    say_move(checkpoint, portable, written, here)
    return portable


def names_in_pipeline(trainer: Any) -> Names:
    """The whole model's weights as the Trainer groups them, taken from the layers, which are in the model's order."""
    layers = [layer.look() for layer in trainer.parts.layers]
    decayed = set(Trainer.get_decay_parameter_names(None, torch.nn.ModuleList(layers)))
    decays: dict[str, bool] = {}
    for index, (layer, module) in enumerate(zip(trainer.parts.layers, layers, strict=True)):
        for inside, _ in module.named_parameters():
            decays.setdefault(layer.weight_name(inside), f"{index}.{inside}" in decayed)
    choice = Trainer.get_optimizer_cls_and_kwargs(trainer.args)
    return Names(groups_of(choice, decays, trainer.args.weight_decay), {})
