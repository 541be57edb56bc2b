"""Names that no path of a run can have. Said before anybody looks for one: the system and Python answer some of them
with errors of their own."""

from __future__ import annotations

import os

MOST_BYTES, MOST_BYTES_OF_A_PART = 4095, 255  # linux/limits.h, PATH_MAX with its NUL, NAME_MAX


def unusable(name: str, may_be_long: bool = False) -> str | None:
    """Why it cannot be the name of a file or folder here, as the end of "but it ..."; None where it can."""
    if name.lstrip().startswith("{"):  # JSON, which some flags take in place of a file
        return None
    if not name.strip():
        return "is blank. Give a name"
    if not name.isprintable():
        strange = next(letter for letter in name if not letter.isprintable())
        return f"has the character {strange!r}, which a path of a run cannot have. Rename it"
    if name.startswith("~") and os.path.expanduser(name) == name:
        return "begins with ~, and there is no such user here. Write the folder out"
    encoded = os.fsencode(name)
    if may_be_long:
        return None
    if len(encoded) > MOST_BYTES or any(len(part) > MOST_BYTES_OF_A_PART for part in encoded.split(b"/")):
        return f"is longer than a file system takes ({MOST_BYTES_OF_A_PART} bytes between slashes). Shorten it"
    return None
