"""Truncates, empties, deletes and flips bits in every kind of checkpoint file, in every layout. Is the damage detected,
and is the previous checkpoint used instead?

    python benchmarks/corruption.py                          # first trains a run of each layout on two ranks
    python benchmarks/corruption.py --runs ddp=runs/a fsdp=runs/b     # or uses existing runs

Each damage is applied to the newest checkpoint in a copy of the run folder. Then `--resume auto` chooses a checkpoint,
as at a start. Prints a table of counts and the damages that were missed. The exit status is 1 if there are any.
"""

import argparse
import contextlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.run.launch import Launch
from finetune.run.recipes.causal_lm_pipeline import CAUSAL_LM_PIPELINE
from finetune.run.recipes.seq_cls import SEQ_CLS
from finetune.run.resolve import resolve
from finetune.training.checkpoints.choice import checkpoint_to_resume, settle
from finetune.training.checkpoints.manifest import checkpoints_in

REPO = Path(__file__).resolve().parents[1]
STEPS = "--max_steps 2 --save_strategy steps --save_steps 1 --eval_strategy no --do_eval False --bf16 False"
TEXT = f"recipes/seq_cls.py --max_train_samples 192 --max_seq_length 32 {STEPS}"
STAGES = (
    "recipes/causal_lm_pipeline.py --pipeline_parallel_size 2 --sample_tokens 0 --schedule_step 0 --max_train_samples "
    "2000 --config_overrides num_hidden_layers=2,hidden_size=32,num_attention_heads=2,max_position_embeddings=32 "
    f"{STEPS}"
)
LAYOUTS = {
    "ddp": TEXT,
    **{name: f"{TEXT} --deepspeed {name}" for name in ("zero0", "zero1", "zero2", "zero3", "zero2_offload")},
    "fsdp": f"{TEXT} --fsdp full_shard",
    "pipeline": STAGES,
}
BITS_A_FILE = 3  # places per file at which a bit is flipped


def cut_off(file: Path, draw: random.Random) -> None:
    with file.open("r+b") as opened:
        opened.truncate(draw.randrange(file.stat().st_size))


def flip_a_bit(file: Path, draw: random.Random) -> None:
    at = draw.randrange(file.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(at)
        old = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([old ^ 1 << draw.randrange(8)]))


def empty(file: Path, draw: random.Random) -> None:
    file.write_bytes(b"")


def remove(file: Path, draw: random.Random) -> None:
    file.unlink()


DAMAGES: dict[str, tuple[Callable[[Path, random.Random], None], int]] = {
    "cut off": (cut_off, 1),
    "a bit flipped": (flip_a_bit, BITS_A_FILE),
    "emptied": (empty, 1),
    "deleted": (remove, 1),
}


def make(layout: str, folder: Path) -> None:
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, *LAYOUTS[layout].split(), "--output_dir", str(folder)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise SystemExit(f"{layout}: {done.stderr[-3000:]}")


def kind_of(name: str) -> str:
    """Files that differ only by rank or step are of one kind."""
    return re.sub(r"\d+", "N", name)


def chosen(run_folder: Path, stages: bool) -> tuple[str | None, str]:
    """The checkpoint that `--resume auto` chooses, and its message."""
    recipe = CAUSAL_LM_PIPELINE if stages else SEQ_CLS
    run = resolve(recipe, ["--output_dir", str(run_folder), "--resume", "auto"], Launch())
    try:
        found = settle(run, checkpoint_to_resume(run))
    except FinetuneError as error:
        return None, str(error)
    return found.checkpoint, " ".join(found.notes)


def campaign(layout: str, run_folder: Path, draw: random.Random) -> tuple[Counter[str], list[str]]:
    """The number of damages by kind, and a line for each that was not detected."""
    counts: Counter[str] = Counter()
    missed = []
    newest, before, *_ = checkpoints_in(run_folder)
    files = sorted(file.relative_to(newest) for file in newest.rglob("*") if file.is_file())
    one_of_each = {kind_of(str(name)): name for name in files if (newest / name).stat().st_size}
    for name in one_of_each.values():
        for damage, (do, times) in DAMAGES.items():
            for _ in range(times):
                with tempfile.TemporaryDirectory() as place:
                    copy = Path(place) / "run"
                    for checkpoint in (newest, before):
                        shutil.copytree(checkpoint, copy / checkpoint.name)
                    do(copy / newest.name / name, draw)
                    took, said = chosen(copy, layout == "pipeline")
                counts[damage] += 1
                if took is None or Path(took).name != before.name or newest.name not in said:
                    missed.append(f"{layout}: {name} {damage}: took {took}; {said}")
    return counts, missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--runs", nargs="+", default=[], help="LAYOUT=FOLDER of runs with two checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    given = dict(one.split("=", 1) for one in asked.runs)
    every, total = [], 0
    print(
        f"| layout | {' | '.join(DAMAGES)} | detected, previous checkpoint used |\n|---|{'---|' * (len(DAMAGES) + 1)}"
    )
    with contextlib.ExitStack() as stack:
        for layout in given or asked.layouts:
            folder = Path(given.get(layout) or stack.enter_context(tempfile.TemporaryDirectory())).absolute()
            if layout not in given:
                make(layout, folder / "run")
                folder = folder / "run"
            counts, missed = campaign(layout, folder, random.Random(asked.seed))
            tried = sum(counts.values())
            cells = " | ".join(str(counts[damage]) for damage in DAMAGES)
            print(f"| {layout} | {cells} | {tried - len(missed)} of {tried} |", flush=True)
            every += missed
            total += tried
    print(f"\n{total - len(every)} of {total} detected.", *every, sep="\n")
    raise SystemExit(1 if every else 0)


if __name__ == "__main__":
    main()
