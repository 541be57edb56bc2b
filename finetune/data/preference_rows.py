"""Rows of preferences as people have them: which columns they are read from, and what a prompt and its answers are."""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from finetune.data.builtin import PACKAGES, parsed
from finetune.data.chat.conversation import completion, conversation
from finetune.data.chat.turns import ASSISTANT, Turn, from_json, has_words, quoted, turns_of
from finetune.data.files import open_file
from finetune.data.formats import NOT_LEARNT, SHAREGPT, TURNS
from finetune.data.splits import open_splits
from finetune.errors import RequestError
from finetune.run.recipes.preference import PreferenceDataArguments

SPLITS = ("train", "validation")
PAIRS, ANSWERS = "preferences", "judged answers"
SCORES = ("score_chosen", "score_rejected")  # UltraFeedback's, whose difference is a margin
GOOD, BAD = ("true", "1", "good", "desirable", "chosen", "yes"), ("false", "0", "bad", "undesirable", "rejected", "no")
SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")  # of Anthropic's HH
OF_SPEAKER = {"Human": "user", "Assistant": ASSISTANT}
FEWEST_WORDS, MOST_WORDS = 5, 40  # of a built-in answer
TokensOfSide = tuple[list[int], list[bool]]  # ids, and which of them are learnt


@dataclass(frozen=True)
class Sides:
    """A prompt and its answers, both texts, or both turns of a conversation. A pair has the better one first."""

    prompt: Any
    answers: tuple[Any, ...]
    margin: float = 0.0
    label: int = 1  # of one answer: whether it is desirable
    number: int = 0  # of its row in its file

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.answers[0], str)


def open_tables(arguments: PreferenceDataArguments) -> tuple[dict[str, Dataset], str]:
    """The raw splits that are there, and where they come from."""
    given = open_splits(
        arguments, lambda split, name: open_file(f"{split}_file", name, encoding=arguments.encoding), SPLITS
    )
    if given:
        return given
    source = "built-in docstrings of functions in Python's standard library, against their words in another order"
    return {"train": Dataset.from_list(docstring_pairs())}, source


def held_out(rows: Sequence[Sides], fraction: float, seed: int) -> dict[str, list[Sides]]:
    """A seeded part. The same prompt is on one side alone. Raises RequestError."""
    keys = [json.dumps(row.prompt or row.answers, sort_keys=True, default=str) for row in rows]
    unique = sorted(set(keys))
    random.Random(seed).shuffle(unique)
    held = set(unique[: max(1, round(fraction * len(unique)))])
    if len(unique) < 2:
        raise RequestError("the training data has a single prompt, and none can be held out. Add --validation_file.")
    found: dict[str, list[Sides]] = {"train": [], "validation": []}
    for key, row in zip(keys, rows, strict=True):
        found["validation" if key in held else "train"].append(row)
    return found


def find_preferences(names: Sequence[str], where: str, wants_single: bool) -> tuple[str, tuple[str, ...]]:
    """PAIRS or ANSWERS, and the columns that are read. Answers by themselves serve KTO alone; it takes pairs apart.
    Raises RequestError."""
    if {"chosen", "rejected"} <= set(names):
        more = [name for name in ("prompt", "margin") if name in names]
        scores = SCORES if set(SCORES) <= set(names) and "margin" not in names else ()
        return PAIRS, ("chosen", "rejected", *more, *scores)
    if {"completion", "label"} <= set(names):
        if not wants_single:
            raise RequestError(
                f"{where}: has answers that are judged one by one (completion, label), which --loss kto learns from. "
                "The other losses compare two answers: give columns chosen and rejected."
            )
        return ANSWERS, ("completion", "label", *(["prompt"] if "prompt" in names else []))
    other = ""
    if {"messages", "conversations", "text"} & set(names) or {"prompt", "completion"} <= set(names):
        other = " Texts and conversations without a worse answer are for recipes/causal_lm.py."
    raise RequestError(
        f"{where}: has no preferences: `chosen` and `rejected` (with `prompt`, or whole conversations each), or "
        f"`completion` and `label`. It has {', '.join(names)}. Rename columns by --column_mapping OLD=NEW.{other}"
    )


def sides_of(kind: str, row: Mapping[str, Any]) -> Sides:
    """What a row says. Raises RequestError for one from which nothing can be learnt."""
    columns = ("chosen", "rejected") if kind == PAIRS else ("completion",)
    prompt, values = row.get("prompt"), [row[name] for name in columns]
    for name, value in zip(columns, values, strict=True):
        if value is None or (
            isinstance(value, str | list) and not (value.strip() if isinstance(value, str) else value)
        ):
            raise RequestError(f"`{name}` is empty.")
    found = [_turns(value) for value in values]
    if any(turns is not None for turns in (*found, _turns(prompt))):
        shared, answers = _dialogues(prompt, values, found)
    else:
        shared, answers = str(prompt or ""), tuple(map(str, values))
    if len(answers) > 1 and answers[0] == answers[1]:
        raise RequestError("`chosen` and `rejected` are alike, which says nothing of what is better.")
    margin = row.get("margin")
    if margin is None and set(SCORES) <= row.keys():
        margin = None if None in (row[SCORES[0]], row[SCORES[1]]) else float(row[SCORES[0]]) - float(row[SCORES[1]])
    label = _label(row["label"]) if kind == ANSWERS else 1
    return Sides(shared, answers, float(margin or 0.0), label)


