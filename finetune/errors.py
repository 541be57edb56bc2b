"""What can go wrong, as a small tree. A recipe or the command line exits with the class's `exit_status`."""

import errno

JOINERS = "\u200c\u200d"  # within words of Persian and Hindi, and in emoji


class FinetuneError(Exception):
    """Anything we can explain to the user. The message says where, what was found, the rule, and the mend."""

    exit_status = 1


class RequestError(FinetuneError):
    """The request was wrong: a flag, a file, a config. Nothing was trained and nothing was deleted."""

    exit_status = 2


class RunError(FinetuneError):
    """The request was right, and the run failed: a full disk, a lost process, a time-out."""


class InterruptedRunError(FinetuneError):
    """The run was asked to stop, and did; it can go on. The status is sysexits.h's EX_TEMPFAIL: try again."""

    exit_status = 75


class BusyError(FinetuneError):
    """The request was right, and somebody else still has what the run needs. The status is EX_TEMPFAIL, as above: a
    cluster starts the run again."""

    exit_status = 75


class NothingToDoError(FinetuneError):
    """What was asked for is there already."""

    exit_status = 0


def first_line(error: BaseException, most_characters: int = 200) -> str:
    """What an error of a library says first, or its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most_characters]


def plain(text: str, instead: str = "?") -> str:
    """In one line, without what would move a terminal's cursor or turn the direction of what follows."""
    return "".join(
        letter if letter.isprintable() or letter in JOINERS else " " if letter.isspace() else instead for letter in text
    )


def disk_is_full(error: BaseException) -> bool:
    """True where a full disk or quota is among the causes of `error`, in whichever library's words."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left" in str(cause):  # safetensors and Arrow keep the words alone
            return True
        cause = cause.__cause__ or cause.__context__
    return False
