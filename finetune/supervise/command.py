"""The command that is supervised: what it starts, where that writes, and whether hosts may come and go."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.errors import RequestError, or_meant
from finetune.run.choose import recipes
from finetune.run.engine import FLAGS, refuse_missing_config, settle_engine
from finetune.run.environment import path_of_programs
from finetune.run.files import SUPERVISION
from finetune.run.launch import COUNT, Launch
from finetune.run.resolve import read_flags, refuse, resolve
from finetune.safe_read import read_yaml
from finetune.shipped import RECIPES, as_typed, files

TORCHRUN = ("torchrun", "torch.distributed.run")
ACCELERATE = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli")
LAUNCHER = re.compile(r"python[0-9.]*|torchrun|deepspeed|accelerate(-launch)?")
KNOWN = ("accelerate", "deepspeed", "docker", "finetune", "python", "srun", "torchrun")  # to suggest
RANGE = re.compile(r"([0-9]{1,6}):([0-9]{1,6})")
SET_HERE = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "max_restarts", "standalone")
FOR_FIXED_HOSTS = ("node_rank", "master_addr", "master_port")
KEEP_ALIVE = "keep_alive_interval"
# Seconds. A host that is gone is noticed by the ranks, long before its agent's heartbeats stop; each heartbeat adds the
# whole state of the rendezvous to its file (torch 2.13, FileStore).
KEEP_ALIVE_SECONDS = 30


@dataclass(frozen=True)
class Command:
    """`launcher` are the words before the recipe. If hosts may come and go, `hosts` are the fewest and the most, and
    `launcher` lacks `--nnodes` and `--rdzv_conf`; else `hosts` is None. `folder` is the run folder."""

    launcher: tuple[str, ...]
    recipe: tuple[str, ...]
    folder: Path
    hosts: tuple[int, int] | None = None
    rendezvous: str = ""  # the user's --rdzv_conf
    address: str = ""  # the user's --local_addr

    @property
    def by_torchrun(self) -> bool:
        return any(Path(word).name in TORCHRUN for word in self.launcher)

    @property
    def home(self) -> Path:
        """Where the supervisors of all hosts and the ranks meet."""
        return self.folder / SUPERVISION

    @property
    def digest(self) -> str:
        """Tells whether it is the recipe and the flags of an earlier start; the same on all hosts."""
        return hashlib.sha256(json.dumps(self.recipe).encode()).hexdigest()[:16]

    def words(self, attempt: Path, fewest: int | None = None, most: int | None = None) -> list[str]:
        """The command of one attempt. For an elastic one, on `fewest` to `most` hosts (default: as given), which meet
        through a file in the attempt's folder: so no host is needed by the others, and what is left of an earlier
        attempt cannot join."""
        if self.hosts is None:
            return [*self.launcher, *self.recipe]
        place = next(i for i, word in enumerate(self.launcher) if Path(word).name in TORCHRUN) + 1
        conf = self.rendezvous
        if KEEP_ALIVE not in conf:
            conf = ",".join(filter(None, (conf, f"{KEEP_ALIVE}={KEEP_ALIVE_SECONDS}")))
        most = most or self.hosts[1]
        own = ["--nnodes", f"{min(fewest or self.hosts[0], most)}:{most}", "--max_restarts", "0"]
        own += ["--rdzv_backend", "c10d", "--rdzv_endpoint", str((attempt / "rendezvous").absolute())]
        own += ["--rdzv_id", attempt.name, "--rdzv_conf", f"store_type=file,{conf}"]
        return [*self.launcher[:place], *own, *self.launcher[place:], *self.recipe]


def read_command(words: Sequence[str]) -> Command:
    """Raises RequestError for a command that names no recipe, or a run that could not be started or continued."""
    place = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if place is None:
        raise RequestError(
            "The command names no recipe. Give the launcher's whole command after --, such as "
            "`finetune supervise -- deepspeed --num_gpus 8 recipes/causal_lm.py --output_dir runs/mine`."
        )
    launcher, (script, *flags) = list(words[:place]), words[place:]
    runs_here = not launcher or LAUNCHER.fullmatch(Path(launcher[0]).name)  # others may run it in a container
    if runs_here and not Path(script).is_file():
        raise RequestError(f"{script}: there is no such file.{or_meant(script, map(as_typed, files('*.py').values()))}")
    if shutil.which(words[0], path=path_of_programs()) is None:
        what = "it may not be executed" if Path(words[0]).is_file() else "there is no such command"
        raise RequestError(f"{words[0]}: {what}.{or_meant(words[0], KNOWN)} Give a launcher's whole command after --.")
    folder, resume, strategy, overwrites = _of_run(script, flags, bool(runs_here))
    if strategy == "no":
        raise RequestError("--save_strategy no: a restart would begin from scratch each time. Drop it.")
    if overwrites:
        raise RequestError("--overwrite_output_dir: a restart would delete what the run has done. Drop it.")
    if resume not in (None, "allow"):
        raise RequestError(f"--resume {resume}: a supervised run continues with --resume allow. Drop it.")
    recipe = (script, *flags, *(() if resume else ("--resume", "allow")))
    plain = Command(tuple(launcher), recipe, folder)
    if plain.by_torchrun:
        return _elastic(plain)
    _refuse_hosts(launcher)
    return plain


def _refuse_hosts(launcher: Sequence[str]) -> None:
    """Raises RequestError if another launcher than torchrun is to be started on each of several hosts: supervisors that
    do not meet would start at different times, and all but one would find the run folder locked."""
    given, _ = _options(launcher, "num_machines", "config_file", "no_ssh")
    machines, said = given["num_machines"], f"--num_machines {given['num_machines']}"
    if any(Path(word).name in ACCELERATE for word in launcher) and machines is None:
        path = Path(given["config_file"] or _default_config())
        found = read_yaml(path) if path.is_file() else None  # JSON is YAML; accelerate itself reports a missing file
        machines, said = str((found if isinstance(found, dict) else {}).get("num_machines", 1)), f"{path}: num_machines"
    if given["no_ssh"] is not None:
        machines, said = "N", "--no_ssh"
    if machines not in (None, "1"):
        raise RequestError(
            f"{said}: this launcher is started on each of several hosts, but the supervisors of several hosts meet "
            f"only through torchrun. Give `torchrun --nnodes {machines}:{machines} --nproc_per_node ...`, or start all "
            "hosts from one: `deepspeed --hostfile FILE`."
        )


def _default_config() -> str:
    """accelerate 1.15, commands/config/config_args.py."""
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(os.environ.get("HF_HOME", f"{caches}/huggingface")).expanduser() / "accelerate"
    return str(next((path for path in home.glob("default_config.y*ml")), home / "default_config.json"))


def _of_run(script: str, flags: Sequence[str], runs_here: bool) -> tuple[Path, str | None, str | None, bool]:
    """The run folder, --resume, --save_strategy and --overwrite_output_dir. Raises RequestError for wrong flags and
    values of a recipe of ours, also, if it `runs_here`, for a DeepSpeed config that is missing; a changed copy may have
    others. Mistakes that depend on the launch are left to it."""
    known = recipes().get(Path(script).stem)
    if known is not None:
        run, typos, _ = read_flags(known, flags, Launch(), is_here=False)
        if Path(script).resolve().parent == RECIPES and not {"-h", "--help"} & {*flags}:
            refuse(typos)
            for asked in filter(None, map(run.value, FLAGS if runs_here else ())):
                if asked != "none":
                    refuse_missing_config(run, str(asked))
        strategy = run.value("save_strategy")
        folder = Path(str(run.value("output_dir"))).expanduser()
        return folder, run.value("resume"), strategy and str(strategy), bool(run.value("overwrite_output_dir"))
    given = _options(flags, "output_dir", "resume", "save_strategy", "overwrite_output_dir")[0]
    if not given["output_dir"]:
        raise RequestError(
            f"{script} is none of the toolkit's recipes, so its run folder is unknown. Give --output_dir."
        )
    overwrites = (given["overwrite_output_dir"] or "false").lower() != "false"
    return Path(given["output_dir"]).expanduser(), given["resume"], given["save_strategy"], overwrites


def _elastic(plain: Command) -> Command:
    """The same, for hosts that may come and go, if torchrun is given a range of them."""
    given, rest = _options(plain.launcher, "nnodes", "rdzv_conf")
    ranks = _options(plain.launcher, "nproc_per_node")[0]["nproc_per_node"] or "1"
    names = (*SET_HERE, *FOR_FIXED_HOSTS, "local_addr")
    others, _ = _options(plain.launcher, *names)
    if ":" not in (given["nnodes"] or ""):
        if others["max_restarts"] not in (None, "0"):
            raise RequestError(
                "--max_restarts of torchrun: `finetune supervise` restarts torchrun itself. Give it before the --."
            )
        if (fixed := given["nnodes"] or "1") != "1":
            raise RequestError(
                f"--nnodes {fixed}: the supervisors of several hosts meet only if it is a range. Give --nnodes "
                f"{fixed}:{fixed}, and drop --node_rank, --master_addr and --rdzv_endpoint."
            )
        return plain
    found = RANGE.fullmatch(given["nnodes"] or "")
    fewest, most = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= fewest <= most:
        raise RequestError(f"--nnodes {given['nnodes']}: it must be MIN:MAX hosts with 1 <= MIN <= MAX, such as 1:4.")
    if wrong := next((name for name in names[:-1] if others[name] is not None), None):
        why = "is for a fixed set of hosts" if wrong in FOR_FIXED_HOSTS else "is set by `finetune supervise`"
        raise RequestError(
            f"--{wrong} {why}: with --nnodes {given['nnodes']}, the hosts meet through the run folder. Drop it."
        )
    if "store_type" in (given["rdzv_conf"] or ""):
        raise RequestError("--rdzv_conf store_type is set by `finetune supervise`. Drop it.")
    if COUNT.fullmatch(ranks):
        _refuse_layouts(plain.recipe, fewest, most, int(ranks))
    address = others["local_addr"] or ""
    return replace(
        plain, launcher=tuple(rest), hosts=(fewest, most), rendezvous=given["rdzv_conf"] or "", address=address
    )


def _refuse_layouts(recipe: Sequence[str], fewest: int, most: int, ranks: int) -> None:
    """Raises RequestError if the run would be refused on some of these numbers of hosts, with `ranks` on each: then a
    lost host would end it."""
    known = recipes().get(Path(recipe[0]).stem)
    if known is None:
        return

    def wrong(hosts: int) -> RequestError | None:
        launch = Launch(world_size=hosts * ranks, local_world_size=ranks, launcher="torchrun")
        try:
            run = settle_engine(resolve(known, recipe[1:], launch, is_here=False))
        except RequestError as error:
            return error
        size = max(run.sequence_parallel_size, run.expert_parallel_size)
        flag = "sequence_parallel_size" if size == run.sequence_parallel_size else "expert_parallel_size"
        too_few = RequestError(f"{run.said(flag)}, more than the {hosts * ranks} rank(s). Lower it.")
        return too_few if hosts * ranks < size else None

    tried = {hosts: wrong(hosts) for hosts in (fewest, fewest + 1, most) if hosts <= most}  # two in a row tell divisors
    found = {hosts: error for hosts, error in tried.items() if error}
    if len(found) == len(tried) > 1:  # wrong on any number of hosts
        raise found[most]
    for hosts, error in found.items():
        raise RequestError(
            f"--nnodes {fewest}:{most} and --nproc_per_node {ranks}: on {hosts} host(s) the run would be refused: "
            f"{error} Or give another --nnodes or --nproc_per_node."
        )


def _options(words: Sequence[str], *names: str) -> tuple[dict[str, str | None], list[str]]:
    """The last value of each option, written with - or _, and the words without them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, dest=name, nargs="?", const="")
    found, rest = parser.parse_known_args(list(words))
    return vars(found), rest
