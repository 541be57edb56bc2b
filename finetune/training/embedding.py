"""Training on texts that are near or far: the trainer, whose loss is over a step's texts of all ranks and micro-batches
(finetune.training.contrast), and which says of itself what sentence-transformers has to know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from finetune.data.columns import WIDTHS
from finetune.data.embedding import IDS, KEYS
from finetune.data.embedding_rows import JUDGED, PAIRS
from finetune.errors import RequestError
from finetune.models.encoder import EncoderSource, pooled
from finetune.models.sentence_folder import write_sentence_model
from finetune.run.recipes.embedding import EmbeddingArguments
from finetune.training.contrast import Contrast, contrast
from finetune.training.mining import WithNegatives, mine
from finetune.training.retrieval import embedding_metrics
from finetune.training.start import Session
from finetune.training.trainer import FinetuneTrainer

PLACE = "place"  # of a micro-batch in its step


@dataclass(frozen=True)
class Part:
    """Of a micro-batch of B rows the losses (B,) and the gradient (B, C, D) of the sum of all losses of its step;
    `random` is what dropout has drawn from, None where the vectors need not be made again."""

    losses: Tensor
    gradient: Tensor
    random: list[Tensor] | None = None


class EmbeddingTrainer(FinetuneTrainer):
    """Call `compare_by` before it trains or evaluates."""

    source: EncoderSource
    contrast: Contrast
    samples: list[dict[str, Any]]  # the micro-batches of the step at hand
    parts: list[Part]  # of these, once they are known
    train_dataset: Any

    def compare_by(self, session: Session, source: EncoderSource, of: Contrast) -> None:
        """How texts become vectors, and what is learnt of these. Raises RequestError for flags that do not go with the
        data or the model."""
        self.source, self.contrast, self.label_names = source, of, ["labels"]
        self.compute_metrics = embedding_metrics(of, self.global_batch_size)
        if session.training.do_train and self.global_batch_size < 2:
            raise RequestError(
                f"{session.run.said('per_device_train_batch_size')}, in a global batch of 1: it has no other rows to "
                "compare with. Raise it, or --gradient_accumulation_steps."
            )
        count = session[EmbeddingArguments].mined_negatives
        if not count or self.train_dataset is None:
            return
        if of.kind != PAIRS:
            raise RequestError(
                f"--mined_negatives {count}: the data are {of.kind}, and only pairs have negatives. Drop it."
            )
        self.train_dataset = WithNegatives(self.train_dataset, count)
        self.add_callback(_Mines(self))

    def vectors(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Of B rows of C texts, in fp32, (B, C, D). First texts are padded to the longest of them, and so on."""
        count, sides = len(inputs[KEYS]), []
        for i, width in enumerate(inputs[WIDTHS]):
            ids, mask = (inputs[name][i * count : (i + 1) * count, :width] for name in ("input_ids", "attention_mask"))
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            sides.append(pooled(hidden, mask, self.source.pooling))
        return torch.stack(sides, dim=1)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """As the Trainer's. The loss looks at all micro-batches of a step, and asks which of them is at hand."""
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        for place, sample in enumerate(samples):
            sample[PLACE] = place
        self.samples, self.parts = samples, []
        return samples, items

    def _look_ahead(self, model: Any) -> list[Part]:
        """Of a step of several micro-batches: their vectors are made without a graph. Not before the first of them is
        at hand, for only then the Trainer draws as a resumed run's checkpoint does (transformers 5.23, _run_epoch)."""
        made, drawn = [], []
        for sample in self.samples:
            inputs = self._prepare_inputs(sample)
            drawn.append(random_states(self.args.device))
            with torch.no_grad():
                made.append(self.vectors(model, inputs))
        found = self._contrasted(made, self.samples)
        return [replace(part, random=states) for part, states in zip(found, drawn, strict=True)]

    def _contrasted(self, made: list[Tensor], samples: list[dict[str, Any]]) -> list[Part]:
        """What each micro-batch of this rank learns from all of all ranks, which must all call it."""
        device, sizes = self.args.device, [len(some) for some in made]
        told = [torch.cat([sample[name].to(device) for sample in samples]) for name in (KEYS, JUDGED)]
        vectors, keys, judged = (self.accelerator.gather(one) for one in (torch.cat(made), *told))
        with torch.autocast(device.type, enabled=False):
            losses, gradient = contrast(vectors, keys, judged.view(torch.float32), self.contrast)
        begin = self.args.process_index * sum(sizes)
        own_rows = slice(begin, begin + sum(sizes))
        return list(map(Part, losses[own_rows].split(sizes), gradient[own_rows].split(sizes)))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In training by the gradient that the rows' vectors have; an evaluation's loss is over all of its rows, and
        the metrics make it."""
        if PLACE not in inputs:
            vectors = self.vectors(model, inputs)
            outputs = {"logits": vectors.flatten(1), KEYS: inputs[KEYS], JUDGED: inputs[JUDGED]}
            return (vectors.new_zeros(()), outputs) if return_outputs else vectors.new_zeros(())

        def compared(**given: Any) -> dict[str, Tensor]:
            if not self.parts and len(self.samples) > 1:
                self.parts = self._look_ahead(model)
            part = self.parts[given[PLACE]] if self.parts else None
            with replayed(part.random if part else None, self.args.device):
                vectors = self.vectors(model, given)
            if part is None:
                self.parts = [part] = self._contrasted([vectors.detach()], [given])
            share = (vectors * part.gradient).sum()
            # Each row's loss by value, and as its gradient what this micro-batch has of the gradient of all losses.
            return {"logits": (part.losses + (share - share.detach()) / len(vectors)).unsqueeze(1)}

        return super().compute_loss(compared, inputs, return_outputs, num_items_in_batch)

    def write_beside(self, folder: Path) -> None:
        """What sentence-transformers asks for."""
        size, source = self.model.config.hidden_size, self.source
        longest, usual = source.model.max_seq_length, source.default_prompt
        write_sentence_model(folder, source.pooling, size, longest, source.prompts, usual)

    def mine(self) -> None:
        """Negatives of all training rows, once, by the model as it is before its first step. All ranks must call it."""
        rows = self.train_dataset
        assert isinstance(rows, WithNegatives)
        rows.found = mine(self, rows, self.embedded)

    def embedded(self, texts: list[list[int]]) -> Tensor:
        """Vectors of texts by their token ids, (texts, D), without a gradient. All ranks must call it, with the same
        texts."""
        size, world, rank, parts = self.args.eval_batch_size, self.args.world_size, self.args.process_index, []
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for begin in range(0, len(texts), size * world):
            self.progress()
            some = order[begin : begin + size * world]
            own = [some[min(rank * size + i, len(some) - 1)] for i in range(size)]  # the last again, to fill up
            rows = [{IDS: [texts[i]], KEYS: [0]} for i in own]
            inputs = self._prepare_inputs(self.data_collator(rows))
            with torch.no_grad(), self.compute_loss_context_manager():
                made = self.vectors(self.model_wrapped, inputs)[:, 0].contiguous()
            parts.append(self.accelerator.gather(made)[: len(some)].cpu())
        found = torch.cat(parts)
        return torch.empty_like(found).index_copy_(0, torch.tensor(order), found)


class _Mines(TrainerCallback):
    """Once the engine stands, and before the first step."""

    def __init__(self, trainer: EmbeddingTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.mine()


def random_states(device: torch.device) -> list[Tensor]:
    """What the next numbers are drawn from, on the CPU and the device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextlib.contextmanager
def replayed(states: list[Tensor] | None, device: torch.device) -> Iterator[None]:
    """With numbers drawn from these states; what is drawn afterwards does not depend on it."""
    if states is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        yield
