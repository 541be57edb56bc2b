"""The file of answers. They are first appended to FILE.unfinished as they come; at the end FILE is made of it, in the
order of the prompts. FILE.settings.json records the settings behind them. Never imports torch."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.errors import RequestError, RunError, first_line
from finetune.safe_read import read_json_object

FORMAT = 1  # increase it when what is recorded changes
MOST_SHOWN = 100  # characters


class Answers:
    """Written by one process. Raises RequestError if the file has other answers, unless it may be overwritten."""

    def __init__(self, output: str, identity: Mapping[str, Any], count: int, overwrite: bool) -> None:
        self.path, self.count = Path(output).expanduser().resolve(), count  # resolved, so that a link is kept
        self.unfinished = self._beside("unfinished")
        self.settings = self._beside("settings.json")
        self.identity = json.loads(json.dumps({"format": FORMAT, **identity}))
        if not self.path.parent.is_dir():
            raise RequestError(f"--output {output}: there is no folder {self.path.parent}. Make it, or name another.")
        if self.path.exists() and not self.path.is_file():
            what = "is a folder. Name a file in it" if self.path.is_dir() else "is not a regular file. Name another"
            raise RequestError(f"--output {output}: {what}.")
        is_there = self.path.is_file() and self.path.stat().st_size > 0
        # It has an answer, or it was to overwrite a file, which stays until all answers are there.
        is_begun = self.unfinished.is_file() and (is_there or self.unfinished.stat().st_size > 0)
        goes_on = (is_there or is_begun) and self._is_same(self.unfinished if is_begun else self.path, overwrite)
        self.goes_on, self.is_done = goes_on and is_begun, goes_on and not is_begun and not overwrite

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{ending}")

    def _is_same(self, there: Path, overwrite: bool) -> bool:
        """Whether the existing answers are from this model, these prompts and these flags."""
        before = read_json_object(self.settings) if self.settings.is_file() else None
        if overwrite or before == self.identity:
            return bool(before == self.identity)
        mend = "Give another --output, or --overwrite."
        if before is None:
            raise RequestError(f"--output {self.path}: {there.name} exists, but not its {self.settings.name}. {mend}")
        name = next(one for one in (*self.identity, *before) if before.get(one) != self.identity.get(one))
        raise RequestError(
            f"--output {self.path}: its answers were made with another {name}, {_shown(before.get(name))}, and not "
            f"{_shown(self.identity.get(name))}. Give the same to go on. {mend}"
        )

    @property
    def all_there(self) -> str:
        return (f"{self.path}: all {self.count:,} answers are there, from the same model, prompts and flags. "
                "--overwrite makes them again.")  # fmt: skip

    def open(self) -> list[int]:
        """The numbers of the prompts that are already answered; all of them if nothing is left to do."""
        if self.is_done:
            return list(range(self.count))
        try:
            self._file = self.unfinished.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RequestError(
                f"--output {self.path}: another process is writing it. Wait, or name another."
            ) from error
        except OSError as error:
            raise RequestError(f"--output {self.path}: cannot be written ({error.strerror}).") from error
        if not self.goes_on:
            self._file.truncate(0)
        self._write_whole(self.settings, [json.dumps(self.identity, indent=2).encode() + b"\n"])
        self._places = self._read()
        return sorted(self._places)

    def _read(self) -> dict[int, int]:
        """The offset of each prompt's answer in the file. A line that a kill left incomplete is removed."""
        places, place = {}, 0
        self._file.seek(0)
        for line in self._file:
            number = _number_in(line)
            if number is None or not 0 <= number < self.count:
                break
            places[number] = place
            place += len(line)
        self._file.truncate(place)
        return places

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Once this returns, a kill loses none of `rows`. Raises RunError, on a full disk for example."""
        lines = [json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n" for row in rows]
        place = self._file.seek(0, os.SEEK_END)
        with self._explained():
            self._file.write(b"".join(lines))
            self._file.flush()
        for row, line in zip(rows, lines, strict=True):
            self._places[row["index"]] = place
            place += len(line)

    def finish(self) -> None:
        """Write all answers to the file, in the order of the prompts."""
        assert len(self._places) == self.count, "a prompt has no answer"
        self._write_whole(self.path, map(self._line, range(self.count)))
        self.unfinished.unlink()
        self._file.close()

    def _line(self, number: int) -> bytes:
        self._file.seek(self._places[number])
        return self._file.readline()

    def _write_whole(self, path: Path, lines: Any) -> None:
        written = self._beside("writing")
        with self._explained():
            with written.open("wb") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            os.replace(written, path)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk, for example
            raise RunError(
                f"{self.path}: cannot be written ({first_line(error)}). The same command continues from what is there."
            ) from error


def _number_in(line: bytes) -> int | None:
    try:
        number = json.loads(line)["index"] if line.endswith(b"\n") else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return number if isinstance(number, int) else None


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)[:MOST_SHOWN]
