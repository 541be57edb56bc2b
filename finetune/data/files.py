"""Opens local tables and hub data sets as `datasets.Dataset`, with errors that name the place and the fix."""

from __future__ import annotations

import csv
import itertools
import json
import re
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from finetune.data.cache import cache_key, file_states
from finetune.data.charset import UTF8, as_utf8
from finetune.data.columns import number_in
from finetune.data.hub import hub_is_reachable
from finetune.data.open_quotes import refuse_open_quotes
from finetune.errors import FinetuneError, RequestError, first_line
from finetune.run.flags.text import CONLL
from finetune.run.paths import missing_file
from finetune.safe_read import DEEPEST, TOKEN
from finetune.safe_read.files import open_plain
from finetune.safe_read.folders import check_data_folder

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

T = TypeVar("T")
KINDS = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
TEXT_FILES = (".txt", ".text", ".md")  # for language models; each file is one document
OFFLINE = "Offline? Give local files with --train_file (csv, tsv, json, parquet), or leave both out for built-in text."
# Error messages of pandas 2 and 3 (_libs/src/parser/tokenizer.c). A message that does not match is shown unchanged.
TOO_LONG = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")
NOT_CLOSED = re.compile(r"EOF inside string starting at row (\d+)")
MOST_COLUMNS = 2_000  # `datasets` copies its description of each column dozens of times: 30,000 take half a minute
HEADER_BYTES = 2**20  # of a table in a folder, read to count its columns
SNIFFED_ROWS = 200  # rows read to detect a header and quoting


def open_file(
    flag: str, name: str, streaming: bool = False, has_header: bool | None = None, encoding: str | None = None
) -> Dataset | IterableDataset:
    """The rows of a csv, tsv, json(l) or parquet file. Cells of csv and tsv stay text: labels are typed later.

    A csv or tsv without a header row gets the column names `column_1`, `column_2`, ... `has_header` None means to
    detect the header. Raises RequestError."""
    from datasets import Features, Value, load_dataset
    from datasets.exceptions import DatasetGenerationError
    from datasets.utils.extract import Extractor

    path = Path(name).expanduser()
    if fault := missing_file(name):
        raise RequestError(f"--{flag} {name}: {fault}")
    open_plain(path, name=f"--{flag} {name}").close()
    if packed := Extractor.infer_extractor_format(path):  # `datasets` would unpack it, whatever its suffix
        raise RequestError(f"--{flag} {name}: is compressed ({packed}). Unpack it.")
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        other = " CoNLL text is for recipes/token_cls.py." if path.suffix.lower() in CONLL else ""
        raise RequestError(f"--{flag} {name}: cannot tell what it is by its name. Give {', '.join(KINDS)}.{other}")
    if path.stat().st_size == 0:
        raise RequestError(f"--{flag} {name}: the file is empty.")
    said, path = f"--{flag} {name}", path if kind == "parquet" else as_utf8(flag, name, encoding, streaming)
    if kind == "json":
        _refuse_deep(said, path)
    options = csv_options(said, path, has_header) if kind == "csv" else {}
    if options and not streaming and options["quoting"] == csv.QUOTE_MINIMAL and len(options["names"]) > 1:
        refuse_open_quotes(said, path, options["sep"], len(options["names"]))
    if options:
        options["features"] = Features({column: Value("string") for column in options["names"]})
    options["cache_dir"] = _cache_of(None, str(path))
    try:
        data = load_dataset(kind, data_files=str(path), split="train", streaming=streaming, **options)
        if streaming:
            next(iter(data))
    except (DatasetGenerationError, UnicodeDecodeError, ValueError, StopIteration) as error:
        raise RequestError(f"{said}: {_fault(kind, path, error)}") from error
    if not streaming and not len(data):
        raise RequestError(f"{said}: the file has no rows.")
    return data


