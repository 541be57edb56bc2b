"""`finetune`: check and plan runs before they start, launch them, and inspect their results.

A command's module (finetune/commands/) is imported only when that command runs, so that each starts fast."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from pathlib import Path
from typing import Any

from finetune import __version__
from finetune.errors import INTERRUPTED, FinetuneError, RequestError
from finetune.privacy import shown
from finetune.run.command_line import CommandParser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit status: 0 done, 1 it failed, 2 the request was wrong."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the terminal cannot show
    try:
        asked = parser().parse_args(argv)
        status = int(importlib.import_module(f"finetune.commands.{asked.command}").run(asked))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `finetune check ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except FinetuneError as error:
        print(f"finetune: {shown(str(error))}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("\nfinetune: stopped.", file=sys.stderr)
        return INTERRUPTED


def _path(words: str) -> str:
    """A path, with the home folder for ~. argparse names the flag of one that cannot be, or may not be looked at."""
    path = os.path.expanduser(words)
    try:
        Path(path).expanduser().lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: ~ of nobody
        why = str(getattr(error, "strerror", None) or error).removesuffix(".")
        raise argparse.ArgumentTypeError(f"{words} is not a usable path ({why})") from error
    return path


class _RecipeFlag(argparse.Action):
    """Collects the values of a recipe's flag in `flags`, for the recipe's own parser."""

    def __call__(self, _: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        words = values if isinstance(values, list) else [] if values is None else [values]
        if namespace.flags.get(self.dest, words) != words:
            raise RequestError(f"--{self.dest} is given twice, with different values. Keep one.")
        namespace.flags = {**namespace.flags, self.dest: words}


def parser() -> argparse.ArgumentParser:
    """Every command with its options, without importing the commands' modules."""
    whole = CommandParser(prog="finetune", description=(__doc__ or "").partition("\n")[0])
    whole.add_argument("--version", action="version", version=f"finetune {__version__}")
    commands = whole.add_subparsers(dest="command", required=True)
    _check_options(commands.add_parser("check", help="find mistakes in DeepSpeed configs, as a recipe does at startup"))
    _doctor_options(commands.add_parser("doctor", help="report what works on this machine, and how to fix the rest"))
    plans = "estimate a run's memory and speed, before anything is loaded"
    _plan_options(commands.add_parser("plan", help=plans))
    _bench_options(commands.add_parser("bench", help="really run a grid of models and layouts, and compare them"))
    reports = "report on runs and benchmarks, as one self-contained page or as Markdown"
    add = commands.add_parser("report", help=reports).add_argument
    add("paths", nargs="+", type=_path, metavar="RUN_OR_BENCH", help="the --output_dir of a recipe or of "
        "`finetune bench`")  # fmt: skip
    add("--html", type=_path, metavar="FILE", help="the page (default: report.html in the folder, or here for several)")
    add("--markdown", type=_path, metavar="FILE", help="for a model card, with its pictures in a folder beside it")
    _checkpoint_options(commands.add_parser("checkpoint", help="list a run folder's checkpoints and verify them"))
    _export_options(commands.add_parser("export", help="convert a checkpoint of any layout to a transformers model"))
    from finetune.generation.flags import add_chat, add_generate

    add_generate(commands.add_parser("generate", help="write a language model's answers to a file of prompts"))
    add_chat(commands.add_parser("chat", help="talk to a language model in this terminal"))
    launches = "print the command that starts a recipe on this machine or cluster"
    _launch_options(commands.add_parser("launch", help=launches))
    _launch_options(commands.add_parser("train", help="run what `launch` prints, if it is one line"))
    supervises = "run a launcher's command, and again after each failure from which the run can continue"
    _supervise_options(commands.add_parser("supervise", help=supervises))
    _recipe_options(commands.add_parser("recipe", help="list, show and copy the recipes and their files"))
    return whole


def _check_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("files", nargs="*", type=_path, metavar="FILE", help="a path, or a shipped name such as zero2")
    add("--config", type=_path, metavar="YAML", help="a recipe's YAML with the run's flags; it may name the FILE")
    add("--world_size", type=int, help="ranks of the run (default: any number)")
    add("--ranks_per_node", type=int, help="ranks on one machine (default: all)")
    add("--pipeline_parallel_size", type=int, help="stages of a pipeline run (default: the Trainer runs it)")
    add("--sequence_parallel_size", type=int, help="ranks that share each text (default: 1)")
    add("--expert_parallel_size", type=int, help="ranks that hold a mixture's experts together (default: 1)")
    device = command.add_mutually_exclusive_group()
    device.add_argument("--gpu", action="store_true", help="the run is on GPUs")
    device.add_argument("--gpu_name", metavar="NAME", help="the run is on this type of GPU, such as V100 or A100")
    device.add_argument("--cpu", action="store_true", help="the run has no GPU (default: unknown)")
    add("--model", type=_path, metavar="FOLDER", help="a Hugging Face model folder, for the rules that need its sizes")
    engines = ("recipe", "trainer", "accelerate", "deepspeed")
    add("--engine", choices=engines, default="recipe", help="who reads the config: one of our recipes (default), "
        "another script's Trainer, a custom loop with accelerate, or deepspeed.initialize alone")  # fmt: skip
    add("--versions", default="", metavar="NAME==VERSION,...", help="versions to check for (default: installed)")
    add("--disable", default="", metavar="CODE,...", help="codes to skip, such as DS902,DS404")
    add("--fix", action="store_true", help="fix what has only one fix, and show the changes")
    add("--format", choices=("text", "json", "sarif", "github"), default="text", help="default: text")


