"""What a process does while its main thread stands still: nothing, or work of its children and its connections."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from finetune.training.guards import movement as module
from finetune.training.guards.movement import OTHER_BYTES, Movement, Seen, _waits_for_a_disk
from finetune.training.guards.verdict import position_of

LOOKS, LAP = 4, 0.3


def looks(movement: Movement) -> list[bool]:
    """As a pulse looks, after the first time, which has nothing to be measured by."""
    found = []
    for _ in range(LOOKS + 1):
        found.append(movement.since_last())
        time.sleep(LAP)
    return found[1:]


@pytest.fixture
def movement() -> Movement:
    """Of this process, whose threads of other tests are not looked at."""
    movement = Movement(ranks=2)
    movement.watchers = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    return movement


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    reads = "import os\nos.write(1, b'.')\nwhile os.read(0, 4096): pass"
    process = subprocess.Popen([sys.executable, "-S", "-c", reads], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1) == b"."  # it has begun
    yield process
    process.kill()
    process.wait()


def test_a_process_whose_child_waits_does_not_move(movement: Movement, child: subprocess.Popen[bytes]) -> None:
    assert looks(movement)[1:] == [False] * (LOOKS - 1)


def test_a_process_whose_child_reads_slowly_moves(movement: Movement, child: subprocess.Popen[bytes]) -> None:
    done = threading.Event()

    def feed() -> None:
        assert child.stdin is not None
        while not done.wait(LAP / 4):
            child.stdin.write(bytes(OTHER_BYTES))
            child.stdin.flush()

    with_nothing_else = threading.Thread(target=feed)
    with_nothing_else.start()
    found = looks(movement)
    done.set()
    with_nothing_else.join()
    assert all(found)


def test_a_process_that_receives_slowly_moves_unless_these_are_heartbeats() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    port = mine.getpeername()[1]
    with mine, theirs:
        sizes = []
        for watched in (Movement(), Movement(watchers_port=port)):
            watched.since_last()
            before = watched.before.other_bytes
            theirs.sendall(bytes(10 * OTHER_BYTES))
            mine.recv(10 * OTHER_BYTES, socket.MSG_WAITALL)
            watched.since_last()
            sizes.append(sum(n - before.get(k, 0) for k, n in watched.before.other_bytes.items()))
    assert sizes == [20 * OTHER_BYTES, 0]  # sent and received are both of this process


@pytest.mark.parametrize("state", ["D", "S"])
def test_a_thread_that_waits_for_a_disk_is_seen(state: str, tmp_path: Path) -> None:
    (tmp_path / "task/7").mkdir(parents=True)
    (tmp_path / "task/7/stat").write_text(f"7 (a) b) {state} 1 2 3")
    assert _waits_for_a_disk(tmp_path) is (state == "D")


def save(wait: Callable[[], object]) -> None:
    from finetune.training.checkpoints import writing

    writing.together(wait)


def read_over_the_network(wait: Callable[[], object]) -> None:
    from fsspec.callbacks import Callback

    Callback(hooks={"wait": lambda *_: wait()}).call()


@pytest.mark.parametrize(
    ("does", "said"),
    [(save, "saves or deletes a checkpoint"), (read_over_the_network, "reads over the network"), (lambda w: w(), "")],
)
def test_others_wait_patiently_for_who_saves_or_reads_over_a_network(does: Callable[..., None], said: str) -> None:
    released, entered = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        released.wait()

    thread = threading.Thread(target=does, args=(wait,))
    thread.start()
    entered.wait()
    try:
        found = position_of(thread.ident or 0)
    finally:
        released.set()
        thread.join()
    assert found.patient == said


@pytest.mark.parametrize(("share", "moves"), [(0.02, False), (0.2, True)])
def test_a_process_that_takes_little_of_a_core_waits(
    share: float, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(Seen(at, {0: share * at}, 0, {}, False) for at in (0.0, 10.0))
    movement = Movement()
    monkeypatch.setattr(movement, "_look", lambda: next(times))
    monkeypatch.setattr(module, "_bytes_of", lambda place: 0)
    movement.since_last()
    assert movement.since_last() is moves
