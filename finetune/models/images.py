"""Image classifiers: any pretrained one, or a ResNet or AlexNet from scratch at a size that suits the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

from finetune.data.columns import Labels
from finetune.data.image_decoding import CHANNELS
from finetune.errors import RequestError, first_line
from finetune.models.alexnet import AlexNetConfig, AlexNetForImageClassification
from finetune.models.batch_norm import batch_norms, freeze_batch_norm, keep_statistics_in_fp32, synchronise_batch_norm
from finetune.models.classifier import trained_labels
from finetune.models.pipeline import PipelineModel
from finetune.models.resnet_group_norm import GroupNormResNetConfig, GroupNormResNetForImageClassification
from finetune.models.source import from_pretrained, load_weights, refuse_without_weights
from finetune.run.flags.images import ImageModelArguments
from finetune.run.sizes import ALEXNET_SIZES, resnet_shape


@dataclass(frozen=True)
class ImageSource:
    """A model before its weights are loaded: `config` and `processor` are None if it will be trained from scratch."""

    config: Any | None
    processor: Any | None
    description: str
    hub_id: str | None  # for the model card; None for a folder or a model from scratch

    @property
    def labels(self) -> Labels | None:
        """A trained model's classes, in the order of their ids; None if its config has none."""
        return trained_labels(self.config)


def find_image_source(arguments: ImageModelArguments, image_size: int | None) -> ImageSource:
    """Load the model's config and image processor, not its weights. Raises RequestError if either cannot be used."""
    name = arguments.model_name_or_path
    if name is None:
        norm = f", {arguments.norm} norm" if arguments.model_type == "resnet" else ""
        what = f"{arguments.model_type} from scratch, size {arguments.model_size}{norm}"
        return ImageSource(None, None, what, None)
    config = from_pretrained(AutoConfig, "model_name_or_path", name, arguments)
    refuse_without_weights(name)
    place = Path(name).expanduser()
    if place.is_dir() and not (place / "preprocessor_config.json").is_file():
        raise RequestError(
            f"--model_name_or_path {name}: the folder has no preprocessor_config.json, which says how to resize and "
            "normalize pictures. Copy it from the model's source."
        )
    processor = from_pretrained(AutoImageProcessor, "model_name_or_path", name, arguments)
    own = getattr(config, "image_size", None)
    if image_size is not None:
        if own not in (None, image_size) and getattr(config, "model_type", "") != "alexnet":
            raise RequestError(f"--image_size is {image_size}, but the model reads {own} x {own}. Drop it.")
        keys = ("shortest_edge",) if "shortest_edge" in processor.size else ("height", "width")
        processor.size = dict.fromkeys(keys, image_size)
    return ImageSource(config, processor, name, None if place.exists() else name)


def settled_image_config(arguments: ImageModelArguments, source: ImageSource, data: Any, will_train: bool) -> Any:
    """The model's config, with the class names in `data`. Raises RequestError if the model is not trained here and does
    not have these classes."""
    labels, side = data.labels, data.account.side
    if not will_train:
        _check_knows(source, labels)
    named = {"id2label": dict(enumerate(labels.names)), "label2id": {name: i for i, name in enumerate(labels.names)}}
    if source.config is not None:
        for key, value in named.items():
            setattr(source.config, key, value)
        return source.config
    if arguments.model_type == "alexnet":
        shape = {**ALEXNET_SIZES[arguments.model_size], "image_size": side, "num_channels": CHANNELS}
        dropout = {} if arguments.dropout is None else {"dropout": arguments.dropout}
        return AlexNetConfig(**{**shape, **dropout, **named})
    kind = GroupNormResNetConfig if arguments.norm == "group" else ResNetConfig
    return kind(**resnet_shape(arguments.model_size), **named)


def build_image_classifier(
    arguments: ImageModelArguments, source: ImageSource, config: Any, side: int, seed: int, recomputes: bool = False
) -> Any:
    """The model. Call it after `TrainingArguments`, so that ZeRO-3 shards it. Raises RequestError if pictures of `side`
    pixels are too small for it, or if `recomputes` is set and it cannot recompute activations."""
    if source.config is None:
        model = _from_scratch(config, seed)
        _check_side(config, type(model), side)
    else:
        name = str(Path(str(arguments.model_name_or_path)).expanduser())
        # A head with another number of classes is replaced by a new one.
        auto = AutoModelForImageClassification
        model = load_weights(auto, name, config, arguments, has_new_head=True)
    if recomputes and not model.supports_gradient_checkpointing:
        raise RequestError(
            f"--activation_checkpoint_interval: transformers' {type(model).__name__} cannot recompute activations. "
            "Drop it; smaller micro-batches save memory, too."
        )
    if not batch_norms(model):
        _refuse_batch_norm_flags(arguments)
    if arguments.freeze_batch_norm:
        freeze_batch_norm(model)
    if arguments.sync_batch_norm:
        model = synchronise_batch_norm(model)
    keep_statistics_in_fp32(model)
    return model


def image_pipeline(arguments: ImageModelArguments, source: ImageSource, config: Any, seed: int) -> PipelineModel:
    """An AlexNet as a list of layers, from scratch or loaded from a folder. Raises RequestError for other models."""
    if not isinstance(config, AlexNetConfig):
        kind = getattr(config, "model_type", "model")
        other = ", or give --model_type alexnet" if source.config is None else ""
        raise RequestError(
            f"--pipeline_parallel_size: only an alexnet runs as a pipeline here, not a {kind}. Drop it{other}."
        )
    _refuse_batch_norm_flags(arguments)
    if source.hub_id:
        raise RequestError(f"--model_name_or_path {source.hub_id}: a pipeline reads a folder. Download it first.")
    if source.config is None:
        _check_side(config, AlexNetForImageClassification, config.image_size)
    return AlexNetForImageClassification.pipeline(config, seed=seed if source.config is None else None)


def _refuse_batch_norm_flags(arguments: ImageModelArguments) -> None:
    for flag in ("sync_batch_norm", "freeze_batch_norm"):
        if getattr(arguments, flag):
            raise RequestError(f"--{flag}: the model has no batch norm. Drop it.")


def _check_knows(source: ImageSource, labels: Labels) -> None:
    known = source.labels.names if source.labels else ()
    if labels.names != known:
        raise RequestError(
            f"--do_train False evaluates a trained model, but --model_name_or_path knows the classes "
            f"{', '.join(known[:10]) or 'of nothing'}, but the data has {', '.join(labels.names[:10])}. Give the data "
            "that it was trained for."
        )


def _from_scratch(config: Any, seed: int) -> Any:
    # Not `from_config`: under ZeRO-3 it initializes weights in another order, so the run would start elsewhere.
    if isinstance(config, AlexNetConfig):
        model = AlexNetForImageClassification(config)
        model.draw_weights(seed)
        return model
    group = isinstance(config, GroupNormResNetConfig)
    return (GroupNormResNetForImageClassification if group else ResNetForImageClassification)(config)


def _check_side(config: Any, kind: Any, side: int) -> None:
    """Runs the model on the meta device, where tensors have only shapes."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
            kind(config).eval()(torch.ones(2, CHANNELS, side, side))
    except RuntimeError as error:
        raise RequestError(
            f"--image_size {side}: pictures are too small for this {config.model_type} ({first_line(error)}). "
            "Give a larger one, or a smaller --model_size."
        ) from error
