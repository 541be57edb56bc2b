"""Finds the characters of a rendered conversation that the assistant says: from the end of the prompt for its turn up
to and including the mark that ends the turn, which the model must learn as well."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from finetune.data.chat.left_out import left_out
from finetune.data.chat.sentinels import CALL, WORDS, Located, Part, locate
from finetune.data.chat.turns import ASSISTANT, Turn, has_words, quoted
from finetune.errors import RequestError, plain

SHOWN = 160  # characters of a rendering in a message
# What looks like a mark, even if the tokenizer has no token for it; and what is not one, even if it is a special token.
MARK = r"<[|\uff5c][^<>\s]{1,60}[|\uff5c]>|</s>|<end_of_turn>|<eos>|<\|?im_end\|?>"
NO_MARK = re.compile(r"</?(think(ing)?|tool_\w+|answer|tools?)>|\[/?THINK\]|\s*")
OPENS = re.compile(r"user|system|human|start|begin|observation|\[INST|<s>|<bos>", re.IGNORECASE)  # a turn, if not "end"
MARK_WORDS = ", or put {% generation %} marks around the assistant's words in this one"
UNTOLD = (
    "the chat template {why}. Give another template with --chat_template{mend}. It writes {whole}{other}: {quoted}."
)

Render = Callable[[list[Turn], bool], str]  # turns, and whether the prompt for an answer follows


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` of turn `turn`; `stops` if they end in a mark at which generation can stop."""

    turn: int
    start: int
    end: int
    stops: bool


