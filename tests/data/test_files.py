"""Tables as people have them: with and without header, quoted and not, and broken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from finetune.data.files import open_file, open_hub
from finetune.data.tables import clean_tables, load_tables
from finetune.errors import RequestError
from finetune.run.flags.text import DataArguments, PreparationArguments


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


READ = [
    pytest.param("a.csv", "text,label\nhello there,1\nbye,0\n", {"text": "hello there", "label": "1"}, id="plain csv"),
    pytest.param("a.csv", '\ufefftext,label\n"a, b",1\nc,0\n', {"text": "a, b", "label": "1"}, id="quotes and a BOM"),
    pytest.param(
        "a.csv", 'text,label\n"two\nlines",1\nc,0\n', {"text": "two\nlines", "label": "1"}, id="line in a cell"
    ),
    pytest.param("a.tsv", "sentence\tlabel\na b\t1\nc d\t0\n", {"sentence": "a b", "label": "1"}, id="SST-2 of GLUE"),
    pytest.param("a.tsv", "a b\t1\nc d\t0\n", {"column_1": "a b", "column_2": "1"}, id="SST-2 without header"),
    pytest.param(
        "a.tsv",
        "good\tpos\nbad\tneg\nfine\tpos\nso\tneg\nwell\tpos\n",
        {"column_1": "good", "column_2": "pos"},
        id="words",
    ),
    pytest.param("a.tsv", 'say "hi\t1\nb\t0\n', {"column_1": 'say "hi', "column_2": "1"}, id="a lone quote in a tsv"),
    pytest.param("a.tsv", 't\tlabel\n"a ""b"""\t1\n', {"t": 'a "b"', "label": "1"}, id="a quoted tsv"),
    pytest.param(
        "a.csv", "text;label\nhallo welt;gut\nnein;schlecht\n", {"text": "hallo welt", "label": "gut"}, id=";"
    ),
    pytest.param("a.csv", "text,label\nNA,1\nnull,0\n", {"text": "NA", "label": "1"}, id="NA is a word"),
    pytest.param(
        "a.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n', {"text": "a", "label": 1}, id="jsonl"
    ),
    pytest.param(
        "a.json", '[{"text": "a", "label": 1}, {"text": "b", "label": 0}]', {"text": "a", "label": 1}, id="json"
    ),
]


@pytest.mark.parametrize(("name", "content", "first"), READ)
def test_a_table_is_read_as_it_is_meant(name: str, content: str, first: dict[str, object], tmp_path: Path) -> None:
    assert open_file("train_file", write(tmp_path, name, content))[0] == first


def test_parquet_is_read(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}).to_parquet(str(tmp_path / "a.parquet"))
    assert open_file("train_file", str(tmp_path / "a.parquet"))[1] == {"text": "b", "label": 1}


