"""Do the documents of a block see one another? The model is asked, for a mask that is not honoured is not missed."""

from __future__ import annotations

from typing import Any

import torch

from finetune.errors import RequestError, first_line
from finetune.models.small_copy import small_copy

DOCUMENT_TOKENS = 3


def check_document_mask(model: Any, rows: int) -> None:
    """Raises RequestError where positions that start again do not part documents in this model; `rows` are those of a
    micro-batch.

    transformers builds the mask from `position_ids` (masking_utils.py, find_packed_sequence_indices), for models that
    let it build their masks; others, and layers that are no attention, mix the documents without a word.
    """
    attention = str(model.config._attn_implementation)
    if "flash" in attention and rows > 1:
        # modeling_flash_attention_utils.py, _is_packed_sequence: positions are looked at in batches of one row alone.
        raise RequestError(
            f"--document_mask: {attention} parts documents only with one row a micro-batch, and there are {rows}. Set "
            "--per_device_train_batch_size and --per_device_eval_batch_size to 1, or leave --attn_implementation out."
        )
    if attention not in ("eager", "sdpa"):
        return  # it runs on no CPU
    try:
        apart = documents_are_apart(model)
    except Exception as error:  # whatever a config says to being shortened
        raise RequestError(
            f"--document_mask: whether {type(model).__name__} keeps the documents of a block apart could not be found "
            f"out ({first_line(error)}). Drop it, or use --packing none."
        ) from error
    if not apart:
        raise RequestError(
            f"--document_mask: {type(model).__name__} lets the documents of a block see one another all the same. Drop "
            "it, or use --packing none."
        )


def documents_are_apart(model: Any) -> bool:
    """True if a document's logits in a block are those that it has alone, in a small copy of `model`."""
    twin = small_copy(model, 2 * DOCUMENT_TOKENS)
    ids = torch.arange(2 * DOCUMENT_TOKENS)[None]
    positions = torch.arange(DOCUMENT_TOKENS).repeat(2)[None]
    with torch.no_grad():
        packed = twin(input_ids=ids, position_ids=positions).logits[:, DOCUMENT_TOKENS:]
        alone = twin(input_ids=ids[:, DOCUMENT_TOKENS:], position_ids=positions[:, DOCUMENT_TOKENS:]).logits
    return bool(torch.allclose(packed, alone, atol=1e-4))
