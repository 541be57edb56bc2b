"""Start and end of a recipe's process. Nothing heavy is imported until the command line has been parsed and checked, so
--help, mistyped flags and wrong paths are reported at once."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from finetune.errors import INTERRUPTED, FinetuneError, InterruptedRunError, NothingToDoError, RequestError
from finetune.privacy import shown
from finetune.run.accelerate_plugin import check_fields, config_of_fields
from finetune.run.checks import found_wrong_here, others, raised_by
from finetune.run.command_line import help_of
from finetune.run.engine import (
    context_of,
    deepspeed_by_accelerate,
    deepspeed_config_of,
    fsdp_by_accelerate,
    load_deepspeed,
    refuse_under_zero3,
    refuse_unused_disk,
    settle_engine,
)
from finetune.run.environment import left_over, obeyed
from finetune.run.facts import check_sharded
from finetune.run.importing import begin_imports
from finetune.run.launch import Launch, own_rank, read_launch
from finetune.run.output_dir import check_output_dir
from finetune.run.rates import vain_rates
from finetune.run.recipe import Recipe
from finetune.run.resolve import read_flags, refuse
from finetune.run.run import Run
from finetune.run.supervised import own_attempt, tell_end


def resolve_here(recipe: Recipe, argv: Sequence[str], launch: Launch) -> Run:
    """`resolve` for a run that is about to start on this machine: also checks its files, folders and DeepSpeed config.
    Raises RequestError."""
    run, typos, mistakes = read_flags(recipe, argv, launch, is_here=True)
    asked: str | None = None
    try:
        run = settle_engine(run)
        asked = deepspeed_config_of(run)
    except RequestError as error:
        typos += others([str(error)], typos)  # the engine is unknown, so later checks that depend on it may be wrong
    run = obeyed(run)
    run = run.noted(*vain_rates(run))
    mistakes += left_over(run, asked)
    mistakes += [*found_wrong_here(run, asked), *raised_by(lambda: _check_engine(run, asked))]
    if launch.speaks:
        # The output folder comes last: choosing another one fixes none of the flags.
        mistakes += raised_by(*(partial(look, run) for look in _looks_ahead()), partial(check_output_dir, run))
    refuse([*typos, *others(mistakes, typos)])
    return run


def _check_engine(run: Run, asked: str | None) -> None:
    if asked:  # checked again once the GPUs are known
        precision: dict[str, bool] = {name: run.given[name] for name in ("bf16", "fp16") if name in run.given}
        loaded = load_deepspeed(run, asked, context_of(run, precision, has_cuda=None))
        refuse_unused_disk(run, loaded.config, loaded.name)
    elif deepspeed_by_accelerate(run) and run.value("do_train"):
        refuse_under_zero3(run, config_of_fields(), "by accelerate")
        check_fields(context_of(run, {}, has_cuda=None, engine="trainer"), tuple(run.value("disable_check") or ()))
    elif run.value("fsdp") or fsdp_by_accelerate(run):
        check_sharded(run)


def _looks_ahead() -> Sequence[Callable[[Run], None]]:
    """Checks that read files, from modules that do so without importing torch."""
    from finetune.data.first_look import look_at_columns
    from finetune.run.decoders import look_at_model
    from finetune.training.checkpoints.flags_of_before import look_at_flags
    from finetune.training.hub import check_hub

    return look_at_model, look_at_columns, look_at_flags, check_hub


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
