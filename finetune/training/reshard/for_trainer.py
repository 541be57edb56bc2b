"""Resuming from another layout under the Trainer: a folder for its loaders, and what DeepSpeed's loader leaves out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from finetune.dsconfig.config import Config
from finetune.errors import RequestError
from finetune.run.files import STATE_FILE
from finetune.run.launch import accelerate_uses_fsdp
from finetune.safe_read import read_json_object
from finetune.training.reshard.move import Mover, read_any
from finetune.training.reshard.one_file import Names
from finetune.training.reshard.portable import WEIGHT, Group, Portable, settings_of
from finetune.training.reshard.sharding import Sharding, can_load_as_it_stands, sharding_of
from finetune.training.run_folder import write_json

UNIVERSAL = {"load_universal": True}


class Reshard(TrainerCallback):
    """Of a run that resumes: `folder` is what its engine is to load, the checkpoint itself or one made of it."""

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
                f"--resume: the checkpoint was written by {written}, and this run has {here}. LoRA's adapters are not "
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
        """Once DeepSpeed has loaded: what its universal loader has left out or shared."""
        trainer, portable = self.trainer, self.portable
        if portable is None:
            return
        for name, buffer in trainer.model.named_buffers():
            if name in portable.buffers:  # the loader takes the weights alone (runtime/engine.py, _load_checkpoint)
                buffer.copy_(portable.buffers[name])
        if not self.is_universal:
            return
        outer = trainer.model_wrapped.optimizer
        mend_optimizer(outer.optimizer, portable)
        scaler = vars(outer.loss_scaler) if getattr(outer, "loss_scaler", None) is not None else {}
        scaler.update({name: value for name, value in portable.loss_scale.items() if name in scaler})
        # What is loaded later, such as the best checkpoint, is as DeepSpeed saves it.
        trainer.model_wrapped._config.load_universal_checkpoint = False
        del trainer.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every rank has read all that it needs, also its random states, before the first step."""
        if self.folder == self.mover.folder:
            self.portable, self.folder = None, self.mover.checkpoint
            self.mover.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Of a run that had all its steps."""
        self.on_step_end(args, state, control)


def load_best(trainer: Any, checkpoint: Path) -> bool:
    """Put in the weights of the best checkpoint where DeepSpeed's engine cannot load it, for another layout wrote it.
    False where it can."""
    if not trainer.is_deepspeed_enabled or not checkpoint.is_dir():
        return False
    written = sharding_of(checkpoint)
    if can_load_as_it_stands(written, here_of(trainer)):
        return False
    portable = read_any(checkpoint, written, names_of(trainer))
    for name, weight in trainer.model.named_parameters():
        if name in portable.shapes:
            with gathered(weight), torch.no_grad():
                weight.copy_(portable.read(name, WEIGHT))
    for name, buffer in trainer.model.named_buffers():
        if name in portable.buffers:
            buffer.copy_(portable.buffers[name])
    return True


def gathered(weight: Any) -> Any:
    """Inside, a weight that ZeRO-3 shards is there in full, and what is put into it stays."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=0) if hasattr(weight, "ds_id") else nullcontext()


def _complete_state(folder: Path, trainer: Any) -> None:
    """The Trainer wants to find all callbacks that have a state in a resumed run's (transformers 5.23, trainer.py,
    _save_checkpoint), and a pipeline has fewer."""
    path = folder / STATE_FILE
    record = read_json_object(path)
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            record["stateful_callbacks"].setdefault(type(callback).__name__, callback.state())
    path.unlink()  # a link to the checkpoint's, which stays as it is
    write_json(path, record)


def mend_optimizer(optimizer: Any, portable: Portable) -> None:
    """The steps and the settings of the groups, which DeepSpeed 0.19.8 restores for ZeRO-1 and 2 alone.

    For ZeRO-3 its loader gives one tensor, the step, to all sub-groups: torch's Adam then counts every sub-group's
    update as a step of all. And the first group's settings to all groups: biases and norms would be decayed
    (runtime/zero/stage3.py, load_hp_checkpoint_state_from_checkpoint_dir_stage3). A step also must be where and what
    the optimizer wants it, as torch's own `load_state_dict` sees to: torch's a tensor, with the weights where it is
    fused; DeepSpeed's a number, which goes to its kernel.
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
        config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        devices = [Config(config).offload(name) for name in ("offload_optimizer", "offload_param")]
        where = next((device for device in ("nvme", "cpu") if device in devices), "none")
        precision = next((n for n in ("bf16", "fp16") if config.get(n, {}).get("enabled") is True), "fp32")
        stage = config.get("zero_optimization", {}).get("stage", 0)
        return Sharding("deepspeed", ranks, stage, where, precision)
    return Sharding("fsdp" if trainer.args.fsdp or accelerate_uses_fsdp() else "ddp", ranks)


def names_of(trainer: Any) -> Names:
    """As `Trainer.create_optimizer` will group them."""
    model = trainer.model
    decayed = set(trainer.get_decay_parameter_names(model))
    learnt = {name: p for name, p in model.named_parameters() if p.requires_grad}
    choice = trainer.optimizer_cls_and_kwargs or Trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
    settings = settings_from(choice)
    groups = []
    for decays, rate in ((True, trainer.args.weight_decay), (False, 0.0)):
        names = tuple(name for name in learnt if (name in decayed) == decays)
        groups.append(Group(names, {**settings, "weight_decay": rate}))
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return Names(tuple(groups), {name: first[id(p)] for name, p in every if first[id(p)] != name})


def settings_from(choice: tuple[Any, dict[str, Any]]) -> dict[str, Any]:
    """All settings of a group, also those that an optimizer's class fills in."""
    kind, given = choice
    return settings_of(kind([torch.nn.Parameter(torch.zeros(1))], **given).param_groups[0])
