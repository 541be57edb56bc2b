"""The model that a run has kept beside its recipe.yaml, which says more of it than the recipe's flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import RequestError

SHAPING = ("model_size", "config_overrides", "tokenizer", "bpe_vocab_size")  # flags of a model from scratch
# What only recipes/image_cls.py takes. Its model from scratch hangs on the data.
IMAGE_FLAGS = ("train_dir", "validation_dir", "test_dir", "cifar_dir", "image_column_name", "image_size", "model_type",
               "norm", "sync_batch_norm", "freeze_batch_norm", "crop_padding", "horizontal_flip")  # fmt: skip


def with_kept_model(values: Mapping[str, Any], folder: Path, processor: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a run's recipe with the model of its folder, if it has one, for each recipe has another by default.
    `processor` is what preprocessor_config.json holds."""
    flags = dict(values)
    if (folder / "config.json").is_file():
        flags = {name: value for name, value in flags.items() if name not in SHAPING}
        flags["model_name_or_path"] = str(folder)
    side = processor.get("size")
    if isinstance(side, dict) and "height" in side:
        flags.setdefault("image_size", side["height"])
    return flags


def refuse_images(values: Mapping[str, Any]) -> None:
    """Raises RequestError for flags of the image recipe where no model is named."""
    if named := next((name for name in IMAGE_FLAGS if values.get(name) is not None), None):
        raise RequestError(
            f"{named} is of recipes/image_cls.py, whose model from scratch hangs on the data, and no model is named. "
            "Give the recipe.yaml of a run that has kept its model, or --model_name_or_path: a folder, a config.json, "
            "or resnet-50."
        )
