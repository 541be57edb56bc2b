"""Do packed documents attend to each other? The model is tested, since one that ignores the mask does not fail."""

from __future__ import annotations

from typing import Any

import torch

from finetune.errors import RequestError, first_line
from finetune.models.small_copy import small_copy

DOCUMENT_TOKENS = 3


def check_document_mask(model: Any, rows: int) -> None:
    """Raises RequestError if restarted positions do not separate documents in this model; `rows` is the size of a
    micro-batch.

    transformers builds the mask from `position_ids` (masking_utils.py, find_packed_sequence_indices) for models that
    let it build their masks; other models, and layers other than attention, mix the documents silently.
    """
    attention = str(model.config._attn_implementation)
    if "flash" in attention and rows > 1:
        # modeling_flash_attention_utils.py, _is_packed_sequence: positions are only read in batches of one row.
        raise RequestError(
            f"--document_mask: {attention} separates documents only with one row per micro-batch, not {rows}. Set "
            "--per_device_train_batch_size and --per_device_eval_batch_size to 1, or leave --attn_implementation out."
        )
    if attention not in ("eager", "sdpa"):
        return  # not available on CPU, where the small copy runs
    try:
        apart = documents_are_apart(model)
    except Exception as error:  # a shortened config can raise anything
        raise RequestError(
            f"--document_mask: could not check whether {type(model).__name__} keeps the documents of a block apart "
            f"({first_line(error)}). Drop it, or use --packing none."
        ) from error
    if not apart:
        raise RequestError(
            f"--document_mask: {type(model).__name__} still lets the documents of a block attend to each other. Drop "
            "it, or use --packing none."
        )


def documents_are_apart(model: Any) -> bool:
    """True if a document has the same logits in a block as alone, in a small copy of `model`."""
    twin = small_copy(model, 2 * DOCUMENT_TOKENS)
    ids = torch.arange(2 * DOCUMENT_TOKENS)[None]
    positions = torch.arange(DOCUMENT_TOKENS).repeat(2)[None]
    with torch.no_grad():
        packed = twin(input_ids=ids, position_ids=positions).logits[:, DOCUMENT_TOKENS:]
        alone = twin(input_ids=ids[:, DOCUMENT_TOKENS:], position_ids=positions[:, DOCUMENT_TOKENS:]).logits
    return bool(torch.allclose(packed, alone, atol=1e-4))
