"""Corpora from text files, tables and Python's own manual; what is held out; and the tokens that are made of them."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data import documents, token_stream
from finetune.data.causal_lm import prepare_corpus
from finetune.data.packing import IGNORED
from finetune.data.tokenizer import train_text_tokenizer
from finetune.errors import RequestError, RunError
from finetune.run.flags.language import BlockArguments, CorpusArguments
from finetune.run.launch import Launch


def prepared(tokenizer: Any = None, block_size: int = 16, blocks: dict[str, Any] | None = None, **flags: Any) -> Any:
    return prepare_corpus(
        CorpusArguments(**flags),
        BlockArguments(**(blocks or {})),
        tokenizer,
        block_size=block_size,
        seed=1,
        launch=Launch(),
    )


def text_of(data: Any, split: str) -> str:
    return data.tokenizer.decode(data.splits[split].tokens.ids.tolist())


@given(st.text(min_size=1))
@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_a_tokenizer_from_scratch_gives_every_text_back(kind: str, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode() or "a"
    made = train_text_tokenizer(kind, [text, "some more words"], 300, 64, with_end=True)
    assert made.decode(made(text, add_special_tokens=False)["input_ids"]) == text


def test_a_character_tokenizer_of_one_text_has_its_characters_alone(tmp_path: Path) -> None:
    made = train_text_tokenizer("char", ["hello\n", "world"], 0, 64, with_end=False)
    assert len(made) == len(set("hello\nworld"))
    made.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path)("hold").input_ids == made("hold").input_ids


def test_a_text_file_is_one_document_and_its_end_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 50)  # so that the file has many pieces
    text = "".join(f"line {i} of the text\n" for i in range(60))
    path = tmp_path / "a.txt"
    path.write_text(text)
    data = prepared(train_file=str(path), validation_split_percentage=10)
    cut = int(len(text) * 0.9)
    assert (text_of(data, "train"), text_of(data, "validation")) == (text[:cut], text[cut:])
    assert data.account.documents == {"train": 1, "validation": 1}
    assert data.account.characters == {"train": cut, "validation": len(text) - cut}
    assert data.account.left_over == (cut - 1) % 16
    assert data.account.describe() == (
        f"data: a.txt ({cut:,} train, {len(text) - cut:,} validation tokens, {(cut - 1) % 16} left over; blocks of 16, "
        "wrapped)"
    )
    assert data.tokenizer.eos_token is None
    blocks = data.splits["train"]
    assert len(blocks) == (cut - 1) // 16
    assert data.account.left_over == (cut - 1) % 16


def test_rows_are_documents_joined_by_the_end_of_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document number {i}"}) + "\n" for i in range(20)))
    data = prepared(train_file=str(path), blocks={"tokenizer": "bpe", "packing": "bfd", "document_mask": True})
    assert data.account.documents == {"train": 18, "validation": 2}
    pieces = text_of(data, "train").split(data.tokenizer.eos_token)
    assert len(pieces) == 19
    assert not pieces[-1]
    assert "position_ids" in data.splits["train"][0]


def test_conversations_are_learnt_in_part(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "Yes."}]
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"messages": turns}) + "\n") * 4)
    tokenizer = train_text_tokenizer("byte", [], 0, 64, with_end=True)
    data = prepared(tokenizer, block_size=64, blocks={"packing": "none"}, train_file=str(path))
    labels = data.splits["train"][0]["shift_labels"]
    assert tokenizer.decode(labels[labels != IGNORED].tolist()) == f"Yes.{tokenizer.eos_token}", "it learns to stop"
    assert data.account.learnt["train"] == 3 * len("Yes.!")
    assert data.account.characters["train"] == 3 * len("Yes.")
    assert data.account.tokens_per_byte == data.account.tokens_per_character == len("Yes.!") / len("Yes.")
    assert data.tokenizer.chat_template, "and the template that it has learnt by is saved with it"


@pytest.mark.parametrize(
    ("content", "blocks", "message"),
    [
        ("a" * 30, {}, "has 27 tokens, less than one block of 64"),
        ("", {}, "is empty"),
    ],
    ids=["shorter than a block", "empty"],
)
def test_bad_corpora_are_refused(content: str, blocks: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(content)
    with pytest.raises(RequestError, match=message):
        prepared(block_size=64, blocks=blocks, train_file=str(path))


def test_a_models_own_character_tokenizer_meets_no_unknown_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(20)) + '{"text": "row \u00e9"}\n' * 9
    )
    letters = train_text_tokenizer("char", ["row 0123456789"], 0, 64, with_end=True)
    with pytest.raises(RequestError, match=r"has 'é' \(U\+00E9\) in 'row é', .*no token"):
        prepared(letters, train_file=str(path))
    letters = train_text_tokenizer("byte", [], 0, 64, with_end=True)
    assert prepared(letters, train_file=str(path)).account.documents["train"] == 26


def stream(folder: Path, **flags: Any) -> Any:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i} " * (i % 7 + 1)}) + "\n" for i in range(400)))
    return prepared(
        train_file=str(path), **{"streaming": True, "blocks": {"tokenizer": "byte"}, "max_eval_samples": 20, **flags}
    )


@pytest.mark.parametrize("packing", ["wrapped", "bfd", "none"])
def test_a_stream_gives_the_documents_that_are_not_held_out_once_an_epoch(
    packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_stream, "WINDOW_TOKENS", 1500)  # so that there are many windows
    data = stream(tmp_path, blocks={"tokenizer": "byte", "packing": packing}, block_size=64)
    train = data.splits["train"]
    epochs = []
    for epoch in range(2):
        epochs.append([item["input_ids"].tolist() for item in train.blocks(epoch)])
    assert epochs[0] != epochs[1], "each epoch is shuffled anew"
    both = [item["input_ids"].tolist() for item in islice(train, len(epochs[0]) + len(epochs[1]))]
    assert both == epochs[0] + epochs[1], "and they follow one another"
    held_out = set(text_of(data, "validation").split(data.tokenizer.eos_token)[:-1])
    assert len(held_out) == 20
    learnt: Counter[int] = Counter()
    for item in train.blocks(0):
        learnt.update(item["shift_labels"][item["shift_labels"] != IGNORED].tolist())
    wanted: Counter[int] = Counter()
    for i in range(400):
        text = f"document {i} " * (i % 7 + 1)
        if text not in held_out:
            ids = [*data.tokenizer(text).input_ids, data.tokenizer.eos_token_id]
            wanted.update(ids if packing == "wrapped" else ids[1:])
    missing = wanted - learnt
    assert len(list(train._windows())) > 4
    if packing == "wrapped":  # but for the first token, and what fills no block at the end
        assert missing.total() == 1 + (wanted.total() - 1) % 64
        assert {len(ids) for ids in epochs[0]} == {64}
    else:
        assert not missing
    assert not learnt - wanted


def test_each_epoch_of_a_stream_has_its_documents_in_an_order_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not its blocks alone, which are shuffled within a window."""
    monkeypatch.setattr(token_stream, "WINDOW_TOKENS", 1500)
    train = stream(tmp_path).splits["train"]
    windows = []
    for epoch in (0, 1, 0):
        assert len(list(train.blocks(epoch))) > 100
        windows.append([window.tokens.ids.tolist() for window in train._windows()])
    assert windows[0] == windows[2] != windows[1]
    assert windows[0][0] != windows[1][0]


