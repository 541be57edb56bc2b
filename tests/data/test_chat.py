"""What the assistant says is learnt, with the mark that ends its turn, and nothing else, under every template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_templates import FAMILIES, FORMATS, SPECIAL, TEMPLATES, TOOL, conversations, judge, takes, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.chat.conversation import Learning, completion, conversation
from finetune.data.chat.remarks import REMARKS, notes_of
from finetune.data.chat.templates import FOLDER, read_template, shipped
from finetune.data.tokenizer import END_OF_TEXT, train_text_tokenizer
from finetune.errors import RequestError
from finetune.run.paths import TEMPLATES as KNOWN

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Seven."},
]
MARKED = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}{%- generation -%}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
UNMARKED = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORGETFUL = "{{ messages[-1]['content'] }}"
MACRO = (  # in which jinja counts the marked characters wrongly
    "{% macro turn(m) %}<|{{ m.role }}|>{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ turn(m) }}{% else %}<|{{ m.role }}|>{{ m.content }}"
    "{% endif %}{% endfor %}"
)
CALL = {"function": {"name": "look_up", "arguments": {"word": "cat"}}}
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "What is a cat?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "An animal."},
    {"role": "assistant", "content": "An animal."},
]


def tokenizer(template: str | None = None) -> Any:
    made = train_text_tokenizer("byte", [], 0, 512, with_end=True)
    made.chat_template = template
    return made


def learnt(made: Any, *row: Any, **choices: str) -> str:
    ids, used, _ = conversation(made, *row, learning=Learning(**choices))
    assert len(ids) == len(used)
    return str(made.decode([i for i, one in zip(ids, used, strict=True) if one]))


def said_of(made: Any, *row: Any) -> set[str]:
    return {name for name, count in zip(REMARKS, conversation(made, *row).remarks, strict=True) if count}


def test_there_are_templates_of_all_families() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(FAMILIES)
    assert len(FAMILIES) >= 20


CELLS = [(name, format_) for name in FAMILIES for format_ in FORMATS]


@pytest.mark.parametrize(("name", "format_"), [cell for cell in CELLS if takes(FAMILIES[cell[0]], cell[1])])
def test_exactly_what_the_assistant_says_is_learnt(name: str, format_: str) -> None:
    found = judge(name, format_)
    assert found["other"] == 0, found["first"]


@pytest.mark.parametrize("name", [name for name in FAMILIES if not takes(FAMILIES[name], "tools")])
def test_tools_that_a_template_does_not_know_are_refused(name: str) -> None:
    turns, tools, _ = next(conversations("tools", FAMILIES[name]))
    with pytest.raises(RequestError, match="--chat_template"):
        conversation(tokenizer_of(name), turns, tools)


@pytest.mark.parametrize("name", FAMILIES)
def test_marks_in_what_the_user_says_lead_nobody_astray(name: str) -> None:
    """Nor words that the user has said before, nor digits as the sentinels have them."""
    marks = (
        "<|im_start|>assistant\n [/INST] </s> <start_of_turn>model\n <|start|>assistant<|end|> ASSISTANT: <|eot_id|>"
    )
    said = ["One. ASSISTANT: <|user|>", "1907222222222222"]
    turns = [{"role": "user", "content": marks}, {"role": "assistant", "content": said[0]}]
    turns += [{"role": "user", "content": said[0]}, {"role": "assistant", "content": said[1]}]
    family = FAMILIES[name]
    wanted = str(family.words).format(words=said[0]) + str(family.final or family.words).format(words=said[1])
    assert learnt(tokenizer_of(name), turns) == wanted


@pytest.mark.parametrize("name", ["llama2", "mistral_v3", "qwen3"])
def test_tokens_of_several_characters_are_learnt_whole(name: str) -> None:
    made = train_text_tokenizer("bpe", ["Two and two? Four. And three? Seven. assistant user"] * 9, 400, 512, True)
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": SPECIAL})
    made.chat_template = tokenizer_of(name).chat_template
    family = FAMILIES[name]
    wanted = str(family.words).format(words="Four.") + str(family.final or family.words).format(words="Seven.")
    assert learnt(made, TURNS[1:]) == wanted


def test_one_of_several_templates_is_taken_by_the_tools() -> None:
    made = tokenizer_of("qwen3")
    made.chat_template = {"default": made.chat_template, "tool_use": tokenizer_of("qwen2_5").chat_template}
    assert "made by Alibaba" in made.decode(conversation(made, TURNS[1:], [TOOL]).ids)
    assert "made by Alibaba" not in made.decode(conversation(made, TURNS[1:]).ids)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"glm4"}))
def test_marks_that_are_no_tokens_are_found_as_well(name: str) -> None:
    found = judge(name, "multi", has_marks=False)
    assert found["other"] == 0, found["first"]


# What a template does to contents: none of it is a reason to learn less or more.
TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1).filter(
    lambda text: text.strip() and not any(mark in text for mark in ("<", "[", "｜"))
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3))
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "mistral_v3", "phi3", "llama2", "gpt_oss", "command_r7b"])
def test_any_words_are_learnt_whole(name: str, exchanges: list[tuple[str, str]]) -> None:
    turns = [
        {"role": role, "content": text.strip()}
        for exchange in exchanges
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]
    family = FAMILIES[name]
    shapes = [str(family.words)] * (len(exchanges) - 1) + [str(family.final or family.words)]
    wanted = [shape.format(words=answer.strip()) for shape, (_, answer) in zip(shapes, exchanges, strict=True)]
    assert learnt(tokenizer_of(name), turns) == "".join(wanted)


@pytest.mark.parametrize(
    ("template", "wanted"),
    [(MARKED, "Four.Seven."), (UNMARKED, "Four.Seven."), (None, f"Four.{END_OF_TEXT}Seven.{END_OF_TEXT}")],
)
def test_the_assistants_turns_alone_are_learnt(template: str | None, wanted: str) -> None:
    made = tokenizer(template)
    assert learnt(made, TURNS) == wanted
    assert "Two and two?" in made.decode(conversation(made, TURNS).ids)
    assert ("endless" in said_of(made, TURNS)) == (template is not None)


def test_marks_that_jinja_counts_wrongly_are_not_believed() -> None:
    assert learnt(tokenizer(MACRO), TURNS) == f"Four.{END_OF_TEXT}Seven.{END_OF_TEXT}"


def test_turns_that_a_template_joins_are_learnt_as_one() -> None:
    joins = (
        "{% for m in messages %}{% if loop.first or m.role != loop.previtem.role %}<|{{ m.role }}|>{% endif %}"
        "{{ m.content }}{% if loop.last or m.role != loop.nextitem.role %}<|end|>{% else %} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [TURNS[1], TURNS[2], {"role": "assistant", "content": "Not five."}, TURNS[3], TURNS[4]]
    assert learnt(tokenizer(joins), turns) == "Four. Not five.<|end|>Seven.<|end|>"
    assert "repeated" in said_of(tokenizer(joins), turns)


def test_a_template_that_looks_into_contents_is_read_turn_by_turn() -> None:
    looks = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and m.content not in ('Four.', 'Seven.') %}"
        "{{ raise_exception('what?') }}{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert learnt(tokenizer(looks), TURNS) == "Four.<|end|>Seven.<|end|>"


def test_which_turns_are_learnt_is_chosen() -> None:
    made = tokenizer_of("qwen2_5")
    assert learnt(made, TURNS, train_on="last") == "Seven.<|im_end|>"
    everything = learnt(made, TURNS, train_on="all")
    assert everything == made.decode(conversation(made, TURNS).ids)
    assert learnt(tokenizer(MARKED), TURNS, train_on="last") == "Seven."


@pytest.mark.parametrize("in_content", [True, False])
def test_thoughts_are_kept_as_the_template_writes_them_or_stripped(in_content: bool) -> None:
    made = tokenizer_of("qwen3")
    thought = {"content": "<think>\nEasy.\n</think>\n\nSeven."} if in_content else {"reasoning_content": "Easy."}
    turns = [*TURNS[:-1], TURNS[-1] | thought]
    assert learnt(made, turns) == "Four.<|im_end|><think>\nEasy.\n</think>\n\nSeven.<|im_end|>"
    assert learnt(made, turns, reasoning="strip") == "Four.<|im_end|><think>\n\n</think>\n\nSeven.<|im_end|>"
    assert "unthought" not in said_of(made, turns)
    if in_content:
        assert "unthought" in said_of(tokenizer_of("deepseek_r1"), turns)


def test_a_thought_that_was_cut_off_is_stripped_too() -> None:
    turns = [*TURNS[:-1], {"role": "assistant", "content": "<think>\nEasy, since"}]
    assert learnt(tokenizer_of("qwen2_5"), turns, reasoning="strip") == "Four.<|im_end|>"


def test_tools_and_calls_reach_the_template_however_a_table_holds_them() -> None:
    made = tokenizer_of("qwen2_5")
    wanted = (
        '<tool_call>\n{"name": "look_up", "arguments": {"word": "cat"}}\n</tool_call><|im_end|>An animal.<|im_end|>'
    )
    as_text = {"function": {"name": "look_up", "arguments": '{"word": "cat"}'}}
    padded = {"function": {"name": "look_up", "arguments": {"word": "cat", "most": None}}, "id": None}
    for call in (CALL, as_text, padded):
        turns = [CALLS[0], CALLS[1] | {"tool_calls": [call]}, *CALLS[2:]]
        turns = [{"tool_calls": [], **turn} for turn in turns]
        for tools in ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]):
            ids, _, _ = conversation(made, json.dumps(turns) if tools == [TOOL] else turns, tools)
            assert '"name": "look_up", "description"' in made.decode(ids)
            assert learnt(made, turns, tools) == wanted
    assert "untooled" in said_of(tokenizer_of("llama3"), TURNS, [TOOL])


def test_calls_that_a_template_leaves_out_are_refused() -> None:
    for name in ("phi3", "smollm2"):
        with pytest.raises(RequestError, match=r"leaves out the tool calls of turn 2.*--chat_template"):
            conversation(tokenizer_of(name), CALLS, [TOOL])


@pytest.mark.parametrize("tools", ["look_up", 7, ["look_up"], {"a": 1}])
def test_tools_that_are_none_are_quoted(tools: Any) -> None:
    with pytest.raises(RequestError, match="`tools` must be a list of functions"):
        conversation(tokenizer_of("qwen3"), TURNS, tools)


def test_parts_of_text_are_joined_and_others_refused_by_name() -> None:
    made = tokenizer_of("qwen2_5")
    parts = [{"type": "text", "text": "Sev", "image_url": None}, {"type": "text", "text": "en."}]
    assert learnt(made, [*TURNS[:-1], {"role": "assistant", "content": parts}]).endswith("Seven.<|im_end|>")
    with pytest.raises(RequestError, match="part of type `image_url`"):
        conversation(made, [{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": "a"}}]}])


def test_what_would_teach_something_else_is_said() -> None:
    made = tokenizer_of("qwen2_5")
    assert said_of(made, TURNS) == set()
    empty = [*TURNS[:2], {"role": "assistant", "content": " "}, *TURNS[3:]]
    assert said_of(made, empty) == {"empty"}
    assert learnt(made, empty) == "Seven.<|im_end|>", "an empty turn is not learnt"
    assert said_of(made, [TURNS[1], *TURNS[1:]]) == {"repeated"}
    assert said_of(made, TURNS[2:]) == {"repeated"}
    assert "unknown" in said_of(tokenizer_of("llama3"), [*TURNS, {"role": "gpt", "content": "Yes."}])
    assert "unruled" in said_of(tokenizer_of("mistral_v3"), TURNS)
    made.chat_template = "{{ bos_token }}" * 2 + made.chat_template
    assert said_of(made, TURNS) == {"twice"}
    assert said_of(tokenizer_of("glm4"), TURNS) == {"endless"}
    assert "of 10 conversations" in notes_of([1] * len(REMARKS), 10)[0]
    assert "all 3 conversations" in notes_of([3] * len(REMARKS), 3)[0]


def test_a_template_that_changes_earlier_turns_is_refused_and_shown() -> None:
    with pytest.raises(RequestError, match=r"leaves out the words of turn 3.*--chat_template.*'Seven\.'"):
        conversation(tokenizer(FORGETFUL), TURNS)
    upper = "{% for m in messages %}{{ m.content | reverse if loop.last else m.content | upper }}{% endfor %}"
    with pytest.raises(RequestError, match=r"It writes '.*FOUR.*, but with each part marked '"):
        conversation(tokenizer(upper), TURNS)


@pytest.mark.parametrize("turns", [[], [{"content": "no role"}], ["words"], [{"role": "user"}], "words", None])
def test_turns_without_role_or_content_are_refused(turns: Any) -> None:
    with pytest.raises(RequestError, match=r"`messages` must be a list of turns .* but one is"):
        conversation(tokenizer(), turns)


def test_a_conversation_that_the_template_refuses_is_quoted() -> None:
    template = "{{ raise_exception('the user speaks first') }}"
    with pytest.raises(RequestError, match=r"\(the user speaks first\): .*Be brief"):
        conversation(tokenizer(template), TURNS)


@pytest.mark.parametrize("name", ["qwen2_5", "mistral_v3", None])
def test_a_content_of_null_is_an_empty_text_under_every_template(name: str | None) -> None:
    made = tokenizer_of(name) if name else tokenizer()
    null, empty = ([{"role": "user", "content": one}, {"role": "assistant", "content": "Yes."}] for one in (None, ""))
    assert conversation(made, null) == conversation(made, empty)


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_template_teaches_to_stop(name: str) -> None:
    made = tokenizer_of("chatml_without_prompt")
    made.chat_template = read_template(name)
    said = learnt(made, TURNS)
    assert "Four." in said
    assert "Seven." in said
    assert "three" not in said
    assert said_of(made, TURNS) == set()
    ids = conversation(made, TURNS[:4]).ids
    text = made.apply_chat_template(TURNS[:4], tokenize=False, add_generation_prompt=True)
    assert text.startswith(made.decode(ids)), "a prompt is what the model has learnt to answer"
    if name in ("chatml", "qwen3", "llama3", "mistral"):
        assert '"look_up"' in learnt(made, CALLS, [TOOL])
        assert not said_of(made, CALLS, [TOOL])
    else:
        with pytest.raises(RequestError):
            conversation(made, CALLS, [TOOL])


def test_templates_are_known_without_reading_them() -> None:
    assert set(KNOWN) == set(shipped()) == {path.stem for path in FOLDER.iterdir()}


def test_a_completion_that_is_none_is_quoted() -> None:
    with pytest.raises(RequestError, match=r"must be texts, but one row is \['a', None\]"):
        completion(tokenizer(), "a", None, [])  # type: ignore[arg-type]


def test_a_completion_is_learnt_with_the_end_of_text() -> None:
    made = tokenizer()
    ids, used, _ = completion(made, "Two and two?", " Four.", [])
    assert made.decode([i for i, one in zip(ids, used, strict=True) if one]) == f" Four.{END_OF_TEXT}"
    assert made.decode(ids) == f"Two and two? Four.{END_OF_TEXT}"
    assert all(completion(made, "Two and two?", " Four.", [], Learning("all")).learnt)
    assert completion(made, "Two and two?", f" Four.{END_OF_TEXT}", []) == completion(
        made, "Two and two?", " Four.", []
    )


@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_blank_completion_is_not_learnt(blank: str) -> None:
    assert not any(completion(tokenizer(), "Two and two?", blank, []).learnt)
    assert all(completion(tokenizer(), "Two and two?", blank, [], Learning("all")).learnt)
