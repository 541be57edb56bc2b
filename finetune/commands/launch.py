"""`finetune launch`: print the command that starts a recipe on the described machine or cluster. It starts nothing."""

from __future__ import annotations

import argparse
import ipaddress
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from finetune.commands.recipe import find
from finetune.dsconfig.load import find_config
from finetune.errors import RequestError
from finetune.host.hardware import gpus_here
from finetune.hostfile import check_port, chosen, read_hostfile
from finetune.launchers import (
    LAUNCHERS,
    Cluster,
    Command,
    check_container,
    config_of,
    default_config,
    in_container,
    value_of,
)
from finetune.run.choose import recipes
from finetune.run.engine import context_of, load_deepspeed
from finetune.run.flags.expert_parallel import expert_faults_here
from finetune.run.flags.groups import GROUPS, is_on
from finetune.run.flags.sequence_parallel import sequence_faults_here
from finetune.run.launch import Launch
from finetune.run.recipe import ENGINE_FLAG
from finetune.run.resolve import resolve
from finetune.run.run import Run
from finetune.shipped import RECIPES, as_typed

SIZES = (*GROUPS, ENGINE_FLAG)


def run(asked: argparse.Namespace) -> int:
    """Print the command; returns the exit status. Notes begin with #; if hosts need different lines, they say which."""
    commands, cluster = commands_of(asked)
    several = len(cluster.hosts) > 1
    config = asked.ds_config or default_config(asked.recipe, asked.launcher)
    if config and config != "none":
        per_node = f" --ranks_per_node {max(cluster.hosts.values())}" if several else ""
        sizes = "".join(f" --{name} {size}" for name, size in asked.sizes.items())
        print(f"# before: finetune check {shlex.quote(config)} --world_size {cluster.ranks}{per_node}{sizes}")
    if asked.interface and asked.launcher == "deepspeed" and several and not asked.no_ssh:
        print(f"# CPU ranks: add GLOO_SOCKET_IFNAME={asked.interface} to .deepspeed_env; ssh forwards NCCL's only")
    if several and asked.launcher != "slurm":
        hosts = f" --hostfile {shlex.quote(asked.hostfile)}" if asked.hostfile else ""
        print(f"# before, on every host: finetune doctor{hosts} --master_addr {cluster.master_addr} "
              f"--master_port {cluster.master_port}")  # fmt: skip
    for command in commands:
        if command.where:
            print(f"# on {command.where}")
        print(command.line())
    return 0


def commands_of(asked: argparse.Namespace) -> tuple[list[Command], Cluster]:
    """The commands that start the run, and the cluster; sets `asked.launcher` if not given, and what the flags say:
    `asked.ds_config`, the DeepSpeed config, and `asked.sizes`, of stages and groups of ranks. Raises RequestError."""
    recipe = _recipe(asked.recipe)
    names = vars(asked).keys() - {"command", "print", "recipe", "flags"}  # options, which no recipe has
    own = next((word for word in asked.flags if word.startswith("--") and word[2:].partition("=")[0] in names), None)
    if own:
        raise RequestError(
            f"{own} is an option of `finetune {asked.command}`, but flags after the recipe are the recipe's. Put it "
            "before the recipe."
        )
    cluster = _cluster(asked)
    faults, several = list(_missing(asked)), len(cluster.hosts) > 1
    asked.launcher = asked.launcher or ("torchrun" if asked.image or (several and not asked.hostfile) else "deepspeed")
    asked.sizes = {name: size for name in SIZES if (size := value_of(asked.flags, name))}
    asked.ds_config = _checked(asked, recipe, cluster, faults) or config_of(asked.flags)
    if asked.no_ssh and asked.launcher != "deepspeed":
        raise RequestError(f"--no_ssh is for the deepspeed launcher; {asked.launcher} needs no ssh. Leave it out.")
    if asked.image:
        check_container(asked, recipe)
    commands = LAUNCHERS[asked.launcher](asked, cluster, [recipe, *asked.flags])
    if asked.image:
        commands = [in_container(command, asked.image, several) for command in commands]
    return commands, cluster