def open_hub(
    name: str, config: str | None, split: str, streaming: bool = False, mend: str = OFFLINE
) -> Dataset | IterableDataset | None:
    """One split of a hub data set (or of a local folder in the hub's layout); None if it has no such split. `mend`
    tells the user what to do without the hub."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    cached = Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___"))
    if is_local := Path(name).expanduser().is_dir():
        check_data_folder(Path(name).expanduser(), f"--dataset_name {name}")
        _refuse_wide_tables(Path(name).expanduser(), f"--dataset_name {name}")
    if not (is_local or hub_is_reachable() or (cached.is_dir() and not streaming)):
        away = ConnectionError("the hub cannot be reached, and no copy is cached here")
        raise RequestError(_not_found(name, away, mend))
    try:
        cache = _cache_of(name) if is_local else None
        return datasets.load_dataset(name, config, split=split, streaming=streaming, cache_dir=cache)
    except DatasetNotFoundError as error:
        raise RequestError(_not_found(name, error, mend)) from error
    except ValueError as error:
        if "Unknown split" in str(error) or "Bad split" in str(error):
            return None
        raise RequestError(f"--dataset_name {name}: {error}") from error
    except Exception as error:  # malformed files can raise anything
        raise RequestError(_not_found(name, error, mend)) from error


def _cache_of(folder: str | None, *files: str) -> str:
    """A cache folder for what `datasets` makes of local files. `datasets` itself identifies files by name and mtime
    alone (5.2, data_files.py, _get_single_origin_metadata), and could return rows of an older file."""
    import datasets

    return str(Path(datasets.config.HF_DATASETS_CACHE, f"local-{cache_key(file_states(folder, *files))}"))


def _not_found(name: str, error: Exception, mend: str) -> str:
    return f"--dataset_name {name}: not a local folder, and not available from the hub ({first_line(error)}). {mend}"


def csv_options(said: str, path: Path, has_header: bool | None) -> dict[str, Any]:
    """Separator, quoting and header, detected from the first rows, as keyword arguments for pandas' reader."""
    with path.open(encoding=UTF8, newline="", errors="replace") as file:
        lines = list(itertools.islice(file, SNIFFED_ROWS))
    first = lines[0] if lines else ""
    separator = next((s for s in ("\t", ";") if s in first and "," not in first), ",")
    if path.suffix.lower() in (".tsv", ".txt"):
        separator = "\t"
    quoting: Any = csv.QUOTE_NONE if separator == "\t" and not _is_quoted(lines) else csv.QUOTE_MINIMAL
    reader = csv.reader(lines, delimiter=separator, quoting=quoting)
    try:
        numbered = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise RequestError(f"{said}: is not csv: {error}. Is a quote left open?") from error
    rows = [row for _, row in numbered]
    if not rows:
        raise RequestError(f"{said}: the file has no rows.")
    for number, row in numbered:  # pandas would silently take the first cell as an index
        if len(row) > len(rows[0]):
            raise RequestError(f"{said}: {_too_long(number, len(row), len(rows[0]))}")
    refuse_wide(said, len(rows[0]))
    usual = statistics.mode([len(row) for row in rows[1:]] or [0])
    are_most = 2 * sum(len(row) == usual for row in rows) > len(rows)
    named = len(rows[0]) - next((i for i, name in enumerate(reversed(rows[0])) if name.strip()), len(rows[0]))
    if 1 < usual < named and are_most:  # pandas would fill the missing cells with empty ones
        raise RequestError(f"{said}: {_too_long(numbered[0][0], len(rows[0]), usual)}")
    header = _has_header(rows) if has_header is None else has_header
    names = rows[0] if header else [f"column_{i + 1}" for i in range(len(rows[0]))]
    if len(set(names)) < len(names):
        raise RequestError(f"{said}: two columns have the same name in the header: {', '.join(names)}.")
    return {
        "sep": separator,
        "quoting": quoting,
        "header": 0 if header else None,
        "names": names,
        "keep_default_na": False,  # "NA" and "null" are words; empty cells are handled later
        "encoding": UTF8,
    }


def refuse_wide(said: str, columns: int) -> None:
    if columns > MOST_COLUMNS:
        raise RequestError(
            f"{said}: has {columns:,} columns, but a table for a recipe has at most {MOST_COLUMNS:,}. Keep only those "
            "with text and label."
        )


