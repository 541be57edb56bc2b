"""Normalizes the turns and tools of a row for chat templates. Raises RequestError for malformed ones, quoting them."""

from __future__ import annotations

import json
from typing import Any

from finetune.errors import RequestError

QUOTED_CHARACTERS = 200
ASSISTANT = "assistant"
RULERS = ("system", "developer")
TOOLS = ("tool", "function", "ipython")  # whose turns are results of calls
ROLES = (*RULERS, "user", ASSISTANT, *TOOLS)
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # as transformers reads them (utils/chat_template_utils.py)
OPENS_THOUGHT, CLOSES_THOUGHT = "<think>", "</think>"

Turn = dict[str, Any]


def turns_of(messages: Any, reasoning: str) -> list[Turn]:
    """Turns of `role`, `content` (a text, or missing), `tool_calls` and anything else a template may read; no value is
    None. `reasoning` "strip" removes thoughts."""
    found = from_json(messages)
    if not isinstance(found, list) or not found or not all(map(_is_turn, found)):
        raise RequestError(
            "`messages` must be a list of turns with `role` and `content` (or `tool_calls`), but one is "
            f"{quoted(messages)}."
        )
    return [_turn(_without_none(turn), reasoning == "strip") for turn in found]


def tools_of(tools: Any) -> list[dict[str, Any]] | None:
    """The functions that a row offers, as JSON schemas; None if there are none."""
    found = from_json(tools)
    found = [from_json(one) for one in found] if isinstance(found, list) else found
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise RequestError(
            f"`tools` must be a list of functions, each an OpenAI JSON schema, or the same as text: {quoted(tools)}."
        )
    return [_without_none(one) for one in found]


def has_words(turn: Turn) -> bool:
    """Whether a turn has text or calls a tool."""
    return bool(turn.get("tool_calls") or any(str(turn.get(name) or "").strip() for name in ("content", *THOUGHTS)))


def quoted(value: Any) -> str:
    return repr(value)[:QUOTED_CHARACTERS]


def _is_turn(turn: Any) -> bool:
    return (
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and not {"content", "tool_calls", "function_call", *THOUGHTS}.isdisjoint(turn)
    )


def _turn(turn: Turn, strips: bool) -> Turn:
    if "content" in turn:
        turn["content"] = _text(turn["content"], turn["role"])
    if "function_call" in turn:  # OpenAI's older form of a single call
        turn["tool_calls"] = [{"type": "function", "function": turn.pop("function_call")}]
    if turn["role"] == ASSISTANT and turn.get("weight", 1) not in (0, 1):
        raise RequestError(f"`weight` of a turn must be 0 (context only) or 1, but one is {quoted(turn)}.")
    if not turn.get("tool_calls"):
        turn.pop("tool_calls", None)  # tables have empty lists here if other rows have calls
        turn.setdefault("content", "")  # it was null, which not every template can write
    elif not isinstance(turn["tool_calls"], list) or not all(isinstance(one, dict) for one in turn["tool_calls"]):
        raise RequestError(f"`tool_calls` must be a list of calls with `function`, but one is {quoted(turn)}.")
    for call in turn.get("tool_calls", []):
        function = call["function"] if isinstance(call.get("function"), dict) else call
        if "arguments" in function:
            # OpenAI stores arguments as text, which most templates would encode as JSON again; vLLM decodes it, too
            # (entrypoints/chat_utils.py).
            read = from_json(function["arguments"] or "{}")
            if not isinstance(read, dict):
                raise RequestError(
                    f"`arguments` of a tool call must be an object, or its JSON text, but one is {quoted(call)}."
                )
            function["arguments"] = read
    if strips and turn["role"] == ASSISTANT:
        turn = {name: value for name, value in turn.items() if name not in THOUGHTS}
        if CLOSES_THOUGHT in turn.get("content", ""):
            turn["content"] = turn["content"].rpartition(CLOSES_THOUGHT)[2].lstrip()  # as templates do
        elif OPENS_THOUGHT in turn.get("content", ""):  # cut off, so no answer follows
            turn["content"] = turn["content"].partition(OPENS_THOUGHT)[0]
    return turn


def _text(content: Any, role: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and role not in ("tool", "function", "ipython"):
        return "".join(_text_of_part(part) for part in content)
    if isinstance(content, list) and content and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(_text_of_part(part) for part in content)
    if role in ("tool", "function", "ipython"):  # the result of a function
        return json.dumps(content, ensure_ascii=False)
    raise RequestError(f"`content` must be a text or a list of parts, but one is {quoted(content)}.")


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and str(kind).endswith("text") and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RequestError(
        f"`content` has a part of type `{str(kind)[:40]}`, but this recipe supports only text. Remove such rows: "
        f"{quoted(part)}."
    )


def from_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _without_none(value: Any) -> Any:
    """Removes keys whose value is None: a table gives every row the keys of all rows."""
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value
