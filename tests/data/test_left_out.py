"""What a chat template leaves out of a conversation is counted, or refused if the assistant says it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from chat_templates import TOOL, tokenizer_of

from finetune.data.chat.conversation import Learning, conversation
from finetune.data.chat.remarks import REMARKS
from finetune.data.chat.templates import read_template
from finetune.errors import RequestError

ASKED = {"role": "user", "content": "Will it rain?"}
ANSWER = {"role": "assistant", "content": "Yes, it will."}
FUNCTIONS = [{"name": "look_up", "arguments": {"word": word}} for word in ("Paris", "Rome")]
CALLS: list[dict[str, Any]] = [{"type": "function", "function": function} for function in FUNCTIONS]
RESULT = {"role": "tool", "name": "look_up", "content": "Clouds."}
OLD_CALL = [  # OpenAI's older format
    ASKED,
    {"role": "assistant", "content": None, "function_call": FUNCTIONS[0]},
    RESULT | {"role": "function"},
    ANSWER,
]
TWO_CALLS = [ASKED, {"role": "assistant", "tool_calls": CALLS}, RESULT, RESULT | {"content": "Sun."}, ANSWER]
CHATML = "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ {words} }}}}<|im_end|>\n{{% endfor %}}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CUT = CHATML.format(words="m.content[:8]")
CUT_ANSWER = CHATML.format(words="m.content[:8] if m.role == 'assistant' else m.content")
MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content[:8] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def with_template(template: str) -> Any:
    made = tokenizer_of("qwen2_5")
    made.chat_template = template
    return made


def said_of(made: Any, turns: Any, tools: Any = None, train_on: str = "assistant") -> set[str]:
    remarks = conversation(made, turns, tools, Learning(train_on)).remarks
    return {name for name, count in zip(REMARKS, remarks, strict=True) if count}


def learnt(made: Any, turns: Any) -> str:
    ids, used, _ = conversation(made, turns)
    return str(made.decode([i for i, one in zip(ids, used, strict=True) if one]))


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "smollm3"])
def test_results_of_functions_that_are_left_out_are_counted(name: str, train_on: str) -> None:
    made = tokenizer_of(name)
    assert said_of(made, OLD_CALL, [TOOL], train_on) == {"unseen"}
    renamed = [*OLD_CALL[:2], RESULT, ANSWER]
    assert said_of(made, renamed, [TOOL], train_on) == set()


def test_a_result_is_left_out_even_if_its_words_occur_elsewhere() -> None:
    turns = [ASKED | {"content": "Clouds."}, ANSWER, RESULT, ANSWER]
    assert said_of(tokenizer_of("phi4"), turns) == {"unseen"}
    assert said_of(tokenizer_of("phi4"), [*turns[:2], ASKED, ANSWER]) == set()


def test_turns_of_unknown_roles_that_are_left_out_are_counted() -> None:
    turns = [ASKED, {"role": "witness", "content": "Clouds."}, ANSWER]
    assert said_of(tokenizer_of("phi4"), turns) == {"unknown", "unheard"}
    assert said_of(tokenizer_of("chatml_without_prompt"), turns) == {"unknown"}


def test_a_second_call_that_is_left_out_is_refused() -> None:
    with pytest.raises(RequestError, match=r"leaves out some of the tool calls of turn 2.*--chat_template"):
        conversation(tokenizer_of("gpt_oss"), TWO_CALLS, [TOOL])
    assert said_of(tokenizer_of("gpt_oss"), TWO_CALLS, [TOOL], "all") == {"unheard"}
    assert said_of(tokenizer_of("qwen3"), TWO_CALLS, [TOOL]) == set()


@pytest.mark.parametrize("name", ["smollm3", "smollm2"])
def test_thoughts_are_counted_with_generation_marks_and_without(name: str) -> None:
    assert said_of(tokenizer_of(name), [ASKED, ANSWER | {"reasoning_content": "Clouds."}]) == {"unthought"}


@pytest.mark.parametrize("template", [CUT, CUT_ANSWER, CUT_ANSWER + PROMPT, MARKED])
def test_words_that_are_cut_are_refused(template: str) -> None:
    turns = [{"role": "user", "content": f"Say: {ANSWER['content']}"}, ANSWER]
    with pytest.raises(RequestError, match="cuts or changes the words of turn 2") as caught:
        conversation(with_template(template), turns)
    assert "generation %}" not in str(caught.value), "marks would not help"
    short = [turns[0], ANSWER | {"content": "Yes."}]
    assert learnt(with_template(template), short) == "Yes.<|im_end|>"


def test_what_the_user_says_is_counted_if_it_is_cut() -> None:
    made = with_template(CHATML.format(words="m.content[:8] if m.role == 'user' else m.content"))
    assert said_of(made, [ASKED, ANSWER]) == {"unheard"}
    assert said_of(with_template(CUT), [ASKED, ANSWER], train_on="all") == {"unheard"}


@pytest.mark.parametrize(("change", "said"), [("upper", "YES, IT WILL."), ("capitalize", "Yes, it will.")])
def test_words_in_another_case_are_not_left_out(change: str, said: str) -> None:
    made = with_template(CHATML.format(words=f"m.content | {change}"))
    turns = [{"role": "system", "content": "Be brief, on the Straße too."}, ASKED, ANSWER]
    assert said_of(made, turns) == set()
    assert learnt(made, turns) == f"{said}<|im_end|>"


def test_where_a_turn_starts_is_not_guessed() -> None:
    looks = "{% if '1907' in (messages | string) %}{{ raise_exception('what?') }}{% endif %}"
    calls = CHATML.format(words="m.content or m.tool_calls")
    with pytest.raises(RequestError, match="unclear where turn 2 starts"):
        conversation(with_template(looks + calls), TWO_CALLS[:2])


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", "line 2 is not valid jinja: unexpected '}'"),
        ("{{ messages\n | louder }}", "is not valid jinja: No filter named 'louder'"),
    ],
)
def test_a_faulty_template_is_named_and_not_the_row(tmp_path: Path, template: str, fault: str) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(template)
    with pytest.raises(RequestError, match=re.escape(f"{file}: ") + ".*" + re.escape(fault)):
        read_template(str(file))
    with pytest.raises(RequestError, match=r"of the tokenizer's chat template is not valid jinja: .*--chat_template"):
        conversation(with_template(template), [ASKED, ANSWER])


def test_a_template_may_use_what_transformers_allows(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(MARKED + "{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('%Y') }}")
    assert read_template(str(file)) == file.read_text()
