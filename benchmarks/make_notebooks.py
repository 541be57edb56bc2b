"""Writes the notebooks of docs/notebooks/ from the cells below, and executes them.

python benchmarks/make_notebooks.py          # both, into docs/notebooks/
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
CELL_SECONDS = 600
CLASSIFY = [
    """# Classify your own CSV file

All you need is a CSV file with a column of texts and a column of labels. Here, two packages of Python's standard
library stand in for your classes, so that this runs anywhere, offline and without a GPU.""",
    """import csv

from finetune.data.builtin import docstring_rows

rows = docstring_rows()
pairs = zip(rows["text"], rows["label"], strict=True)
pairs = [pair for pair in pairs if pair[1] in ("asyncio", "email")][::2]
with open("texts.csv", "w", newline="") as file:
    csv.writer(file).writerows([("text", "label"), *pairs])
len(pairs)""",
    """## Train

The flags are those of `recipes/seq_cls.py`. Give `model_name_or_path` to start from a pretrained model. Without it, a
small DistilBERT is trained from scratch.""",
    """from finetune import train

run = train(
    "seq_cls",
    train_file="texts.csv",
    num_train_epochs=2,
    max_seq_length=32,
    logging_steps=5,
    output_dir="runs/texts",
    overwrite_output_dir=True,
)""",
    """## Look at the run

Everything about a run is in its folder: the model, the metrics, the model card.""",
    "run",
    "run.plot()",
    'round(run.metrics["eval_accuracy"], 2)',
    "## Use the model",
    """tokens = run.tokenizer("Schedule a callback on the event loop.", return_tensors="pt")
run.model.config.id2label[int(run.model(**tokens).logits.argmax())]""",
    """## Mistyped flags

The exception has the same message as the command line.""",
    """from finetune.errors import RequestError

try:
    train("seq_cls", train_file="texts.csv", num_train_epoch=3)
except RequestError as error:
    print(error)""",
]
PLAN = [
    """# Plan and check before a run

Neither needs torch, a GPU, or the machine that will run the training.""",
    "## Will it fit?",
    """from finetune import plan

plan("causal_lm", model="Llama-2-7b", gpu="A100-80GB", per_device_train_batch_size=1, layouts=["zero2", "zero3"])""",
    "## Figures for your own code",
    """for name in ("RTX4090", "A100-80GB", "H100-80GB"):
    found = plan("causal_lm", model="gpt2", gpu=name, gpus_per_node=1, per_device_train_batch_size=4, search=False)
    print(f"{name:<10} {found.peak_bytes / 2**30:.1f} GiB, {found.samples_per_second:.0f} samples/s")""",
    """## Is the config right?

A path, a shipped name, or a dict:""",
    """from finetune import check

check("zero3", world_size=16, ranks_per_node=8)""",
    """check({"train_batch_size": 16, "gradient_cliping": 1.0, "zero_optimization": {"stage": 4}}, world_size=2)""",
]
NOTEBOOKS = {"classify_your_csv": CLASSIFY, "plan_and_check": PLAN}


def made(name: str, folder: Path) -> Any:
    """The notebook, executed in `folder`. Raises if a cell does."""
    import nbformat
    from nbclient import NotebookClient

    new = nbformat.v4
    cells = [
        (new.new_markdown_cell if text.startswith("#") else new.new_code_cell)(text, id=f"cell-{index}")
        for index, text in enumerate(NOTEBOOKS[name])
    ]
    notebook = new.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}})
    client = NotebookClient(notebook, timeout=CELL_SECONDS, resources={"metadata": {"path": str(folder)}})
    client.execute()
    for cell in notebook.cells:
        cell.metadata = {}  # times of this machine
        if "outputs" in cell:
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]  # progress bars
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return notebook


if __name__ == "__main__":
    import nbformat

    for name in sys.argv[1:] or NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(made(name, Path(folder)), FOLDER / f"{name}.ipynb")
        print(f"wrote {FOLDER / name}.ipynb")