@pytest.mark.parametrize("most", [None, 300])
def test_no_held_out_document_of_a_stream_of_many_files_is_trained_on(most: int | None, tmp_path: Path) -> None:
    """Shuffling a stream changes the order of its files, under any filter that counts."""
    for part in range(4):
        rows = [json.dumps({"text": f"document {part}-{i}"}) + "\n" for i in range(100)]
        (tmp_path / f"train-{part}.jsonl").write_text("".join(rows))
    flags: dict[str, Any] = {"dataset_name": str(tmp_path), "streaming": True, "max_eval_samples": 30}
    data = prepared(blocks={"tokenizer": "byte", "packing": "none"}, block_size=64, **flags, max_train_samples=most)
    held_out = set(text_of(data, "validation").split(data.tokenizer.eos_token)[:-1])
    for epoch in range(2):
        trained = [data.tokenizer.decode(item["input_ids"]) for item in data.splits["train"].blocks(epoch)]
        assert len(held_out) == 30
        assert not held_out & {text.removesuffix(data.tokenizer.eos_token) for text in trained}
        assert len(trained) == len(set(trained)) == (most or 370)


def test_a_streamed_text_stays_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(token_stream, "BATCH_ROWS", 2)  # so that there are many windows
    monkeypatch.setattr(token_stream, "WINDOW_TOKENS", 300)
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"
    text = "".join(f"line {i} of the text\n" for i in range(100))
    path.write_text(text)
    other.write_text("some more\n" * 20)
    flags = {"train_file": str(path), "validation_file": str(other), "streaming": True}
    data = prepared(blocks={"tokenizer": "byte"}, block_size=32, **flags)
    train, decode = data.splits["train"], data.tokenizer.decode
    assert len(list(train._windows())) > 4
    found = {decode(item["input_ids"]): decode(item["shift_labels"]) for item in train.blocks(0)}
    # Blocks are shuffled, and each is a run of the text; the next character is the label of each, and none is lost.
    starts = range(0, (len(text) - 1) // 32 * 32, 32)
    assert found == {text[start : start + 32]: text[start + 1 : start + 33] for start in starts}


def test_a_validation_file_is_used_whatever_trains(tmp_path: Path) -> None:
    folder, held_out = tmp_path / "data", tmp_path / "v.txt"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "words to train on"}\n' * 30)
    (folder / "validation.jsonl").write_text('{"text": "words that come with it"}\n' * 30)
    held_out.write_text("words to validate on\n" * 30)
    own = tmp_path / "v.jsonl"
    own.write_text('{"text": "words of my own"}\n' * 5)
    byte = {"tokenizer": "byte"}
    data = prepared(blocks=byte, dataset_name=str(folder), validation_file=str(own))
    assert text_of(data, "validation").startswith("words of my own")
    alone = prepared(blocks=byte, validation_file=str(held_out))
    assert text_of(alone, "validation") == held_out.read_text()


