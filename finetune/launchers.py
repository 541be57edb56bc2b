"""The lines that start a recipe under each launcher, for `finetune launch`. Never imports torch."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from finetune.errors import RequestError
from finetune.shipped import launch_file

ACCELERATE_CONFIGS = ("zero1", "zero2", "zero3", "zero3_offload")  # recipes/launch/accelerate_*.yaml
CONTAINER = [
    *("docker", "run", "--rm", "--init", "--gpus", "all"),
    # NCCL shares data between ranks through shared memory, of which a container has only 64 MB by default.
    *("--ipc=host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
    *("--stop-timeout", "300"),  # seconds to save
    *("--env", "HF_TOKEN", "--env", "WANDB_API_KEY"),  # passed on from the shell, if set there
]
HERE = '"$PWD"'  # expanded by the shell


@dataclass(frozen=True)
class Command:
    """One line for a shell, and the host to type it on ("" if there is only one)."""

    where: str
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words = [word if word.startswith(HERE) else shlex.quote(word) for word in self.words]
        return " ".join([*settings, *words])


@dataclass(frozen=True)
class Cluster:
    """Hosts and their numbers of ranks, in rank order. `gpus`: for hosts where only some GPUs take part, which ones."""

    hosts: dict[str, int]
    master_addr: str
    master_port: int
    gpus: dict[str, list[int]] = field(default_factory=dict)
    named: bool = False  # by a hostfile

    def place(self, host: str) -> str:
        """The host to type a line on; "" for a single host that nobody named."""
        return host if self.named or len(self.hosts) > 1 else ""

    def visible(self, host: str) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus[host]))} if host in self.gpus else {}

    @property
    def ranks(self) -> int:
        return sum(self.hosts.values())


def python(asked: argparse.Namespace, cluster: Cluster, recipe: list[str]) -> list[Command]:
    if cluster.ranks > 1:
        raise RequestError("--launcher python starts one process. Use deepspeed, torchrun or accelerate for several.")
    return [Command("", ["python", *recipe])]


def deepspeed(asked: argparse.Namespace, cluster: Cluster, recipe: list[str]) -> list[Command]:
    if not asked.hostfile:
        return [Command("", ["deepspeed", "--num_gpus", str(cluster.ranks), *_port(cluster), *recipe])]
    words = ["deepspeed", "--hostfile", asked.hostfile]
    for name in ("include", "exclude"):
        words += [f"--{name}", getattr(asked, name)] if getattr(asked, name) else []
    words += ["--master_addr", cluster.master_addr, "--master_port", str(cluster.master_port)]
    environment = _interface(asked)
    if not asked.no_ssh:
        if len(cluster.hosts) == 1:  # the launcher does not use ssh for one host (deepspeed 0.19.8, launcher/runner.py)
            return [Command(next(iter(cluster.hosts)), [*words, *recipe], environment)]
        if strange := next((word for word in recipe if not re.fullmatch(r"[\w@%+=:,./ -]+", word)), None):
            raise RequestError(
                f"{strange!r}: the other hosts' shells would parse it again, without its quotes. Put it in a YAML "
                "file and pass that as --config, or add --no_ssh."
            )
        return [Command("one of the hosts, from which ssh reaches the others", [*words, *recipe], environment)]
    return [
        Command(name, [*words, "--no_ssh", "--node_rank", str(rank), *recipe], environment)
        for rank, name in enumerate(cluster.hosts)
    ]


def torchrun(asked: argparse.Namespace, cluster: Cluster, recipe: list[str]) -> list[Command]:
    if len(cluster.hosts) == 1:
        (host,) = cluster.hosts
        words = ["torchrun", *(_port(cluster) or ["--standalone"]), "--nproc_per_node", str(cluster.ranks), *recipe]
        return [Command(cluster.place(host), words, cluster.visible(host))]
    # Not c10d's rendezvous: it finds the listening host by its host name, which on Debian resolves to 127.0.1.1, and
    # then no host listens (torch 2.13, distributed/elastic/rendezvous/utils.py, _matches_machine_hostname).
    rest = ["--master_addr", cluster.master_addr, "--master_port", str(cluster.master_port), *recipe]
    commands = []
    for rank, (host, ranks) in enumerate(cluster.hosts.items()):
        words = ["torchrun", "--nnodes", str(len(cluster.hosts)), "--node_rank", str(rank)]
        words += ["--nproc_per_node", str(ranks), *rest]
        commands.append(Command(host, words, {**_interface(asked), **cluster.visible(host)}))
    return commands


def accelerate(asked: argparse.Namespace, cluster: Cluster, recipe: list[str]) -> list[Command]:
    script, *flags = recipe
    kind = "ddp"
    config, fsdp = config_of(flags), (_taken(flags, "fsdp")[0] or "false").lower()
    if config and Path(config).parent.name == "ds_configs":
        config = Path(config).stem
    if config not in (None, "none") and fsdp != "false":
        raise RequestError("--deepspeed and --fsdp contradict each other. Keep one.")
    if config in ACCELERATE_CONFIGS:
        kind, (_, flags) = config, _taken(flags, "deepspeed", "deepspeed_config")
    elif config not in (None, "none"):
        raise RequestError(
            f"--deepspeed {config}: recipes/launch/ has an accelerate config for {', '.join(ACCELERATE_CONFIGS)}. Use "
            "another launcher, or copy one of them and name your file in it."
        )
    elif fsdp == "true":
        kind, (_, flags) = "fsdp", _taken(flags, "fsdp")
    elif fsdp != "false":
        raise RequestError(f"--fsdp {fsdp}: accelerate takes FSDP's options from a file. Copy accelerate_fsdp.yaml, or "
                           "use torchrun.")  # fmt: skip
    words = ["accelerate", "launch", "--config_file", launch_file(f"accelerate_{kind}.yaml")]
    words += ["--num_processes", str(cluster.ranks)]
    if len(cluster.hosts) == 1:
        (host,) = cluster.hosts
        words += _port(cluster, "--main_process_port")
        return [Command(cluster.place(host), [*words, script, *flags], cluster.visible(host))]
    if len(set(cluster.hosts.values())) > 1:
        raise RequestError("--launcher accelerate needs as many ranks on each host. Use torchrun, or --include fewer.")
    words += ["--num_machines", str(len(cluster.hosts)), "--main_process_ip", cluster.master_addr]
    words += ["--main_process_port", str(cluster.master_port)]
    words += ["--deepspeed_multinode_launcher", "standard"] if kind in ACCELERATE_CONFIGS else []
    return [
        Command(
            host, [*words, "--machine_rank", str(rank), script, *flags], {**_interface(asked), **cluster.visible(host)}
        )
        for rank, host in enumerate(cluster.hosts)
    ]


def slurm(asked: argparse.Namespace, cluster: Cluster, recipe: list[str]) -> list[Command]:
    if asked.image:
        raise RequestError("--launcher slurm with --image: clusters start containers differently (enroot, "
                           "Apptainer). Leave --image out, and see docs/launch.md.")  # fmt: skip
    if asked.hostfile:
        raise RequestError("--launcher slurm chooses hosts by itself. Give --nodes and --gpus_per_node instead.")
    nodes, gpus = str(len(cluster.hosts)), str(max(cluster.hosts.values()))
    # Whole nodes, because Slurm gives a task one core by default.
    words = ["sbatch", "--nodes", nodes, "--gpus-per-node", gpus, "--exclusive", launch_file("slurm.sbatch"), *recipe]
    meeting = {"MASTER_ADDR": asked.master_addr} if asked.master_addr else {}
    if asked.master_port != 29500:
        meeting["MASTER_PORT"] = str(asked.master_port)
    return [Command("", words, {**_interface(asked), **meeting})]


def check_container(asked: argparse.Namespace, recipe: str) -> None:
    """Raises RequestError for files outside the mounted folder, and if ssh would start ranks outside the container."""
    for flag, name in (("", recipe), ("--hostfile ", asked.hostfile or "")):
        if not Path(name).resolve().is_relative_to(Path.cwd()):
            raise RequestError(f"{flag}{name}: a container sees only this folder. Copy it here.")
    if asked.hostfile and asked.launcher == "deepspeed" and not asked.no_ssh:
        raise RequestError(
            "--image with --hostfile: ssh would start ranks outside the container. Add --no_ssh, or use torchrun."
        )


def in_container(command: Command, image: str, several: bool) -> Command:
    """The command in a container, with the repository's folder mounted, so that what a run writes is kept."""
    words = [*CONTAINER, *(["--network=host"] if several else [])]
    for name, value in command.environment.items():
        words += ["--env", f"{name}={value}"]
    words += ["--volume", f"{HERE}:/workspace/finetune", "--workdir", "/workspace/finetune", image]
    return Command(command.where, [*words, *command.words])


