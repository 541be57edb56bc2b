"""Models built from a config alone, with random weights, and samples that fit them."""

from __future__ import annotations

import json
from typing import Any

import torch
import transformers

import finetune.models.gptlite
import finetune.models.mlp  # noqa: F401 - they register their models
from finetune.models.adapters import with_adapter
from finetune.models.composite import class_for, freeze_unread
from finetune.plan.families.parts import CLASSES, IMAGES, SEQ2SEQ, SPANS, TAGS, VECTORS
from finetune.plan.model import HEADS, MLP, head_of_class
from finetune.plan.tracing import TRUSTS
from finetune.run.choose import recipes
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.groups import of_text


def config_of(values: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(**values)


def class_of(head: str, config: Any) -> Any:
    """transformers' class for models of this kind with this head. Raises RequestError if there is none."""
    names = (f"AutoModel{end}" for end, known in HEADS.items() if known == head)
    return class_for(next(name for name in names if hasattr(transformers, name)), config)


def config_in(config: dict[str, Any]) -> Any:
    """As the code in the model's folder has it, if the user trusts that."""
    if not config.get(TRUSTS):
        return config_of(config)
    values = {name: one for name, one in config.items() if name not in ("auto_map", "_name_or_path", "model_type")}
    return transformers.AutoConfig.from_pretrained(config["_name_or_path"], **values)  # with TRUSTS


def on_meta(config: dict[str, Any], head: str, how: dict[str, Any], window: int | None) -> Any:
    """A model without memory, such that it can be trained. `how`: `dtype` and `attn_implementation`; `window`: in place
    of a sliding window."""
    made = config_in(config)
    text = made.get_text_config()
    if getattr(text, "pad_token_id", 0) is None:
        text.pad_token_id = 0  # classifiers of several texts ask for one
    if head == SEQ2SEQ and getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = 0
    trusts = {"trust_remote_code": True} if "auto_map" in config else {}
    with torch.device("meta"):
        model = as_loaded(_built(made, head, **how, **trusts), config)
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            if not one.is_meta:  # XLNet's FloatTensor
                setattr(module, name, torch.nn.Parameter(torch.empty_like(one, device="meta", dtype=how["dtype"])))
    if window:  # now, because parameters may be as large as it: a bias by distance
        parts = (part for part in model.modules() if isinstance(part, transformers.PreTrainedModel))
        for its in (part.config.get_text_config() for part in parts):
            if getattr(its, "sliding_window", None):
                its.sliding_window = window
    return model.train()


def _built(made: Any, head: str, **how: Any) -> Any:
    """A model with this head; for vectors one without a head, whose pooler would go unused."""
    if head == VECTORS:
        try:
            return transformers.AutoModel.from_config(made, add_pooling_layer=False, **how)
        except TypeError:
            return transformers.AutoModel.from_config(made, **how)
    return class_of(head, made).from_config(made, **how)


def build(values: dict[str, Any], head: str, attention: str, dtype: torch.dtype | None = None) -> Any:
    """With "sdpa" as recipes build by default: transformers takes "eager" for models without it."""
    chosen = {} if dtype is None else {"dtype": dtype}
    chosen |= {} if attention == "sdpa" else {"attn_implementation": attention}
    config = config_of(values)
    return as_loaded(class_of(head, config).from_config(config, **chosen), values)


def as_loaded(model: Any, values: dict[str, Any]) -> Any:
    """T5's config class ties all models' embeddings, whatever their file says. Loading nevertheless leaves two weights
    apart that a file has both of (transformers 5.23, configuration_t5.py; modeling_utils.py, tie_weights)."""
    head = model.get_output_embeddings()
    is_apart = values.get("model_type") == "t5" and values.get("tie_word_embeddings") is False
    if is_apart and head is not None and head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    return model


def build_adapted(values: dict[str, Any], head: str, attention: str, adapter: str) -> tuple[Any, Any]:
    """The model without and with an adapter, if there is one: flags of AdapterArguments, as a JSON object."""
    if not adapter:
        return (base := freeze_unread(build(values, head, attention))), base
    arguments = AdapterArguments(use_peft=True, **json.loads(adapter))
    base = build(values, head, attention, getattr(torch, arguments.dtype))
    task = next(one.task.adapter for one in recipes().values() if head_of_class(one.task.auto) == head)
    return base, with_adapter(base, arguments, None, task)


def samples(
    config: dict[str, Any],
    head: str,
    tokens: int,
    for_pipeline: bool = False,
    is_shared: bool = False,
    documents: bool = False,
) -> dict[str, torch.Tensor]:
    """One sample, without a batch dimension. A text that ranks share has shifted labels: the token
    after a part is another rank's. With `documents` it has two, whose positions begin at 0."""
    if config["model_type"] == MLP:
        return {"inputs": torch.ones(config["width"]), "labels": torch.tensor(0)}
    if head == IMAGES:
        sides = config.get("num_channels", 3), config["image_size"], config["image_size"]
        return {"pixel_values": torch.ones(sides), "labels": torch.tensor(0)}
    ids = torch.arange(tokens) % (of_text(config.get)("vocab_size") or tokens)
    if head == CLASSES:
        return {"input_ids": ids, "labels": torch.tensor(0)}
    if head == TAGS:
        return {"input_ids": ids, "labels": torch.zeros_like(ids)}
    if head == SPANS:
        return {"input_ids": ids, "start_positions": torch.tensor(0), "end_positions": torch.tensor(1)}
    positions = {"position_ids": torch.arange(tokens) % (tokens // 2)} if documents else {}
    if for_pipeline:
        return {"input_ids": ids, "shift_labels": ids.roll(-1), **positions}
    if is_shared:
        return {"input_ids": ids, "labels": (following := ids.roll(-1)), "shift_labels": following, **positions}
    return {"input_ids": ids, "labels": ids, **positions}
