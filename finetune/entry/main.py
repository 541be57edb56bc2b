"""How a recipe begins and ends as a process. Nothing heavy is imported before the command line has been understood: so
--help, mistyped flags and wrong paths are answered in a moment."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

from finetune.entry.here import resolve_here
from finetune.errors import FinetuneError, InterruptedRunError, NothingToDoError
from finetune.privacy import shown
from finetune.run.help import help_of
from finetune.run.importing import begin_imports
from finetune.run.launch import Launch, own_rank, read_launch
from finetune.run.recipe import Recipe
from finetune.run.run import Run

SILENT_RANK_WAITS_SECONDS = 20.0
INTERRUPTED_RANK_WAITS_SECONDS = 60.0  # while rank 0 tells its trackers; its end is that of the others
RESUMES = "Where a checkpoint was saved, --resume auto goes on from it."
INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def run_recipe(recipe: Recipe, main: Callable[[Run], None]) -> None:
    """Answer --help, or settle what the command line asks for and run a recipe's `main` on it; then end as `run_main`
    does."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        if own_rank() == 0:
            _print(help_of(recipe, sys.modules[main.__module__].__doc__))
        return
    run_main(lambda: main(_settled(recipe)))


def _settled(recipe: Recipe) -> Run:
    run = resolve_here(recipe, sys.argv[1:], read_launch())
    begin_imports(run)
    return run


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `--help | head`; nothing may be left for Python to write as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_script(parser: argparse.ArgumentParser, main: Callable[[argparse.Namespace, Launch], None]) -> None:
    """As `run_recipe`, of a script that trains nothing and has a parser of its own: one rank answers --help."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        if own_rank() == 0:
            _print(parser.format_help())
        return
    run_main(lambda: main(parser.parse_args(), read_launch()), "The same command goes on where it was stopped.")


def run_main(main: Callable[[], None], mend: str = RESUMES) -> None:
    """Run `main` and end the process: 0 done, 1 the run failed, 2 the request was wrong, 75 a signal asked it to stop
    or its predecessor still had the folder, 130 Ctrl-C, of which `mend` says how to go on.

    Every rank meets the same fault in the request, and rank 0 alone says it. The others wait for the launcher to end
    them, which it does as soon as rank 0 has; ending first, they would have rank 0 killed before it spoke. A rank whose
    fault rank 0 does not share speaks once it has waited in vain.
    """
    rank, done = own_rank(), threading.Event()
    atexit.register(_leave, done)  # the first that is registered is the last that is called
    try:
        main()
    except KeyboardInterrupt:
        if rank == 0:
            print(f"\nstopped. {mend}", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)
    except InterruptedRunError as error:  # which has been said
        if rank != 0:
            time.sleep(INTERRUPTED_RANK_WAITS_SECONDS)
        os._exit(error.exit_status)
    except NothingToDoError as error:
        if rank == 0:
            print(shown(str(error)), flush=True)
        os._exit(error.exit_status)
    except FinetuneError as error:
        prefix = ""
        if rank != 0:
            time.sleep(SILENT_RANK_WAITS_SECONDS)
            prefix = f"[rank {rank}] "
        print(f"\n{prefix}error: {shown(str(error))}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(error.exit_status)  # no atexit hook may hang on a collective that the other ranks have left
    done.set()
    if rank != 0:
        _leave(done)


def _leave(done: threading.Event) -> None:
    """Once a run is done, nothing is left but to tear down threads of gloo and of libraries, over which ranks have
    been seen to die ("terminate called without an active exception", pytorch PR 179291), and with them the run."""
    if done.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
