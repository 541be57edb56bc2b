"""Tokenizes conversations and marks the tokens to train on: only the assistant's turns, or only the completion."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from finetune.data.chat.remarks import remarks_on
from finetune.data.chat.sentinels import sentinels
from finetune.data.chat.spans import Span, Writing, marks_of
from finetune.data.chat.templates import DEFAULT_TEMPLATE
from finetune.data.chat.turns import ASSISTANT, QUOTED_CHARACTERS, Turn, quoted, tools_of, turns_of
from finetune.data.tokenizer import begun
from finetune.errors import RequestError

GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
Schemas = list[dict[str, Any]] | None


class Encoded(NamedTuple):
    """Token ids, for each whether it is trained on, and how often each of `remarks.REMARKS` applies."""

    ids: list[int]
    learnt: list[bool]
    remarks: list[int]


@dataclass(frozen=True)
class Learning:
    """Which turns to train on (--train_on), and whether to include thoughts (--reasoning). A turn with `weight` 0, as
    in OpenAI's format, is context only."""

    train_on: str = "assistant"
    reasoning: str = "keep"


def conversation(tokenizer: Any, messages: Any, tools: Any = None, learning: Learning | None = None) -> Encoded:
    """Encodes a conversation with the `tools` it offers. Raises RequestError, quoting it.

    If the template marks the assistant's words ({% generation %}), these marks are used; otherwise spans.py finds them
    in the rendering, including the end mark of each turn and excluding its header."""
    learning = learning or Learning()
    turns, schemas = turns_of(messages, learning.reasoning), tools_of(tools)
    try:
        return _encoded(tokenizer, turns, schemas, learning)
    except TemplateSyntaxError as error:
        raise RequestError(
            f"line {error.lineno} of the tokenizer's chat template is not valid jinja: {error.message} Give another "
            "with --chat_template."
        ) from error
    except (TemplateError, TypeError) as error:
        raise RequestError(
            f"the chat template rejects a conversation ({error}): {quoted(messages)}. Fix the row, or "
            "give another template with --chat_template."
        ) from error


