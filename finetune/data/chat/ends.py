"""Finds the tokens that end the assistant's turns, where generation must stop."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.data.packing import Tokens

LOOKED_AT = 10_000  # documents
LEAST_SHARE = 0.01  # of these, for a token to count as an end
SHOWN_TOKENS = 10


def turn_ends(tokens: Tokens, tokenizer: Any) -> list[int]:
    """The special tokens that end the trained part of conversations, the most common first."""
    found, counts = np.unique(tokens.ids[_last_learnt(tokens)], return_counts=True)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    ends = [(n, i) for i, n in zip(found.tolist(), counts.tolist(), strict=True) if n >= LEAST_SHARE * counts.sum()]
    return [i for _, i in sorted(ends, reverse=True) if i in special]


def note_of_ends(tokens: Tokens, tokenizer: Any) -> str:
    """A warning for the case that no special token ends the assistant's turns."""
    last = int(_last_learnt(tokens).tolist()[0])
    shown = tokenizer.decode(tokens.ids[max(0, last + 1 - SHOWN_TOKENS) : last + 1].tolist())
    return (
        f"the assistant's turns end in {shown!r}, which is not a special token: generation does not stop there by "
        "itself (use --chat_template with a template whose marks are special tokens, or that ends in eos_token)"
    )


def _last_learnt(tokens: Tokens) -> npt.NDArray[np.int64]:
    assert tokens.learnt is not None
    starts = tokens.starts[: LOOKED_AT + 1]
    learnt: npt.NDArray[np.int64] = np.flatnonzero(tokens.learnt[: starts[-1]])
    after: npt.NDArray[np.int64] = np.searchsorted(learnt, starts[1:])
    return np.unique(learnt[after[after > 0] - 1])
