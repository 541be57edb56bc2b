"""Only the assistant's words are learnt, under templates with and without marks."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data.chat import completion, conversation
from finetune.data.tokenizer import END_OF_TEXT, train_text_tokenizer
from finetune.errors import RequestError

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Seven."},
]
MARKED = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
UNMARKED = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORGETFUL = "{{ messages[-1]['content'] }}"


def tokenizer(template: str | None = None) -> Any:
    made = train_text_tokenizer("byte", [], 0, 512, with_end=True)
    made.chat_template = template
    return made


def learnt_text(made: Any, ids: list[int], learnt: list[bool]) -> str:
    return made.decode([i for i, used in zip(ids, learnt, strict=True) if used])


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (MARKED, "Four.Seven."),
        (UNMARKED, "Four.Seven."),
        (None, f"Four.{END_OF_TEXT}\nSeven.{END_OF_TEXT}\n"),
    ],
)
def test_the_assistants_turns_alone_are_learnt(template: str | None, wanted: str) -> None:
    made = tokenizer(template)
    ids, learnt = conversation(made, TURNS)
    assert len(ids) == len(learnt)
    assert learnt_text(made, ids, learnt) == wanted
    assert "Two and two?" in made.decode(ids)


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    with pytest.raises(RequestError, match="generation"):
        conversation(tokenizer(FORGETFUL), TURNS)


@pytest.mark.parametrize("turns", [[], [{"content": "no role"}], ["words"]])
def test_turns_without_role_or_content_are_refused(turns: list[Any]) -> None:
    with pytest.raises(RequestError, match=r"`messages` must be a list of turns .* but one is"):
        conversation(tokenizer(), turns)


def test_a_conversation_that_the_template_refuses_is_quoted() -> None:
    template = "{{ raise_exception('the user speaks first') }}"
    with pytest.raises(RequestError, match=r"\(the user speaks first\): .*Be brief"):
        conversation(tokenizer(template), TURNS)


def test_a_turn_without_words_is_for_the_template_to_know() -> None:
    turns = [{"role": "user", "content": None}]
    assert conversation(tokenizer("{% for m in messages %}[{{ m['role'] }}]{% endfor %}"), turns)
    with pytest.raises(RequestError, match="takes no such conversation"):
        conversation(tokenizer(), turns)


def test_a_completion_that_is_none_is_quoted() -> None:
    with pytest.raises(RequestError, match=r"must be texts, but one row is \['a', None\]"):
        completion(tokenizer(), "a", None)


def test_a_completion_is_learnt_with_the_end_of_text() -> None:
    made = tokenizer()
    ids, learnt = completion(made, "Two and two?", " Four.")
    assert learnt_text(made, ids, learnt) == f" Four.{END_OF_TEXT}"
    assert made.decode(ids) == f"Two and two? Four.{END_OF_TEXT}"
