"""Detects the format of documents by their columns: texts, conversations, or prompts with a completion.
Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.data.chat.turns import ASSISTANT, Turn, from_json, quoted
from finetune.data.column_names import (
    ALPACA,
    ANSWER_OF,
    ANSWERS,
    FORMATS,
    MESSAGES,
    NUMBERED,
    SHAREGPT,
    SYSTEM,
    mapping_for,
    said_mapping,
)
from finetune.data.columns import CHAT, COMPLETION, TEXT, TOOLS, listed
from finetune.data.find_columns import TEXT_NAMES
from finetune.errors import RequestError

NOT_LEARNT = 0  # OpenAI's `weight` of an assistant turn that is not trained on
# ShareGPT's role names, and vendors' variants.
ROLE_OF = {"human": "user", "user": "user", "observation": "tool", "function_response": "tool"} | dict.fromkeys(
    ("gpt", "model", "chatgpt", "bot", "assistant", "function_call"), ASSISTANT
)
SUMMARISED = ("article", "dialogue", "document", *TEXT_NAMES)
MORE_ANSWERS = ("answers", "responses", "outputs", "completions", "reply")  # not read under these names
PROMPTS = ("prompt", "instruction", "question")
HEADLESS = (
    " Its first row was not taken as a header, because it has numbers above numbers, or a cell that recurs below. "
    "If it is one, remove the lines below that repeat it."
)
PAIRS = ("chosen", "rejected")  # the better and the worse answer
OUT_OF_THE_WAY = "--column_mapping NAME=OTHER renames a column, --text_column_name NAME trains on one as plain text"


@dataclass(frozen=True)
class Format:
    """`kind` is what a row becomes: TEXT, CHAT or COMPLETION; `columns` are the columns to read."""

    name: str
    kind: str
    columns: tuple[str, ...]

    def conversation(self, row: Mapping[str, Any]) -> tuple[Any, Any]:
        """The turns and the tools of a row. Raises RequestError for malformed turns, quoting them."""
        return led_by(row.get(SYSTEM), TURNS[self.name](row)), row.get(TOOLS)

    def words(self, row: Mapping[str, Any]) -> str:
        """A row's text without system message and tools, for comparing rows."""
        if self.kind != CHAT:
            return "\n".join(str(row[name] or "") for name in self.columns)
        turns = self.conversation(row)[0]
        own = [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
        said = [str(turn.get("content") or turn.get("tool_calls") or "") for turn in own if turn.get("role") != SYSTEM]
        return "\n".join(said)

    def describe(self, names: Sequence[str], renamed: Mapping[str, str], rows: int | None) -> str:
        """Describes a table: its columns `names`, some `renamed` (new name to old), and number of `rows`, if known."""
        read = [renamed.get(name, name) for name in self.columns]
        others = [renamed.get(name, name) for name in names if name not in self.columns]
        into = " -> messages" if self.kind == CHAT and read[0] != "messages" else ""
        unit = "conversations" if self.kind == CHAT else "rows"
        counted = f", {rows:,} {unit}" if rows is not None else ""
        left_out = f"; left out: {listed(others, ', ')}" if others else ""
        return f"{self.name}{counted}; columns {listed(read, ' + ')}{into}{left_out}"


def find_format(names: Sequence[str], rows: Iterable[Mapping[str, Any]], column: str | None, where: str) -> Format:
    """The format of a table or stream, from its column names and first row; `column` is --text_column_name, if given.
    Raises RequestError if the format is ambiguous."""
    found = [row for row in FORMATS if set(row[1]) <= set(names)] if column is None else []
    if len(found) > 1:
        kinds = " and ".join(f"{name} ({' + '.join(needed)})" for name, needed, _ in found)
        raise RequestError(
            f"{where}: the rows have the columns of {kinds}, which is ambiguous; the columns are "
            f"{', '.join(names)}. {OUT_OF_THE_WAY}."
        )
    if not found:
        return _text(names, rows, column, where)
    name, needed, optional = found[0]
    first = next(iter(rows))
    columns = (*needed, *(one for one in optional if one in names))
    if len(needed) == 1:
        turn = _first_turn(first[needed[0]])
        name = SHAREGPT if {"from", "value"} <= turn.keys() else MESSAGES
        return Format(name, CHAT, columns)
    if name == "prompt/completion" and not any(isinstance(first[one], list | dict) for one in needed):
        return Format(name, COMPLETION, needed)
    return Format(name, CHAT, columns)


def _text(names: Sequence[str], rows: Iterable[Mapping[str, Any]], column: str | None, where: str) -> Format:
    first = next(iter(rows))
    found = _column_of_texts(names, first, where) if column is None else column
    turns = next((name for name in names if isinstance(first[name], list) and _first_turn(first[name])), None)
    renaming = said_mapping({turns: "messages"}) if turns else mapping_for(names)
    if found is None or found not in names:
        given = f" (--text_column_name {column})" if column else " by its name, and the columns match no format"
        columns = ", ".join("`" + "` and `".join(needed) + "`" for _, needed, _ in FORMATS)
        bare = HEADLESS if NUMBERED in names else ""
        such = f" (such as {renaming})" if renaming else ""
        raise RequestError(
            f"{where}: no column with text found{given}; it has {', '.join(names)}.{bare} Name one with "
            f"--text_column_name, or rename columns with --column_mapping NAME=OTHER to one of: {columns}{such}."
        )
    if not isinstance(value := first[found], str | None):
        raise RequestError(
            f"{where}: column {found} holds {type(value).__name__} ({str(value)[:80]}), not text. Name another with "
            "--text_column_name, or give conversations as `messages` with `role` and `content`"
            f"{f', here with {renaming}' if turns else ''}."
        )
    return Format("text", TEXT, (found,))


def _column_of_texts(names: Sequence[str], first: Mapping[str, Any], where: str) -> str | None:
    """The column with texts by its name, or the only column; None if neither. Raises RequestError for rows of another
    recipe, and if a column beside the texts looks like their answer or prompt."""
    lower = {name.lower(): name for name in names}
    for of_another in (_preferences, _squad, _summaries):
        if why := of_another(lower, first):
            raise RequestError(f"{where}: {why}")
    found = next((lower[name] for name in TEXT_NAMES if name in lower), names[0] if len(names) == 1 else None)
    if found is not None:
        _refuse_answers(names, found, where)
    if found is not None and found.lower() == "prompt":
        raise RequestError(f"{where}: has `prompt` without `completion`. Add it, or give --text_column_name prompt.")
    return found


def _preferences(names: Mapping[str, str], first: Mapping[str, Any]) -> str:
    """What to say of rows with a better and a worse answer, by their lower-case `names`; empty for other rows."""
    if not set(PAIRS) <= first.keys():
        return ""
    better = "messages" if _first_turn(first["chosen"]) else "completion" if "prompt" in first else "text"
    return (
        "the rows are preferences with a better and a worse answer each (chosen, rejected), for "
        f"recipes/preference.py. To train on the better answer alone, add --column_mapping chosen={better}."
    )


def _squad(names: Mapping[str, str], first: Mapping[str, Any]) -> str:
    articles = first.get("data")
    article = articles[0] if isinstance(articles, list) and articles else None
    if not isinstance(article, dict) or "paragraphs" not in article:
        return ""
    return "is SQuAD's JSON: questions, each with a text that contains the answer. Use recipes/question_answering.py."


def _summaries(names: Mapping[str, str], first: Mapping[str, Any]) -> str:
    article = next((names[name] for name in SUMMARISED if name in names), None)
    if article is None or "summary" not in names:
        return ""
    mapping = said_mapping({article: "prompt", names["summary"]: "completion"})
    return (
        f"the rows look like texts with a summary each ({article}, summary), and the summary would not be "
        "trained on. Use recipes/seq2seq.py to write summaries; or train on the summary as an answer with "
        f"{mapping}, or on the text with --text_column_name {article}."
    )


def _refuse_answers(names: Sequence[str], found: str, where: str) -> None:
    """Raises RequestError if a column beside the text `found` looks like its answer, or like the prompt before it."""
    lower = {name.lower(): name for name in names if name != found}
    if beside := next((lower[name] for name in (*ANSWERS, *MORE_ANSWERS) if name in lower), None):
        pair, other = {found: "prompt", beside: "completion"}, ""
        if found.lower() == "question":
            pair = {found: "question", beside: "answer"}
            other = " Answers that stand in a `context` are for recipes/question_answering.py." * ("context" in lower)
        raise RequestError(
            f"{where}: has {beside} beside {found}, which would not be trained on. Train on it as an answer with "
            f"{said_mapping(pair)}, or on the text alone with --text_column_name {found}.{other}"
        )
    if asks := next((name for name in PROMPTS if name in lower), None):
        pair = {lower[asks]: asks, found: "completion" if asks == "prompt" else ANSWER_OF[asks]}
        raise RequestError(
            f"{where}: has {lower[asks]} beside {found}, which would not be read. Train on {found} as its answer with "
            f"{said_mapping(pair)}, or on it alone with --text_column_name {found}."
        )


def _first_turn(value: Any) -> dict[str, Any]:
    """The first turn of what may be a conversation, as a list or in JSON; empty if it is none."""
    found = from_json(value)
    first = found[0] if isinstance(found, list) and found else found
    return first if isinstance(first, dict) and not {"role", "from"}.isdisjoint(first) else {}


def led_by(rules: Any, turns: Any) -> Any:
    """Puts the `system` column's message before turns that do not start with a system message."""
    if not isinstance(rules, str) or not rules.strip() or not isinstance(turns, list):
        return turns
    begins = bool(turns) and isinstance(turns[0], dict) and turns[0].get("role") == SYSTEM
    return turns if begins else [{"role": SYSTEM, "content": rules}, *turns]


def _messages(row: Mapping[str, Any]) -> Any:
    column = next(name for name in ("messages", "conversations") if name in row)
    return from_json(row[column])


def _sharegpt(row: Mapping[str, Any]) -> list[Turn]:
    found = _messages(row)
    if not isinstance(found, list) or not found or not all(isinstance(t, dict) and t.get("from") for t in found):
        raise RequestError(f"a conversation must be a list of turns with `from` and `value`: {quoted(found)}.")
    return [_sharegpt_turn(turn) for turn in found]


def _sharegpt_turn(turn: Turn) -> Turn:
    name, value = str(turn["from"]), turn.get("value")
    weight = {"weight": turn["weight"]} if turn.get("weight") is not None else {}
    role = ROLE_OF.get(name.lower(), name)
    calls = from_json(value) if name.lower() == "function_call" else None
    if calls is None:
        return {"role": role, "content": value, **weight}
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise RequestError(f"a `function_call` must be JSON with `name` and `arguments`: {quoted(value)}.")
    return {"role": role, "tool_calls": [{"type": "function", "function": call} for call in calls], **weight}


def alpaca_prompt(row: Mapping[str, Any]) -> tuple[str, list[Turn]]:
    """The question, from `instruction` and `input`, and the turns of the earlier `history`. Raises RequestError."""
    past = from_json(row.get("history")) or []
    if not isinstance(past, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in past):
        raise RequestError(f"`history` must be a list of question and answer pairs: {quoted(past)}.")
    asked = "\n\n".join(str(row[name]) for name in ("instruction", "input") if str(row.get(name) or "").strip())
    return asked, [turn for pair in past for turn in _exchange(*pair)]


def _alpaca(row: Mapping[str, Any]) -> list[Turn]:
    asked, past = alpaca_prompt(row)
    return [*past, *_exchange(asked, row["output"])]


def _exchange(question: Any, answer: Any) -> list[Turn]:
    return [*_said("user", question), *_said(ASSISTANT, answer)]


def _answered(prompt: str, answer: str) -> Callable[[Mapping[str, Any]], list[Turn]]:
    """Reads a prompt and its answer, texts or turns. Assistant turns in the prompt are not trained on."""

    def turns(row: Mapping[str, Any]) -> list[Turn]:
        before = [
            {**turn, "weight": NOT_LEARNT} if turn.get("role") == ASSISTANT else turn
            for turn in _said("user", row[prompt])
        ]
        return [*before, *_said(ASSISTANT, row[answer])]

    return turns


def _said(role: str, value: Any) -> list[Turn]:
    """A text as a turn of `role`, also if it is JSON; turns unchanged."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    turns = value if isinstance(value, list) else [value]
    if not turns or not all(isinstance(turn, dict) for turn in turns):
        raise RequestError(f"must be a text, or turns with `role` and `content`: {quoted(value)}.")
    return turns


TURNS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    MESSAGES: _messages,
    SHAREGPT: _sharegpt,
    ALPACA: _alpaca,
    **{name: _answered(*needed) for name, needed, _ in FORMATS if len(needed) == 2 and name != ALPACA},
}