REFUSED = [
    pytest.param("a.csv", "text,label\na,1\nb,0,9\n", "line 3 has 3 cells", id="a cell too many"),
    pytest.param("a.csv", "so, so,1\nb,0\nc,1\nd,0\n", "line 1 has 3 cells", id="a cell too many at first"),
    pytest.param("a.jsonl", '{"text": "a"}\n{"text": \n', r"line 2, column", id="broken json line"),
    pytest.param("a.csv", "", "the file is empty", id="empty file"),
    pytest.param("a.csv", "text,label\n", "no rows", id="a header alone"),
    pytest.param("a.csv", "text,text\na,1\n", "two columns have the same name", id="one name twice"),
    pytest.param("a.xlsx", "text", "cannot tell what it is", id="a spreadsheet"),
    pytest.param("a.parquet", "text", "cannot be read as parquet", id="no parquet at all"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_a_broken_table_is_refused_with_its_place(name: str, content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        open_file("train_file", write(tmp_path, name, content))


def test_a_test_file_of_one_column_without_header_keeps_its_first_row(tmp_path: Path) -> None:
    train = write(tmp_path, "train.tsv", "good film\t1\nbad film\t0\nbad plot\t0\n")
    test = write(tmp_path, "test.tsv", "first row\nsecond row\n")
    tables, _ = load_tables(DataArguments(train_file=train, test_file=test))
    assert tables["test"]["column_1"][:] == ["first row", "second row"]


def test_a_quote_left_open_is_no_traceback(tmp_path: Path) -> None:
    text = 'text,label\n"' + "a long cell " * 20_000 + "\n"
    with pytest.raises(RequestError, match="Is a quote left open"):
        open_file("train_file", write(tmp_path, "a.csv", text))


def test_a_missing_file_is_refused_with_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, "reviews.csv", "text,label\n")
    with pytest.raises(RequestError, match=r"no such file.*holds reviews\.csv"):
        open_file("train_file", str(tmp_path / "review.csv"))


def test_real_sst2_is_read_whole(sst2: Path) -> None:
    train = open_file("train_file", str(sst2 / "train.tsv"))
    assert len(train) == 6920
    assert set(train["column_2"]) == {"0", "1"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "text,label\na b,1\nc, d,0\n", "line 3 has 3 cells, but there are 2 columns"),
        ("a.csv", "text,label\n1,2,3\n4,5,6\n", "line 2 has 3 cells, but there are 2 columns"),
        ("a.csv", "text,label\na,1,\nb,0,\n", "line 2 has 3 cells, but there are 2 columns"),
        ("a.csv", 'text,label\n"a\nb",1\nc, d,0\n', "line 4 has 3 cells"),
        ("a.tsv", "text\tlabel\na b\t1\nc\td\t0\n", "line 3 has 3 cells, but there are 2 columns"),
        ("a.csv", "text,label\n" + "a b,1\n" * 300 + "c, d,0\n", "line 302 has 3 cells, but there are 2 columns"),
        (
            "a.csv",
            'text,label\n"a b",1\n"c d,0\n"e",1\n"f",0\n',
            "line 3 opens .* lines 3 to 4 would be one row. Close it",
        ),
        ("a.csv", 'text,label\n"c, d,0\nx,1\ny,0\n"e f",1\n', "line 2 opens .* lines 2 to 5 would be one"),
        (
            "a.csv",
            "text,label\n" + "a b,1\n" * 300 + '"c d,0\n' + "e,1\n",
            "line 302 opens a double quote that its row does not close",
        ),
    ],
)
def test_a_row_with_too_many_cells_is_named_by_its_line(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(RequestError, match=f"--train_file {path}: {said}"):
        open_file("train_file", str(path))


@pytest.mark.parametrize(
    "cell", ["one, two\nthree, four", 'he said ""a,1""\nand, so', "a\n\nb,1", "b,1\n", '""a""\nb,1']
)
def test_a_quoted_cell_of_several_lines_is_read_whole(cell: str, tmp_path: Path) -> None:
    text = f'text,label\nx,1\n"{cell}",0\n"y",1\n'
    assert open_file("train_file", write(tmp_path, "a.csv", text))["text"][:] == ["x", cell.replace('""', '"'), "y"]


def test_a_text_of_one_column_is_told_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("One line of text.\nAnother line.\n")
    tables, _ = load_tables(DataArguments(train_file=str(path)))
    with pytest.raises(
        RequestError, match=r"has one column, 'One line of text.', and no label.*txt file, tabs separate columns"
    ):
        clean_tables(tables, DataArguments(), PreparationArguments(), 1)


@pytest.mark.parametrize(("name", "row"), [("a.csv", "text,label\n{0},1\n"), ("a.jsonl", '{{"text": "{0}"}}\n')])
@pytest.mark.parametrize("as_folder", [False, True])
def test_rows_are_those_of_the_file_as_it_is_now_though_it_has_its_old_time(
    name: str, row: str, as_folder: bool, tmp_path: Path
) -> None:
    """As `rsync -t`, `cp -p` and archives leave it."""
    for said in ("one", "two"):
        path = write(tmp_path, name, row.format(said))
        os.utime(path, (1_650_000_000, 1_650_000_000))
        data = open_hub(str(tmp_path), None, "train") if as_folder else open_file("train_file", path)
        assert data is not None
        assert [given["text"] for given in data] == [said]


def test_a_folder_with_a_table_of_thousands_of_columns_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", ",".join(f"c{n}" for n in range(2001)) + "\n")
    with pytest.raises(RequestError, match=r"train\.csv: has 2,001 columns"):
        open_hub(str(tmp_path), None, "train")
