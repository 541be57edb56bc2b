"""The exceptions, as a small tree. A recipe or the command line exits with the class's `exit_status`."""

import errno
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

INTERRUPTED = 130  # exit status after Ctrl-C: 128 + SIGINT, the shells' convention
FULL = "No space left", "quota exceeded"  # what the system says of a full disk or quota
JOINERS = "\u200c\u200d"  # used within words of Persian and Hindi, and in emoji


class FinetuneError(Exception):
    """Any error we can explain to the user. The message says where, what was found, the rule, and the fix."""

    exit_status = 1


class RequestError(FinetuneError):
    """The request was wrong: a flag, a file, a config. Nothing was trained and nothing was deleted."""

    exit_status = 2


class UnevenBatchError(RequestError):
    """The global batch does not divide among the ranks; it would among those of `most_hosts`, fewer than there are (0:
    of no number of hosts)."""

    def __init__(self, message: str, most_hosts: int) -> None:
        super().__init__(message)
        self.most_hosts = most_hosts


class RunError(FinetuneError):
    """The request was right, but the run failed: a full disk, a lost process, a timeout."""


class InterruptedRunError(FinetuneError):
    """The run was asked to stop and did; it can be resumed. The status is sysexits.h's EX_TEMPFAIL: try again."""

    exit_status = 75


class BusyError(FinetuneError):
    """The request was right, but another process holds what the run needs. The status is EX_TEMPFAIL, as above, so
    that a cluster restarts the run."""

    exit_status = 75


class NothingToDoError(FinetuneError):
    """What was requested already exists."""

    exit_status = 0


def first_line(error: BaseException, most_characters: int = 200) -> str:
    """The first line of an error's message, or its class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most_characters]


def plain(text: str, instead: str = "?") -> str:
    """The text on one line, without characters that move a terminal's cursor or change the writing direction."""
    return "".join(
        letter if letter.isprintable() or letter in JOINERS else " " if letter.isspace() else instead for letter in text
    )


def listed(names: Sequence[str], most: int = 8) -> str:
    """ "a, b and 3 more": the first `most` of the names; "nothing" if there are none."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "nothing"


def or_meant(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of an error about an unknown word: the closest of the known ones as a question, else `otherwise`."""
    near = get_close_matches(word, list(known), 1)
    return f" Did you mean {near[0]}?" if near else otherwise


def disk_is_full(error: BaseException) -> bool:
    """Whether a full disk or quota is among the causes of `error`, whichever library raised it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(words in str(cause) for words in FULL):  # safetensors and Arrow keep only the text
            return True
        cause = cause.__cause__ or cause.__context__
    return False
