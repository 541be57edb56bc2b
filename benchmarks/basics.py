"""The output of the lessons in recipes/basics. Writes docs/results/basics.json and its plots; pages.py makes the page.

python benchmarks/basics.py        # about a minute on two cores
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results"
PICTURES = Path("runs") / "basics"  # where the lessons write their plots
NAMES = "model_parallelism pipeline_by_hand gradient_compression powersgd parameter_server gossip".split()
HEAD = """# Output of the lessons in recipes/basics

`python benchmarks/basics.py` ran each lesson once, with the command in its docstring, on two CPU cores without a GPU
(gloo; torch {torch}). Seeds are fixed, but the results of the parameter server and of gossip depend on the order in
which messages arrive. The digits are scikit-learn's 1,797 images of 8 x 8 pixels.
"""


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": version("torch"), "pages": {}}
    for name in NAMES:
        script = f"recipes/basics/{name}.py"
        ranks = re.search(r"--nproc_per_node (\d+)", (REPO / script).read_text())
        assert ranks
        command = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", ranks[1], script]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        lines = [line.rstrip() for line in done.stdout.strip().splitlines()]
        found["pages"][name] = {"ranks": int(ranks[1]), "printed": lines}
        picture = REPO / PICTURES / f"{name}.png"
        if picture.is_file():
            shutil.copy(picture, OUT / "basics" / picture.name)
        print(name, *lines, sep="\n", flush=True)
    return found


def page(found: dict[str, Any]) -> str:
    lines = [HEAD.format(torch=found["torch"])]
    for name, row in found["pages"].items():
        lines += [f"## {name}.py, {row['ranks']} ranks", "", "```", *row["printed"], "```", ""]
        if (OUT / "basics" / f"{name}.png").is_file():
            lines += [f"![Plot drawn by {name}.py](basics/{name}.png)", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    (OUT / "basics.json").write_text(json.dumps(measure(), indent=1) + "\n")
