"""What --ddp_comm_hook costs and saves: final loss, bytes, and step time on a slow link. Writes docs/results/.

    python benchmarks/comm_hooks.py                     # all parts, on two CPU ranks; `link` and `recipe` need root
    python benchmarks/comm_hooks.py --parts link        # one part: link, recipe, accuracy; or page, from the JSON
    python benchmarks/comm_hooks.py --parts accuracy --recipes seq_cls --seeds 1 2

`link`: one rank in each of two network namespaces, joined by a link whose rate `tc … tbf` limits; every hook at every
rate, interleaved. `recipe`: recipes/causal_lm.py on that link at 100 Mbit/s. `accuracy`: both recipes with every hook,
on two ranks, compared with the run without a hook. A part that is not run keeps its earlier figures.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

from comm_hooks_page import draw, page

from finetune.run.flags.compression import HOOKS

REPO = Path(__file__).resolve().parents[1]
sys.path += [str(REPO / "tests"), str(REPO / "tests" / "launch")]
OUT = REPO / "docs" / "results"
RATES = (10, 30, 100, 300, 1000, 1500, 2000, 3000, 0)
RECIPE_RATE = 100
# Small enough to run every hook, long enough for a meaningful loss.
RUNS = {
    "causal_lm": {"max_steps": 300, "per_device_train_batch_size": 8, "logging_steps": 20, "sample_tokens": 1},
    "seq_cls": {"max_steps": 250, "logging_steps": 20},
}
TRANSFORMER = "num_hidden_layers=4,hidden_size=256,num_attention_heads=4,max_position_embeddings=64"


def run(command: list[str], **env: str) -> str:
    every = {**os.environ, "HF_HUB_OFFLINE": "1", **env}
    done = subprocess.run(command, cwd=REPO, env=every, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def torchrun(*words: str) -> list[str]:
    return [str(Path(sys.executable).with_name("torchrun")), *words]


@contextmanager
def cable():
    """Two hosts of tests/launch, or None if this machine cannot create them."""
    import pytest
    from hosts import two_hosts

    try:
        with two_hosts() as both:
            yield both
    except pytest.skip.Exception as reason:
        print(f"skipped: {reason}", flush=True)
        yield None


def on_both(hosts: tuple, script: list[str]) -> None:
    """Run one rank on each host."""
    from conftest import kill_family
    from hosts import INTERFACE

    env = {**os.environ, "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    meet = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", hosts[0].address, "--master_port", "29577"]
    commands = [torchrun(*meet, "--node_rank", str(rank), *script) for rank in (0, 1)]
    running = []
    for host, command in zip(hosts, commands, strict=True):
        speaks = None if host is hosts[0] else subprocess.DEVNULL
        running.append(subprocess.Popen([*host.inside, *command], cwd=REPO, env=env, stdout=speaks))
    try:
        statuses = [process.wait(timeout=600) for process in running]
    finally:
        for process in running:
            kill_family(process.pid)
    if any(statuses):
        raise SystemExit(f"{' '.join(script)}: ended with {statuses}")


def link(options: argparse.Namespace, scratch: Path) -> dict | None:
    from hosts import INTERFACE

    result = scratch / "link.json"
    script = ["benchmarks/comm_hooks_link.py", "--interface", INTERFACE, "--result", str(result)]
    rates, load = [str(rate) for rate in options.rates], os.getloadavg()[0]
    with cable() as hosts:
        if hosts is None:
            return None
        on_both(hosts, [*script, "--steps", str(options.steps), "--rates", *rates])
    return {**json.loads(result.read_text()), "load": load}


def recipe(options: argparse.Namespace, scratch: Path) -> dict | None:
    """Median seconds per step of the recipe, started as a user would, at RECIPE_RATE."""
    from hosts import INTERFACE

    found = {}
    with cable() as hosts:
        if hosts is None:
            return None
        for host in hosts:
            slow = ["tbf", "rate", f"{RECIPE_RATE}mbit", "burst", "125000", "latency", "400ms"]
            done = host.run("tc", "qdisc", "add", "dev", INTERFACE, "root", *slow)
            if done.returncode:
                raise SystemExit(f"tc: {done.stderr}")
        for hook in ("none", "onebit_adam"):
            folder = scratch / f"recipe-{hook}"
            flags = {"output_dir": folder, "config_overrides": TRANSFORMER, "max_steps": 14, "warmup_steps": 0}
            flags |= {
                "per_device_train_batch_size": 4,
                "logging_steps": 1,
                "eval_strategy": "no",
                "save_strategy": "no",
            }
            flags |= {"do_eval": False, "max_train_samples": 400, "sample_tokens": 1, "bf16": False}
            flags |= {"ddp_comm_hook": hook} | ({} if hook == "none" else {"comm_hook_start_steps": 3})
            on_both(hosts, ["recipes/causal_lm.py", *as_words(flags)])
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            found[hook] = statistics.median(r["step_seconds"] for r in rows if "step_seconds" in r and r["step"] > 4)
            print("recipe", hook, round(found[hook], 3), flush=True)
    return {"mbit": RECIPE_RATE, "step_seconds": found}


def as_words(flags: dict) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def accuracy(options: argparse.Namespace, scratch: Path, found: dict) -> dict:
    """Final losses by recipe, seed and hook, and the bytes of compressed steps; `found` has the earlier figures."""
    for name in options.recipes:
        for seed in options.seeds:
            for hook in options.hooks:
                folder = scratch / f"{name}-{seed}-{hook}"
                flags = {**RUNS[name], "output_dir": folder, "seed": seed, "ddp_comm_hook": hook, "bf16": False}
                flags |= {"save_strategy": "no", "eval_strategy": "no"}
                start = time.perf_counter()
                run(torchrun("--nproc_per_node", "2", f"recipes/{name}.py", *as_words(flags)), OMP_NUM_THREADS="1")
                figures = json.loads((folder / "all_results.json").read_text())
                kept = ("eval_loss", "train_loss", "eval_accuracy", "comm_bytes_per_step", "comm_share_of_fp32")
                kept += ("comm_compressed_share_of_fp32", "eval_token_accuracy")
                row = {key: figures[key] for key in kept if key in figures}
                rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
                losses = [row["loss"] for row in rows if "loss" in row]
                row |= {"last_train_loss": statistics.mean(losses[-len(losses) // 10 :]), "steps": rows[-1]["step"]}
                found.setdefault(name, {}).setdefault(str(seed), {})[hook] = row
                print(name, seed, hook, row, f"{time.perf_counter() - start:.0f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["link", "recipe", "accuracy"])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="Mbit/s; 0 for no limit")
    parser.add_argument("--steps", type=int, default=9, help="per hook and rate")
    parser.add_argument("--recipes", nargs="+", default=list(RUNS))
    parser.add_argument("--hooks", nargs="+", default=HOOKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes end, too
    path = options.out / "comm_hooks.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    with tempfile.TemporaryDirectory(prefix="finetune-comm-") as scratch:
        parts = {"link": link, "recipe": recipe, "accuracy": partial(accuracy, found=found.get("accuracy", {}))}
        for name, part in parts.items():
            if name in options.parts and (figures := part(options, Path(scratch))) is not None:
                found[name] = figures
                found.setdefault("taken", {})[name] = time.strftime("%Y-%m-%d")
    packages = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    found["machine"] = {"cpu_cores": os.cpu_count(), "python": platform.python_version(), **packages}
    path.write_text(json.dumps(found, indent=1) + "\n")
    if "link" in found:
        draw(found["link"], options.out / "comm_hooks.png")
    (options.out / "comm_hooks.md").write_text(page(found))


if __name__ == "__main__":
    main()
