"""How a Hugging Face Trainer saves, pushes and resumes: the part of FinetuneMixin that writes and reads folders."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers import TrainerState
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy

from finetune.errors import RequestError
from finetune.models.adapters import ends_of, labels_of
from finetune.run.files import GENERATION_CONFIG, LABELS, STATE_FILE
from finetune.training.checkpoints.final import best_to_load, open_final, save_final
from finetune.training.checkpoints.writing import outer_of
from finetune.training.expert_parallel import whole_shapes
from finetune.training.fsdp import keep_class, named_weights
from finetune.training.hub import open_repo
from finetune.training.reshard.resuming import load_best
from finetune.training.resuming import ended_early, restore_callbacks
from finetune.training.run_folder import write_arguments, write_json
from finetune.training.runtime import leave_muon_uncompiled

if TYPE_CHECKING:
    from transformers import Trainer as AnyTrainer
else:
    AnyTrainer = object  # classes list the Trainer's class after the mixin


class SavingMixin(AnyTrainer):
    """A part of FinetuneMixin, whose `__init__` sets the attributes used here."""

    _unwrapped: tuple[Any, Any] = (None, None)  # accelerate reads packages' metadata each time (1.15, utils/imports.py)
    _wrote_model = False  # whether the Trainer has called `_save`

    @property
    def bare_model(self) -> Any:
        """Without the wrappers of DDP, DeepSpeed and torch.compile."""
        if self._unwrapped[0] is not self.model:
            self._unwrapped = self.model, self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return self._unwrapped[1]

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            create = super().init_hf_repo
            open_repo(self, lambda: create(*args, **kwargs))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the Trainer's draft would overwrite the run's own card (finetune.training.model_card)."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Like the Trainer's, which would already push here, without the card (transformers 5.23,
        Trainer.save_model)."""
        run_folder = Path(self.args.output_dir)
        if output_dir is None or Path(output_dir) == run_folder:
            records = save_final(run_folder, self._write_model)
            open_final(run_folder, records, trained_shapes(self.bare_model))
            return
        with own_names(self.bare_model):
            self._write_model(Path(output_dir))
        if self.comm_hook and _internal_call and not self.args.save_only_model:
            self.comm_hook.save(Path(output_dir))  # a checkpoint

    def _write_model(self, folder: Path) -> None:
        if self.is_fsdp_enabled:
            keep_class(self.bare_model)
        self._wrote_model = False
        if self._copies_to(folder) and self.is_deepspeed_enabled and not self.needs_all_ranks:
            self._save(str(folder))  # the Trainer's clones all weights first (accelerate 1.15, get_state_dict)
        else:
            super().save_model(str(folder), _internal_call=True)
        if self.args.should_save and not self._wrote_model:
            self._write_others(folder)  # FSDP writes its shards without `_save`

    def _write_others(self, folder: Path) -> None:
        """Write the files of a saved model that the Trainer's class does not write."""
        if (folder / TRAINING_ARGS_NAME).is_file():
            write_arguments(folder, self.args)
        model = self.bare_model
        labels = labels_of(model)
        if labels is not None:
            write_json(folder / LABELS, labels)
        ends = ends_of(model)
        if ends is not None:
            write_json(folder / GENERATION_CONFIG, {"eos_token_id": ends})
        self.write_beside(folder)

    def _copies_to(self, folder: Path) -> bool:
        """Whether this is a checkpoint that another process writes."""
        return self.saves.beside.writer_of(folder) is not None

    def write_beside(self, folder: Path) -> None:
        """Override it for a task that saves more than weights and the tokenizer, the same at each save. One rank calls
        it."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Like the Trainer's, but saves a tied weight once: below ZeRO-3 accelerate copies the weight for each name
        (1.15, accelerator.py, get_state_dict), so the copies no longer show that they are tied."""
        folder, self._wrote_model = Path(output_dir or self.args.output_dir), True
        is_live = state_dict is None
        if not is_live:
            state_dict = self._once(self.expert_parallel.whole(state_dict) if self.expert_parallel else state_dict)
        if not (self.args.should_save and self._copies_to(folder)):
            self._save_model_files(folder, state_dict)
            return
        weights = self.bare_model.state_dict() if is_live else state_dict

        def write(alone: Path) -> None:
            given = state_dict
            if is_live and self.is_deepspeed_enabled:  # transformers could take parts of a flat tensor for tied weights
                given = {name: weight.to("cpu", copy=True) for name, weight in self._once(weights).items()}
            self._save_model_files(alone, given)

        self.saves.beside.writer.keep_model(weights, self._settings, is_live, write)

    def _save_model_files(self, folder: Path, weights: Any) -> None:
        super()._save(str(folder), weights)
        if self.args.should_save:
            self._write_others(folder)

    def _once(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        once, named = named_weights(self.bare_model), named_weights(self.bare_model, every=True)
        return {name: weight for name, weight in weights.items() if name in once or name not in named}

    def _settings(self) -> bytes:
        """What the files beside the weights depend on. A run does not change its tokenizer. Raises pickle's errors."""
        model = self.bare_model
        return pickle.dumps((self.args, *(getattr(model, f"{kind}config", None) for kind in ("", "generation_"))))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Like the Trainer's. If only rank 0 has states to save, they may be written in the background."""
        is_plain = not (self.is_deepspeed_enabled or self.is_fsdp_enabled)
        writer = self.saves.beside.writer_of(Path(output_dir))
        if writer is None or not is_plain or not self.args.should_save:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        for name, stateful in ((OPTIMIZER_NAME, self.optimizer), (SCHEDULER_NAME, self.lr_scheduler)):
            if not writer.keep(Path(output_dir, name), state := stateful.state_dict()):
                torch.save(state, Path(output_dir, name))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = super()._save_checkpoint
        self.running_loss.note(self.accelerator.gather)
        self.saves.save(lambda folder: write(model, trial))  # `_get_output_dir` leads it there

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Like the Trainer's, which matches weights by name and only warns about missing ones. Raises RequestError for
        these."""
        if self.reshard and self.reshard.moves:
            return
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            refuse_other_names(Path(resume_from_checkpoint), self.bare_model)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Like the Trainer's, but a checkpoint of another layout is loaded weight by weight."""
        if self.is_deepspeed_enabled:
            leave_muon_uncompiled(self.accelerator.state.deepspeed_plugin.deepspeed_config)
        if not (self.reshard and self.reshard.moves):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self.reshard.load()
        return prepared

    def _get_output_dir(self, trial: Any) -> str:
        """Where the Trainer may write and delete checkpoints: a folder with only the one being written, so that our
        code does the rotation, also at the end of training (transformers 5.23, _finalize_training)."""
        return str(outer_of(self.saves.place))

    def _load_best_model(self) -> None:
        """Like the Trainer's, but the checkpoint must verify, and may have another layout."""
        self.saves.beside.finish()
        best = best_to_load(Path(self.args.output_dir), self.state.best_model_checkpoint)
        if best is not None:
            self.state.best_model_checkpoint = str(best)
            if not load_best(self, best):
                super()._load_best_model()

    def _load_callback_state(self) -> None:
        restore_callbacks(
            self.callback_handler.callbacks, self.state, self.args.restore_callback_states_from_checkpoint
        )

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Like the Trainer's, but leaves no epoch if --max_steps are done or early stopping has ended the run: a run
        resumed at its end would take one more step (transformers 5.23, Trainer._run_epoch checks the number of steps
        only after each step)."""
        epochs, *others, self.max_steps = super().set_initial_training_values(args, dataloader)
        self.epochs = epochs
        if self.reshard:
            state = TrainerState.load_from_json(str(self.reshard.folder / STATE_FILE))
            callbacks = self.callback_handler.callbacks
            restore_callbacks(callbacks, state, args.restore_callback_states_from_checkpoint)
            if state.global_step >= self.max_steps or ended_early(callbacks):
                epochs = 0
        return (epochs, *others, self.max_steps)


@contextmanager
def own_names(model: Any) -> Iterator[None]:
    """In this block a model is saved under the names of its own parameters. transformers saves it under those of known
    files (LayerNorm.gamma of an old BERT, encoder.layer of a ViT, each expert of a Mixtral), and its Trainer does not
    undo that when it resumes from a checkpoint (5.23, core_model_loading.py, revert_weight_conversion, and trainer.py,
    _load_from_checkpoint); `from_pretrained` accepts both."""
    known = vars(model).get("_weight_conversions")
    model._weight_conversions = []
    try:
        yield
    finally:
        model._weight_conversions = known


def refuse_other_names(checkpoint: Path, model: Any) -> None:
    """Raises RequestError if the checkpoint lacks weights of the model under their names: the run would continue with
    other weights."""
    files = sorted(checkpoint.glob("model*.safetensors"))
    if hasattr(model, "peft_config") or not files:
        return
    there: set[str] = set()
    for path in files:
        with safe_open(path, framework="pt") as file:
            there.update(file.keys())
    with own_names(model):
        missing = [name for name in trained_shapes(model) if name not in there]
    if missing:
        raise RequestError(
            f"{checkpoint}: lacks {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}: an earlier "
            "version saved it under other names than the model has. Start a new run from it with "
            "--model_name_or_path."
        )


def trained_shapes(model: Any) -> dict[str, list[int]]:
    """The shapes of the weights that a saved model must have, by their names in the file; for an adapter, only its own.
    Empty under FSDP version 1, which flattens weights."""
    named = named_weights(model, every=True)
    if any("_fsdp_wrapped_module" in name or "_flat_param" in name for name in named):
        return {}
    names = Counter(map(id, named.values()))  # the file has any one of the names of tied weights
    whole = {name: torch.empty(getattr(p, "ds_shape", p.shape), device="meta") for name, p in named.items()}
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict

        saved = get_peft_model_state_dict(model, whole, save_embedding_layers=False)
    else:
        ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
        alone = {name: w for name, w in whole.items() if names[id(named[name])] == 1 and name not in ignored}
        saved = revert_weight_conversion(model, whole_shapes(model, alone))
    return {name: list(weight.shape) for name, weight in saved.items()}


def check_push(args: Any) -> None:
    """Refuse to push checkpoints: a checkpoint's folder is renamed once it is complete."""
    if args.push_to_hub and args.hub_strategy != HubStrategy.END:
        raise RequestError(
            f"hub_strategy is {args.hub_strategy.value}, but a run is pushed once, at its end. Set it to end."
        )
