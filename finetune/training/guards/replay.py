"""A batch that gave no finite step, on disk; and run again alone:

    python -m finetune.training.guards.replay RUN/_nan/step-5 CHECKPOINT --model_class AutoModelForCausalLM

says for each micro-batch which tensor is the first that is not finite, on one process and with the given weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import distributed

FOLDER = "_nan"  # what begins so is not pushed to the hub (transformers 5.23, trainer.py, ignore_patterns)
RNG = "rng."


def write_batch(place: Path, batches: list[dict[str, torch.Tensor]], rng: dict[str, torch.Tensor]) -> None:
    """`rank-R.safetensors`: tensors named MICRO_BATCH.NAME, and the random states from before the step."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    place.mkdir(parents=True, exist_ok=True)
    tensors = {f"{i}.{name}": t.cpu().contiguous() for i, batch in enumerate(batches) for name, t in batch.items()}
    save_file(tensors | {RNG + name: state.cpu() for name, state in rng.items()}, place / f"rank-{rank}.safetensors")


def write_report(place: Path, step: int, epoch: float | None, said: str, findings: list[dict[str, Any]]) -> None:
    plain = [{**one, "found": vars(one["found"]) if one["found"] else None} for one in findings]
    record = {"step": step, "epoch": epoch, "said": said, "micro_batches": plain}
    (place / "report.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_batches(file: Path) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """The micro-batches of a rank, and its random states."""
    rng: dict[str, torch.Tensor] = {}
    batches: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(file).items():
        if name.startswith(RNG):
            rng[name.removeprefix(RNG)] = tensor
        else:
            number, _, key = name.partition(".")
            batches.setdefault(int(number), {})[key] = tensor
    return [batches[number] for number in sorted(batches)], rng


def replay(model: torch.nn.Module, file: Path) -> list[str]:
    """One line for each micro-batch. `model` takes it by name, and gives an output with `loss`."""
    from finetune.training.guards.finder import Finder, odd_inputs

    batches, rng = read_batches(file)
    torch.set_rng_state(rng["cpu"])
    model.train()
    lines = []
    for number, batch in enumerate(batches):
        with Finder(model).looking() as finder:
            loss = model(**batch).loss
        found = odd_inputs(batch) or finder.first or finder.backward(loss, parameters=True)
        lines.append(f"micro-batch {number + 1}: loss {float(loss):g}; {found.what if found else 'all is finite'}")
    return lines


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", type=Path, help="the folder _nan/step-N of a run")
    parser.add_argument("checkpoint", type=Path, help="a folder with weights: a checkpoint, or the run folder")
    parser.add_argument("--model_class", default="AutoModelForCausalLM", help="of transformers, such as the default")
    asked = parser.parse_args()
    import finetune.models.gptlite  # noqa: F401  # which Auto classes then know

    model = getattr(transformers, asked.model_class).from_pretrained(asked.checkpoint)
    for file in sorted(asked.step.glob("rank-*.safetensors")):
        print(file.stem, *replay(model, file), sep="\n  ")


if __name__ == "__main__":
    main()
