"""Checks of host names, ports, other hosts and the hub."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from psutil import net_if_addrs

from finetune.errors import RequestError
from finetune.host.result import ABSENT, FAILED, OK, WARNING, Asked, Result, warned
from finetune.hostfile import read_hostfile


def names(asked: Asked) -> Iterator[Result]:
    here, address = socket.gethostname(), _address(socket.gethostname())
    mend = "gloo looks it up. Add it to /etc/hosts with its network address, or set GLOO_SOCKET_IFNAME."
    found = f"{here} is {address}" if address else f"{here} has no address"
    yield warned("this host's name", address is not None, found, mend)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", asked.port))
            taken = False
        except OSError:
            taken = True
    mend = f"Another run is using it: stop that run, or launch with --master_port {asked.port + 1}."
    yield warned("rendezvous port", not taken, f"{asked.port} is {'taken' if taken else 'free'}", mend)


def why_ranks_do_not_meet(master_addr: str, port: int, said: str) -> list[str]:
    """The problems that `interfaces` and `meeting_place` find on this host, two sentences each. Warnings count only if
    the error, `said`, is about connections."""
    asked = Asked(output_dir=Path(), nvme_path=None, hostfile=None, port=port, master_addr=master_addr)
    counts = (FAILED, WARNING) if re.search("connect|gloo|timed? ?out", said, re.IGNORECASE) else (FAILED,)
    found = [*interfaces(asked), *meeting_place(asked)]
    return [f"{result.name}: {result.found}. {result.mend}" for result in found if result.status in counts]


def interfaces(asked: Asked) -> Iterator[Result]:
    """The network interface on which this host talks to the others: as set for gloo and NCCL, or as gloo would choose.
    It need not be the one that leads to the meeting place, because data may use a separate, faster network."""
    here = {name: {a.address for a in every if a.family == socket.AF_INET} for name, every in net_if_addrs().items()}
    way = _own_address_towards(asked.master_addr) if asked.master_addr else None
    by = next((name for name, addresses in here.items() if way in addresses and name != "lo"), None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        told = os.environ.get(variable, "")
        names = [name.lstrip("=") for name in told.split(",") if name and not told.startswith("^")]
        found = [other for other in here for name in names if other == name or
                 (variable.startswith("NCCL") and not told.startswith("=") and other.startswith(name))]  # fmt: skip
        if names and not found:
            mend = f"This host has {', '.join(sorted(here))}. Set {variable} to one of them, or unset it."
            yield Result(variable, FAILED, f"there is no interface {told}", mend, needed=True)
        elif by and found == ["lo"]:
            mend = f"Set {variable}={by}, or unset it."
            yield Result(variable, FAILED, f"{told}, but {asked.master_addr} is reached by {by}", mend, needed=True)
        elif found:
            yield Result(variable, OK, told)
    own = _address(socket.gethostname()) or "no address"
    if by and not os.environ.get("GLOO_SOCKET_IFNAME") and own not in here[by]:
        # gloo listens on the address of the host's own name (torch, ProcessGroupGloo.cpp, createDefaultDevice).
        mend = f"Set GLOO_SOCKET_IFNAME={by} on this host, or map its name to its address {way} in /etc/hosts."
        yield Result("GLOO_SOCKET_IFNAME", WARNING, f"unset, and this host's name is {own}: others cannot answer", mend)


def meeting_place(asked: Asked) -> Iterator[Result]:
    """Whether this host, if it is not the meeting place, can reach the address and port where the ranks meet."""
    if asked.master_addr is None:
        return
    name, place = "meeting place", f"{asked.master_addr}:{asked.port}"
    address = _address(asked.master_addr)
    if address is None:
        mend = "Add it to DNS or /etc/hosts on every host, or give its address with --master_addr."
        yield Result(name, FAILED, f"{asked.master_addr} has no address", mend, needed=True)
        return
    if any(address == own.address for every in net_if_addrs().values() for own in every):
        yield Result(name, OK, f"{place} is this host; run this on the others", needed=True)
        return
    try:
        socket.create_connection((address, asked.port), timeout=3).close()
        yield Result(name, OK, f"{place} answers", needed=True)
    except ConnectionRefusedError:
        yield Result(name, OK, f"{place} can be reached; nobody listens there yet", needed=True)
    except OSError as error:
        mend = (
            f"Is {asked.master_addr} up, and on this network? If so, a firewall blocks it: open TCP {asked.port}, and "
            "all ports between a run's hosts, because ranks choose their own."
        )
        yield Result(name, FAILED, f"{place} cannot be reached ({error})", mend, needed=True)


def _own_address_towards(host: str) -> str | None:
    """The address of this host from which it would reach `host`. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except (OSError, ValueError, TypeError):
        return None


def hosts(asked: Asked) -> Iterator[Result]:
    if asked.hostfile is None:
        return
    try:
        named = read_hostfile(asked.hostfile)
    except RequestError as error:
        yield Result("hostfile", FAILED, str(error), "Fix the file.", needed=True)
        return
    for host in named:
        if (address := _address(host)) is None:
            mend = "Add it to DNS or /etc/hosts on every host."
            yield Result(f"host {host}", FAILED, "has no address", mend, needed=True)
            continue
        try:
            socket.create_connection((address, 22), timeout=3).close()
            yield Result(f"host {host}", OK, f"{address}, ssh answers", needed=True)
        except OSError as error:
            mend = (
                f"The deepspeed launcher starts ranks over ssh: open port 22 on {host} and add a key, or start each "
                "host separately (--no_ssh, or torchrun)."
            )
            yield Result(f"host {host}", FAILED, f"{address}: ssh does not answer ({error})", mend, needed=True)


def hub(asked: Asked) -> Iterator[Result]:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield Result("hub", ABSENT, "HF_HUB_OFFLINE is set: only local files and built-in data")
        return
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
        socket.create_connection((endpoint.hostname or "", port), timeout=3).close()
        yield Result("hub", OK, "reachable")
    except (OSError, ValueError) as error:
        mend = "Give local paths to models and data, or set HF_ENDPOINT to a mirror; HF_HUB_OFFLINE=1 avoids the wait."
        yield Result("hub", WARNING, f"cannot be reached ({type(error).__name__})", mend)
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    known = bool(os.environ.get("HF_TOKEN")) or (home / "token").is_file()
    found = "present" if known else "none: only public models, and no --push_to_hub"
    yield Result("hub token", OK if known else ABSENT, found)
