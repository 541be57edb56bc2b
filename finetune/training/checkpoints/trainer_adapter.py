"""A checkpoint of the Hugging Face Trainer: whole or not at all, with what its manifest says, and what goes for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.run.files import STATE_FILE
from finetune.training.checkpoints.atomic_folder import AtomicFolder
from finetune.training.checkpoints.final import note_place_of_best
from finetune.training.checkpoints.manifest import Spread
from finetune.training.checkpoints.rotation import Keeper
from finetune.training.checkpoints.space import check_space, trainer_bytes
from finetune.training.checkpoints.trainer_beside import SavesBeside
from finetune.training.checkpoints.writing import About


class TrainerSaves:
    """Those of one run. All ranks must call every method but `go_on`."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.keeper = Keeper(Path(trainer.args.output_dir))
        self.saved_bytes = 0  # of the last checkpoint, all files
        self.beside = SavesBeside(self)
        self.chosen: Path | None = None  # the checkpoint that the run goes on from

    @property
    def place(self) -> Path:
        """Of the checkpoint of this step."""
        return Path(self.trainer.args.output_dir) / f"checkpoint-{self.trainer.state.global_step}"

    def save(self, write: Callable[[], None]) -> None:
        """`write` is the Trainer's own saving, sent to the unfinished folder; its paths are then made those to come."""
        trainer, state, place, about = self.trainer, self.trainer.state, self.place, self._about()
        self.beside.finish(place.name)
        self.check_space(f"step {about.step}")
        beside = self.beside.of(about)
        with (whole := AtomicFolder(place, about, beside)) as folder:
            write()
            note_place_of_best(state, place)
            if trainer.args.should_save:
                state.save_to_json(str(folder / STATE_FILE))
        if beside is not None:
            if trainer.stop.agreed:  # the run ends here
                beside.finish()
            return
        self.saved_bytes = whole.bytes
        if trainer.is_world_process_zero():
            self.keeper.trust(place)
            self.keeper.rotate(trainer.args.save_total_limit, place, state.best_model_checkpoint)

    def go_on(self) -> None:
        """Once the Trainer knows the step after which a resumed run begins. Only rank 0."""
        if self.chosen is not None:
            self.keeper.go_on_from(self.chosen, self.trainer.state.global_step)

    def check_space(self, when: str) -> None:
        """Raises RunError where there is too little for the next."""
        check_space(Path(self.trainer.args.output_dir), self.expected_bytes(), when)

    def expected_bytes(self) -> int:
        """Of the next checkpoint, all ranks together."""
        return self.saved_bytes or trainer_bytes(self.trainer, self._about().layout.zero_stage)

    def _about(self) -> About:
        trainer, ranks = self.trainer, self.trainer.args.world_size
        if trainer.is_deepspeed_enabled:
            config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
            layout = Spread("deepspeed", ranks, zero_stage=int(config.get("zero_optimization", {}).get("stage", 0)))
        else:
            layout = Spread("fsdp" if trainer.is_fsdp_enabled else "ddp", ranks)
        return About(
            trainer.state.global_step, trainer.state.epoch, trainer.global_batch_size, layout, trainer.identity
        )