def _refuse_wide_tables(folder: Path, said: str) -> None:
    """Counts the separators in each table's first line."""
    for path in sorted(path for kind in ("*.csv", "*.tsv") for path in folder.rglob(kind)):
        with open_plain(path) as file:
            line = file.readline(HEADER_BYTES)
        refuse_wide(f"{said}: {path.name}", 1 + max(line.count(separator) for separator in (b",", b"\t", b";")))


def _too_long(line: int, cells: int, columns: int) -> str:
    return (
        f"line {line} has {cells} cells, but there are {columns} columns. Put a cell that contains the separator in "
        "double quotes, or remove the extra cells."
    )


def _refuse_deep(said: str, path: Path) -> None:
    """Arrow's parser recurses for each level, and crashes the process at some thousands. Counts brackets first and, if
    there are many, parses tokens, because brackets inside strings do not count."""
    level = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            opened = line.count(b"{") + line.count(b"[")
            if level + opened <= DEEPEST:
                level += opened - line.count(b"}") - line.count(b"]")
                level = max(level, 0)
                continue
            for mark in TOKEN.finditer(line.decode("utf-8", "replace")):
                level += (mark[0] in "[{") - (mark[0] in "]}")
                if level > DEEPEST:
                    raise RequestError(f"{said}: line {number}: is nested deeper than {DEEPEST} levels.")


def _is_quoted(lines: list[str]) -> bool:
    """Whether cells are wrapped in double quotes as csv writers do; otherwise a quote is an ordinary character."""
    cells = [cell for line in lines for cell in line.rstrip("\r\n").split("\t") if '"' in cell]
    wrapped = [c for c in cells if len(c) > 1 and c[0] == c[-1] == '"' and '"' not in c[1:-1].replace('""', "")]
    return bool(cells) and len(wrapped) == len(cells)


def _has_header(rows: list[list[str]]) -> bool:
    """The first row is a header unless one of its cells looks like the cells below it: a number above numbers, or a
    value that recurs in the column."""
    if len(rows) < 2:
        return True
    for column, first in enumerate(rows[0]):
        below = [row[column] for row in rows[1:] if column < len(row)]
        if number_in(first) is not None and below and all(number_in(cell) is not None for cell in below):
            return False
        if below.count(first) >= 2 and len(set(below)) <= len(below) / 2:
            return False
    return True


def _fault(kind: str, path: Path, error: Exception) -> str:
    """The fault, with its line, of a file that a reader rejected."""
    if kind == "json":
        for number, line in _numbered_lines(path):
            try:
                json.loads(line)
            except json.JSONDecodeError as fault:
                return f"line {number}, column {fault.colno}: {fault.msg}. One JSON object per line is expected."
            except (ValueError, RecursionError):
                return f"line {number}: nested too deeply, or a number too long. One JSON object per line is expected."
    causes: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(str(cause).strip())
        cause = cause.__cause__
    if "corresponds to no data" in str(error):
        return "the file has no rows."
    return _explained(causes[-1]) or f"cannot be read as {kind}: {causes[-1] or causes[0] or type(error).__name__}"


def _explained(words: str) -> str:
    """A clearer form of some pandas errors; empty for others."""
    if found := TOO_LONG.search(words):
        return _too_long(int(found[2]), int(found[3]), int(found[1]))
    if found := NOT_CLOSED.search(words):
        return f"row {int(found[1]) + 1} opens a double quote that nothing closes. Close it, or double it if meant."
    return ""


def readable(rows: Iterable[T], fault: type[FinetuneError]) -> Iterator[T]:
    """Yields `rows` of a stream, of which only the beginning was checked. Raises `fault` if reading fails later."""
    try:
        yield from rows
    except UnicodeDecodeError as error:
        raise fault(
            f"the stream is not UTF-8 to its end ({error.reason}), only at its beginning. Set --encoding."
        ) from error
    except ValueError as error:  # includes errors of Arrow and pandas
        why = _explained(str(error)) or f"{first_line(error)}. Fix its file."
        raise fault(f"the stream cannot be read to its end: {why}") from error


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
