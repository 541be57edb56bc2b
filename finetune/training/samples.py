"""What the model writes: a seeded sample at each evaluation, into the run folder; the recipe prints the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from finetune.data.encoding import refuse_unknown_characters
from finetune.data.tokenizer import letters_of
from finetune.errors import RequestError
from finetune.models.source import positions_of
from finetune.report.text import fenced
from finetune.run.flags.language import SampleArguments
from finetune.training.resuming import kept_random_states

SAMPLES_FILE = "samples.md"


def check_sample(tokenizer: Any, arguments: SampleArguments, positions: int) -> None:
    """Raises RequestError for a --sample_prompt that the tokenizer would leave out in part, or that leaves no room in
    the model's `positions`."""
    for name in ("sample_tokens", "sample_temperature"):
        if getattr(arguments, name) < 0:
            raise RequestError(f"--{name} is {getattr(arguments, name)}, but it must be 0 or more.")
    if arguments.sample_prompt != SampleArguments().sample_prompt:  # a tokenizer need not know what nobody asked for
        refuse_unknown_characters(letters_of(tokenizer), arguments.sample_prompt, "--sample_prompt")
    length = len(tokenizer(arguments.sample_prompt, add_special_tokens=False)["input_ids"])
    if length >= positions:
        raise RequestError(
            f"--sample_prompt has {length} tokens, but the model has {positions} positions. Give a shorter one."
        )


class Samples(TrainerCallback):
    """Appends to samples.md. Every rank generates, as ZeRO-3 needs, and rank 0 writes."""

    def __init__(self, arguments: SampleArguments, folder: Path, seed: int) -> None:
        self.arguments, self.folder, self.seed = arguments, folder, seed
        self.last, self.step = "", -1

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.arguments.sample_tokens < 1 or state.global_step == self.step:
            return
        self.step = state.global_step
        self.last = self.sample(kwargs["model"], kwargs["processing_class"], args.device)
        if state.is_world_process_zero:
            self.write(self.step)

    def write(self, step: int) -> None:
        """Append the last sample to samples.md."""
        with (self.folder / SAMPLES_FILE).open("a", encoding="utf-8") as file:
            file.write(f"## Step {step}\n\n{fenced(self.last)}\n\n")

    def write_from_folder(self, step: int) -> None:
        """Sample from the model that the run folder holds, on the CPU: for a run of which no rank has it whole."""
        if self.arguments.sample_tokens < 1:
            return
        model = AutoModelForCausalLM.from_pretrained(str(self.folder))
        tokenizer = AutoTokenizer.from_pretrained(str(self.folder))
        self.last = self.sample(model, tokenizer, torch.device("cpu"))
        self.write(step)

    def sample(self, model: Any, tokenizer: Any, device: torch.device) -> str:
        """What `model` writes; torch's random state stays as it is."""
        ids = tokenizer(self.arguments.sample_prompt, add_special_tokens=False)["input_ids"]
        ids = ids or [tokenizer.eos_token_id or 0]  # the default prompt may be of no known character
        given = {
            "input_ids": torch.tensor([ids], device=device),
            "attention_mask": torch.ones(1, len(ids), device=device),
        }
        length = min(self.arguments.sample_tokens, positions_of(model.config) - len(ids))
        was_training = model.training
        model.eval()
        with kept_random_states(), torch.no_grad():
            torch.manual_seed(self.seed)
            made = model.generate(
                **given,
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=self.arguments.sample_temperature > 0,
                temperature=self.arguments.sample_temperature or None,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            )
        model.train(was_training)
        return str(tokenizer.decode(made[0], skip_special_tokens=True))