def _checked(asked: argparse.Namespace, recipe: str, cluster: Cluster, faults: list[str]) -> str | None:
    """The DeepSpeed config that the flags or their YAML name; sets `asked.sizes`. Raises RequestError with `faults`,
    all mistakes in the recipe's flags and in that config, and what its ranks cannot share."""
    config = None
    known = recipes().get(Path(recipe).stem) if Path(recipe).resolve().parent == RECIPES else None
    if known and not {"-h", "--help"} & set(asked.flags) and not _is_elsewhere(asked):
        try:
            run = resolve(known, asked.flags, Launch(world_size=cluster.ranks), is_here=False)
            config = run.value("deepspeed") or run.value("deepspeed_config")
            asked.sizes = {name: run.value(name) for name in GROUPS if is_on(run, name)}
            asked.sizes |= {} if run.stages is None else {ENGINE_FLAG: run.stages}
            _check_config(run, config, max(cluster.hosts.values()))
            engine = config or default_config(recipe, asked.launcher)
            engine = None if engine == "none" else engine
            faults += [*sequence_faults_here(run, engine), *expert_faults_here(run, engine)]
        except RequestError as error:
            faults.append(str(error))
    if faults:
        raise RequestError("\n".join(faults))
    return config


def _check_config(run: Run, config: str | None, per_node: int) -> None:
    """Raises RequestError with the errors of the DeepSpeed config for this run, if the file is here."""
    try:
        find_config(config or "none")
    except RequestError:
        return
    precision: dict[str, bool] = {name: run.given[name] for name in ("bf16", "fp16") if name in run.given}
    load_deepspeed(run, str(config), context_of(run, precision, None, is_here=False, ranks_per_node=per_node))


def _is_elsewhere(asked: argparse.Namespace) -> bool:
    """Whether --config names a YAML on the target machine rather than here."""
    words = [word for flag in asked.flags for word in flag.split("=", 1)]
    given = [path for flag, path in pairwise(words) if flag == "--config"]
    return asked.command == "launch" and any(path.startswith("/") and not Path(path).exists() for path in given)


def _missing(asked: argparse.Namespace) -> Iterator[str]:
    """What the launcher needs for several hosts, or for a cluster, and was not given."""
    if asked.launcher == "slurm" and asked.gpus_per_node is None and not asked.hostfile:
        yield "--launcher slurm: this machine's GPUs are not the cluster's. Give --gpus_per_node."
    if asked.hostfile or asked.launcher == "slurm" or (asked.nodes or 1) <= 1:
        return
    if asked.launcher == "deepspeed":
        yield "--launcher deepspeed reads its hosts from a file. Give --hostfile, or --launcher torchrun."
    if not asked.master_addr:
        yield (
            f"--nodes {asked.nodes}: the ranks must know where they meet. Give --master_addr, the name or address of "
            "the first host as the others see it, or a --hostfile."
        )


def _recipe(name: str) -> str:
    """A file's path unchanged, or the path of a recipe of the toolkit."""
    return name if Path(name).is_file() and name.endswith(".py") else as_typed(find(name))


def _cluster(asked: argparse.Namespace) -> Cluster:
    for name in ("nodes", "gpus_per_node"):
        if getattr(asked, name) is not None and getattr(asked, name) < 1:
            raise RequestError(f"--{name} is {getattr(asked, name)}, but it must be 1 or more.")
    if asked.master_addr and not re.fullmatch(r"[\w.-]+", asked.master_addr) and not _is_address(asked.master_addr):
        raise RequestError(f"--master_addr {asked.master_addr} is not a name or address. The port is --master_port.")
    check_port(asked.master_port)
    if asked.hostfile:
        if asked.nodes is not None or asked.gpus_per_node is not None:
            raise RequestError("--hostfile lists the hosts. Leave out --nodes and --gpus_per_node, or --hostfile.")
        every = read_hostfile(Path(asked.hostfile))
        slots = chosen(every, asked.include, asked.exclude)
        hosts = {name: len(numbers) for name, numbers in slots.items()}
        gpus = {name: numbers for name, numbers in slots.items() if len(numbers) < every[name]}
        address = asked.master_addr or next(iter(hosts)).rpartition("@")[2]
        return Cluster(hosts, address, asked.master_port, gpus, named=True)
    if asked.include or asked.exclude:
        raise RequestError("--include and --exclude choose among the hosts of a --hostfile. Give one.")
    nodes = asked.nodes or 1
    ranks = asked.gpus_per_node or (1 if asked.launcher == "python" else gpus_here() or 2)
    return Cluster({f"host {i}": ranks for i in range(nodes)}, asked.master_addr or "127.0.0.1", asked.master_port)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
