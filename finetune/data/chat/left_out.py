"""Which parts of a conversation a template leaves out, whichever way the assistant's spans are found."""

from __future__ import annotations

import json
from collections.abc import Sequence

from finetune.data.chat.sentinels import THOUGHT, WORDS, Located
from finetune.data.chat.turns import ASSISTANT, RULERS, Turn, has_words


def left_out(turns: Sequence[Turn], whole: str, located: Located) -> set[tuple[int, str]]:
    """The turn and kind of each part of `turns` that is not, or not entirely, in their rendering `whole`. Of the
    assistant's thoughts only the last count: templates drop earlier ones by design.

    Sentinels tell this if they do not change the rendering; otherwise, and for turns without them, the text does."""
    if located.is_exact:
        lost = {(part.turn, part.kind) for part in located.parts if not part.is_there}
    else:
        lost = _missing(turns, whole, located)
    marked = {part.turn for part in located.parts}
    for i, turn in enumerate(turns):
        is_told = i in marked if located.is_exact else turn["role"] not in RULERS
        content = turn.get("content", "").strip()
        if not is_told and content not in whole and _after(content, whole.casefold(), 0) < 0:
            lost.add((i, WORDS))
    own = (i for i, turn in enumerate(turns) if turn["role"] == ASSISTANT and has_words(turn))
    last = max(own, default=-1)
    return {(i, kind) for i, kind in lost if kind != THOUGHT or i == last or turns[i]["role"] != ASSISTANT}


def _missing(turns: Sequence[Turn], whole: str, located: Located) -> set[tuple[int, str]]:
    """What does not occur in `whole` in the order of the turns: the same words may occur in another turn."""
    folded, at, lost = whole.casefold(), 0, set()
    for i, turn in enumerate(turns):
        if turn["role"] in RULERS:
            continue
        parts = [(part.kind, part.text) for part in located.parts if part.turn == i]
        if turn["role"] != ASSISTANT:
            parts = [(WORDS, turn.get("content", ""))]
        begin = at
        for kind, text in parts:
            end = _after(text, folded, at if kind == WORDS else begin)  # calls may be written before words
            if end < 0:
                lost.add((i, kind))
            elif kind == WORDS:
                at = end
    return lost


def _after(text: str, folded: str, at: int) -> int:
    """Where `text`, as it is or in JSON, ends in the case-folded text `folded` from `at`; -1 if it is not there."""
    for form in (text, json.dumps(text, ensure_ascii=False)[1:-1]):
        found = folded.find(form.strip().casefold(), at)
        if found >= 0:
            return found + len(form.strip().casefold())
    return -1
