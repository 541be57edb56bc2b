"""DeepSpeed's hostfile, and the hosts and GPUs that `--include` and `--exclude` select from it. Never imports torch.

Parses like deepspeed/launcher/runner.py (0.19.8: _parse_hostfile, parse_resource_filter); what DeepSpeed misreads
silently, or answers with a traceback, raises RequestError here.
"""

from __future__ import annotations

import re
from pathlib import Path

from finetune.errors import RequestError
from finetune.safe_read import read_bounded

MOST_BYTES = 2**20  # thirty thousand hosts
LINE = re.compile(r"(\w[\w.@-]*)\s+slots=(\d+)(\s+max_slots=\d+)?")


def read_hostfile(path: Path) -> dict[str, int]:
    """Host name to number of slots, in the file's order, which is the order of the ranks."""
    try:
        lines = read_bounded(path.expanduser(), MOST_BYTES, name=f"--hostfile {path}").splitlines()
    except RequestError as error:
        raise RequestError(f"{error} Give a file of lines: worker-1 slots=8.") from error
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        found = LINE.fullmatch(text)
        if not found or len(found[2]) > 6 or int(found[2]) < 1:
            raise RequestError(f"{path}:{number}: {text!r} is not a host. Write its name and GPUs: worker-1 slots=8.")
        if found[1] in hosts:
            raise RequestError(
                f"{path}:{number}: {found[1]} appears twice. Give each host one line, with all its slots."
            )
        hosts[found[1]] = int(found[2])
    if not hosts:
        raise RequestError(f"--hostfile {path}: names no host. Write a line for each: worker-1 slots=8.")
    return hosts


def chosen(hosts: dict[str, int], include: str, exclude: str) -> dict[str, list[int]]:
    """Host name to the slots that take part. Filter syntax: `worker-0@worker-1:0,2` means all of the first host and two
    GPUs of the second."""
    if include and exclude:
        raise RequestError("--include and --exclude cannot both be given. Keep one.")
    every = {name: list(range(slots)) for name, slots in hosts.items()}
    named = _filter(include or exclude, every, "--include" if include else "--exclude")
    if include:
        left = {name: named[name] for name in every if name in named}
    else:
        left = {name: [slot for slot in slots if slot not in named.get(name, [])] for name, slots in every.items()}
    left = {name: slots for name, slots in left.items() if slots}
    if not left:
        raise RequestError(f"{f'--exclude {exclude}' if exclude else f'--include {include}'} leaves no GPU.")
    return left


def check_port(port: int) -> None:
    """Raises RequestError unless it is a valid port."""
    if not 0 < port < 65536:
        raise RequestError(f"--master_port {port} is not a valid port. Give 1 to 65535; 29500 is the usual one.")


def _filter(text: str, every: dict[str, list[int]], flag: str) -> dict[str, list[int]]:
    named: dict[str, list[int]] = {}
    for part in filter(None, text.split("@")):
        name, _, numbers = part.partition(":")
        if name not in every:
            raise RequestError(f"{flag} {text}: there is no host {name!r}. The hosts are {', '.join(every)}.")
        if numbers and not re.fullmatch(r"\d+(,\d+)*", numbers):
            raise RequestError(
                f"{flag} {text}: {numbers!r} is not a list of GPUs. Write HOST:0,2 or HOST; @ between hosts."
            )
        slots = sorted({int(number) for number in numbers.split(",")}) if numbers else every[name]
        beyond = [slot for slot in slots if slot not in every[name]]
        if beyond:
            raise RequestError(f"{flag} {text}: {name} has no GPU {beyond[0]}; it has 0 to {len(every[name]) - 1}.")
        named[name] = sorted({*named.get(name, []), *slots})
    return named
