"""Runs untrusted code, such as a chat template, in a child process with bounded time and memory, because no sandbox
bounds either. Jinja's sandbox allows any number of nested loops of a hundred thousand steps each, and doubling a string
until memory runs out; and a call into C cannot be interrupted from inside the process."""

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

SECONDS_EACH = 2  # of CPU time; an ordinary conversation takes a millisecond
WAITS_SECONDS = 60  # of wall clock, however busy the machine: a forked child may wait for a lock that a thread held
MORE_BYTES = 256 * 2**20  # on top of what the process has mapped at the start
MOST_RESULT_BYTES = 32 * 2**20


def each_bounded(do: Callable[[Any], Any], items: Sequence[Any], what: str) -> list[Any]:
    """Apply `do` to each item in one forked child; results come back as JSON. A RequestError from `do` is raised again;
    any other exception, or an item that exceeds the limits above, raises a RequestError that begins with `what`."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forking with threads
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
                    break  # the child was killed, maybe in the middle of a line
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
            f"{what} took more than {SECONDS_EACH} s of CPU time, {WAITS_SECONDS} s of wall clock or "
            f"{MORE_BYTES >> 20} MiB, and was stopped, at {plain(repr(items[len(found)]))[:200]}."
        )
    return found


def _serve(do: Callable[[Any], Any], items: Sequence[Any], what: str, write_end: int) -> NoReturn:
    """In the child: write one line of JSON for each item, until one fails."""
    try:
        gc.disable()  # collecting would touch, and so copy, all of the parent's pages
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
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
        os._exit(0)  # skip the parent's exit handlers


def _answer(do: Callable[[Any], Any], item: Any, what: str, stream: BinaryIO) -> None:
    error = None
    try:
        content = json.dumps([do(item), None]).encode()
        if len(content) > MOST_RESULT_BYTES:
            error = f"{what} produces {len(content):,} bytes; at most {MOST_RESULT_BYTES:,} are read."
    except RequestError as refused:
        error = str(refused)
    except MemoryError:
        error = f"{what} took more than {MORE_BYTES >> 20} MiB, and was stopped."
    except Exception as failed:  # untrusted code can raise anything
        error = f"{what} fails: {type(failed).__name__}: {plain(first_line(failed))}."
    if error is not None:
        content = json.dumps([None, error]).encode()
    stream.write(content + b"\n")
    stream.flush()


def _lower(limit: int, most: int) -> None:
    """Lower only the soft limit, because it is set again for each item; never above the hard limit."""
    _, hard = resource.getrlimit(limit)
    with suppress(ValueError, OSError):  # macOS does not enforce RLIMIT_AS
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _bytes_mapped() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 2**40  # a system without /proc: only time is bounded
