"""A prompt that two answers share, computed once for both. The model is tested for support, since one that ignores the
mask does not fail."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from finetune.data.shared_prompts import CHOSEN, PROMPT, REJECTED
from finetune.errors import RequestError, first_line
from finetune.models.small_copy import small_copy

PROMPT_TOKENS, ANSWER_TOKENS = 5, 3
# Config keys for how far back a token attends. An explicit mask replaces the window's (transformers 5.23,
# masking_utils.py, _preprocess_mask_arguments: a 4-d mask is returned unchanged).
WINDOWS = ("sliding_window", "attention_chunk_size")
TOLERANCE = 1e-5  # for a small copy's logits, which are below 1


def shared_mask(segments: Tensor) -> Tensor:
    """The mask (B, 1, T, T) for rows of a prompt and its two answers, marked by `segments` (B, T): each token attends
    to itself and to earlier tokens of the prompt and its own segment. So does padding: an empty row would yield NaN."""
    own = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == PROMPT)
    return torch.tril(own)[:, None]


def check_shared_prompt(model: Any, block_size: int) -> None:
    """Raises RequestError if sharing a prompt changes the logits of `model` for texts of up to `block_size` tokens."""
    name, attention = type(model).__name__, str(model.config._attn_implementation)
    if attention != "sdpa":
        raise RequestError(
            f"--share_prompt: {attention} attention cannot take a mask that hides one answer from the other. Give "
            "--attn_implementation sdpa, or drop it."
        )
    config = model.config.get_text_config()
    sees = {key: value for key in WINDOWS if isinstance(value := getattr(config, key, None), int)}
    short = {key: ANSWER_TOKENS for key, value in sees.items() if value < block_size}
    try:
        alike = answers_are_apart(model, short)
    except Exception as error:  # a shortened config or model can raise anything
        raise RequestError(
            f"--share_prompt: could not check whether {name} can share a prompt ({first_line(error)}). Drop it."
        ) from error
    if not alike:
        more = f", or give --block_size {min(sees.values())} at most" if short else ""
        raise RequestError(f"--share_prompt: the logits of {name} change if two answers share a prompt. Drop it{more}.")


def answers_are_apart(model: Any, windows: dict[str, int]) -> bool:
    """True if two answers after one shared prompt have the same logits as each in its own row, in a small copy of
    `model` with these `windows`."""
    twin = small_copy(model, PROMPT_TOKENS + 2 * ANSWER_TOKENS, windows)
    ids = torch.arange(PROMPT_TOKENS + 2 * ANSWER_TOKENS)
    prompt, *answers = ids.split([PROMPT_TOKENS, ANSWER_TOKENS, ANSWER_TOKENS])
    parts = zip((PROMPT, CHOSEN, REJECTED), (prompt, *answers), strict=True)
    segments = torch.cat([torch.full_like(some, part) for part, some in parts])[None]
    positions = torch.arange(PROMPT_TOKENS + ANSWER_TOKENS)
    both = torch.cat([positions, positions[PROMPT_TOKENS:]])[None]
    with torch.no_grad():
        shared = twin(input_ids=ids[None], attention_mask=shared_mask(segments), position_ids=both).logits[0]
        alone = [twin(input_ids=torch.cat([prompt, answer])[None]).logits[0, PROMPT_TOKENS:] for answer in answers]
    return bool(torch.allclose(shared[PROMPT_TOKENS:], torch.cat(alone), rtol=0, atol=TOLERANCE))
