"""Prompts of every kind of file; what is none is named by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import RequestError
from finetune.generation.prompts import read_prompts

USER = {"role": "user", "content": "Is it raining?"}
ROWS: list[Any] = [{"prompt": "One", "id": "a"}, {"messages": [USER]}, "Three"]


def read(folder: Path, name: str, text: str, column: str | None = None) -> list[Any]:
    (folder / name).write_text(text)
    return [(prompt.content, prompt.id) for prompt in read_prompts(str(folder / name), column)]


def test_every_kind_of_file_gives_the_same_prompts(tmp_path: Path) -> None:
    wanted = [("One", "a"), ([USER], None), ("Three", None)]
    assert read(tmp_path, "a.jsonl", "\n\n".join(map(json.dumps, ROWS)) + "\n") == wanted
    assert read(tmp_path, "a.json", json.dumps(ROWS)) == wanted
    texts = [("One, two", None), ("Three", None)]
    assert read(tmp_path, "a.csv", 'prompt,label\n"One, two",x\nThree,y\n') == texts
    assert read(tmp_path, "a.tsv", "prompt\tlabel\nOne, two\tx\nThree\ty\n") == texts
    assert read(tmp_path, "a.txt", "One, two\r\n\r\nThree\n") == texts
    assert read(tmp_path, "b.csv", "question,label\nOne,x\n", "question") == [("One", None)]


def test_tools_and_calls_are_read_as_in_training(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    turns = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "rain"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns, "tools": [{"type": "function"}]}))
    (prompt,) = read_prompts(str(tmp_path / "a.jsonl"), None)
    assert prompt.tools == [{"type": "function"}]
    assert prompt.content[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": \n', "a.jsonl:2: is not valid JSON"),
        (
            "a.jsonl",
            '{"prompt": "a"}\n\n{"question": "a", "n": 1}\n',
            "a.jsonl:3: has no `prompt` and no `messages`; it has question, n. Name the column",
        ),
        ("a.jsonl", "7\n", "a.jsonl:1: must be an object"),
        ("a.jsonl", "[" * 99 + "]" * 99, "a.jsonl:1: is nested deeper"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "a.jsonl:1: `messages` must be"),
        ("a.jsonl", '{"prompt": 7}', "a.jsonl:1: `prompt` must be a text"),
        (
            "a.jsonl",
            json.dumps({"messages": [USER, {"role": "assistant", "content": "No."}]}),
            "a.jsonl:1: ends in a turn of role `assistant`",
        ),
        ("a.json", '{"prompt": "a"}', "a.json: must be a list"),
        ("a.json", '["a", {}]', "a.json, row 2: has no `prompt`"),
        ("a.csv", "prompt,b\nx,y\nx\n", "a.csv:3: has more or fewer cells"),
        ("a.csv", 'prompt,b\n"x,y\n', "a.csv:2: is not csv"),
        ("a.txt", "\n \n", "the file has no prompts"),
        ("a.csv", "prompt\n", "the file has no prompts"),
        ("a.jsonl", "", "the file has no prompts"),
        ("a.parquet", "", "cannot tell what it is by its name"),
    ],
)
def test_what_is_no_prompt_is_named_by_its_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(tmp_path, name, text)
    assert words in str(refused.value)


def test_a_file_that_is_not_there_or_is_no_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no such file"):
        read_prompts(str(tmp_path / "a.txt"), None)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match=r"is UTF-16.*not UTF-8"):
        read_prompts(str(tmp_path / "a.txt"), None)
    with pytest.raises(RequestError, match="has lines of text, and no columns"):
        read_prompts(str(tmp_path / "a.txt"), "question")