def rendered(
    tokenizer: Any, turns: list[Turn], tools: Schemas, prompt: bool = False, template: str | None = None
) -> str:
    """Renders `turns` with the tokenizer's template or another `template`; `prompt` adds the prompt for an answer."""
    template = template or template_of(tokenizer, tools)
    return str(
        tokenizer.apply_chat_template(
            turns, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
    )


def template_of(tokenizer: Any, tools: Schemas) -> str:
    """The tokenizer's template; it may have several, one of them for tools."""
    return str(tokenizer.get_chat_template(None, tools)) if tokenizer.chat_template else DEFAULT_TEMPLATE


def _written(tokenizer: Any, turns: list[Turn], tools: Schemas) -> Writing:
    """Turns with tool calls only get an empty text if the template requires one."""

    def render(some: list[Turn], prompt: bool) -> str:
        return rendered(tokenizer, some, tools, prompt)

    writing = Writing(render, turns, partial(marks_of, tokenizer))
    try:
        _ = writing.whole
    except (TemplateError, TypeError):
        if all("content" in turn or "tool_calls" not in turn for turn in turns):
            raise
        with_texts = [{"content": "", **turn} if "tool_calls" in turn else turn for turn in turns]
        return replace(writing, turns=with_texts)
    return writing


def _encoded(tokenizer: Any, turns: list[Turn], tools: Schemas, learning: Learning) -> Encoded:
    if not tokenizer.is_fast:
        raise RequestError(
            f"{type(tokenizer).__name__} does not map tokens to characters, so the assistant's tokens cannot be found. "
            "Set --tokenizer_name to a folder with a tokenizer.json."
        )
    writing = _written(tokenizer, turns, tools)
    turns = writing.turns
    learns_all = learning.train_on == "all"
    if not learns_all:
        writing.refuse_left_out()
    spans = [] if learns_all else _spans(tokenizer, writing, tools)
    last = max((i for i, turn in enumerate(turns) if turn["role"] == ASSISTANT), default=-1)
    spans = [span for span in spans if turns[span.turn].get("weight") != 0]
    if learning.train_on == "last":
        spans = [span for span in spans if span.turn == last]
    encoded = tokenizer(writing.whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = list(encoded["input_ids"])
    learnt = [True] * len(ids) if learns_all else _learnt(encoded["offset_mapping"], spans)
    ignores_tools = bool(tools) and writing.whole == _without_tools(tokenizer, turns)
    twice = ids[:2] == [tokenizer.bos_token_id] * 2
    said = {"ignores_tools": ignores_tools, "twice": twice, "is_learnt": any(learnt)}
    remarks = remarks_on(turns, spans, writing.left_out, **said)
    return Encoded(ids, learnt, remarks)


def _without_tools(tokenizer: Any, turns: list[Turn]) -> str | None:
    try:
        return rendered(tokenizer, turns, None)
    except (TemplateError, TypeError):
        return None


def _spans(tokenizer: Any, writing: Writing, tools: Schemas) -> list[Span]:
    """Uses the template's own marks if it has any. transformers 5.23 locates them through jinja, which is wrong inside
    macros (utils/chat_template_utils.py, _generation_support), so we replace the marks with sentinels."""
    template = template_of(tokenizer, tools)
    if not GENERATION.search(template):
        return writing.spans()
    begins, ends = sentinels(writing.whole + template)
    template = GENERATION.sub(rf"{{%\1 if true %}}{begins}{{% if true \2%}}", template)
    template = END_GENERATION.sub(rf"{{%\1 endif %}}{ends}{{% endif \2%}}", template)
    marked = rendered(tokenizer, writing.turns, tools, template=template)
    if re.sub(f"{begins}|{ends}", "", marked) != writing.whole:
        return writing.spans()
    places, begin, taken = [], 0, 0
    for match in re.finditer(f"{begins}|{ends}", marked):
        if match[0] == begins:
            begin = match.start() - taken
        elif begin < match.start() - taken:
            places.append((begin, match.start() - taken))
        taken += len(match[0])
    return [span for i, place in enumerate(places) if (span := _marked(writing, i, place, len(places)))]


def _marked(writing: Writing, number: int, place: tuple[int, int], places: int) -> Span | None:
    """The span of one of the `places` that a template marks; None for an empty turn."""
    own = [i for i, turn in enumerate(writing.turns) if turn["role"] == ASSISTANT]
    start, end = place
    within = [i for i in own if any(part.start < end and part.end > start for part in writing.there.get(i, ()))]
    if writing.located.is_exact and not within:
        return None
    turn = within[0] if within else own[number] if len(own) == places else own[-1]
    said = writing.whole[start:end].rstrip()
    return Span(turn, start, end, any(match.end() == len(said) for match in writing.marks.finditer(said)))


def _learnt(offsets: list[tuple[int, int]], spans: list[Span]) -> list[bool]:
    """For each token whether any of its characters is in a span; spans are sorted and do not overlap."""
    ends = [span.end for span in spans]
    found = []
    for start, end in offsets:
        i = bisect_right(ends, start)
        found.append(i < len(spans) and spans[i].start < end and start < end)
    return found


def completion(
    tokenizer: Any, prompt: str, answer: str, beginning: list[int], learning: Learning | None = None
) -> Encoded:
    """A prompt and its completion; the completion and the end of text are trained on, unless the completion is blank.
    `beginning` is what the tokenizer puts before every text (`data.tokenizer.beginning_of`). Raises RequestError."""
    if not isinstance(prompt, str) or not isinstance(answer, str):
        shown = repr([prompt, answer])[:QUOTED_CHARACTERS]
        raise RequestError(
            f"`prompt` and `completion` must be texts, but one row is {shown}. Turns go into one column `messages`."
        )
    first = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    first = begun(first, beginning)
    second = tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"]
    end = [tokenizer.eos_token_id]
    end = [] if end[0] is None or second[-1:] == end else end
    learns_all = learning is not None and learning.train_on == "all"
    learnt = [learns_all] * len(first) + [learns_all or bool(answer.strip())] * (len(second) + len(end))
    return Encoded([*first, *second, *end], learnt, [])
