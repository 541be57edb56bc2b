"""Warnings about conversations that would not teach what they should, counted row by row; and the tokens that end the
assistant's turns, where generation must stop."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.data.chat.sentinels import CALL, THOUGHT
from finetune.data.chat.spans import Span
from finetune.data.chat.turns import ASSISTANT, ROLES, RULERS, TOOLS, Turn, has_words
from finetune.data.packing import Tokens

REMARKS = {
    "endless": "in {n} the chat template writes no mark after the assistant's words, so the model will not learn "
    "to stop: write {{{{ eos_token }}}} there, or give --chat_template",
    "twice": "{n} begin with two tokens for the beginning of a text: remove one from the chat template or the rows",
    "repeated": "in {n} a role speaks twice in a row, or the assistant first: merge such turns, or remove the rows",
    "empty": "{n} have an empty assistant turn, which is not trained on: fill it, or remove the row",
    "unlearnt": "{n} have nothing to train on: no assistant turn with words, or each has weight 0: remove the rows",
    "unknown": "{n} have turns of unknown roles, which are not trained on (known are "
    + ", ".join(ROLES)
    + "): rename them",
    "unthought": "in {n} the chat template leaves out the last thoughts: they are not trained on (use another "
    "--chat_template, or --reasoning strip if intended)",
    "beside": "in {n} the chat template leaves out the words next to a tool call: they are not trained on",
    "unruled": "in {n} the chat template leaves out the system message: use a --chat_template that includes it",
    "unseen": "in {n} the chat template leaves out results of tools (turns of role "
    + ", ".join(TOOLS)
    + "), so answers are learned without them: use a --chat_template that writes them, or rename the role",
    "unheard": "in {n} the chat template leaves out or cuts a turn (of the user, of an unknown role or, with "
    "--train_on all, of the assistant): use a --chat_template that includes it",
    "untooled": "in {n} the chat template does not write `tools`: use a --chat_template that does",
}
ENDLESS = (
    "the chat template writes no mark after the assistant's words in any conversation: the model would never learn to "
    "stop, and no later check would notice. Write {{ eos_token }} there, or give --chat_template (chatml, "
    "llama3, ...); --train_on all trains on such texts as they are."
)
ENDLESS_TOKENIZER = (
    "the data has conversations, but the tokenizer has neither a chat template nor an end-of-text token, so the model "
    "would never learn to stop, and no later check would notice. Use a model whose tokenizer has one, or give "
    "--chat_template (chatml, llama3, ...); --train_on all trains on such texts as they are."
)


def remarks_on(
    turns: Sequence[Turn],
    spans: Sequence[Span],
    left_out: set[tuple[int, str]],
    *,
    ignores_tools: bool,
    twice: bool,
    is_learnt: bool,
) -> list[int]:
    """For each of REMARKS, whether it applies to these turns, of which the template leaves out `left_out`."""
    roles = [turn["role"] for turn in turns]
    spoken = [role for role in roles if role not in RULERS]
    lost = {_remark_on(turns[i], kind) for i, kind in left_out}
    found = {
        "endless": not all(span.stops for span in spans),
        "twice": twice,
        "repeated": spoken[:1] == [ASSISTANT] or any(a == b and a in ("user", ASSISTANT) for a, b in pairwise(roles)),
        "empty": any(turn["role"] == ASSISTANT and not has_words(turn) for turn in turns),
        "unlearnt": not is_learnt,
        "unknown": not set(roles) <= set(ROLES),
        "untooled": ignores_tools,
    }
    return [int(name in lost or found.get(name, False)) for name in REMARKS]


def _remark_on(turn: Turn, kind: str) -> str:
    """Which of REMARKS applies if a part of this kind is left out of a turn."""
    if turn["role"] in RULERS:
        return "unruled"
    if turn["role"] in TOOLS:
        return "unseen"
    if turn["role"] != ASSISTANT or kind == CALL:
        return "unheard"
    return "unthought" if kind == THOUGHT else "beside" if "tool_calls" in turn else "unheard"


def notes_of(counts: Sequence[int], conversations: int) -> list[str]:
    """The remarks in words, each with the number of `conversations` it applies to."""
    every = f"all {conversations:,} conversations"
    shown = [every if n >= conversations else f"{n:,} of {conversations:,} conversations" for n in counts]
    return [text.format(n=n) for text, n, count in zip(REMARKS.values(), shown, counts, strict=True) if count]


LOOKED_AT = 10_000  # documents
LEAST_SHARE = 0.01  # of these, for a token to count as an end
SHOWN_TOKENS = 10


def turn_ends(tokens: Tokens, tokenizer: Any) -> list[int]:
    """The special tokens that end the trained part of conversations, the most common first."""
    found, counts = np.unique(tokens.ids[_last_learnt(tokens, tokenizer)], return_counts=True)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    ends = [(n, i) for i, n in zip(found.tolist(), counts.tolist(), strict=True) if n >= LEAST_SHARE * counts.sum()]
    return [i for _, i in sorted(ends, reverse=True) if i in special]


def note_of_ends(tokens: Tokens, tokenizer: Any) -> str:
    """A warning for the case that no special token ends the assistant's turns."""
    last = int(_last_learnt(tokens, tokenizer).tolist()[0])
    shown = tokenizer.decode(tokens.ids[max(0, last + 1 - SHOWN_TOKENS) : last + 1].tolist())
    return (
        f"the assistant's turns end in {shown!r}, which is not a special token: generation does not stop there by "
        "itself (use --chat_template with a template whose marks are special tokens, or that ends in eos_token)"
    )


def _last_learnt(tokens: Tokens, tokenizer: Any) -> npt.NDArray[np.int64]:
    """Where the trained part of conversations ends, before a blank that the template trains as well, as SmolLM3's."""
    assert tokens.learnt is not None
    starts = tokens.starts[: LOOKED_AT + 1]
    learnt: npt.NDArray[np.int64] = np.flatnonzero(tokens.learnt[: starts[-1]])
    after: npt.NDArray[np.int64] = np.searchsorted(learnt, starts[1:])
    last: npt.NDArray[np.int64] = np.unique(learnt[after[after > 0] - 1])
    blank = [one for one in np.unique(tokens.ids[last]).tolist() if not tokenizer.decode([one]).strip()]
    return last - (np.isin(tokens.ids[last], blank) & (last > 0) & tokens.learnt[last - 1])
