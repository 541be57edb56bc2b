"""Synthetic samples that can be learned. Each has its own seed, so it is the same whichever rank reads it, with any
number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset

from finetune.bench.models import TEXT, BenchModel
from finetune.measure.models import config_of
from finetune.models import gptlite
from finetune.models.alexnet import AlexNetForImageClassification
from finetune.models.gptlite_pipeline import gptlite_pipeline
from finetune.models.gptlite_weights import draw_weights
from finetune.models.mlp import MLPForClassification
from finetune.models.pipeline import LayeredClassifier, PipelineModel

LAYERED = {kind.__name__: kind for kind in (MLPForClassification, AlexNetForImageClassification)}
FACTOR = 7  # the next token is FACTOR times the previous one, plus 1


class MadeUp(Dataset):  # type: ignore[misc]
    """`many` synthetic samples for `model`."""

    def __init__(self, model: BenchModel, many: int, seed: int, for_pipeline: bool = False) -> None:
        self.model, self.many, self.seed, self.for_pipeline = model, many, seed, for_pipeline

    def __len__(self) -> int:
        return self.many

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = np.random.default_rng((self.seed, index))
        if self.model.image_size:
            return self._picture(random)
        return self._text(random) if self.model.name in TEXT else self._numbers(random)

    def _numbers(self, random: np.random.Generator) -> dict[str, torch.Tensor]:
        """The study's task: numbers between -1 and 1; the class is the sum of squares modulo the number of classes."""
        config = self.model.config
        numbers = random.random(config["width"], dtype=np.float32) * 2 - 1
        label = int(np.dot(numbers, numbers)) % config["num_labels"]
        return {"inputs": torch.from_numpy(numbers), "labels": torch.tensor(label)}

    def _text(self, random: np.random.Generator) -> dict[str, torch.Tensor]:
        """For a language model, each token determines the next; for a classifier, the first token is the class."""
        vocabulary, tokens = self.model.config["vocab_size"], self.model.sequence_tokens
        if self.model.name == "distilbert":
            label = int(random.integers(self.model.config["num_labels"]))
            ids = torch.from_numpy(random.integers(0, vocabulary, tokens))
            ids[0] = label
            return {"input_ids": ids, "labels": torch.tensor(label)}
        walk = [int(random.integers(vocabulary))]
        for _ in range(tokens - 1):
            walk.append((walk[-1] * FACTOR + 1) % vocabulary)
        ids = torch.tensor(walk)
        if self.for_pipeline:  # the last token has no target, as in the other form
            return {"input_ids": ids, "shift_labels": torch.tensor([*walk[1:], -100])}
        return {"input_ids": ids, "labels": ids.clone()}

    def _picture(self, random: np.random.Generator) -> dict[str, torch.Tensor]:
        config, pixels = self.model.config, self.model.image_size
        label = int(random.integers(config["num_labels"]))
        noise = random.standard_normal((config["num_channels"], pixels, pixels), dtype=np.float32)
        noise += 2 * label / config["num_labels"] - 1
        return {"pixel_values": torch.from_numpy(noise), "labels": torch.tensor(label)}


def build(model: BenchModel, seed: int) -> Any:
    """The model as a Hugging Face one, with the same initial weights from `seed` as a pipeline's stages have."""
    config, kind = config_of(model.config), model.config["architectures"][0]
    torch.manual_seed(seed)
    built = (LAYERED.get(kind) or getattr(gptlite, kind, None) or getattr(transformers, kind))(config)
    if isinstance(built, LayeredClassifier):
        built.draw_weights(seed)
    elif hasattr(gptlite, kind):
        draw_weights(built, seed)
    return built


def build_stages(model: BenchModel, seed: int) -> PipelineModel:
    """The model as a list of layers; see IN_STAGES."""
    config, kind = config_of(model.config), LAYERED.get(model.config["architectures"][0])
    return kind.pipeline(config, seed) if kind else gptlite_pipeline(config, seed)
