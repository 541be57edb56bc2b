"""Reads text files of any encoding as UTF-8: as --encoding says, or as detected from the bytes and then reported."""

from __future__ import annotations

import codecs
import shutil
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.data.cache import cache_home, cache_key, file_state, prepare_once
from finetune.errors import RequestError
from finetune.run.launch import Launch

UTF8 = "utf-8-sig"  # with or without a byte order mark
MARKS = (
    (codecs.BOM_UTF8, UTF8),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is a prefix of it
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
PIECE = 1 << 20  # bytes; all that is checked of a stream
# Non-ASCII characters of Western European text. Other Windows-1252 characters come from misreading other alphabets:
# Turkish would have many ý and þ, Polish ³ and ¹, Russian only such characters.
WESTERN = frozenset("àáâãäåæçèéêëìíîïñòóôõöøœùúûüßÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØŒÙÚÛÜŸ‘’“”–—…•«»¿¡€£§°©®™·´\xa0")  # noqa: RUF001
JUDGED_PIECES = 16
MOSTLY = 0.98
MOST_BEYOND_ASCII = 0.4  # of all characters
ZEROS = 0.3  # of every second byte, in UTF-16 without a mark
COPY_SECONDS = 7200.0  # for a copy by another process, like the default for other preparation
NO_TEXT = (".parquet",)  # formats that declare their text encoding


def as_utf8(flag: str, name: str, encoding: str | None, streaming: bool = False) -> Path:
    """The file, or a UTF-8 copy of it in the cache if it has another `encoding`. Without `encoding`, a stream is
    checked only at its beginning. Raises RequestError for bytes that do not match the encoding."""
    path = Path(name).expanduser()
    found = _encoding(flag, name, encoding, streaming, file_state(name))
    if found == UTF8:
        return path
    folder = cache_home() / "utf-8" / cache_key(file_state(name), found)
    said = f"--{flag} {name}"
    prepare_once(
        folder,
        lambda unfinished: _copy(path, found, unfinished / path.name, said),
        what=f"to read {path.name} as {found}",
        launch=Launch(),  # whichever rank comes first
        timeout_seconds=COPY_SECONDS,
    )
    return folder / path.name


def _copy(path: Path, encoding: str, to: Path, said: str) -> None:
    try:
        with path.open(encoding=encoding, newline="") as source, to.open("w", encoding="utf-8", newline="") as copy:
            shutil.copyfileobj(source, copy, PIECE)
    except UnicodeError as error:
        why = getattr(error, "reason", error)
        raise RequestError(f"{said}: is not text in {encoding} ({why}). Set the right --encoding.") from error


def encoding_notes(arguments: Any, splits: tuple[str, ...]) -> tuple[str, ...]:
    """Notes on files that were read in another encoding than UTF-8 without --encoding."""
    notes = []
    for split in splits:
        name = getattr(arguments, f"{split}_file", None)
        if arguments.encoding or not name or Path(name).suffix.lower() in NO_TEXT:
            continue
        streaming = split == "train" and getattr(arguments, "streaming", False)
        found = _encoding(f"{split}_file", name, None, streaming, file_state(name))
        notes += [] if found == UTF8 else [f"{Path(name).name} read as {found} (--encoding overrides this)"]
    return tuple(notes)


@lru_cache
def _encoding(flag: str, name: str, given: str | None, streaming: bool, _: Any) -> str:
    """Python's name for the encoding."""
    path = Path(name).expanduser()
    with path.open("rb") as file:
        head = file.read(PIECE)
    marked = next((encoding for mark, encoding in MARKS if head.startswith(mark)), None)
    if given is not None:
        known = codecs.lookup(given).name
        found = UTF8 if known == "utf-8" else marked if marked and known.startswith(marked) else known
    else:
        found = marked or _without_mark(head) or UTF8
    wrong = _first_wrong(path, streaming) if found == UTF8 else None
    if wrong is None:
        return found
    if given is None and _is_ascii(path, wrong) and _is_western(path, wrong):
        return "cp1252"
    raise RequestError(
        f"--{flag} {name}: is not UTF-8 text (byte {wrong:,}), and its encoding cannot be detected. Set "
        "--encoding, for example cp1251, gb18030 or shift_jis."
    )


def _without_mark(head: bytes) -> str | None:
    """Detects UTF-16 by the zero bytes of its Latin letters."""
    low, high = head[0::2], head[1::2]
    if high and high.count(0) > ZEROS * len(high) and low.count(0) < len(low) / 100:
        return "utf-16-le"
    if high and low.count(0) > ZEROS * len(low) and high.count(0) < len(high) / 100:
        return "utf-16-be"
    return None


def _first_wrong(path: Path, streaming: bool) -> int | None:
    """The position, from 0, of the first byte that is not UTF-8."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while True:
            piece, kept = file.read(PIECE), len(decoder.getstate()[0])
            try:
                decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                return read - kept + error.start
            read += len(piece)
            if not piece or streaming:
                return None


def _is_ascii(path: Path, end: int) -> bool:
    """Whether all bytes before `end` are ASCII. Otherwise the file is UTF-8 with a bad byte."""
    with path.open("rb") as file:
        return all(file.read(min(PIECE, end - at)).isascii() for at in range(0, end, PIECE))


def _is_western(path: Path, start: int) -> bool:
    """Whether the non-ASCII bytes around and after `start`, decoded as Windows-1252, are typical of Western European
    text, and mostly not UTF-8. Later pieces are checked when read."""
    read = beyond = western = wrong = 0
    with path.open("rb") as file:
        file.seek(max(0, start - PIECE // 2))
        for piece in islice(iter(lambda: file.read(PIECE), b""), JUDGED_PIECES):
            text = piece.decode("cp1252", errors="replace")
            wrong += piece.decode("utf-8", errors="replace").count("\ufffd")
            read += len(text)
            others = [letter for letter in text if letter > "\x7f"]
            beyond += len(others)
            western += sum(letter in WESTERN for letter in others)
    return western >= MOSTLY * beyond and beyond <= MOST_BEYOND_ASCII * read and 2 * wrong >= beyond
