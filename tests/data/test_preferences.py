"""Which rows preferences are read from, and what becomes of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data.chat.templates import read_template
from finetune.data.preference_batches import collate
from finetune.data.preference_columns import ANSWERS, PAIRS, find_preferences
from finetune.data.preference_rows import (
    docstring_pairs,
    encoded,
    fitted,
    settled,
    sides_of,
    single,
    with_others,
)
from finetune.data.preferences import PreferenceData, prepare_preferences
from finetune.data.tokenizer import pad_apart, train_text_tokenizer
from finetune.errors import RequestError
from finetune.run.flags.text import PreparationArguments
from finetune.run.launch import read_launch
from finetune.run.recipes.preference import PreferenceDataArguments

USER, GOOD, BAD = ({"role": role, "content": text} for role, text in
                   (("user", "Hello"), ("assistant", "Good day"), ("assistant", "What?")))  # fmt: skip
BYTES = train_text_tokenizer("byte", ["a"], 257, 64, with_end=True)

ROWS = [
    ({"prompt": "Hello", "chosen": [GOOD], "rejected": [BAD]}, "a prompt as text, answers as turns"),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, "a prompt as turns"),
    ({"prompt": "Hello", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "UltraFeedback"),
    ({"chosen": json.dumps([USER, GOOD]), "rejected": json.dumps([USER, BAD])}, "turns in JSON"),
    ({"chosen": "\n\nHuman: Hello\n\nAssistant: Good day", "rejected": "\n\nHuman: Hello\n\nAssistant: What?"}, "HH"),
    (
        {name: [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": text}]
         for name, text in (("chosen", "Good day"), ("rejected", "What?"))},
        "ShareGPT",
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", [pytest.param(row, id=name) for row, name in ROWS])
def test_conversations_are_read_whatever_their_layout(row: dict[str, Any]) -> None:
    assert sides_of(PAIRS, row).prompt == [USER]
    assert sides_of(PAIRS, row).answers == ([GOOD], [BAD])


def test_a_score_of_each_answer_gives_the_margin() -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 8.0, "score_rejected": 5.5}
    read = {PAIRS: ("chosen", "rejected", "score_chosen", "score_rejected"), "their prompt": ("prompt",)}
    assert find_preferences(list(row), [row], "rows", False) == (PAIRS, read)
    assert sides_of(PAIRS, row).margin == 2.5


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "are the same"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "are the same"),
        ({"prompt": "p", "chosen": "a", "rejected": " "}, "`rejected` is empty"),
        ({"prompt": "p", "chosen": None, "rejected": "a"}, "`chosen` is empty"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "no assistant answer"),
    ],
)
def test_a_row_that_says_nothing_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        sides_of(PAIRS, row)


@pytest.mark.parametrize("text", ["[]", '[{"name": "f", "arguments": {}}]', '{"role": "admin"}', "3"])
def test_an_answer_in_json_is_a_text_unless_it_is_a_conversation(text: str) -> None:
    assert sides_of(PAIRS, {"prompt": "p", "chosen": text, "rejected": "b"}).answers == (text, "b")


@pytest.mark.parametrize(
    "more", [{"margin": "large"}, {"margin": float("nan")}, {"score_chosen": "n/a", "score_rejected": "3"}]
)
def test_a_margin_that_is_no_number_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="must be numbers"):
        sides_of(PAIRS, {"prompt": "p", "chosen": "a", "rejected": "b", **more})


@pytest.mark.parametrize("label", [0.7, float("nan"), None, 2])
def test_a_label_that_is_neither_true_nor_false_is_refused(label: Any) -> None:
    with pytest.raises(RequestError, match="must be true or false"):
        sides_of(ANSWERS, {"prompt": "p", "completion": "a", "label": label})


def test_answers_to_unlike_prompts_are_refused() -> None:
    other = {"role": "user", "content": "Bye"}
    with pytest.raises(RequestError, match="do not answer the same prompt"):
        sides_of(PAIRS, {"chosen": [USER, GOOD], "rejected": [other, BAD]})


def test_other_rows_name_the_recipe_or_the_loss_that_they_are_for() -> None:
    with pytest.raises(RequestError, match=r"recipes/causal_lm\.py"):
        find_preferences(["messages"], [], "rows", False)
    with pytest.raises(RequestError, match="--loss kto"):
        find_preferences(["prompt", "completion", "label"], [], "rows", False)
    assert find_preferences(["prompt", "completion", "label"], [], "rows", True)[0] == ANSWERS


def test_kto_takes_pairs_apart_and_refuses_answers_of_one_kind() -> None:
    pair = sides_of(PAIRS, {"prompt": "p", "chosen": "a", "rejected": "b"})
    assert [(one.answers, one.label) for one in single([pair])] == [(("a",), 1), (("b",), 0)]
    alone = sides_of(ANSWERS, {"prompt": "p", "completion": "a", "label": "True"})
    with pytest.raises(RequestError, match="desirable, so there is no contrast to learn"):
        single([alone, alone])


def test_the_answers_alone_are_learnt_and_both_prompts_are_cut_alike() -> None:
    pair, _ = encoded(BYTES, sides_of(PAIRS, {"prompt": "0123456789", "chosen": "abc", "rejected": "de"}))
    assert [(len(ids), learnt.index(True), sum(learnt)) for ids, learnt in pair] == [(14, 10, 4), (13, 10, 3)]
    short, was_cut = fitted(pair, 8)
    assert was_cut
    assert [BYTES.decode(ids[:4]) for ids, _ in short] == ["6789", "6789"]
    assert [sum(learnt) for _, learnt in short] == [4, 3]
    shorter, _ = fitted(pair, 3)
    assert [(learnt, BYTES.decode(ids)) for ids, learnt in shorter] == [
        ([False, True, True], "9ab"), ([False, True, True], "9de")]  # fmt: skip


def test_of_conversations_the_answers_are_learnt_with_their_end() -> None:
    row = sides_of(PAIRS, {"chosen": [USER, BAD, USER, GOOD], "rejected": [USER, BAD, USER, BAD]})
    assert row.prompt == [USER, BAD, USER]
    said = [
        BYTES.decode([token for token, used in zip(ids, learnt, strict=True) if used])
        for ids, learnt in encoded(BYTES, row)[0]
    ]
    assert said == ["Good day<|endoftext|>", "What?<|endoftext|>"]


@pytest.mark.parametrize(
    ("special", "names", "pads"),
    [
        ([], {"pad_token": "<pad>"}, "<pad>"),
        (["<s>", "<|finetune_right_pad_id|>"], {}, "<|finetune_right_pad_id|>"),
        (["<|im_end|>", "<|vision_pad|>"], {"pad_token": "<|endoftext|>"}, "<|vision_pad|>"),
        (["<|padding|>"], {"unk_token": "<|endoftext|>"}, "<|padding|>"),
        (["<s>"], {"unk_token": "<unk>", "pad_token": "<|endoftext|>"}, "<unk>"),
        (["<s>", "<|reserved_special_token_0|>"], {}, "<|reserved_special_token_0|>"),
        (["<|im_start|>", "<|im_end|>"], {}, None),
        ([], {"pad_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}, "<|endoftext|>"),
    ],
    ids=["its own", "Llama 3.1", "Qwen", "GPT-NeoX", "Llama 2", "Llama 3", "none", "GPT-2"],
)
def test_padding_is_another_token_than_the_end_of_text_where_there_is_one(
    special: list[str], names: dict[str, str], pads: str | None
) -> None:
    tokenizer = copy.deepcopy(BYTES)
    tokenizer.pad_token = None
    tokenizer.add_special_tokens({"additional_special_tokens": special, **names})
    before = tokenizer("A text<|endoftext|>")["input_ids"]
    pad_apart(tokenizer)
    assert tokenizer.pad_token == pads
    assert tokenizer("A text<|endoftext|>")["input_ids"] == before


def test_a_reward_model_reads_all_that_a_chat_template_writes(tmp_path: Path) -> None:
    chat = copy.deepcopy(BYTES)
    chat.chat_template = read_template("chatml")
    layout = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    asked = [{**layout, "prompt": [{**USER, "content": str(n)}]} for n in range(4)]
    found = {loss: prepared(tmp_path, asked, loss, block_size=256, tokenizer=chat) for loss in ("reward", "dpo")}
    scored, learnt = (data.splits["train"][0] for data in found.values())
    for side in ("chosen", "rejected"):
        assert chat.decode(scored[f"{side}_ids"]) == chat.decode(learnt[f"{side}_ids"]) + "\n"
        assert chat.decode(learnt[f"{side}_ids"]).endswith("<|im_end|>")


def test_the_other_answer_of_kto_is_that_of_another_row() -> None:
    rows = single([sides_of(PAIRS, {"prompt": "p", "chosen": "a", "rejected": "bc"})])
    made = with_others(rows, [fitted(encoded(BYTES, row)[0], 64) for row in rows], 64)
    assert [[BYTES.decode(ids, skip_special_tokens=True) for ids, _ in sides] for sides, _ in made] == [
        ["pa", "pbc"], ["pbc", "pa"]]  # fmt: skip


def test_the_other_answer_of_kto_belongs_to_another_prompt_and_each_answer_serves_once() -> None:
    pairs = [sides_of(PAIRS, {"prompt": f"{p}", "chosen": f"{p}a", "rejected": f"{p}b"}) for p in (1, 2, 1, 3, 4)]
    rows = single(pairs)
    made = with_others(rows, [fitted(encoded(BYTES, row)[0], 64) for row in rows], 64)
    read = [[BYTES.decode(ids, skip_special_tokens=True) for ids, _ in sides] for sides, _ in made]
    assert [own[0] == own[1] for own, _ in read] == [True] * 10, "its prompt before its own answer"
    assert all(other[0] == own[0] != other[1] for own, other in read), "and before another prompt's"
    assert sorted(other[1:] for _, other in read) == sorted(own[1:] for own, _ in read)


def test_texts_begin_with_the_mark_that_the_tokenizer_begins_texts_with() -> None:
    from tokenizers.processors import TemplateProcessing

    marking = train_text_tokenizer("byte", ["a"], 257, 64, with_end=True)
    marking.add_special_tokens({"bos_token": "<s>"})
    marking.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", marking.bos_token_id)]
    )
    row = sides_of(PAIRS, {"prompt": "p", "chosen": "a", "rejected": "b"})
    for ids, learnt in encoded(marking, row)[0]:
        assert ids[:2] == marking("p")["input_ids"]
        assert learnt == [False, False, True, True]


def test_a_batch_predicts_the_next_token_of_answers_and_pads_on_the_right() -> None:
    rows = [{"chosen_ids": [1, 2, 3], "chosen_learnt": [False, True, True], "rejected_ids": [1, 4],
             "rejected_learnt": [False, True], "label": 1, "row": 7}]  # fmt: skip
    batch = collate(("chosen", "rejected"), 0, rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [1, 4, 0]]
    assert batch["targets"].tolist() == [[2, 3, -100], [4, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["places"].tolist() == [14, 15]
    assert next(iter(batch)) == "labels", "the Trainer counts by the first"


def test_a_prompt_is_on_one_side_of_the_split_alone() -> None:
    rows = [sides_of(PAIRS, {"prompt": f"p{i % 10}", "chosen": f"a{i}", "rejected": "b"}) for i in range(40)]
    parts, _ = settled({"train": rows}, PreparationArguments(validation_fraction=0.2), 0)
    prompts = [{row.prompt for row in part} for part in parts.values()]
    assert not prompts[0] & prompts[1]
    assert len(parts["validation"]) == 8


def test_built_in_pairs_differ_in_the_order_of_their_words_alone() -> None:
    pairs = docstring_pairs()
    assert len(pairs) > 1_000
    for pair in pairs[:50]:
        assert pair["chosen"] != pair["rejected"]
        assert sorted(pair["chosen"].split()) == sorted(pair["rejected"].split())


def prepared(
    folder: Path,
    rows: list[dict[str, Any]],
    loss: str = "dpo",
    block_size: int = 12,
    tokenizer: Any = BYTES,
    **more: Any,
) -> PreferenceData:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags, cut = PreferenceDataArguments(train_file=str(path)), PreparationArguments(**more)
    return prepare_preferences(flags, cut, tokenizer, loss=loss, block_size=block_size, seed=0, launch=read_launch())


def test_bad_rows_are_named_by_their_line_or_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}" * 10, "chosen": "ab", "rejected": "c"} for i in range(10)]
    rows[3] = {"prompt": "x", "chosen": "a", "rejected": "a"}
    with pytest.raises(RequestError, match=r"rows\.jsonl line 4: .*the same.*1 such rows of 10"):
        prepared(tmp_path, rows)
    with pytest.raises(RequestError, match=r"1 such rows of 1\. Fix them\.$"):
        prepared(tmp_path, rows[3:4])
    data = prepared(tmp_path, rows, skip_bad_rows=True)
    assert data.account.skipped == {"train": 1}
    assert data.account.rows == {"train": 8, "validation": 1}
    assert sum(data.account.truncated.values()) == 9
    assert "cut equally on both sides" in data.describe()
    assert [row for split in data.splits.values() for row in split["row"]] == list(range(9))


TEXTS = {"chosen": "Good day", "rejected": "What?"}
ASKED, RULES = {"role": "user", "content": "Who is there?"}, {"role": "system", "content": "Be brief."}
SAID = [{"from": "human", "value": "Hello"}]
ANSWERED = {name: {"from": "gpt", "value": text} for name, text in TEXTS.items()}
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"question": "Who is there?"}, {"prompt": "Who is there?"}, "question"),
    ({"instruction": "Who is there?"}, {"prompt": "Who is there?"}, "instruction"),
    ({"instruction": "Say", "input": "Who is there?"}, {"prompt": "Say\n\nWho is there?"}, "instruction + input"),
    ({"input": "Who is there?"}, {"prompt": "Who is there?"}, "input"),
    ({"query": "Who is there?"}, {"prompt": "Who is there?"}, "query"),
    ({"system": "Be brief.", "question": "Who is there?"}, {"prompt": [RULES, ASKED]}, "system + question"),
    ({"system": "Be brief.", "prompt": "Who is there?"}, {"prompt": [RULES, ASKED]}, "system + prompt"),
    ({"system": "", "question": "Who is there?"}, {"prompt": [ASKED]}, "system + question"),
    ({"messages": [USER, GOOD, ASKED]}, {"prompt": [USER, GOOD, ASKED]}, "messages"),
    ({"conversations": SAID, **ANSWERED}, {"prompt": [USER]}, "conversations"),
    ({"conversations": SAID, "system": "Be brief.", **ANSWERED}, {"prompt": [RULES, USER]}, "system + conversations"),
    (
        {"instruction": "Who is there?", "input": "", "history": [["Hello", "Good day"]]},
        {"prompt": [USER, GOOD, ASKED]},
        "instruction + input + history",
    ),
    (
        {"system": "Be brief.", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [RULES, USER]},
        "system",
    ),
    ({"prompt": "\n\nHuman: Who is there?\n\nAssistant:"}, {"prompt": [ASKED]}, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "same", "said", "loss"), [*((*layout, "dpo") for layout in LAYOUTS), (*LAYOUTS[0], "kto")]
)
def test_a_prompt_under_any_of_its_names_gives_the_tokens_of_a_column_prompt(
    row: dict[str, Any], same: dict[str, Any], said: str, loss: str, tmp_path: Path
) -> None:
    found = [prepared(tmp_path, rows_of({**TEXTS, **one}), loss, block_size=256) for one in (row, same)]
    for split, table in found[1].splits.items():
        assert table.to_list() == found[0].splits[split].to_list()
    assert f", {said} as their prompt" in found[0].describe()


def test_turns_that_the_template_leaves_out_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "system", "content": f"Be {i}."}, USER], "chosen": [GOOD], "rejected": [BAD]}
            for i in range(5)]  # fmt: skip
    mute = copy.deepcopy(BYTES)
    mute.chat_template = (
        "{% for turn in messages if turn.role != 'system' %}{{ turn.role }}: {{ turn.content }}{{ eos_token }}"
        "{% endfor %}"
    )
    said = prepared(tmp_path, [*rows, {**rows[0], "prompt": [USER]}], block_size=64, tokenizer=mute).describe()
    assert "in 5 of 6 conversations the chat template leaves out the system message" in said


def rows_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The same four times, and a held-out one."""
    return [row] * 4 + [json.loads(json.dumps(row).replace("Who is there?", "You?").replace("Hello", "Hi"))]


