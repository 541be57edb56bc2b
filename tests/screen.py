"""What a terminal shows: programs that run in one, and the few control codes that rich uses for a live line."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

PIECE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


def run_on_terminal(
    command: Sequence[str], env: Mapping[str, str], cwd: Path, columns: int, timeout_seconds: float
) -> tuple[int, str]:
    """The exit status, and all that was written to the terminal."""
    process, terminal = pty.fork()
    if not process:
        os.chdir(cwd)
        os.execvpe(command[0], list(command), {**os.environ, **env})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    limit = threading.Timer(timeout_seconds, os.killpg, (process, signal.SIGKILL))  # it leads its session
    limit.start()
    written = b""
    try:
        while some := os.read(terminal, 65536):
            written += some
    except OSError:  # how Linux says that nobody has it open any more
        pass
    finally:
        limit.cancel()
        os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), written.decode(errors="replace")


def rows_on_screen(written: str, columns: int) -> list[str]:
    """The screen at the end, with what has scrolled out of it above. An unknown control code fails."""
    rows, row, column = [""], 0, 0
    for code, letter, back, down, text in PIECE.findall(written):
        if back:
            column = 0
        elif down:
            row += 1
        elif letter == "A":
            row -= int(code or 1)
        elif letter == "K":
            assert code == "2", f"ESC[{code}K"
            rows[row] = ""
        elif letter:
            assert letter in "mhl", f"ESC[{code}{letter}"  # colours, and whether the cursor is shown
        for sign in text:
            row, column = (row + 1, 0) if column == columns else (row, column)
            rows += [""] * (row + 1 - len(rows))
            rows[row] = rows[row].ljust(column)[:column] + sign + rows[row][column + 1 :]
            column += 1
        rows += [""] * (row + 1 - len(rows))
    return [row.rstrip() for row in rows]
