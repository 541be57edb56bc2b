"""Converts preference rows in common formats to a prompt and its answers."""

from __future__ import annotations

import ast
import json
import math
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from finetune.data.builtin import PACKAGES, parsed
from finetune.data.chat.conversation import completion, conversation
from finetune.data.chat.turns import ASSISTANT, Turn, has_words, quoted
from finetune.data.column_names import SYSTEM
from finetune.data.formats import NOT_LEARNT, led_by
from finetune.data.preference_columns import ANSWERS, SCORES, SIDES, prompt_of, turns_in
from finetune.data.splits import HeldOut, hold_out_by, open_splits
from finetune.data.tables import settle_splits
from finetune.data.tokenizer import beginning_of
from finetune.errors import RequestError
from finetune.run.flags.text import PreparationArguments
from finetune.run.recipes.preference import PreferenceDataArguments

SPLITS = ("train", "validation")
GOOD, BAD = ("true", "1", "good", "desirable", "chosen", "yes"), ("false", "0", "bad", "undesirable", "rejected", "no")
FEWEST_WORDS, MOST_WORDS = 5, 40  # of a built-in answer
TokensOfSide = tuple[list[int], list[bool]]  # ids, and which of them are trained on


@dataclass(frozen=True)
class Sides:
    """A prompt and its answers, either all texts or all lists of turns. In a pair the better answer comes first."""

    prompt: Any
    answers: tuple[Any, ...]
    margin: float = 0.0
    label: int = 1  # for a single answer: whether it is desirable
    number: int = 0  # row number in its file

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.answers[0], str)

    @property
    def inputs(self) -> Any:
        """The prompt; without one, the answers."""
        return self.prompt or self.answers


def open_tables(arguments: PreferenceDataArguments) -> tuple[dict[str, Dataset], str]:
    """The raw splits given, and where they come from."""
    source = "built-in docstrings of functions in Python's standard library, against their words in another order"
    return open_splits(arguments, lambda: {"train": Dataset.from_list(docstring_pairs())}, source, splits=SPLITS)


def settled(sides: dict[str, list[Sides]], cut: PreparationArguments, seed: int) -> tuple[dict[str, list[Sides]], str]:
    """As `settle_splits`: all rows of a prompt go to the same side. Raises RequestError."""

    def held_out(rows: list[Sides]) -> HeldOut:
        keys = [_key(row.inputs) for row in rows]
        return hold_out_by(keys, cut.validation_fraction, seed, "the training data", "prompts")

    return settle_splits(sides, cut, seed, held_out, lambda rows, some: [rows[i] for i in some])


def sides_of(kind: str, row: Mapping[str, Any]) -> Sides:
    """Parses a row. Raises RequestError if nothing can be learned from it."""
    values = [row[name] for name in SIDES[kind]]
    for name, value in zip(SIDES[kind], values, strict=True):
        if value is None or not (value.strip() if isinstance(value, str) else value not in ([], {})):
            raise RequestError(f"`{name}` is empty.")
    prompt, found = prompt_of(row), [turns_in(value) for value in values]
    shared: Any = prompt
    if isinstance(prompt, str) and not any(found):
        answers: tuple[Any, ...] = tuple(map(str, values))
    else:
        before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] if prompt else []
        own = [
            turns or [{"role": ASSISTANT, "content": str(value)}] for turns, value in zip(found, values, strict=True)
        ]
        shared, answers = _dialogues(before, own, row.get(SYSTEM))
    if len(answers) > 1 and answers[0] == answers[1]:
        raise RequestError("`chosen` and `rejected` are the same, so the row states no preference.")
    label = _label(row["label"]) if kind == ANSWERS else 1
    return Sides(shared, answers, _margin(row), label)


def _margin(row: Mapping[str, Any]) -> float:
    """0 for a row without a margin or scores."""
    names = ("margin",) if row.get("margin") is not None else SCORES
    if any(row.get(name) is None for name in names):
        return 0.0
    try:
        numbers = [float(row[name]) for name in names]
    except (TypeError, ValueError):
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise RequestError(f"`{'` and `'.join(names)}` must be numbers: {quoted([row[name] for name in names])}.")
    return numbers[0] if len(numbers) == 1 else numbers[0] - numbers[1]


def single(rows: Sequence[Sides], needs_both: bool = True) -> list[Sides]:
    """Splits each pair into a desirable and an undesirable answer. Raises RequestError if `needs_both` and all answers
    are of one kind."""
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
            f"--loss kto: all {len(found):,} answers are {kind}, so there is no contrast to learn. Give both kinds."
        )
    return found