def test_so_many_pieces_of_a_text_end_like_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 50)
    path = tmp_path / "a.txt"
    path.write_text("a line of the text\n" * 100)
    data = prepared(train_file=str(path), max_train_samples=10, max_eval_samples=1)
    assert data.account.documents == {"train": 1, "validation": 1}
    assert len(data.splits["validation"]) >= 2


def test_packing_uses_the_same_tokens_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "some words"}\n' * 30)
    tokenizer = train_text_tokenizer("byte", [], 0, 64, with_end=True)
    for packing, block_size in (("wrapped", 16), ("bfd", 16), ("none", 32)):
        prepared(tokenizer, block_size=block_size, blocks={"packing": packing}, train_file=str(path))
    assert len([place for place in (tmp_path / "cache" / "causal_lm").iterdir() if place.is_dir()]) == 1


def chats(folder: Path, role: str, prompts: list[str]) -> str:
    path = folder / f"{role}.jsonl"
    turns = [[{"role": "user", "content": p}, {"role": role, "content": "Yes."}] for p in prompts]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))
    return str(path)


def test_blocks_in_which_nothing_is_learnt_are_left_out(tmp_path: Path) -> None:
    tokenizer = train_text_tokenizer("byte", [], 0, 64, with_end=True)
    path = chats(tmp_path, "assistant", ["short", "l" * 200] * 10)
    for packing in ("none", "wrapped", "bfd"):
        train = prepared(tokenizer, block_size=32, blocks={"packing": packing}, train_file=path).splits["train"]
        assert all((item["shift_labels"] != IGNORED).any() for item in train)
    with pytest.raises(RequestError, match=r"only turns of role `assistant` are learned, .* here are gpt, user"):
        prepared(tokenizer, block_size=32, train_file=chats(tmp_path, "gpt", ["a", "b", "c"]))