def marks_of(tokenizer: Any) -> re.Pattern[str]:
    """Matches the marks between turns: the tokenizer's special tokens, and anything else that looks like one."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    special = sorted((name for name in names if not NO_MARK.fullmatch(name)), key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, special), MARK]))


@dataclass
class Writing:
    """How a template writes `turns`: the `whole` text, where the parts of each turn are, and the assistant's spans."""

    render: Render
    turns: list[Turn]
    find_marks: Callable[[], re.Pattern[str]]

    @cached_property
    def marks(self) -> re.Pattern[str]:
        return self.find_marks()

    @cached_property
    def whole(self) -> str:
        return self.render(self.turns, False)

    @cached_property
    def located(self) -> Located:
        return locate(self._tried, self.turns, self.whole)

    @cached_property
    def left_out(self) -> set[tuple[int, str]]:
        """The turn and kind of each part that the template leaves out, however the spans are found."""
        return left_out(self.turns, self.whole, self.located)

    @cached_property
    def there(self) -> dict[int, list[Part]]:
        """The parts that occur in the rendering, by turn."""
        found: dict[int, list[Part]] = {}
        for part in self.located.parts:
            if part.is_there:
                found.setdefault(part.turn, []).append(part)
        return found

    def spans(self) -> list[Span]:
        """A span for each nonempty assistant turn. Raises RequestError if the place of one is ambiguous."""
        if not any(turn["role"] == ASSISTANT and has_words(turn) for turn in self.turns):
            return []
        if not self.located.is_exact:
            return self._by_prefix()
        spans: list[Span] = []
        for i in self._own:
            end, stops = self._end(i)
            spans.append(Span(i, max(self._start(i), spans[-1].end if spans else 0), end, stops))
        return spans

    def refuse_left_out(self) -> None:
        """Raises RequestError if the template leaves out words or calls of the assistant. It may leave out thoughts,
        and words next to calls."""
        verb = "leaves out" if self.located.is_exact else "cuts or changes"
        for i, kind in sorted(self.left_out):
            if self.turns[i]["role"] != ASSISTANT:
                continue
            if kind == CALL:
                some = any(part.kind == CALL for part in self.there.get(i, ()))
                raise self._untold(f"{verb} {'some of ' if some else ''}the tool calls of turn {i + 1}", mend="")
            if kind == WORDS and "tool_calls" not in self.turns[i]:
                raise self._untold(f"{verb} the words of turn {i + 1}", mend="")

    @cached_property
    def _last(self) -> int:
        return max(i for i, turn in enumerate(self.turns) if turn["role"] == ASSISTANT and has_words(turn))

    def _begin(self, i: int) -> int:
        """Where turn i's parts begin."""
        return min(part.start for part in self.there[i])

    def _finish(self, i: int) -> int:
        return max(part.end for part in self.there[i])

    def _start(self, i: int) -> int:
        """Where the prompt for turn i ends: after the header, if there is one."""
        begin = self._begin(i)
        before = max((self._finish(j) for j in self.there if j < i), default=0)
        if self._header:
            at = self.whole.rfind(self._header, before, begin)
            return at + len(self._header) if at >= 0 else self._after_part_of_header(before, begin)
        prompt = self._rendered(self.turns[:i], True)
        if prompt is not None and self.whole.startswith(prompt) and before <= len(prompt) <= begin:
            return len(prompt)
        if prompt is None or i - 1 not in self.there:
            return begin
        asked = locate(lambda turns: self._rendered(turns, True), self.turns[:i], prompt)
        ends = [part.end for part in asked.parts if asked.is_exact and part.turn == i - 1 and part.is_there]
        closing = prompt[max(ends) :] if ends else ""
        return before + len(closing) if ends and self.whole.startswith(closing, before, begin) else begin

    def _after_part_of_header(self, before: int, begin: int) -> int:
        """Where the turn starts if the prompt also opens a thought, but the turn has none."""
        mark = self.marks.search(self._header)
        at = self.whole.rfind(mark[0], before, begin) if mark else -1
        if mark is None or at < 0:
            return begin
        return at + len(_shared(self._header[mark.start() :], self.whole[at:begin]).rstrip("<["))

    @cached_property
    def _header(self) -> str:
        """What precedes each assistant turn: the generation prompt or, if the template has none, what it writes before
        an answer."""
        first = self._own[0]
        before = self.turns[:first] or [{"role": "user", "content": "a"}]
        closed, asked = self._rendered(before, False), self._rendered(before, True)
        if closed is None or asked is None:
            return ""
        if header := asked[len(_shared(closed, asked)) :]:
            return header
        answered = [*before, {"role": ASSISTANT, "content": "a"}]
        if (whole := self._rendered(answered, False)) is None or not whole.startswith(asked):
            return ""
        found = locate(self._tried, answered, whole)
        begin = max((part.start for part in found.parts if part.turn == len(before)), default=-1)
        written = whole[len(asked) : begin] if found.is_exact and begin >= 0 else ""
        return written if written.strip() else ""

    def _end(self, i: int) -> tuple[int, bool]:
        """Where turn i ends, including its end mark, and whether it has one."""
        finish = self._finish(i)
        following = min((self._begin(j) for j in self.there if j > i), default=len(self.whole))
        tail = self.whole[finish:following]
        ends_in_call = max(self.there[i], key=lambda part: part.end).kind == CALL
        alone = self._tail_alone(i) if ends_in_call else self._last_tail
        if ends_in_call:
            shared = _shared(self.whole[finish:], alone)
            found = [match.end() for match in self.marks.finditer(shared)]
            if found:
                return finish + found[-1], True
        goes_on = i + 1 in self.there and self.turns[i + 1]["role"] == ASSISTANT
        if goes_on and not self.marks.search(tail) and (not self._header or self._header not in tail):
            return finish + len(tail), True  # the assistant's turn continues: not its end
        if not alone.strip():
            return finish + len(tail) - len(tail.lstrip()), False
        if not self.marks.search(alone):
            stops = tail.startswith(alone.rstrip())
            return finish + (len(alone.rstrip()) if stops else 0), stops
        return self._mark(finish, tail, alone)

    def _mark(self, finish: int, tail: str, alone: str) -> tuple[int, bool]:
        """After the first mark of `tail`, or after the adjacent mark that ends a last turn."""
        first = self.marks.search(tail)
        if first is None or (OPENS.search(first[0]) and "end" not in first[0].lower()):
            return finish, False
        wanted, run = _together(self.marks, alone), _together(self.marks, tail)
        last = next((match for match in run if match[0] == wanted[-1][0]), first)
        return finish + last.end(), True

    @cached_property
    def _last_tail(self) -> str:
        return self._tail_alone(self._last if self._last in self.there else max(self._own))

    @property
    def _own(self) -> list[int]:
        return [i for i in self.there if self.turns[i]["role"] == ASSISTANT]

    def _tail_alone(self, i: int) -> str:
        """What the template writes after turn i if no turn follows."""
        if i == len(self.turns) - 1:
            return self.whole[self._finish(i) :]
        turns = self.turns[: i + 1]
        if (whole := self._rendered(turns, False)) is None:
            return ""
        found = locate(self._tried, turns, whole)
        ends = [part.end for part in found.parts if found.is_exact and part.turn == i and part.is_there]
        return whole[max(ends) :] if ends else ""

    def _by_prefix(self) -> list[Span]:
        """For a template that inspects contents: takes what each turn adds to the rendering of the earlier turns."""
        spans = []
        for i, turn in enumerate(self.turns):
            if turn["role"] != ASSISTANT or not has_words(turn):
                continue
            before, after = self._rendered(self.turns[:i], True), self._rendered(self.turns[: i + 1], False)
            if before is None or after is None or not (after.startswith(before) and self.whole.startswith(after)):
                raise self._untold(
                    "changes words, and writes a turn differently if others follow: who says what is ambiguous"
                )
            added = self.whole[len(before) : len(after)]
            words = str(turn.get("content", "")).strip()
            match = re.search(re.escape(words), added, re.IGNORECASE) if words else None
            at = match.start() if match else -1
            has_prompt = self._rendered(self.turns[:i], False) != before
            if not has_prompt and match is None:
                raise self._untold(f"has no prompt for an answer, and it is unclear where turn {i + 1} starts")
            skips = not has_prompt and added[:at].strip()
            marks = list(self.marks.finditer(added, max(at, 0) + len(words)))
            end = marks[-1].end() if marks else len(added)
            spans.append(Span(i, len(before) + (at if skips else 0), len(before) + end, bool(marks)))
        return spans

    def _tried(self, turns: list[Turn]) -> str | None:
        return self._rendered(turns, False)

    def _rendered(self, turns: list[Turn], prompt: bool) -> str | None:
        """None for turns that the template rejects."""
        if not turns:
            return "" if not prompt else None
        try:
            return self.render(turns, prompt)
        except (TemplateError, TypeError, RequestError):
            return None

    def _untold(self, why: str, mend: str = MARK_WORDS) -> RequestError:
        seen, whole = self.located.seen, self.whole
        at = max(0, len(_shared(seen, whole)) - SHOWN // 2)
        shown = [plain(repr(text[at : at + SHOWN])) for text in (whole, seen)]
        other = f", but with each part marked {shown[1]}" if seen != whole else ""
        return RequestError(UNTOLD.format(why=why, mend=mend, whole=shown[0], other=other, quoted=quoted(self.turns)))


def _shared(one: str, other: str) -> str:
    """The common prefix."""
    return os.path.commonprefix([one, other])  # noqa: RUF071  (we compare characters, not paths)


def _together(marks: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """The first mark and those directly after it."""
    found: list[re.Match[str]] = []
    for match in marks.finditer(text):
        if found and match.start() != found[-1].end():
            break
        found.append(match)
    return found
