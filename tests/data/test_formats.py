"""Layouts of data sets, found by their columns: the same turns are learnt whatever they are written as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

from finetune.data.causal_lm import prepare_corpus
from finetune.data.column_names import FORMATS, renames_for
from finetune.data.documents import open_corpora
from finetune.data.first_look import look_at_columns
from finetune.data.formats import Format, find_format
from finetune.data.packing import IGNORED
from finetune.data.tokenizer import train_text_tokenizer
from finetune.errors import RequestError
from finetune.run.choose import recipes
from finetune.run.flags.language import BlockArguments, CorpusArguments
from finetune.run.launch import Launch
from finetune.run.resolve import resolve

USER, MODEL = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}
SYSTEM = {"role": "system", "content": "Be brief."}
AGAIN = [{"role": "user", "content": "And three?"}, {"role": "assistant", "content": "Seven."}]
CALL = {"name": "add", "arguments": {"a": 2}}
CALLED = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}


SAID_4 = {"role": "assistant", "content": "4."}


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in turns]


CASES: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("messages", {"messages": [USER, MODEL], "id": 1}, [USER, MODEL]),
    ("messages", {"messages": json.dumps([USER, MODEL])}, [USER, MODEL]),
    ("messages", {"conversations": [USER, MODEL], "system": "Be brief."}, [SYSTEM, USER, MODEL]),
    ("messages", {"messages": [SYSTEM, USER, MODEL], "system": "Be long."}, [SYSTEM, USER, MODEL]),
    ("ShareGPT", {"conversations": said(("human", "Two and two?"), ("gpt", "Four."))}, [USER, MODEL]),
    (
        "ShareGPT",
        {
            "conversations": said(
                ("system", "Be brief."),
                ("user", "Two and two?"),
                ("function_call", json.dumps(CALL)),
                ("observation", "4"),
                ("assistant", "Four."),
            ),
            "tools": "[]",
        },
        [SYSTEM, USER, CALLED, {"role": "tool", "content": "4"}, MODEL],
    ),
    ("Alpaca", {"instruction": "Two and two?", "input": "", "output": "Four.", "text": "all"}, [USER, MODEL]),
    (
        "Alpaca",
        {"instruction": "Add.", "input": "2, 2", "output": "Four.", "system": "Be brief."},
        [SYSTEM, {"role": "user", "content": "Add.\n\n2, 2"}, MODEL],
    ),
    (
        "Alpaca",
        {"instruction": "And three?", "output": "Seven.", "history": [["Two and two?", "Four."]]},
        [USER, MODEL, *AGAIN],
    ),
    (
        "prompt/completion",
        {"prompt": [USER, MODEL, AGAIN[0]], "completion": [AGAIN[1]]},
        [USER, {**MODEL, "weight": 0}, *AGAIN],
    ),
    ("prompt/response", {"prompt": "Two and two?", "response": "Four.", "score": 3}, [USER, MODEL]),
    ("question/answer", {"question": "Two and two?", "answer": "Four."}, [USER, MODEL]),
    ("question/answer", {"question": "Two and two?", "solution": "Four."}, [USER, MODEL]),
    ("question/answer", {"question": "Two and two?", "output": "Four.", "source": "x"}, [USER, MODEL]),
    ("question/answer", {"Question": "Two and two?", "Answer": "Four."}, [USER, MODEL]),
    (
        "question/answer",
        {"id": "1", "system_prompt": "Be brief.", "question": "Two and two?", "response": "Four."},
        [SYSTEM, USER, MODEL],
    ),
    ("prompt/response", {"prompt": "Two and two?", "answer": "Four.", "System": "Be brief."}, [SYSTEM, USER, MODEL]),
    ("Alpaca", {"instruction": "Add.", "input": "2", "response": "4."}, [{**USER, "content": "Add.\n\n2"}, SAID_4]),
    ("messages", {"messages": [USER, MODEL], "Prompt": "a", "Response": "b"}, [USER, MODEL]),
    *(
        ("Alpaca", {"instruction": "Two and two?", "output": text}, [USER, {**MODEL, "content": text}])
        for text in ('{"from": "Paris", "to": "Rome"}', json.dumps([USER, MODEL]))
    ),
    ("question/answer", {"question": '{"role": 1}', "answer": "4."}, [{**USER, "content": '{"role": 1}'}, SAID_4]),
]


def format_of(row: dict[str, Any], where: str = "the training data") -> tuple[Format, dict[str, Any]]:
    renames = renames_for(None, list(row), None, where)
    row = {renames.get(name, name): value for name, value in row.items()}
    return find_format(list(row), [row], None, where), row


@pytest.mark.parametrize(("name", "row", "turns"), CASES)
def test_a_format_is_known_by_its_columns_and_gives_turns(
    name: str, row: dict[str, Any], turns: list[dict[str, Any]]
) -> None:
    found, row = format_of(row)
    assert (found.name, found.kind) == (name, "messages")
    assert found.conversation(row)[0] == turns


def test_texts_stay_a_prompt_and_its_completion_without_turns() -> None:
    row = {"prompt": json.dumps([USER]), "completion": "Four.", "id": 1}
    found, _ = format_of(row)
    assert (found.kind, found.columns) == ("completion", ("prompt", "completion"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER], "prompt": "a", "completion": "b"}, r"messages \(messages\) and prompt/completion"),
        (
            {"instruction": "a", "context": "b", "response": "c"},
            "has context beside instruction and response.*--column_mapping context=input response=output, or leave it",
        ),
        (
            {"Context": "a", "question": "b", "answer": "c"},
            "--column_mapping question=instruction Context=input answer=output, .*--column_mapping Context=unused",
        ),
        ({"text": "a", "response": "b"}, "--column_mapping text=prompt response=completion, .*--text_column_name text"),
        ({"text": "a", "completion": "b"}, "--column_mapping text=prompt, or"),
        ({"prompt": "a", "text": "b"}, "has prompt beside text.*--column_mapping text=completion, or"),
        ({"question": "a", "response": "b", "output": "c"}, "beside question.*--column_mapping response=answer"),
        ({"problem": "a", "solution": "b"}, r"match no format; .*such as --column_mapping problem=question solution="),
        ({"conversation": [USER, MODEL]}, "holds list.*--column_mapping conversation=messages"),
        ({"conversation": [USER, MODEL], "id": 1}, "such as --column_mapping conversation=messages"),
        ({"column_1": "a", "column_2": "b"}, "not taken as a header.*column_1=prompt column_2=completion"),
        (
            {"dialogue": "a b", "summary": "c"},
            "--column_mapping dialogue=prompt summary=completion, or on the text with",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            r"recipes/preference\.py.*--column_mapping chosen=completion",
        ),
        ({"chosen": [USER, MODEL], "rejected": [USER]}, r"are preferences.*--column_mapping chosen=messages"),
        ({"chosen": "Human: a", "rejected": "b"}, "--column_mapping chosen=text"),
        ({"version": "1.1", "data": [{"title": "a", "paragraphs": []}]}, r"recipes/question_answering\.py"),
    ],
    ids=[
        *("two formats", "Dolly", "context", "text and response", "text and completion", "prompt and text"),
        *("two answers", "other names", "a list alone", "a list", "no header", "summaries"),
        *("preferences", "preferences in turns", "preferences in texts", "SQuAD"),
    ],
)
def test_what_is_not_clear_or_would_be_learnt_wrongly_is_refused_with_a_mend(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        format_of(row)


def prepared(path: Path, block_size: int = 64, template: str | None = None, with_end: bool = True, **flags: Any) -> Any:
    tokenizer = train_text_tokenizer("byte", [], 0, 64, with_end=with_end)
    tokenizer.chat_template = template
    return prepare_corpus(
        CorpusArguments(train_file=str(path), **flags),
        BlockArguments(packing="none"),
        tokenizer,
        block_size=block_size,
        seed=1,
        launch=Launch(),
    )


def learnt(data: Any) -> list[str]:
    rows = [data.splits["train"][i]["shift_labels"] for i in range(len(data.splits["train"]))]
    return [data.tokenizer.decode(row[row != IGNORED].tolist()) for row in rows]


def write(path: Path, rows: list[Any], between: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" + between for row in rows))
    return path


@pytest.mark.parametrize("streaming", [False, True])
def test_the_format_is_said_with_what_is_read_and_what_is_left_out(streaming: bool, tmp_path: Path) -> None:
    rows = [{"id": i, "source": "x", "talk": said(("human", f"{i}?"), ("gpt", f"{i}."))} for i in range(40)]
    path = write(tmp_path / "a.jsonl", rows)
    data = prepared(path, column_mapping=["talk=conversations"], streaming=streaming)
    assert data.account.describe().startswith(
        f"data: ShareGPT{'' if streaming else ', 40 conversations'}; columns talk -> messages; left out: id, source; "
        "from a.jsonl ("
    )
    if streaming:
        item = next(iter(data.splits["train"].blocks(0)))
        labels = item["shift_labels"]
        assert data.tokenizer.decode(labels[labels != IGNORED].tolist()).endswith("<|endoftext|>")
        return
    assert sorted(learnt(data))[0].endswith(f".{data.tokenizer.eos_token}")


def test_of_a_conversation_that_is_a_prompt_only_the_completion_is_learnt(tmp_path: Path) -> None:
    rows = [{"prompt": [USER, MODEL, AGAIN[0]], "completion": [AGAIN[1]]}] * 4
    data = prepared(write(tmp_path / "a.jsonl", rows), block_size=200)
    assert set(learnt(data)) == {f"Seven.{data.tokenizer.eos_token}"}


def test_blank_completions_and_a_template_that_is_not_used_are_said(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "completion": " " if i < 3 else f"{i}."} for i in range(8)]
    data = prepared(write(tmp_path / "a.jsonl", rows), template="{{ messages }}")
    told = data.account.describe()
    assert "3 of 8 completions are blank, and not trained on: fill them, or remove the rows" in told
    assert "prompts and completions are trained as plain text, without it (--column_mapping completion=response" in told
    assert all(text.endswith(f".{data.tokenizer.eos_token}") for text in learnt(data))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"conversations": [{"value": "a"}]}, "a list of turns with `from` and `value`"),
        ({"conversations": said(("human", "a"), ("function_call", "no call"))}, "`name` and `arguments`"),
        (
            {"conversations": said(("human", "a"), ("function_call", '{"name": "b", "arguments": "c"}'))},
            "its JSON text",
        ),
        ({"conversations": [*said(("human", "a")), {"from": "gpt", "value": "b", "weight": 0.5}]}, "must be 0 .* or 1"),
    ],
)
def test_a_row_that_cannot_be_is_named_by_file_and_line(bad: dict[str, Any], message: str, tmp_path: Path) -> None:
    rows = [{"conversations": said(("human", "a"), ("gpt", "b"))}] * 9
    path = write(tmp_path / "a.jsonl", [*rows, bad], between="\n")
    with pytest.raises(RequestError, match=rf"^a\.jsonl line 19: .*{message}"):
        prepared(path)


DOCS = (REPO / "docs" / "data.md").read_text()
COMMANDS = [line for line in DOCS.splitlines() if line.startswith("python recipes/")]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_documentation_is_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("chats.jsonl"), [{"conversations": said(("human", "a"), ("gpt", "b"))}])
    write(Path("more.jsonl"), [{"question": "a", "answer": "b"}])
    write(Path("dolly.jsonl"), [{"instruction": "a", "context": "b", "response": "c"}])
    recipe, *words = command.removeprefix("python recipes/").split()
    look_at_columns(resolve(recipes()[recipe.removesuffix(".py")], words, Launch(), is_here=False))


def test_the_documentation_has_every_format() -> None:
    assert len(COMMANDS) >= 2
    for name, needed, _ in FORMATS:
        assert name in DOCS
        assert all(f"`{column}`" in DOCS or "/" in name for column in needed)


def test_a_renamed_column_that_no_file_has_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "x y"}])
    write(tmp_path / "b.jsonl", [{"body": "y z"}])
    files: dict[str, Any] = {"train_file": [str(tmp_path / "a.jsonl")], "validation_file": str(tmp_path / "b.jsonl")}
    assert open_corpora(CorpusArguments(**files, column_mapping=["body=text"]), seed=1)
    with pytest.raises(RequestError, match=r"bode=text: the data has no column 'bode'; it has text\."):
        open_corpora(CorpusArguments(train_file=files["train_file"], column_mapping=["bode=text"]), seed=1)
    mixed = [*files["train_file"], files["validation_file"]]
    write(tmp_path / "held_out.jsonl", [{"text": "z"}])
    files = {"train_file": mixed, "validation_file": str(tmp_path / "held_out.jsonl")}
    assert len(open_corpora(CorpusArguments(**files, column_mapping=["body=text"]), seed=1)) == 2
    with pytest.raises(RequestError, match=r"bode=texts: the data has no column 'bode'; it has text, body\."):
        open_corpora(CorpusArguments(**files, column_mapping=["body=text", "bode=texts"]), seed=1)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("talk=messages", "has no column 'talk'"),
        ("id=body", "has a column 'body' as well as 'id'"),
        ("id", "must be OLD=NEW"),
        ("title=text id=text", "each used only once"),
        ("title=text=body", "must be OLD=NEW"),
        ("title=text", ""),
        ("body=question title=answer", ""),
    ],
)
def test_columns_are_renamed_before_they_are_looked_at(
    words: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a.jsonl"), [{"id": "1", "title": "x", "body": "y z"}])
    Path("a.yaml").write_text("column_mapping:\n" + "".join(f"  {w.replace('=', ': ', 1)}\n" for w in words.split()))
    for how in (["--column_mapping", *words.split()], ["--config", "a.yaml"] if words.count("=") else None):
        if how is None:
            continue
        run = resolve(recipes()["causal_lm"], ["--train_file", "a.jsonl", *how], Launch(), is_here=False)
        if not wrong:
            look_at_columns(run)
            continue
        with pytest.raises(RequestError, match=wrong):
            look_at_columns(run)


BARE = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}\n{% endfor %}"
ENDED = BARE.replace("}}\n", "}}{{ eos_token if turn['role'] == 'assistant' }}\n")
ALTERNATING = (
    "{% for turn in messages %}{% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + ENDED
)


@pytest.mark.parametrize(
    ("template", "turns", "words"),
    [
        (BARE, [USER, MODEL], "writes no mark after the assistant's words in any conversation"),
        (ALTERNATING, [USER, USER, MODEL], r"a.jsonl line \d+: .* rejects a conversation \(roles must alternate\)"),
    ],
)
def test_what_would_be_wrong_in_silence_is_refused(template: str, turns: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(template)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(20)))
    with pytest.raises(RequestError, match=words):
        prepared(path, chat_template=str(tmp_path / "own.jinja"))


def test_a_tokenizer_without_template_and_end_is_named_as_the_cause(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": [USER, MODEL]}] * 20)
    with pytest.raises(RequestError, match="the tokenizer has neither a chat template nor an end-of-text token"):
        prepared(path, with_end=False)


def test_what_does_no_harm_is_said_and_learnt(tmp_path: Path) -> None:
    """A template without a mark, where every token is learnt; roles that a template takes twice; an empty answer."""
    path = tmp_path / "a.jsonl"
    for template, turns, flags, words in (
        (BARE, [USER, MODEL], {"train_on": "all"}, "messages, 20 conversations"),
        (ENDED, [USER, USER, MODEL], {}, "a role speaks twice in a row"),
        (ENDED, [USER, {"role": "assistant", "content": ""}, *AGAIN], {}, "have an empty assistant turn"),
        (ENDED, [USER, {"role": "assistant", "content": None}, *AGAIN], {}, "have an empty assistant turn"),
    ):
        (tmp_path / "own.jinja").write_text(template)
        path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(20)))
        data = prepared(path, chat_template=str(tmp_path / "own.jinja"), **flags)
        assert words in data.account.describe()


def test_conversations_that_teach_nothing_are_counted(tmp_path: Path) -> None:
    rows = [{"messages": turns} for turns in ([USER, MODEL], [USER], [USER, {**MODEL, "weight": 0}], [USER, MODEL])]
    said_of = prepared(write(tmp_path / "a.jsonl", rows * 9)).account.describe()
    assert "18 of 36 conversations have nothing to train on" in said_of
    assert "nothing to train on" not in prepared(tmp_path / "a.jsonl", train_on="all").account.describe()


def test_an_error_about_columns_names_the_file_if_there_are_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a.jsonl"), [{"messages": [USER, MODEL]}] * 9)
    write(Path("b.jsonl"), [{"problem": "a", "remark": "b"}] * 9)
    files = ["a.jsonl", "b.jsonl"]
    with pytest.raises(RequestError, match=r"the training data b\.jsonl: no column"):
        look_at_columns(resolve(recipes()["causal_lm"], ["--train_file", *files], Launch(), is_here=False))
    with pytest.raises(RequestError, match=r"the training data b\.jsonl: no column"):
        open_corpora(CorpusArguments(train_file=files), seed=1)
