"""Finds the columns of preference tables by their usual names, and reads the prompt before the answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.data.chat.turns import ASSISTANT, Turn, from_json, turns_of
from finetune.data.column_names import SHAREGPT, SYSTEM
from finetune.data.formats import TURNS, alpaca_prompt
from finetune.errors import RequestError, plain

PAIRS, ANSWERS = "preferences", "judged answers"
SIDES = {PAIRS: ("chosen", "rejected"), ANSWERS: ("completion",)}
SCORES = ("score_chosen", "score_rejected")  # as in UltraFeedback; their difference is the margin
PROMPT, INSTRUCTION = "prompt", "instruction"
PROMPTS = (PROMPT, "question", INSTRUCTION, "query", "input", "conversations", "messages")
BESIDE = ("input", "history")  # extra columns of an instruction in Alpaca and LLaMA-Factory
SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")  # in Anthropic's HH
OF_SPEAKER = {"Human": "user", "Assistant": ASSISTANT}
OF_TURNS = (("role", "content"), ("role", "tool_calls"), ("from", "value"))
Rows = Sequence[Mapping[str, Any]]


def find_preferences(
    names: Sequence[str], head: Rows, where: str, wants_single: bool
) -> tuple[str, dict[str, tuple[str, ...]]]:
    """PAIRS or ANSWERS, and the columns to read by role; `head` holds the first rows. Single answers are for KTO alone,
    which also takes pairs. Raises RequestError."""
    if set(SIDES[PAIRS]) <= set(names):
        scores = ("margin",) if "margin" in names else SCORES if set(SCORES) <= set(names) else ()
        return PAIRS, _read(PAIRS, scores, names, head, where)
    if {"completion", "label"} <= set(names):
        if not wants_single:
            raise RequestError(
                f"{where}: has answers that are judged one by one (completion, label), which only --loss kto supports. "
                "The other losses compare two answers: give columns chosen and rejected."
            )
        return ANSWERS, _read(ANSWERS, ("label",), names, head, where)
    other = ""
    if {"messages", "conversations", "text"} & set(names) or {"prompt", "completion"} <= set(names):
        other = " Texts and conversations without a worse answer are for recipes/causal_lm.py."
    elif {"source", "target"} <= set(names):
        other = " Text-to-text pairs are for recipes/seq2seq.py."
    raise RequestError(
        f"{where}: has no preferences: `chosen` and `rejected` (with `prompt`, or whole conversations each), or "
        f"`completion` and `label`. It has {', '.join(names)}. Rename columns with --column_mapping OLD=NEW.{other}"
    )


def _read(
    kind: str, judged: tuple[str, ...], names: Sequence[str], head: Rows, where: str
) -> dict[str, tuple[str, ...]]:
    prompt = _find_prompt([name for name in names if name not in (*SIDES[kind], *judged)], SIDES[kind], head, where)
    return {kind: (*SIDES[kind], *judged)} | ({"their prompt": prompt} if prompt else {})


def _find_prompt(names: Sequence[str], sides: tuple[str, ...], head: Rows, where: str) -> tuple[str, ...]:
    """Raises RequestError if the prompt is ambiguous, or if there is none but another column has words."""
    found = [PROMPT] if PROMPT in names else [name for name in PROMPTS if name in names]
    if INSTRUCTION in found:
        found = [name for name in found if name not in BESIDE]
    has_own = any(_has_prompt(row[name]) for row in head for name in sides)
    if len(found) > 1:
        if not has_own:
            raise RequestError(
                f"{where}: the prompt may be in {' or '.join(found)}. Choose one with "
                f"--column_mapping {found[0]}=prompt."
            )
        found = []
    wordy = [name for name in names if name != SYSTEM and any(_has_words(row[name]) for row in head)]
    if not found and not has_own and wordy:
        raise RequestError(
            f"{where}: {' and '.join(f'`{name}`' for name in sides)} contain no prompt, and no column has one of the "
            f"names {', '.join(PROMPTS)}. Name it, for example with --column_mapping {plain(wordy[0])}=prompt (there "
            f"are words in {', '.join(map(plain, wordy))}); if there is no prompt, remove such columns from the data."
        )
    beside = [name for name in BESIDE if found == [INSTRUCTION] and name in names]
    return (*(name for name in names if name == SYSTEM), *found, *beside)


def _has_prompt(side: Any) -> bool:
    try:
        turns = turns_in(side)
    except RequestError:
        return True  # perhaps not, but reading the row gives the better error
    return turns is not None and turns[0]["role"] != ASSISTANT


def _has_words(value: Any) -> bool:
    """Whether it is turns or several words, unlike an id or source name. Some scripts do not use spaces."""
    if isinstance(value, str):
        return len(value.split()) > 1 or not value.isascii()
    return isinstance(value, list) and bool(value) and all(map(_is_turn, value))


def prompt_of(row: Mapping[str, Any]) -> str | list[Turn]:
    """The prompt without the `system` message: a text, or turns. If a table has a column `system` or an instruction's
    `history`, every row has turns."""
    name = next((name for name in PROMPTS if name in row), "")
    value, past, is_chat = row.get(name), list[Turn](), SYSTEM in row
    if name == INSTRUCTION and isinstance(value, str | None):
        value, past = alpaca_prompt(row)
        is_chat = is_chat or "history" in row
    turns = turns_in(value)
    if turns is None and not is_chat:
        return str(value or "")
    turns = turns or ([{"role": "user", "content": str(value)}] if value else [])
    if turns and turns[-1]["role"] == ASSISTANT and not str(turns[-1].get("content") or "").strip():
        turns = turns[:-1]  # HH's prompts end with an empty "Assistant:"
    return [*past, *turns]


def turns_in(value: Any) -> list[Turn] | None:
    """The turns of a conversation, given as a list, as JSON, or in Anthropic's format; None for a text."""
    if isinstance(value, str):
        speakers = list(SPEAKER.finditer(value))
        if speakers and not value[: speakers[0].start()].strip() and speakers[0][1] == "Human":
            ends = [*(match.start() for match in speakers[1:]), len(value)]
            return [
                {"role": OF_SPEAKER[match[1]], "content": value[match.end() : end].strip()}
                for match, end in zip(speakers, ends, strict=True)
            ]
        read = from_json(value)
        # Other JSON is plain text.
        value = read if all(map(_is_turn, read if isinstance(read, list) else [read])) else None
    if not value or isinstance(value, int | float):
        return None
    value = value if isinstance(value, list) else [value]
    if all(isinstance(turn, dict) and "from" in turn for turn in value):
        value = TURNS[SHAREGPT]({"conversations": value})
    return turns_of(value, "keep")


def _is_turn(read: Any) -> bool:
    return isinstance(read, dict) and any({who, *what} <= read.keys() for who, *what in OF_TURNS)
