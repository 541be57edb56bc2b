"""The file of answers: in the prompts' order, whole or not there, gone on with by the same command alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import RequestError
from finetune.generation.answers import Answers

IDENTITY = {"model": "abc", "prompts": "def", "temperature": None, "stop": ["a"]}
COUNT = 5


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"index": number, "text": f"answer {number}\u2028é"} for number in numbers]


def opened(output: Path, overwrite: bool = False, **others: Any) -> tuple[Answers, list[int]]:
    answers = Answers(str(output), {**IDENTITY, **others}, COUNT, overwrite)
    return answers, answers.open()


def written(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().removesuffix("\n").split("\n")]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def test_answers_are_in_the_prompts_order_whatever_they_came_in(output: Path) -> None:
    answers, done = opened(output)
    assert done == []
    answers.add(rows(3, 1))
    answers.add(rows(4, 0, 2))
    assert not output.exists()
    answers.finish()
    assert written(output) == rows(0, 1, 2, 3, 4)
    assert {path.name for path in output.parent.iterdir()} == {"answers.jsonl", "answers.jsonl.settings.json"}


@pytest.mark.parametrize("kept", range(0, 61, 7))
def test_a_kill_loses_at_most_the_line_that_it_tears(output: Path, kept: int) -> None:
    answers, _ = opened(output)
    answers.add(rows(2, 4, 1))
    answers._file.close()
    content = answers.unfinished.read_bytes()
    end = len(content) - kept
    answers.unfinished.write_bytes(content[:end])
    again, done = opened(output)
    assert sorted(done) == sorted([2, 4, 1][: content[:end].count(b"\n")])
    again.add(rows(*({0, 1, 2, 3, 4} - set(done))))
    again.finish()
    assert written(output) == rows(0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"temperature": 0.7}, "with another temperature, none, and not 0.7"),
        ({"model": "xyz"}, 'with another model, "abc", and not "xyz"'),
        ({"stop": None}, 'with another stop, ["a"], and not none'),
    ],
)
@pytest.mark.parametrize("is_done", [True, False])
def test_another_run_is_refused_by_what_differs(output: Path, other: Any, words: str, is_done: bool) -> None:
    answers, _ = opened(output)
    answers.add(rows(0, 1, 2, 3, 4))
    if is_done:
        answers.finish()
    else:
        answers._file.close()
    with pytest.raises(RequestError) as refused:
        opened(output, **other)
    assert words in str(refused.value)
    again, done = opened(output, overwrite=True, **other)
    assert done == []
    assert output.exists() == is_done, "what is to be replaced stays until all is there"
    again._file.close()
    if is_done:
        late, done = opened(output, **other)
        assert (late.is_done, done) == (False, []), "the file is still that of the other run"
        late.add(rows(0, 1, 2, 3, 4))
        late.finish()
        assert opened(output, **other)[0].is_done


def test_what_is_done_is_not_done_again(output: Path) -> None:
    answers, _ = opened(output)
    answers.add(rows(0, 1, 2, 3, 4))
    answers.finish()
    again, done = opened(output)
    assert again.is_done
    assert "all 5 answers are there" in again.all_there
    assert done == [0, 1, 2, 3, 4]


def test_a_file_of_somebody_else_is_not_touched(output: Path) -> None:
    output.write_text("mine\n")
    with pytest.raises(RequestError, match="exists, but not its"):
        opened(output)
    assert output.read_text() == "mine\n"


def test_two_processes_do_not_write_one_file(output: Path) -> None:
    answers, _ = opened(output)
    with pytest.raises(RequestError, match="another process is writing it"):
        opened(output)
    answers._file.close()


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no folder"):
        opened(tmp_path / "nowhere" / "answers.jsonl")
    with pytest.raises(RequestError, match="is a folder"):
        opened(tmp_path)


def test_overwriting_goes_on_after_a_kill_and_makes_whole_answers_again(output: Path) -> None:
    output.write_text("theirs\n")
    answers, _ = opened(output, overwrite=True)
    answers.add(rows(2))
    answers._file.close()
    assert output.read_text() == "theirs\n"
    again, done = opened(output, overwrite=True)
    assert done == [2]
    again.add(rows(0, 1, 3, 4))
    again.finish()
    assert written(output) == rows(0, 1, 2, 3, 4)
    anew, done = opened(output, overwrite=True)
    assert (anew.is_done, done) == (False, [])
    anew._file.close()


def test_a_run_without_an_answer_binds_nobody(output: Path) -> None:
    answers, _ = opened(output)
    answers._file.close()
    other, done = opened(output, temperature=0.7)
    assert done == []
    other._file.close()


def test_a_link_is_written_through_and_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    answers, _ = opened(tmp_path / "link")
    answers.add(rows(0, 1, 2, 3, 4))
    answers.finish()
    assert (tmp_path / "link").is_symlink()
    assert written(tmp_path / "real") == rows(0, 1, 2, 3, 4)
    with pytest.raises(RequestError, match="is not a regular file"):
        opened(Path("/dev/null"))  # which a rename would replace for everybody