def _doctor_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--deep", action="store_true", help="really run: two processes, ZeRO 0-3, offload, a pipeline; a few minutes")
    add("--json", action="store_true", help="for a bug report")
    add("--output_dir", type=_path, default="runs", metavar="FOLDER", help="where runs will be written (default runs)")
    add("--nvme_path", type=_path, metavar="FOLDER", help="a folder for NVMe offload; its disk is timed")
    add("--hostfile", type=_path, metavar="FILE", help="the hosts of a run; each must resolve and answer")
    add("--master_addr", metavar="HOST", help="where the ranks meet, if on another host; it must be reachable")
    add("--master_port", type=int, default=29500, metavar="PORT", help="where the ranks meet (default 29500)")


def _launch_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--launcher", choices=("python", "deepspeed", "torchrun", "accelerate", "slurm"),
        help="default: deepspeed, or torchrun for several hosts without a --hostfile")  # fmt: skip
    add("--nodes", type=int, metavar="N", help="hosts (default 1)")
    add("--gpus_per_node", type=int, metavar="N", help="ranks on each (default: this machine's GPUs, or 2)")
    add("--hostfile", type=_path, metavar="FILE", help="hosts and their slots, in deepspeed's form; replaces these two")
    add("--include", default="", metavar="HOST[:GPU,...]@...", help="only these from the hostfile")
    add("--exclude", default="", metavar="HOST[:GPU,...]@...", help="all but these from the hostfile")
    add("--no_ssh", action="store_true", help="start deepspeed on each host separately")
    add("--master_addr", metavar="HOST", help="where the ranks meet (default: the hostfile's first)")
    add("--master_port", type=int, default=29500, metavar="PORT", help="default 29500")
    add("--interface", metavar="NAME", help="the network between the hosts, such as eth0")
    add("--image", metavar="NAME", help="run in a container of this image")
    add("recipe", metavar="RECIPE", help="such as causal_lm (`finetune recipe list`), or a path")
    add("flags", nargs=argparse.REMAINDER, metavar="...", help="the recipe's own flags")


