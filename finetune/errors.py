"""What can go wrong, as a small tree. A recipe or the command line exits with the class's `exit_status`."""


class FinetuneError(Exception):
    """Anything we can explain to the user. The message says where, what was found, the rule, and the mend."""

    exit_status = 1


class RequestError(FinetuneError):
    """The request was wrong: a flag, a file, a config. Nothing was trained and nothing was deleted."""

    exit_status = 2


class RunError(FinetuneError):
    """The request was right, and the run failed: a full disk, a lost process, a time-out."""
