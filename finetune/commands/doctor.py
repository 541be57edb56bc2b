"""`finetune doctor`: what works on this machine, and how to fix what does not."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from finetune.doctor.probes import look
from finetune.host.result import FAILED, OK, WARNING, Asked, Result
from finetune.hostfile import check_port
from finetune.privacy import shown, without_home


def run(asked: argparse.Namespace) -> int:
    """The exit status: 0 if everything that the defaults need works, else 1."""
    check_port(asked.master_port)
    machine = Asked(
        output_dir=Path(asked.output_dir),
        nvme_path=Path(asked.nvme_path) if asked.nvme_path else None,
        hostfile=Path(asked.hostfile) if asked.hostfile else None,
        port=asked.master_port,
        master_addr=asked.master_addr,
    )
    results = []
    for result in chain(look(machine), _deep() if asked.deep else ()):
        results.append(result)
        if not asked.json:
            print(shown(_line(result)), flush=True)
    failed = [result for result in results if result.status == FAILED and result.needed]
    if asked.json:
        found = {"system": platform.platform(), "results": [vars(result) for result in results]}
        print(json.dumps(without_home(found), indent=2))
    else:
        print(_verdict(results, failed, asked.deep))
    return 1 if failed else 0


def _deep() -> Iterator[Result]:
    from finetune.doctor.trials import run_trials

    return run_trials()


def _line(result: Result) -> str:
    mark = {OK: " ok ", WARNING: "warn", FAILED: "FAIL"}.get(result.status, " -- ")
    took = f"  ({result.seconds:.1f} s)" if result.seconds >= 0.5 else ""
    line = f"[{mark}] {result.name:<18} {result.found}{took}"
    return f"{line}\n       {'':<18} -> {result.mend}" if result.mend else line


def _verdict(results: list[Result], failed: list[Result], deep: bool) -> str:
    if failed:
        return f"\nNeeded by the defaults, but failing here: {', '.join(result.name for result in failed)}."
    other = sum(result.status == FAILED for result in results)
    also = f" {other} other thing(s) fail: see above." if other else ""
    hint = "" if deep else " `finetune doctor --deep` tries it for real."
    return f"\nEverything that the defaults need works here.{also}{hint}"
