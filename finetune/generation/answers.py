"""The file of answers. While they come they go into FILE.unfinished, in the order in which they do; FILE is made of it
at the end, in the order of the prompts. FILE.settings.json says what decided them. Never imports torch."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.errors import NothingToDoError, RequestError, RunError, first_line
from finetune.safe_read import read_json_object

FORMAT = 1  # raise it when what is recorded changes
MOST_SHOWN = 100  # characters


class Answers:
    """One process writes. Raises RequestError where the file is of another run, and is not to be overwritten, and
    NothingToDoError where it is there already, of this one."""

    def __init__(self, output: str, identity: Mapping[str, Any], count: int, overwrite: bool) -> None:
        self.path, self.count = Path(output).expanduser(), count
        self.unfinished = Path(f"{self.path}.unfinished")
        self.settings = Path(f"{self.path}.settings.json")
        self.identity = json.loads(json.dumps({"format": FORMAT, **identity}))
        if not self.path.absolute().parent.is_dir():
            raise RequestError(f"--output {output}: there is no folder {self.path.parent}. Make it, or name another.")
        if self.path.is_dir():
            raise RequestError(f"--output {output}: is a folder. Name a file in it.")
        if not overwrite:
            self._check()

    def _check(self) -> None:
        there = [path for path in (self.path, self.unfinished) if path.exists() and path.stat().st_size]
        if not there:
            return
        mend = "Give another --output, or --overwrite."
        if not self.settings.is_file():
            raise RequestError(f"--output {self.path}: {there[0].name} is there, and nothing says of what. {mend}")
        before = read_json_object(self.settings)
        for name in dict.fromkeys((*self.identity, *before)):
            one, other = before.get(name), self.identity.get(name)
            if one != other:
                raise RequestError(
                    f"--output {self.path}: what is there was made with another {name}, {_shown(one)}, and not "
                    f"{_shown(other)}. Give the same to go on. {mend}"
                )
        if self.path in there:
            raise NothingToDoError(f"{self.path}: all {self.count:,} answers are there, of the same model, prompts and "
                                   "flags. --overwrite makes them again.")  # fmt: skip

    def open(self, overwrite: bool) -> list[int]:
        """The numbers of the prompts that are answered already."""
        try:
            self._file = self.unfinished.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RequestError(
                f"--output {self.path}: another process is writing it. Wait, or name another."
            ) from error
        except OSError as error:
            raise RequestError(f"--output {self.path}: cannot be written ({error.strerror}).") from error
        if overwrite:
            self.path.unlink(missing_ok=True)
            self._file.truncate(0)
        _write_whole(self.settings, json.dumps(self.identity, indent=2) + "\n")
        self._places = self._read()
        return sorted(self._places)

    def _read(self) -> dict[int, int]:
        """Where in the file the answer to each prompt begins. A line that a kill has torn is cut off."""
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
        """Once this returns, a kill loses none of them. Raises RunError, of a full disk say."""
        lines = [json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n" for row in rows]
        place = self._file.seek(0, os.SEEK_END)
        with self._explained():
            self._file.write(b"".join(lines))
            self._file.flush()
        for row, line in zip(rows, lines, strict=True):
            self._places[row["index"]] = place
            place += len(line)

    def finish(self) -> None:
        """All answers, in the order of the prompts."""
        assert len(self._places) == self.count, "a prompt has no answer"
        written = Path(f"{self.path}.writing")
        with self._explained(), written.open("wb") as file:
            for number in range(self.count):
                self._file.seek(self._places[number])
                file.write(self._file.readline())
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, self.path)
        self.unfinished.unlink()
        self._file.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk, say
            raise RunError(
                f"{self.path}: cannot be written ({first_line(error)}). The same command goes on from what is there."
            ) from error


def _number_in(line: bytes) -> int | None:
    try:
        number = json.loads(line)["index"] if line.endswith(b"\n") else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return number if isinstance(number, int) else None


def _write_whole(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".writing")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)[:MOST_SHOWN]
