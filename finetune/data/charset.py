"""Text files of any encoding, read as UTF-8: as --encoding says, or as their bytes show, which is said then."""

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

UTF8 = "utf-8-sig"  # with a mark or without
MARKS = (
    (codecs.BOM_UTF8, UTF8),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins as UTF-16's does
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
PIECE = 1 << 20  # bytes; of a stream no more is looked at
# What Western European text has beside ASCII. Other bytes that Windows-1252 knows are letters of other alphabets, read
# wrong: Turkish would have many ý and þ, Polish ³ and ¹, Russian all of them.
WESTERN = frozenset("àáâãäåæçèéêëìíîïñòóôõöøœùúûüßÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØŒÙÚÛÜŸ‘’“”–—…•«»¿¡€£§°©®™·´\xa0")  # noqa: RUF001
JUDGED_PIECES = 16
MOSTLY = 0.98
MOST_BEYOND_ASCII = 0.4  # of all characters
ZEROS = 0.3  # of every second byte, in UTF-16 without a mark
COPY_SECONDS = 7200.0  # that a copy may take in another process, as the rest of the preparation may by default
NO_TEXT = (".parquet",)  # which says itself how its texts are kept


def as_utf8(flag: str, name: str, encoding: str | None, streaming: bool = False) -> Path:
    """The file, or a copy of it as UTF-8 in the cache where it is of another `encoding`. Of a stream without one, only
    the beginning is looked at. Raises RequestError for bytes that are not of the encoding."""
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
        raise RequestError(f"{said}: is not text in {encoding} ({why}). Say which by --encoding.") from error


def encoding_notes(arguments: Any, splits: tuple[str, ...]) -> tuple[str, ...]:
    """What to say of files that were read as another encoding than UTF-8 though nobody said so."""
    notes = []
    for split in splits:
        name = getattr(arguments, f"{split}_file", None)
        if arguments.encoding or not name or Path(name).suffix.lower() in NO_TEXT:
            continue
        streaming = split == "train" and getattr(arguments, "streaming", False)
        found = _encoding(f"{split}_file", name, None, streaming, file_state(name))
        notes += [] if found == UTF8 else [f"{Path(name).name} read as {found} (--encoding says another)"]
    return tuple(notes)


@lru_cache
def _encoding(flag: str, name: str, given: str | None, streaming: bool, _: Any) -> str:
    """Python's name for it."""
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
        f"--{flag} {name}: is not UTF-8 text (byte {wrong:,}), and its bytes do not show what it is. Say it by "
        "--encoding, such as cp1251, gb18030 or shift_jis."
    )


def _without_mark(head: bytes) -> str | None:
    """UTF-16 by the zeros of its Latin letters."""
    low, high = head[0::2], head[1::2]
    if high and high.count(0) > ZEROS * len(high) and low.count(0) < len(low) / 100:
        return "utf-16-le"
    if high and low.count(0) > ZEROS * len(low) and high.count(0) < len(high) / 100:
        return "utf-16-be"
    return None


def _first_wrong(path: Path, streaming: bool) -> int | None:
    """The first byte, from 0, that is not UTF-8."""
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
    """Up to there. Letters that were UTF-8 so far make a file of UTF-8 with a byte that is wrong."""
    with path.open("rb") as file:
        return all(file.read(min(PIECE, end - at)).isascii() for at in range(0, end, PIECE))


def _is_western(path: Path, start: int) -> bool:
    """Whether what is not ASCII is, read as Windows-1252, what Western European text has, and mostly no UTF-8. It is
    looked at from `start` on; what comes later is looked at when it is read."""
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
