"""What runs a stranger's code, as rendering a chat template does: in a child process of bounded time and memory, for no
sandbox bounds either. Jinja's lets a template loop a hundred thousand times in as many loops as it likes, and double a
text until memory ends; and one call into C cannot be interrupted from inside."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from finetune.errors import RequestError, first_line, plain

SECONDS_EACH = 2  # of processor time; ordinary conversations take a thousandth of one
WAITS_SECONDS = 60  # in all, on a machine however busy: a child forked beside threads may wait for a lock of theirs
MORE_BYTES = 256 * 2**20  # over what the process has when it begins
MOST_RESULT_BYTES = 32 * 2**20


def each_bounded(do: Callable[[Any], Any], items: Sequence[Any], what: str) -> list[Any]:
    """`do` of each item, in one forked child, as JSON brings it. Raises the RequestError that it raises, and one that
    begins with `what` for whatever else it raises, and where an item takes longer or more memory than the constants
    above allow."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of forks with threads; the child has one
        child = os.fork()
    if not child:
        os.close(read_end)
        _serve(do, items, what, write_end)
    os.close(write_end)
    found: list[Any] = []
    try:
        with open(read_end, "rb") as stream:
            while len(found) < len(items):
                if not (line := stream.readline()).endswith(b"\n"):
                    break  # it was stopped, maybe in the middle of a word
                made, error = json.loads(line)
                if error is not None:
                    raise RequestError(error)
                found.append(made)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if len(found) < len(items):
        raise RequestError(
            f"{what} took more than {SECONDS_EACH} s of processor time, {WAITS_SECONDS} s in all or "
            f"{MORE_BYTES >> 20} MiB, and was stopped, at {plain(repr(items[len(found)]))[:200]}."
        )
    return found


def _serve(do: Callable[[Any], Any], items: Sequence[Any], what: str, write_end: int) -> NoReturn:
    """In the child: one line of JSON for each item, until one fails."""
    try:
        gc.disable()  # it would touch, and so copy, all that the parent has
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are not forked
        for ends in (signal.SIGXCPU, signal.SIGALRM):
            signal.signal(ends, signal.SIG_DFL)
        _lower(resource.RLIMIT_CORE, 0)
        _lower(resource.RLIMIT_AS, _bytes_mapped() + MORE_BYTES)
        with open(write_end, "wb") as stream:
            for item in items:
                used = resource.getrusage(resource.RUSAGE_SELF)
                signal.alarm(WAITS_SECONDS)
                _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + SECONDS_EACH + 1)
                _answer(do, item, what, stream)
    finally:
        os._exit(0)  # nothing of the parent's is ended twice


def _answer(do: Callable[[Any], Any], item: Any, what: str, stream: BinaryIO) -> None:
    error = None
    try:
        content = json.dumps([do(item), None]).encode()
        if len(content) > MOST_RESULT_BYTES:
            error = f"{what} gives {len(content):,} bytes; at most {MOST_RESULT_BYTES:,} are read."
    except RequestError as refused:
        error = str(refused)
    except MemoryError:
        error = f"{what} took more than {MORE_BYTES >> 20} MiB, and was stopped."
    except Exception as failed:  # whatever a stranger's code raises
        error = f"{what} fails: {type(failed).__name__}: {plain(first_line(failed))}."
    if error is not None:
        content = json.dumps([None, error]).encode()
    stream.write(content + b"\n")
    stream.flush()


def _lower(limit: int, most: int) -> None:
    """The soft limit alone, for this is set again and again; never above the hard one."""
    _, hard = resource.getrlimit(limit)
    with suppress(ValueError, OSError):  # macOS has no RLIMIT_AS that holds
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _bytes_mapped() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 2**40  # a system without /proc: time alone is bounded
