"""Resuming from another layout, with the Trainer or in a pipeline: a folder for their loaders, and corrections for what
DeepSpeed's loader omits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from finetune.errors import RequestError
from finetune.models.expert_layers import whole_names
from finetune.run.files import STATE_FILE
from finetune.run.launch import accelerate_uses_fsdp
from finetune.safe_read import read_json_object
from finetune.training.reshard.move import Mover, read_any
from finetune.training.reshard.one_file import Names
from finetune.training.reshard.portable import WEIGHT, Group, Portable, settings_of
from finetune.training.reshard.sharding import Sharding, can_load_as_it_stands, of_config, sharding_of
from finetune.training.run_folder import write_json

UNIVERSAL = {"load_universal": True}


class Reshard(TrainerCallback):
    """For a run that resumes: `folder` is what its engine must load, the checkpoint itself or a converted one."""

    def __init__(self, trainer: Any, checkpoint: Path) -> None:
        self.trainer, self.folder = trainer, checkpoint
        self.portable: Portable | None = None
        here, args = here_of(trainer), trainer.args
        self.mover = Mover(checkpoint, Path(args.output_dir), here, args.process_index)
        self.mover.clear()
        written = sharding_of(checkpoint)
        if can_load_as_it_stands(written, here):
            if written.ranks != here.ranks:
                self.mover.link()
                self.folder = self.mover.folder
            return
        if written.engine != here.engine and hasattr(trainer.model, "peft_config"):
            raise RequestError(
                f"--resume: the checkpoint was written by {written}, but this run has {here}. LoRA adapters cannot be "
                "moved to another engine. Resume with the engine that wrote it."
            )
        self.portable = self.mover.move(written, names_of(trainer))
        self.folder = self.mover.folder
        if written.engine == "pipeline" and args.process_index == 0:
            _complete_state(self.folder, trainer)
        trainer.accelerator.wait_for_everyone()
        self.is_universal = bool(here.zero_stage)
        if self.is_universal:
            trainer.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = UNIVERSAL

    def mend(self) -> None:
        """Called once DeepSpeed has loaded: restore what its universal loader omits or shares."""
        trainer, portable = self.trainer, self.portable
        if portable is None:
            return
        put_buffers(trainer, portable)  # DeepSpeed loads only the weights (runtime/engine.py, _load_checkpoint)
        if not self.is_universal:
            return
        outer = trainer.model_wrapped.optimizer
        mend_optimizer(outer.optimizer, portable)
        scaler = vars(outer.loss_scaler) if getattr(outer, "loss_scaler", None) is not None else {}
        scaler.update({name: value for name, value in portable.loss_scale.items() if name in scaler})
        # Later loads, such as the best checkpoint, are in DeepSpeed's normal format.
        trainer.model_wrapped._config.load_universal_checkpoint = False
        del trainer.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clean up: every rank has read all that it needs, including random states, before the first step."""
        if self.folder == self.mover.folder:
            self.portable, self.folder = None, self.mover.checkpoint
            self.mover.clear()

    on_train_end = on_step_end  # for a run that has no steps left


def load_best(trainer: Any, checkpoint: Path) -> bool:
    """Load the best checkpoint's weights if another layout than this DeepSpeed run's wrote it; else return False."""
    if not trainer.is_deepspeed_enabled or not checkpoint.is_dir():
        return False
    written = sharding_of(checkpoint)
    if can_load_as_it_stands(written, here_of(trainer)):
        return False
    portable = trainer.spread.as_here(read_any(checkpoint, written, names_of(trainer)))
    for name, weight in trainer.model.named_parameters():
        if name in portable.shapes:
            with gathered(weight), torch.no_grad():
                weight.copy_(portable.read(name, WEIGHT))
    put_buffers(trainer, portable)
    return True


def put_buffers(trainer: Any, portable: Portable) -> None:
    for name, buffer in trainer.model.named_buffers():
        if name in portable.buffers:
            buffer.copy_(portable.buffers[name])


