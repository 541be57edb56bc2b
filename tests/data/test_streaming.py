"""Classification on a stream: what is held out, what is left, and in which order it comes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from finetune.data import streaming
from finetune.data.streaming import StreamCollator, Survey, TextStream, held_out_rows, is_drawn, some_texts, survey
from finetune.data.tokenizer import train_text_tokenizer
from finetune.errors import RequestError, RunError
from finetune.run.flags.text import DataArguments, PreparationArguments

ROWS = 300


def arguments(folder: Path, rows: list[dict[str, Any]] | None = None) -> DataArguments:
    path = folder / "a.jsonl"
    rows = rows or [{"text": f"row {i}", "label": "good" if i % 3 else "bad"} for i in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataArguments(train_file=str(path), streaming=True)


def surveyed(data: DataArguments, has_validation: bool = False, seed: int = 3, **flags: Any) -> Survey:
    return survey(data, PreparationArguments(**flags), has_validation, seed, None)


def texts(stream: TextStream) -> list[str]:
    return [row["text"][0] for row in stream]


def test_each_epoch_of_a_stream_has_all_its_rows_in_an_order_of_its_own(tmp_path: Path) -> None:
    data = arguments(tmp_path)
    found = surveyed(data, has_validation=True)
    epochs: list[list[str]] = []
    for epoch in (0, 1, 0):
        stream = TextStream(data, found, seed=3)
        stream.set_epoch(epoch)
        epochs.append(texts(stream))
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"row {i}" for i in range(ROWS))
    assert texts(TextStream(data, found, seed=4)) != epochs[0], "and the seed decides"
    assert epochs[0] != [f"row {i}" for i in range(ROWS)]


def test_a_stream_is_cleaned_of_html_line_breaks_as_a_table_is(tmp_path: Path) -> None:
    rows = [{"text": f"row<br />{i}" if i % 7 else "<br>", "label": str(i % 3)} for i in range(ROWS)]
    data = arguments(tmp_path, rows)
    data.clean_line_breaks = True
    with pytest.raises(RequestError, match="data row 1 of the stream has an empty text"):
        surveyed(data)
    found = surveyed(data, skip_bad_rows=True)
    good = sorted(f"row\n{i}" for i in range(ROWS) if i % 7)
    assert sorted([*texts(TextStream(data, found, seed=3)), *held_out_rows(data, found, seed=3)["text"]]) == good
    assert sorted(text for text in some_texts(data, found) if text.strip()) == good


def test_what_is_held_out_is_not_trained_on_and_nothing_is_lost(tmp_path: Path) -> None:
    data = arguments(tmp_path)
    found = surveyed(data)
    held_out = held_out_rows(data, found, seed=3)["text"]
    assert len(held_out) == found.held_out
    assert 15 <= found.held_out <= 45, "a tenth of 300"
    trained = texts(TextStream(data, found, seed=3))
    assert len(trained) == found.rows == ROWS - found.held_out
    assert sorted([*trained, *held_out]) == sorted(f"row {i}" for i in range(ROWS))
    assert Counter(found.label_counts) == Counter("good" if int(t.split()[1]) % 3 else "bad" for t in trained)
    assert held_out == [f"row {i}" for i in range(ROWS) if is_drawn(i, 3, 0.1)]


@pytest.mark.parametrize(("most", "train"), [(None, None), (5, None), (5, 40), (None, 40), (1, 7)])
def test_so_many_are_held_out_and_so_many_trained_on_as_was_asked(
    most: int | None, train: int | None, tmp_path: Path
) -> None:
    data = arguments(tmp_path)
    found = surveyed(data, max_eval_samples=most, max_train_samples=train)
    drawn = [i for i in range(ROWS) if is_drawn(i, 3, 0.1)]
    held_out = held_out_rows(data, found, seed=3)["text"]
    assert held_out == [f"row {i}" for i in drawn[: most or None]]
    trained = texts(TextStream(data, found, seed=3))
    assert len(set(trained)) == len(trained) == found.rows == (train or ROWS - len(held_out))
    assert not set(trained) & set(held_out)


def test_a_stream_is_drawn_from_evenly_and_by_its_seed() -> None:
    drawn = [i for i in range(100_000) if is_drawn(i, 1, 0.1)]
    assert 9_500 < len(drawn) < 10_500
    assert 4_700 < sum(i < 50_000 for i in drawn) < 5_300
    assert not any(is_drawn(i, 1, 0.0) for i in range(1000))
    assert all(is_drawn(i, 1, 1.0) for i in range(1000))
    assert drawn != [i for i in range(100_000) if is_drawn(i, 2, 0.1)]


def test_at_most_a_thousand_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "HELD_OUT_ROWS", 12)
    data = arguments(tmp_path)
    found = surveyed(data)
    assert (found.held_out, found.rows) == (12, ROWS - 12)
    assert is_drawn(found.last_held_out, 3, 0.1)
    assert held_out_rows(data, found, seed=3).num_rows == 12


@pytest.mark.parametrize(("batch", "rows"), [(1, 300), (300, 300), (7, 301), (256, 512), (299, 598), (700, 700)])
def test_the_last_global_batch_of_a_stream_is_filled_up_from_its_first_rows(
    batch: int, rows: int, tmp_path: Path
) -> None:
    data = arguments(tmp_path)
    stream = TextStream(data, surveyed(data, has_validation=True), seed=3)
    stream.global_batch_size = batch
    found = texts(stream)
    assert len(found) == len(stream) == rows
    assert found[ROWS:] == (found[:ROWS] * 2)[: rows - ROWS]
    assert len(set(found[:ROWS])) == ROWS


@pytest.mark.parametrize("batch", [5, 8], ids=["whole batches", "a batch to fill"])
def test_a_stream_whose_file_changes_at_its_end_is_not_finished_silently(batch: int, tmp_path: Path) -> None:
    rows = [{"text": f"row {i:02}", "label": "ab"[i % 2]} for i in range(20)]
    data = arguments(tmp_path, rows)
    stream = TextStream(data, surveyed(data, has_validation=True), seed=3)
    stream.global_batch_size = batch
    read = iter(stream)
    for _ in rows:
        next(read)
    path = Path(str(data.train_file))
    path.write_text(path.read_text().replace("row", "ROW"))
    with pytest.raises(RunError, match="has changed since the run began"):
        list(read)


def test_bad_rows_are_named_or_left_out(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}" if i != 41 else " ", "label": "ab"[i % 2] if i != 50 else None} for i in range(100)]
    data = arguments(tmp_path, rows)
    with pytest.raises(RequestError, match="data row 42 of the stream has an empty text, or an empty or hidden label"):
        surveyed(data)
    found = surveyed(data, skip_bad_rows=True)
    assert (found.skipped, found.rows + found.held_out) == (2, 98)
    trained = texts(TextStream(data, found, seed=3))
    assert len(trained) == found.rows
    assert not {" ", "row 50"} & {*trained, *held_out_rows(data, found, seed=3)["text"]}


@pytest.mark.parametrize(
    ("labels", "said"),
    [(["0", "1", "NaN"], "without a label. 'NaN' counts as no label"), ([0, 1, [1]], r"row 3 .* is \[1\], a list")],
)
def test_labels_of_a_stream_that_are_none_are_refused(labels: list[Any], said: str, tmp_path: Path) -> None:
    rows = [{"text": f"row {i}", "label": labels[i % 3]} for i in range(ROWS)]
    with pytest.raises(RequestError, match=said):
        surveyed(arguments(tmp_path, rows))


def test_a_hidden_label_of_a_stream_is_none_and_not_the_last_class(tmp_path: Path) -> None:
    """SNLI's has the id -1."""
    labels = [-1 if i % 5 == 0 else i % 2 for i in range(100)]
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    rows = {"text": [f"row {i}" for i in range(100)], "label": labels}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    data = DataArguments(dataset_name=str(tmp_path), streaming=True)
    with pytest.raises(RequestError, match="data row 1 of the stream has an empty text, or an empty or hidden label"):
        surveyed(data)
    found = surveyed(data, skip_bad_rows=True)
    assert (found.skipped, found.rows + found.held_out) == (20, 80)
    seen = {row["text"][0]: row["labels"] for row in TextStream(data, found, seed=3)}
    seen |= {row["text"]: row["label"] for row in held_out_rows(data, found, seed=3)}
    assert seen == {f"row {i}": label for i, label in enumerate(labels) if label != -1}


def test_a_stream_that_ends_early_ends_the_run(tmp_path: Path) -> None:
    data = arguments(tmp_path)
    found = surveyed(data, has_validation=True)
    lines = Path(str(data.train_file)).read_text().splitlines(keepends=True)
    Path(str(data.train_file)).write_text("".join(lines[:-1]))
    with pytest.raises(RunError, match="the stream ended after 299 rows, but 300 were counted"):
        texts(TextStream(data, found, seed=3))


def test_a_vocabulary_is_trained_on_the_first_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "TOKENIZER_ROWS", 4)
    data = arguments(tmp_path)
    assert list(some_texts(data, surveyed(data))) == ["row 0", "row 1", "row 2", "row 3"]


def test_rows_are_tokenized_to_the_length_that_was_asked_and_their_labels_kept(tmp_path: Path) -> None:
    tokenizer = train_text_tokenizer("byte", [], 0, 64, with_end=True)
    batch = StreamCollator(tokenizer, 4)([{"text": ("abcdefgh",), "labels": 1}, {"text": ("ab",), "labels": 0}])
    assert batch["input_ids"].shape == (2, 4)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert tokenizer.decode(batch["input_ids"][0]) == "abcd"
    assert batch["labels"].tolist() == [1, 0]