def test_the_prompt_of_a_judged_answer_is_found_too() -> None:
    row = {"question": "Who is there?", "completion": "I am", "label": True}
    read = {ANSWERS: ("completion", "label"), "their prompt": ("question",)}
    assert find_preferences(list(row), [row], "rows", True) == (ANSWERS, read)
    assert sides_of(ANSWERS, row).prompt == "Who is there?"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"post": "Who is there?", **TEXTS}, r"contain no prompt.*--column_mapping post=prompt"),
        ({"问": "你是谁", **TEXTS}, "--column_mapping 问=prompt"),
        ({"dialog": [USER], "chosen": [GOOD], "rejected": [BAD]}, "--column_mapping dialog=prompt"),
        ({"question": "Who?", "messages": [USER], **TEXTS}, r"question or messages.*--column_mapping question=prompt"),
    ],
)
def test_answers_whose_prompt_would_be_left_out_are_refused_with_a_mend(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        find_preferences(list(row), [row], "rows", False)


@pytest.mark.parametrize(
    "row",
    [
        {"id": "a-1", "source": "web", **TEXTS},
        {"notes": "two words", "chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
        {"notes": "two words", "question": "a", "messages": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
    ids=["no words elsewhere", "HH", "whole conversations"],
)
def test_whole_dialogues_and_answers_without_any_prompt_are_read_as_they_are(row: dict[str, Any]) -> None:
    assert find_preferences(list(row), [row], "rows", False) == (PAIRS, {PAIRS: ("chosen", "rejected")})


def test_a_conversation_that_has_its_answer_is_no_prompt() -> None:
    with pytest.raises(RequestError, match="the prompt ends with an assistant turn"):
        sides_of(PAIRS, {"messages": [USER, GOOD], "chosen": [GOOD], "rejected": [BAD]})