def _port(cluster: Cluster, flag: str = "--master_port") -> list[str]:
    return [flag, str(cluster.master_port)] if cluster.master_port != 29500 else []


def _interface(asked: argparse.Namespace) -> dict[str, str]:
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    return dict.fromkeys(names, asked.interface) if asked.interface else {}


def config_of(flags: list[str]) -> str | None:
    return value_of(flags, "deepspeed") or value_of(flags, "deepspeed_config")


def value_of(flags: list[str], name: str) -> str | None:
    """The value of a flag as it is typed, if it is."""
    return _taken(flags, name)[0]


def default_config(recipe: str, launcher: str) -> str | None:
    """The same choice as in finetune.run.engine; None for a recipe that does not train."""
    if Path(recipe).stem == "generate":
        return None
    if Path(recipe).stem.endswith("_pipeline"):
        return "pipeline"
    return "zero2" if launcher == "deepspeed" else None


def _taken(flags: list[str], *names: str) -> tuple[str | None, list[str]]:
    """The value of the last of these flags, as `--name VALUE` or `--name=VALUE`, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(*(f"--{name}" for name in names), dest="value", nargs="?", const="")
    found, rest = parser.parse_known_args(flags)
    return found.value, rest


LAUNCHERS = {function.__name__: function for function in (python, deepspeed, torchrun, accelerate, slurm)}
