"""What the model writes: a seeded sample at each evaluation, into the run folder; the recipe prints the last."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from finetune.data.encoding import refuse_unknown_characters
from finetune.data.tokenizer import letters_of
from finetune.training.model_card import fenced

SAMPLES_FILE = "samples.md"


@dataclass
class SampleArguments:
    """What to have the model write at each evaluation."""

    sample_prompt: str = field(default="\n", metadata={"help": "how the sample begins"})
    sample_tokens: int = field(default=200, metadata={"help": "its length; 0 for none"})
    sample_temperature: float = field(default=0.8, metadata={"help": "0 for the likeliest token each time"})


def check_sample_prompt(tokenizer: Any, arguments: SampleArguments) -> None:
    """Raises RequestError for a --sample_prompt that the tokenizer would leave out in part. The default is not the
    user's, and gives way to another beginning."""
    if arguments.sample_prompt != SampleArguments().sample_prompt:
        refuse_unknown_characters(letters_of(tokenizer), arguments.sample_prompt, "--sample_prompt")


class Samples(TrainerCallback):
    """Appends to samples.md. Every rank generates, as ZeRO-3 needs, and rank 0 writes."""

    def __init__(self, arguments: SampleArguments, folder: Path, seed: int) -> None:
        self.arguments, self.folder, self.seed = arguments, folder, seed
        self.last, self.step = "", -1

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.arguments.sample_tokens < 1 or state.global_step == self.step:
            return
        self.step = state.global_step
        self.last = self._sample(kwargs["model"], kwargs["processing_class"], args.device)
        if state.is_world_process_zero:
            with (self.folder / SAMPLES_FILE).open("a", encoding="utf-8") as file:
                file.write(f"## Step {state.global_step}\n\n{fenced(self.last)}\n\n")

    def _sample(self, model: Any, tokenizer: Any, device: torch.device) -> str:
        given = tokenizer(self.arguments.sample_prompt, return_tensors="pt", add_special_tokens=False).to(device)
        if not given["input_ids"].numel():
            given = tokenizer(tokenizer.eos_token or "a", return_tensors="pt").to(device)
        room = getattr(model.config, "max_position_embeddings", 10**9) - given["input_ids"].shape[1]
        length = max(1, min(self.arguments.sample_tokens, room))
        state = torch.random.get_rng_state()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
        was_training = model.training
        model.eval()
        torch.manual_seed(self.seed)
        with torch.no_grad():
            made = model.generate(
                **given,
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=self.arguments.sample_temperature > 0,
                temperature=self.arguments.sample_temperature or None,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            )
        model.train(was_training)
        torch.random.set_rng_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        return str(tokenizer.decode(made[0], skip_special_tokens=True))