@pytest.mark.parametrize(
    ("packing", "said"),
    [
        ("none", "9 of 18 conversations are longer than --block_size 32 and are cut: 95% of the trained tokens"),
        ("bfd", "9 of 18 conversations are longer than --block_size 32 and are cut: 95% of the trained tokens"),
        ("wrapped", "conversations do not fit into one block of 32 and are cut"),
    ],
)
def test_conversations_that_blocks_cut_are_counted_with_what_is_learnt_without_a_beginning(
    packing: str, said: str, tmp_path: Path
) -> None:
    tokenizer = train_text_tokenizer("byte", [], 0, 64, with_end=True)
    rows = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * n}] for n in [1, 200] * 9]
    kept = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    for name, some in (("a", rows), ("v", kept)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in some))
    flags = {"train_file": str(tmp_path / "a.jsonl"), "validation_file": str(tmp_path / "v.jsonl")}
    data = prepared(tokenizer, 32, {"packing": packing}, **flags)
    predicted = 32 + 1 - len("<|user|>\na\n<|assistant|>\n")  # of a long answer and its end, by the first block
    assert round((201 - predicted) / (201 + 2), 2) == 0.95
    assert said in data.account.describe()
    assert "cut" not in prepared(tokenizer, 400, {"packing": "bfd"}, **flags).account.describe()


def test_what_is_held_out_of_the_manual_is_not_in_its_training_text() -> None:
    for seed in range(3):
        data = prepare_corpus(CorpusArguments(), BlockArguments(), None, block_size=128, seed=seed, launch=Launch())
        train = {line.strip() for line in text_of(data, "train").splitlines()}
        lines = [line.strip() for line in text_of(data, "validation").splitlines() if len(line.strip()) >= 40]
        assert len(lines) > 50
        assert sum(line in train for line in lines) < 0.03 * len(lines)


def test_a_stream_with_less_than_a_block_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="less text than one block"):
        next(iter(stream(tmp_path, block_size=100_000).splits["train"]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"train_file": "text"}, "cannot hold out part of a single text"),
        ({"validation_split_percentage": 1e-9}, "too few documents to hold any out"),
    ],
    ids=["one text", "too few"],
)
def test_streams_that_cannot_be_are_refused(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    if flags.get("train_file") == "text":
        (tmp_path / "a.txt").write_text("some text\n" * 50)
        flags = {**flags, "train_file": str(tmp_path / "a.txt")}
    base = {"streaming": True, "blocks": {"tokenizer": "byte"}}
    if "train_file" not in flags:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "a few words"}\n' * 30)
        base["train_file"] = str(path)
    with pytest.raises(RequestError, match=message):
        prepared(**{**base, **flags})


def test_a_validation_file_may_not_have_characters_that_the_training_text_lacks(tmp_path: Path) -> None:
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_text("abc" * 60 + "\u00df" * 20)  # the end is held out, and its characters are the text's all the same
    assert prepared(train_file=str(path)).account.characters["validation"] == 20
    other.write_text("abc" * 60 + "\u00e9" * 20)
    with pytest.raises(RequestError, match=r"has 'é' \(U\+00E9\) in .*no token"):
        prepared(train_file=str(path), validation_file=str(other))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": 5}, r"column text holds int \(5\), not text"),
        ({"content": [{"by": "human"}]}, r"column content holds list .*`messages` with `role`"),
        ({"prompt": "words"}, "has `prompt` without `completion`"),
    ],
    ids=["numbers", "lists", "prompts alone"],
)
def test_a_column_that_is_no_text_is_refused(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps(row) + "\n") * 20)
    with pytest.raises(RequestError, match=message):
        prepared(train_file=str(path))


