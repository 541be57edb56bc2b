"""Saves a batch whose step was not finite, and runs it again alone:

    python -m finetune.training.guards.replay RUN/_nan/step-5 CHECKPOINT --model_class AutoModelForCausalLM

For each micro-batch, it names the first tensor that is not finite, on one process and with the given weights.
If ranks shared texts (--sequence_parallel_size), it joins their parts first.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import distributed

from finetune.errors import RequestError

FOLDER = "_nan"  # names with "_" are not pushed to the hub (transformers 5.23, trainer.py, ignore_patterns)
RNG = "rng."
SHARING = "ranks_that_share_each_text"


def write_batch(place: Path, batches: list[dict[str, torch.Tensor]], rng: dict[str, torch.Tensor]) -> None:
    """`rank-R.safetensors`: tensors named MICRO_BATCH.NAME, and the random states from before the step. Labels that are
    one tensor under two names are written twice, because safetensors refuses shared memory."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    place.mkdir(parents=True, exist_ok=True)
    own = partial(torch.clone, memory_format=torch.contiguous_format)
    tensors = {f"{i}.{name}": own(t.cpu()) for i, batch in enumerate(batches) for name, t in batch.items()}
    save_file(tensors | {RNG + name: state.cpu() for name, state in rng.items()}, place / f"rank-{rank}.safetensors")


def write_report(
    place: Path, step: int, epoch: float | None, said: str, findings: list[dict[str, Any]], sharing: int = 1
) -> None:
    """`report.json`. `sharing` neighbouring ranks' files hold parts of the same texts."""
    plain = [{**one, "found": vars(one["found"]) if one["found"] else None} for one in findings]
    record = {"step": step, "epoch": epoch, "said": said, SHARING: sharing, "micro_batches": plain}
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


def groups_in(place: Path) -> list[list[Path]]:
    """The ranks' files, grouped by shared texts. Raises RequestError if a part of a text is missing."""
    report = place / "report.json"  # may be missing if the disk was full
    sharing = int(json.loads(report.read_text(encoding="utf-8")).get(SHARING, 1)) if report.is_file() else 1
    groups: dict[int, list[Path]] = {}
    for file in sorted(place.glob("rank-*.safetensors"), key=_rank):
        groups.setdefault(_rank(file) // sharing, []).append(file)
    if short := [group for group, files in groups.items() if len(files) != sharing]:
        ranks = f"{short[0] * sharing} to {(short[0] + 1) * sharing - 1}"
        raise RequestError(
            f"{place}: ranks {ranks} shared each text, but some of their files are missing. Copy them from the other "
            "hosts."
        )
    return list(groups.values())


def replay(model: torch.nn.Module, *files: Path) -> list[str]:
    """One line per micro-batch. `model` takes its tensors as keyword arguments and returns an output with `loss`.
    Several files hold the parts of the same texts, in order: tensors (B, T / files)."""
    from finetune.training.guards.finder import Finder, odd_inputs

    parts, states = zip(*map(read_batches, files), strict=True)
    batches = [
        {name: torch.cat([part[name] for part in same], dim=1) for name in same[0]} if len(files) > 1 else same[0]
        for same in zip(*parts, strict=True)
    ]
    rng = states[0]
    torch.set_rng_state(rng["cpu"])
    model.train()
    lines = []
    for number, batch in enumerate(batches):
        with Finder(model).looking() as finder:
            loss = model(**batch).loss
        found = odd_inputs(batch) or finder.first or finder.backward(loss, parameters=True)
        lines.append(
            f"micro-batch {number + 1}: loss {float(loss.detach()):g}; {found.what if found else 'all is finite'}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", type=Path, help="the folder _nan/step-N of a run")
    parser.add_argument("checkpoint", type=Path, help="a folder with weights: a checkpoint, or the run folder")
    parser.add_argument("--model_class", default="AutoModelForCausalLM", help="a model class of transformers")
    asked = parser.parse_args()
    try:
        groups = groups_in(asked.step)
        model = _opened(asked.model_class, asked.checkpoint)
    except RequestError as error:
        parser.error(str(error))
    for files in groups:
        joined = ", the parts of each text joined" if len(files) > 1 else ""
        print(" and ".join(file.stem for file in files) + joined, *replay(model, *files), sep="\n  ")


def _opened(model_class: str, checkpoint: Path) -> Any:
    import transformers

    import finetune.models.gptlite  # noqa: F401  # registers it with the Auto classes
    from finetune.models.composite import class_for

    kind = getattr(transformers, model_class)
    if model_class.startswith("Auto") and (checkpoint / transformers.CONFIG_NAME).is_file():  # an adapter has none
        try:
            kind = class_for(model_class, transformers.AutoConfig.from_pretrained(checkpoint))
        except RequestError as error:
            raise RequestError(f"{checkpoint}: {error}") from error
    return kind.from_pretrained(checkpoint)


def _rank(file: Path) -> int:
    return int(file.stem.removeprefix("rank-"))


if __name__ == "__main__":
    main()