def encoded(tokenizer: Any, row: Sides, whole: bool = False) -> tuple[list[TokensOfSide], list[int]]:
    """Token ids of the prompt with each answer, up to the last trained token or, if `whole`, to the end of what a chat
    template writes; and for conversations whether each of `remarks.REMARKS` applies. Plain texts begin with the
    tokenizer's own start tokens, as in `finetune generate`; chat templates write their own. Raises RequestError."""
    made, beginning, remarks = [], [] if row.is_chat else beginning_of(tokenizer), []
    for answer in row.answers:
        if row.is_chat:
            before = [{**turn, "weight": NOT_LEARNT} for turn in row.prompt]
            ids, learnt, said = conversation(tokenizer, [*before, *answer])
            remarks.append(said)
        else:
            ids, learnt, _ = completion(tokenizer, row.prompt, answer, beginning)
        end = max((i + 1 for i, used in enumerate(learnt) if used), default=0)
        if not end:
            raise RequestError(f"row {row.number + 1}: no token of an answer is trained on: {quoted(answer)}.")
        end = len(ids) if whole else end
        made.append((list(ids[:end]), list(map(bool, learnt[:end]))))
    return made, [max(said) for said in zip(*remarks, strict=True)]


def fitted(sides: Sequence[TokensOfSide], most: int) -> tuple[list[TokensOfSide], bool]:
    """Sides cut to at most `most` tokens, and whether any was cut. Cuts the start of the prompt, equally on both sides,
    then the end if still too long. At least one token stays before the first trained one."""
    cut = max(len(ids) for ids, _ in sides) - most
    if cut <= 0:
        return list(sides), False
    room = min(learnt.index(True) for _, learnt in sides) - 1
    cut = max(0, min(cut, room))
    return [(ids[cut:][:most], learnt[cut:][:most]) for ids, learnt in sides], True


def with_others(
    rows: Sequence[Sides], made: Sequence[tuple[list[TokensOfSide], bool]], most: int
) -> list[tuple[list[TokensOfSide], bool]]:
    """Adds to each answer in `made`, the tokens of `rows`, its prompt with another row's answer, from which KTO
    estimates its KL term."""
    found = []
    for ([side], was_cut), number in zip(made, _others([_key(row.prompt) for row in rows]), strict=True):
        ids, learnt = made[number][0][0]
        start, begin = side[1].index(True), learnt.index(True)
        other = (side[0][:start] + ids[begin:], side[1][:start] + learnt[begin:])
        found.append(([side, *fitted([other], most)[0]], was_cut))
    return found


def _others(prompts: Sequence[str]) -> list[int]:
    """For each row the number of another row, each used once. Sorts rows by prompt and shifts by the size of the
    largest prompt group, so that the other row has another prompt unless one prompt has more than half of all rows."""
    first: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        first.setdefault(prompt, number)
    order = sorted(range(len(prompts)), key=lambda number: first[prompts[number]])
    further = max(Counter(prompts).values()) % len(prompts) or 1
    others = dict(zip(order, [*order[further:], *order[:further]], strict=True))
    return [others[number] for number in range(len(prompts))]


def _key(said: Any) -> str:
    return json.dumps(said, sort_keys=True, default=str)


def _label(value: Any) -> int:
    number = int(value) if isinstance(value, bool | float) and float(value).is_integer() else value
    word = str(number).strip().lower()
    if word not in (*GOOD, *BAD):
        raise RequestError(f"`label` is {quoted(value)}, but it must be true or false.")
    return int(word in GOOD)


def _dialogues(before: list[Turn], sides: Sequence[list[Turn]], rules: Any) -> tuple[Any, tuple[Any, ...]]:
    """The turns that the sides share, and the rest of each side. A side that does not start with an assistant turn
    contains its prompt. `rules` is the system message, used if no turn has one."""
    whole = []
    for own in sides:
        if before and before[-1]["role"] == own[0]["role"] == ASSISTANT:
            raise RequestError(
                f"the prompt ends with an assistant turn, so it already has an answer: {quoted(before[-1])}."
            )
        whole.append(led_by(rules, [*before, *own] if own[0]["role"] == ASSISTANT else own))
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
            raise RequestError(f"one side has no assistant answer beyond what both share: {quoted(turns)}.")
        if turns[0]["role"] in ("user", "system"):
            raise RequestError(
                f"`chosen` and `rejected` do not answer the same prompt: one continues with {quoted(turns[0])}."
            )
    return whole[0][:shared], answers


def docstring_pairs() -> list[dict[str, str]]:
    """Rows of `prompt` (a function's name and arguments), `chosen` (the first paragraph of its docstring) and
    `rejected` (the same words shuffled). Sources are parsed, never imported."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for package in PACKAGES:
        for head, text in _described(library / package):
            if FEWEST_WORDS <= len(text.split()) <= MOST_WORDS and text not in found:
                found[text] = head
    rows = []
    for text, head in sorted(found.items()):
        words = text.split()
        random.Random(text).shuffle(words)  # seeded by the text, so every process gets the same order
        if " ".join(words) != text:
            rows.append({"prompt": f"{head}\n", "chosen": text, "rejected": " ".join(words)})
    return rows


def _described(folder: Path) -> Iterator[tuple[str, str]]:
    for tree in parsed(folder):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                yield f"{node.name}({ast.unparse(node.args)})", " ".join(text.split("\n\n")[0].split())
