"""Which modules FSDP shards as a unit."""

from __future__ import annotations

from typing import Any

from torch import nn

from finetune.errors import RequestError
from finetune.run.launch import accelerate_uses_fsdp


def settle_fsdp(trainer: Any) -> None:
    """Choose the modules whose weights FSDP gathers together, unless the user did: the layers of the model.

    accelerate 1.15 shards the modules in a model's `_no_split_modules`, and then the input embeddings separately
    (utils/fsdp_utils.py, fsdp2_prepare_model). BERT, RoBERTa, ViT and some forty others also list the module that holds
    the embeddings, which would then be sharded twice; torch 2.13 fails with "value was None when it should not be".
    DistilBERT lists nothing, so the weights of all its layers would be gathered at once. Remove this once accelerate
    skips embeddings that are already sharded. Raises RequestError for a model that FSDP cannot shard.
    """
    wants_fsdp = trainer.args.fsdp or accelerate_uses_fsdp()
    assert trainer.is_fsdp_enabled or not wants_fsdp, "FSDP was asked for, and Accelerate would run DDP"
    plugin, model = trainer.accelerator.state.fsdp_plugin if wants_fsdp else None, trainer.model
    if plugin is None or plugin.fsdp_version != 2 or plugin.transformer_cls_names_to_wrap is not None:
        return
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:
        raise RequestError(
            f"FSDP by accelerate shards models with input embeddings, and a {type(model).__name__} has none. Drop "
            "--fsdp; ZeRO-2 and ZeRO-3 shard any model."
        ) from None
    around = {type(one).__name__ for one in model.modules() if embeddings in one.children()}
    named = [name for name in model._no_split_modules or () if name not in around]
    plugin.transformer_cls_names_to_wrap = named or _layers(model)


def _layers(model: nn.Module) -> list[str]:
    """The classes of the modules in the model's longest ModuleList."""
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) > 1]
    return sorted({type(layer).__name__ for layer in max(lists, key=len)}) if lists else []