def _supervise_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--max_restarts", type=int, default=5, metavar="N", help="restarts in a row that may bring no new checkpoint "
        "(default 5)")  # fmt: skip
    add("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="such as `-- torchrun --nnodes 1:4 "
        "--nproc_per_node 8 recipes/causal_lm.py ...`, on every host")  # fmt: skip


def _recipe_options(command: argparse.ArgumentParser) -> None:
    kinds = command.add_subparsers(dest="kind", metavar="{list,show,copy}", required=True)
    kinds.add_parser("list", help="list the names, files and purposes")
    show = kinds.add_parser("show", help="print one")
    copy = kinds.add_parser("copy", help="copy one here, to edit it")
    for one in (show, copy):
        one.add_argument("name", metavar="NAME", help="such as seq_cls, lora_24gb or slurm.sbatch")
    copy.add_argument("to", nargs="?", metavar="TO", help="a new file, or a folder (default: here)")


def _plan_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("target", nargs="?", metavar="YAML|FOLDER|NAME", help="a recipe or its YAML; a model's folder or config.json; "
        "or a known model's name, such as gpt2")  # fmt: skip
    add("--gpu", type=_path, default="cpu", metavar="NAME|FILE", help="such as H100-80GB, or a profile that "
        "--calibrate wrote (default: cpu)")  # fmt: skip
    add("--nodes", type=int, metavar="N", help="machines (default 1)")
    add("--gpus_per_node", type=int, metavar="N", help="ranks on each (default: usual for machines with this GPU)")
    add("--host_memory", type=float, metavar="GIB", help="host memory of each machine (default: the profile's)")
    add("--global_batch_size", type=int, metavar="N", help="samples per step that each layout must reach (default: "
        "the run's own; 0: any)")  # fmt: skip
    add("--layouts", nargs="+", metavar="NAME", help="shipped configs to choose from (default: all)")
    add("--no_search", action="store_true", help="plan only this run, without searching for a better layout")
    asks = command.add_mutually_exclusive_group().add_argument
    asks("--longest", action="store_true", help="find the longest block or text that fits")
    asks("--largest_batch", action="store_true", help="find the largest batch per rank that fits")
    asks("--largest_model", action="store_true", help="find the largest known model that fits")
    asks("--deadline", type=float, metavar="HOURS", help="find the smallest cluster that finishes --max_steps in HOURS")
    add("--price_per_gpu_hour", type=float, metavar="X", help="print the run's cost, and an upper bound on its energy")
    add("--one_more_gpu", action="store_true", help="print what adding one GPU changes")
    add("--params_per_layer", type=int, metavar="N", help="for a model of an unknown family")
    add("--json", action="store_true", help="bytes and seconds, for another program")
    add("--html", type=_path, metavar="FILE", help="one page with pictures")
    add("--png", type=_path, metavar="FILE", help="only the pictures")
    add("--write", type=_path, metavar="FILE", help="write the DeepSpeed config of the fastest layout that fits")
    add("--autotune", type=int, metavar="N", help="run the best N on this machine, and rank them by measured speed")
    add("--estimator", action="store_true", help="print DeepSpeed's own memory estimates beside the plan")
    add("--verify", action="store_true", help="run the plan on this machine, and print planned and measured values")
    add("--calibrate", type=_path, metavar="FILE", help="measure this machine and write a profile for --gpu; "
        "takes two minutes")  # fmt: skip
    add("--ranks", type=int, metavar="N", help="processes that --calibrate measures with (default 2)")
    from finetune.run.choose import recipes

    every = [flag for recipe in recipes().values() for flag in recipe.flags.values()]
    # Several values, if any recipe does.
    flags = {flag.name: flag for flag in sorted(every, key=lambda flag: flag.many)}
    add(
        "--recipe",
        choices=tuple(recipes()),
        help="the recipe to plan for (default: as the YAML says, else by the flags)",
    )
    command.set_defaults(flags={})
    for flag in flags.values():
        many: Any = "+" if flag.many else "?" if flag.kind == "bool" else 1
        add(f"--{flag.name}", nargs=many, action=_RecipeFlag, help=argparse.SUPPRESS)
    command.epilog = "Recipes' flags also work here and override the YAML; recipes/NAME.py --help lists them."


def _bench_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("target", type=_path, metavar="YAML|FOLDER", help="a grid, such as recipes/configs/bench_laptop.yaml; "
        "or the folder of a finished one, to show its results")  # fmt: skip
    add("--output_dir", type=_path, metavar="FOLDER", help="default: runs/ and the YAML's name")
    add("--resume", action="store_true", help="run the cells that are missing in that folder")
    add("--scale", type=float, metavar="S", help="scale of the models' sizes; overrides the YAML's")
    add("--repeats", type=int, metavar="N", help="launches of each cell; overrides the YAML's")
    add("--only", metavar="PATTERN", help="cells whose names match: 'wide-*', or zero2,zero3 for those with either")
    add("--dry_run", action="store_true", help="list what would run, with the plan for each")
    add("--machine", type=_path, metavar="NAME|FILE", help="the machine profile to plan with (default: this "
        "machine's, if known)")  # fmt: skip
    add("--compare", type=_path, metavar="OLD", help="another benchmark's folder or results.jsonl; exit status "
        "1 if this is worse")  # fmt: skip
    add("--threshold", type=float, default=0.05, metavar="X", help="how much worse, as a fraction (default 0.05)")


def _checkpoint_options(command: argparse.ArgumentParser) -> None:
    kinds = command.add_subparsers(dest="kind", metavar="{ls,verify}", required=True)
    ls = kinds.add_parser("ls", help="list the checkpoints of a run folder, newest first")
    ls.add_argument("folder", type=_path, metavar="RUN_FOLDER", help="the --output_dir of a recipe")
    ls.add_argument("--verify", action="store_true", help="read every byte (default: only names and sizes)")
    ls.add_argument("--json", action="store_true", help="for another program")
    verify = kinds.add_parser("verify", help="read every byte; exit status 1 if anything differs from what was saved")
    verify.add_argument("folder", type=_path, metavar="FOLDER_OR_CHECKPOINT", help="a run folder or a checkpoint in it")
    verify.add_argument("--json", action="store_true", help="for another program")


def _export_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("checkpoint", type=_path, metavar="CHECKPOINT", help="such as runs/x/checkpoint-100, or a finished run folder")
    add("out", type=_path, metavar="OUT", help="a new or empty folder")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    add("--max_shard_size", default="5GB", metavar="SIZE", help="largest file, such as 500MB (default 5GB)")
    add("--merge_adapter", action="store_true", help="LoRA: write the base model with the adapter in its weights")
    add("--base_model", type=_path, metavar="FOLDER", help="the base model for --merge_adapter (default: its own)")


if __name__ == "__main__":
    sys.exit(main())
