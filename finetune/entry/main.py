"""Start and end of a recipe's process. Nothing heavy is imported until the command line has been parsed and checked, so
--help, mistyped flags and wrong paths are reported at once."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from finetune.entry.here import resolve_here
from finetune.errors import INTERRUPTED, FinetuneError, InterruptedRunError, NothingToDoError
from finetune.privacy import shown
from finetune.run.command_line import help_of
from finetune.run.importing import begin_imports
from finetune.run.launch import Launch, own_rank, read_launch
from finetune.run.recipe import Recipe
from finetune.run.run import Run
from finetune.run.supervised import own_attempt, tell_end

SILENT_RANK_WAITS_SECONDS = 20.0
INTERRUPTED_RANK_WAITS_SECONDS = 60.0  # while rank 0 closes its trackers; the launcher ends the others with rank 0
AGENTS_NOTICE_SECONDS = 3.0  # an agent reads the rendezvous about once a second


def run_recipe(recipe: Recipe, main: Callable[[Run], None]) -> None:
    """Answer --help, or resolve the command line and run a recipe's `main` on the result; then end as `run_main`
    does."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        if own_rank() == 0:
            _print(help_of(recipe, sys.modules[main.__module__].__doc__))
        return
    run_main(lambda: _train(recipe, main))


def _train(recipe: Recipe, main: Callable[[Run], None]) -> None:
    """Raises KeyboardInterrupt with how to continue."""
    run = resolve_here(recipe, sys.argv[1:], read_launch())
    begin_imports(run)
    try:
        main(run)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(_how_to_continue(run)) from stop


def _how_to_continue(run: Run) -> str:
    from finetune.training.checkpoints.manifest import checkpoints_in

    folder = Path(run.values["output_dir"])
    if not folder.expanduser().is_dir():
        return "Nothing has been written: start it again."
    saved = checkpoints_in(folder.expanduser())
    if not saved:
        return f"{folder} holds no checkpoint. Start again with --resume allow, or --overwrite_output_dir True."
    return f"{folder / saved[0].name} is the newest checkpoint; --resume auto continues from the newest valid one."


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `--help | head`; Python's flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_script(parser: argparse.ArgumentParser, main: Callable[[argparse.Namespace, Launch], None]) -> None:
    """Like `run_recipe`, for a script that trains nothing and has its own parser: one rank answers --help."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        if own_rank() == 0:
            _print(parser.format_help())
        return
    run_main(lambda: main(parser.parse_args(), read_launch()), "Run the same command again to continue.")


def run_main(main: Callable[[], None], mend: str = "") -> None:
    """Run `main` and end the process. Exit status: 0 done, 1 the run failed, 2 the request was wrong, 75 a signal
    stopped it or an earlier run still holds the folder, 130 Ctrl-C; then how to continue is printed: `mend`, or
    what the KeyboardInterrupt says.

    Every rank finds the same error in the request, and only rank 0 prints it. The others wait until the launcher ends
    them, which it does when rank 0 exits; if one exited first, the launcher would kill rank 0 before it printed. If
    rank 0 does not have the error, a rank that has it prints it after the wait.
    """
    rank, done = own_rank(), threading.Event()
    atexit.register(_leave, done)  # registered first, so called last
    try:
        main()
    except KeyboardInterrupt as stop:
        if rank == 0:
            print(f"\nstopped. {stop or mend}".rstrip(), file=sys.stderr, flush=True)
            tell_end(INTERRUPTED)
        os._exit(INTERRUPTED)
    except InterruptedRunError as error:  # already printed
        if rank == 0:
            tell_end(error.exit_status, error)
        _wait_interrupted(rank)
        os._exit(error.exit_status)
    except NothingToDoError as error:
        if rank == 0:
            print(shown(str(error)), flush=True)
            tell_end(error.exit_status)
        os._exit(error.exit_status)
    except FinetuneError as error:
        prefix = ""
        if rank != 0:
            time.sleep(SILENT_RANK_WAITS_SECONDS)
            prefix = f"[rank {rank}] "
        print(f"\n{prefix}error: {shown(str(error))}", file=sys.stderr, flush=True)
        tell_end(error.exit_status, error)
        sys.stdout.flush()
        os._exit(error.exit_status)  # an atexit hook could hang in a collective that the other ranks have left
    done.set()
    if rank != 0:
        _leave(done)
    tell_end(0)


def _wait_interrupted(rank: int) -> None:
    """Let rank 0 close its trackers before a launcher ends it, which it does once another rank has ended. If hosts come
    and go, each agent waits for its own ranks, so none lingers; but an agent whose ranks end before it has noticed that
    a host waits to join (torch 2.13, agent/server/api.py, _invoke_run) takes that for a failure."""
    if own_attempt() is not None and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(AGENTS_NOTICE_SECONDS)
    elif rank != 0:
        time.sleep(INTERRUPTED_RANK_WAITS_SECONDS)


def _leave(done: threading.Event) -> None:
    """After a finished run, exit without tearing down the threads of gloo and other libraries: ranks have crashed in
    that ("terminate called without an active exception", pytorch PR 179291), which fails the run."""
    if done.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