def gathered(weight: Any) -> Any:
    """Inside this context, a weight that ZeRO-3 shards is present in full, and changes to it persist."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=0) if hasattr(weight, "ds_id") else nullcontext()


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


def mend_optimizer(optimizer: Any, portable: Portable) -> None:
    """Restore the step counts and the groups' settings, which DeepSpeed 0.19.8 restores only for ZeRO-1 and 2.

    For ZeRO-3 its loader assigns the same step tensor to all sub-groups, so torch's Adam counts every sub-group's
    update as a step of all, and the first group's settings to all groups, so biases and norms would be decayed
    (runtime/zero/stage3.py, load_hp_checkpoint_state_from_checkpoint_dir_stage3). The step must also have the type and
    device that the optimizer expects, as with torch's `load_state_dict`: for torch a tensor, on the weights' device if
    fused; for DeepSpeed a number, which is passed to its kernel.
    """
    is_torch = type(optimizer).__module__.startswith("torch.")
    for weight, state in optimizer.state.items():
        if portable.steps is None or not state:
            continue
        if is_torch:
            on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
            device = weight.device if on_device else torch.device("cpu")
            state["step"] = torch.tensor(portable.steps, dtype=torch.float32, device=device)
        else:
            state["step"] = int(portable.steps)
    for own, written in zip(optimizer.param_groups, portable.groups, strict=True):
        own.update({key: value for key, value in written.settings.items() if key in own})


def here_of(trainer: Any) -> Sharding:
    """The layout of this run."""
    ranks = trainer.args.world_size
    if trainer.is_deepspeed_enabled:
        return of_config(trainer.accelerator.state.deepspeed_plugin.deepspeed_config, ranks)
    return Sharding("fsdp" if trainer.args.fsdp or accelerate_uses_fsdp() else "ddp", ranks)


def names_of(trainer: Any) -> Names:
    """The weights' names, grouped as `Trainer.create_optimizer` will group them."""
    model = trainer.model
    decayed = set(trainer.get_decay_parameter_names(model))
    decays = {name: name in decayed for name, p in model.named_parameters() if p.requires_grad}
    if trainer.spread.size > 1:  # its engine renames them
        decays = {name: decays[parts[0]] for name, parts in whole_names(list(decays)).items()}
    choice = trainer.optimizer_cls_and_kwargs or Trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
    groups = groups_of(choice, decays, trainer.args.weight_decay)
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    tied = {name: first[id(p)] for name, p in every if first[id(p)] != name}
    return Names(groups, tied, trainer.spread.split_names(groups))


def groups_of(choice: tuple[Any, dict[str, Any]], decays: Mapping[str, bool], decay: float) -> tuple[Group, ...]:
    """The groups with and without weight decay, with all settings, including the optimizer's defaults. `choice` is the
    optimizer's class and its arguments."""
    kind, given = choice
    settings = settings_of(kind([torch.nn.Parameter(torch.zeros(1))], **given).param_groups[0])
    return tuple(
        Group(tuple(name for name in decays if decays[name] == wanted), {**settings, "weight_decay": rate})
        for wanted, rate in ((True, decay), (False, 0.0))
    )


@contextmanager
def loadable(checkpoint: Path, trainer: Any) -> Iterator[Path]:
    """Yields a folder that a pipeline can load: the checkpoint itself or a converted one. All ranks must call it."""
    here = Sharding("pipeline", trainer.launch.world_size)
    mover = Mover(checkpoint, Path(trainer.args.output_dir), here, trainer.launch.rank)
    mover.clear()
    written = sharding_of(checkpoint)
    if can_load_as_it_stands(written, here):
        yield checkpoint
        return
    optimizer = type(trainer.checkpoints.states.optimizer).__name__
    mover.move(written, names_in_pipeline(trainer), (trainer.global_batch_size, optimizer))
    yield mover.folder
    distributed.barrier()  # all ranks have read
    mover.clear()


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
