"""Text generated during training: a seeded sample at each evaluation, into the run folder; the recipe prints the last
one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, TrainerCallback

from finetune.data.chat.conversation import rendered
from finetune.data.encoding import refuse_unknown_characters
from finetune.data.tokenizer import beginning_of, begun, letters_of
from finetune.errors import RequestError
from finetune.models.composite import class_for
from finetune.models.source import positions_of
from finetune.report.text import fenced
from finetune.run.flags.language import SampleArguments
from finetune.run.task import TEXT_GENERATION
from finetune.safe_read.bounded import each_bounded
from finetune.training.resuming import kept_random_states

SAMPLES_FILE = "samples.md"
QUESTION = "Please tell me about yourself."  # the default prompt of a chat model


def check_sample(tokenizer: Any, arguments: SampleArguments, positions: int, is_chat: bool = False) -> None:
    """Raises RequestError for a --sample_prompt with characters that the tokenizer lacks, or that leaves no room in the
    model's `positions`."""
    for name in ("sample_tokens", "sample_temperature"):
        if getattr(arguments, name) < 0:
            raise RequestError(f"--{name} is {getattr(arguments, name)}, but it must be 0 or more.")
    if arguments.sample_prompt != SampleArguments().sample_prompt:  # the default need not be encodable
        refuse_unknown_characters(letters_of(tokenizer), arguments.sample_prompt, "--sample_prompt")
    if is_chat and not arguments.sample_tokens:
        return
    length = len(_tokens(tokenizer, arguments, is_chat))
    if length >= positions:
        raise RequestError(
            f"--sample_prompt has {length} tokens, but the model has {positions} positions. Give a shorter one."
        )


def asked(arguments: SampleArguments, is_chat: bool) -> str:
    """The start of a sample, or the question to a chat model."""
    is_default = arguments.sample_prompt == SampleArguments().sample_prompt
    return QUESTION if is_chat and is_default else arguments.sample_prompt


def _tokens(tokenizer: Any, arguments: SampleArguments, is_chat: bool) -> list[int]:
    """The tokens of the prompt; for a chat model, with all that its template writes before the answer."""
    text = asked(arguments, is_chat)
    if is_chat:
        turns = [{"role": "user", "content": text}]
        try:
            (text,) = each_bounded(lambda one: rendered(tokenizer, one, None, True), [turns], "the chat template")
        except RequestError as error:
            raise RequestError(f"no sample can be generated: {error} --sample_tokens 0 leaves samples out.") from error
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids if is_chat else begun(ids, beginning_of(tokenizer))


class Samples(TrainerCallback):
    """Appends a sample to samples.md at each evaluation. Every rank generates, as ZeRO-3 needs, and rank 0 writes. A
    chat model answers a user's turn until it ends its own. `synced`: ranks generate until the last has ended;
    transformers does so by itself under ZeRO-3 and FSDP only (5.23, generation/utils.py, generate)."""

    def __init__(
        self, arguments: SampleArguments, folder: Path, seed: int, is_chat: bool = False, synced: bool = False
    ) -> None:
        self.arguments, self.folder, self.seed, self.is_chat = arguments, folder, seed, is_chat
        self.synced = synced
        self.last, self.step = "", -1
        self.prompt: list[int] | None = None

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
        """Sample on the CPU from the model in the run folder, for a run in which no rank holds the whole model."""
        if self.arguments.sample_tokens < 1:
            return
        auto = class_for(TEXT_GENERATION.auto, AutoConfig.from_pretrained(str(self.folder)))
        model = auto.from_pretrained(str(self.folder))
        tokenizer = AutoTokenizer.from_pretrained(str(self.folder))
        self.last = self.sample(model, tokenizer, torch.device("cpu"))
        self.write(step)

    def sample(self, model: Any, tokenizer: Any, device: torch.device) -> str:
        """Text that `model` generates; torch's random state does not change."""
        if self.prompt is None:
            self.prompt = _tokens(tokenizer, self.arguments, self.is_chat)
        ids = self.prompt or [tokenizer.eos_token_id or 0]  # the default prompt may encode to nothing
        made = self.continued(model, tokenizer, device, ids, may_end=self.is_chat)
        if self.is_chat:
            answer = str(tokenizer.decode(made, skip_special_tokens=True))
            return f"user: {asked(self.arguments, True)}\nassistant: {answer.strip()}"
        return str(tokenizer.decode([*ids, *made], skip_special_tokens=True))

    def continued(self, model: Any, tokenizer: Any, device: torch.device, ids: list[int], may_end: bool) -> list[int]:
        """The tokens that `model` generates after `ids`: --sample_tokens of them, or with `may_end` up to its own
        end."""
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
                min_new_tokens=0 if may_end else length,
                do_sample=self.arguments.sample_temperature > 0,
                temperature=self.arguments.sample_temperature or None,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
                synced_gpus=self.synced or None,
            )
        model.train(was_training)
        return list(made[0][len(ids) :].tolist())


class Answers(Samples):
    """Greedy answers to `prompts` (lists of token ids) before the first step of a run and at each evaluation."""

    def __init__(self, tokens: int, folder: Path, seed: int, prompts: Sequence[list[int]]) -> None:
        super().__init__(SampleArguments(sample_tokens=tokens, sample_temperature=0.0), folder, seed)
        self.prompts, self.first = prompts, ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.on_evaluate(args, state, control, **kwargs)
            self.first = self.last

    def sample(self, model: Any, tokenizer: Any, device: torch.device) -> str:
        """Each prompt with its answer; torch's random state does not change."""
        found = []
        for ids in self.prompts:
            answer = self.continued(model, tokenizer, device, ids, may_end=True)
            texts = (str(tokenizer.decode(part, skip_special_tokens=True)).strip() for part in (ids, answer))
            found.append("prompt: {}\nanswer: {}".format(*texts))
        return "\n\n".join(found)