def test_text_of_another_encoding_is_refused_and_line_ends_are_alike(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\u043f\u0440\u0438\u0432\u0435\u0442\n".encode("cp1251") * 50)
    with pytest.raises(RequestError, match="is not UTF-8 text"):
        prepared(train_file=str(path))
    path.write_bytes("\ufeffa line\r\nanother\r\n".encode() * 50)
    assert "\r" not in text_of(prepared(train_file=str(path)), "train")


def test_a_table_without_text_lists_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("price,size\n1,2\n3,4\n")
    with pytest.raises(RequestError, match=r"it has price, size\. Name one with --text_column_name, or rename columns"):
        prepared(train_file=str(path))


def test_the_manual_is_there_on_every_python() -> None:
    data = prepared(block_size=128)
    assert data.account.tokens["train"] > 300_000
    assert data.account.documents["validation"] >= 5


@pytest.mark.parametrize(
    ("row", "flags", "said"),
    [
        ({"document": "a b c", "author": "d"}, {}, "reads document as text, not author"),
        ({"said": "a b c"}, {"column_mapping": ["said=text"]}, "reads said as text"),
        (
            {"document": "a b c", "summary": "d e f"},
            {"text_column_name": "summary"},
            "reads summary as text, not document",
        ),
        ({"text": "a b c"}, {}, "reads text as text"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_columns_are_said_with_those_that_nothing_reads(
    row: dict[str, str], flags: dict[str, Any], said: str, streaming: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({k: f"{v} {i}" for k, v in row.items()} | {"n": i}) + "\n" for i in range(90)))
    corpus = documents.open_corpus(CorpusArguments(train_file=str(path), streaming=streaming, **flags), seed=1)
    assert corpus.columns == (f"{said} + n" if "not" in said else f"{said}, not n")


def test_a_pad_token_that_ends_turns_as_well_is_learnt_where_it_ends_one(tmp_path: Path) -> None:
    tokenizer = train_text_tokenizer("byte", [], 0, 64, with_end=True)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    data = prepared(tokenizer, 64, {"packing": "none"}, train_file=chats(tmp_path, "assistant", ["a", "b" * 20] * 4))
    batch = data.collator([data.splits["train"][i] for i in range(4)])
    assert (batch["input_ids"][:, -1] == tokenizer.pad_token_id).any(), "some are padded"
    assert ((batch["labels"] == tokenizer.eos_token_id).sum(-1) == 1).all()


def test_what_chats_teach_is_chosen_said_and_part_of_what_is_cached(tmp_path: Path) -> None:
    def learnt(**flags: Any) -> tuple[Any, str]:
        tokenizer = train_text_tokenizer("byte", [], 0, 512, with_end=True)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        made = prepared(tokenizer, 512, {"packing": "none"}, train_file=str(path), **flags)
        labels = made.splits["train"][0]["shift_labels"]
        return made, tokenizer.decode(labels[labels != IGNORED].tolist())

    turns = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "<think>Hm.</think>Yes."}] * 2
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"messages": turns, "tools": None}) + "\n") * 4)
    data, text = learnt()
    end = data.tokenizer.eos_token
    assert text == f"<think>Hm.</think>Yes.{end}" * 2
    assert "; the tokenizer has no chat template" in data.account.describe()
    assert data.account.turn_ends == [data.tokenizer.eos_token_id]
    assert learnt(train_on="last", reasoning="strip")[1] == f"Yes.{end}"
    data, text = learnt(chat_template="chatml", reasoning="strip")
    assert text == "Yes.<|im_end|>" * 2
    assert data.account.turn_ends == [data.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    data.tokenizer.save_pretrained(tmp_path / "saved")
    assert "<|im_start|>" in (tmp_path / "saved" / "chat_template.jinja").read_text(), "it goes with the model"
    mine = tmp_path / "mine.jinja"
    for mark in ("<|a|>", "<|b|>"):
        mine.write_text("{% for m in messages %}{{ m.role }}:{{ m.content }}" + mark + "{% endfor %}")
        data, text = learnt(chat_template=str(mine), train_on="last", reasoning="strip")
        assert text == f"Yes.{mark}", "what the file says counts, not its name"
        assert f"Yes.{mark}', which is not a special token" in data.account.describe()


@pytest.mark.parametrize("flags", [{"train_on": "last"}, {"reasoning": "strip"}, {"chat_template": "chatml"}])
def test_flags_of_chats_are_refused_for_text(flags: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a few words"}\n' * 30)
    with pytest.raises(RequestError, match=r"is for conversations, but the data has text"):
        prepared(train_text_tokenizer("byte", [], 0, 64, with_end=True), train_file=str(path), **flags)