def single(rows: Sequence[Sides], needs_both: bool = True) -> list[Sides]:
    """Pairs as two answers each, a desirable and an undesirable one. Raises RequestError where all are of one kind and
    it `needs_both`."""
    found = []
    for row in rows:
        labels = (1, 0) if len(row.answers) == 2 else (row.label,)
        found += [
            Sides(row.prompt, (answer,), label=label, number=row.number)
            for answer, label in zip(row.answers, labels, strict=True)
        ]
    if needs_both and len({row.label for row in found}) < 2:
        kind = "desirable" if found[0].label else "undesirable"
        raise RequestError(
            f"--loss kto: all {len(found):,} answers are {kind}, and there is nothing to tell apart. Give both kinds."
        )
    return found


def encoded(tokenizer: Any, row: Sides) -> list[TokensOfSide]:
    """Of each answer the ids with its prompt, up to the last that is learnt. Raises RequestError."""
    made = []
    for answer in row.answers:
        if row.is_chat:
            before = [{**turn, "weight": NOT_LEARNT} for turn in row.prompt]
            ids, learnt, _ = conversation(tokenizer, [*before, *answer])
        else:
            ids, learnt, _ = completion(tokenizer, row.prompt, answer)
        end = max((i + 1 for i, used in enumerate(learnt) if used), default=0)
        if not end:
            raise RequestError(f"row {row.number + 1}: nothing of an answer is learnt: {quoted(answer)}.")
        made.append((list(ids[:end]), list(map(bool, learnt[:end]))))
    return made


def fitted(sides: Sequence[TokensOfSide], most: int) -> tuple[list[TokensOfSide], bool]:
    """Sides of at most so many tokens, and whether they were cut: their prompt from its beginning, by as much on both
    sides, then what is still too long at its end. A token before the first that is learnt stays."""
    cut = max(len(ids) for ids, _ in sides) - most
    if cut <= 0:
        return list(sides), False
    room = min(learnt.index(True) for _, learnt in sides) - 1
    cut = max(0, min(cut, room))
    return [(ids[cut:][:most], learnt[cut:][:most]) for ids, learnt in sides], True


def with_others(rows: Sequence[tuple[list[TokensOfSide], bool]], most: int) -> list[tuple[list[TokensOfSide], bool]]:
    """To each answer its prompt with the answer of the next row, by which KTO measures how far the policy has gone."""
    found = []
    for i, ([side], was_cut) in enumerate(rows):
        ids, learnt = rows[(i + 1) % len(rows)][0][0]
        start, begin = side[1].index(True), learnt.index(True)
        other = (side[0][:start] + ids[begin:], side[1][:start] + learnt[begin:])
        found.append(([side, *fitted([other], most)[0]], was_cut))
    return found


def _label(value: Any) -> int:
    word = str(int(value) if isinstance(value, bool | float) else value).strip().lower()
    if word not in (*GOOD, *BAD):
        raise RequestError(f"`label` is {quoted(value)}, but it must be true or false.")
    return int(word in GOOD)


def _turns(value: Any) -> list[Turn] | None:
    """Of a conversation, in turns, in JSON, or as Anthropic writes it; None for a text."""
    if isinstance(value, str):
        speakers = list(SPEAKER.finditer(value))
        if speakers and not value[: speakers[0].start()].strip() and speakers[0][1] == "Human":
            ends = [*(match.start() for match in speakers[1:]), len(value)]
            return [
                {"role": OF_SPEAKER[match[1]], "content": value[match.end() : end].strip()}
                for match, end in zip(speakers, ends, strict=True)
            ]
        value = from_json(value)
    if isinstance(value, dict) and ("role" in value or "from" in value):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        return None
    if value and {"from", "value"} <= value[0].keys():
        value = TURNS[SHAREGPT]({"conversations": value})
    return turns_of(value, "keep")


def _dialogues(prompt: Any, values: Sequence[Any], found: Sequence[list[Turn] | None]) -> tuple[Any, tuple[Any, ...]]:
    """The turns that the sides share, and the rest of each. A side that does not begin with the assistant's turn has
    its prompt in it."""
    before = _turns(prompt) or ([{"role": "user", "content": str(prompt)}] if prompt else [])
    whole = []
    for value, turns in zip(values, found, strict=True):
        own = turns or [{"role": ASSISTANT, "content": str(value)}]
        whole.append([*before, *own] if own[0]["role"] == ASSISTANT else own)
    shared = 0
    if len(whole) == 1:
        shared = len(whole[0]) - 1
    while len(whole) > 1 and shared < min(map(len, whole)) and whole[0][shared] == whole[1][shared]:
        shared += 1
    answers = tuple(turns[shared:] for turns in whole)
    if len(answers) > 1 and answers[0] == answers[1]:
        return whole[0], answers
    for turns in answers:
        if not any(turn["role"] == ASSISTANT and has_words(turn) for turn in turns):
            raise RequestError(f"one side has no answer of the assistant's beyond what both share: {quoted(turns)}.")
    return whole[0][:shared], answers


def docstring_pairs() -> list[dict[str, str]]:
    """Rows of `prompt`, `chosen` and `rejected`: a function's name and arguments, the first paragraph of its docstring,
    and the same words in another order. Sources are parsed, never imported."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for package in PACKAGES:
        for head, text in _described(library / package):
            if FEWEST_WORDS <= len(text.split()) <= MOST_WORDS and text not in found:
                found[text] = head
    rows = []
    for text, head in sorted(found.items()):
        words = text.split()
        random.Random(text).shuffle(words)  # a text seeds the same order in every process
        if " ".join(words) != text:
            rows.append({"prompt": f"{head}\n", "chosen": text, "rejected": " ".join(words)})
    return rows


def _described(folder: Path) -> Iterator[tuple[str, str]]:
    for tree in parsed(folder):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                yield f"{node.name}({ast.unparse(node.args)})", " ".join(text.split("\n\n")[0].split())
