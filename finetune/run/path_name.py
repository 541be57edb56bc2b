"""Names that no path of a run can have. Reported before they are looked up, because the system and Python raise errors
of their own for some of them."""

from __future__ import annotations

import os
import unicodedata

MOST_BYTES, MOST_BYTES_OF_A_PART = 4095, 255  # linux/limits.h, PATH_MAX with its NUL, NAME_MAX

# Control characters, line ends, and bytes that are not UTF-8 (which no record of a run can hold); and characters that
# change the writing direction, so that a name reads as another. Spaces and joiners of any script occur in real names.
UNSEEN = ("Cc", "Zl", "Zp", "Cs")
TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def unusable(name: str, may_be_long: bool = False) -> str | None:
    """Why it cannot be the name of a file or folder, as the end of "but it ..."; None if it can."""
    if not name.strip():
        return "is blank, maybe from an empty shell variable. Give a name"
    strange = next((letter for letter in name if unicodedata.category(letter) in UNSEEN or letter in TURNS), None)
    if strange:
        return f"has the character {strange!r}, which a path of a run cannot have. Rename it"
    if name.startswith("~") and os.path.expanduser(name) == name:
        return "begins with ~, but there is no such user here. Write the folder out"
    encoded = b"" if may_be_long else os.fsencode(name)
    if len(encoded) > MOST_BYTES or any(len(part) > MOST_BYTES_OF_A_PART for part in encoded.split(b"/")):
        return f"is longer than a file system allows ({MOST_BYTES_OF_A_PART} bytes between slashes). Shorten it"
    return None
