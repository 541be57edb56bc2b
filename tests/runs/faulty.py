"""A recipe in whose midst something goes wrong: faulty.py [flags], with the recipe and the fault as JSON in $FAULT.

    {"recipe": "recipes/seq_cls.py", "kind": "sleep", "rank": 1, "batch": 5}    the fifth batch of rank 1 never comes
    {"kind": "nan", "rank": 0, "batch": 5}      an embedding gives NaN for the fifth micro-batch that it ever sees there
    {"kind": "gradient", "rank": 0, "batch": 5} as nan, but in the gradient of the embedding's output
    {"kind": "clock", "rank": 0, "batch": 5}    the machine's clock is set back by a day before the fifth batch
    {"kind": "cut", "rank": 0, "batch": 5, "file": "train-0/tokens.bin"}  a mapped file of that name is cut off after it
    {"kind": "row", "rank": 0, "row": 17}       a row of the training set cannot be read
    {"kind": "few", "rank": 0, "ranks": 1, "seconds": 0.2}  each batch of a run of so many ranks takes so much longer
A rank is one of $RANK. A poisoned micro-batch is known by its content, so that it is so again when it is run again.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable

import torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from finetune.data.changes import mapped_files

fault = json.loads(os.environ["FAULT"])
mine = int(os.environ.get("RANK", "0")) == fault["rank"]


def before_the_batch(do: Callable[[], None]) -> None:
    fetch, fetched = _MapDatasetFetcher.fetch, []

    def slow(self: _MapDatasetFetcher, indices: list[int]) -> object:
        fetched.append(indices)
        is_the_one = len(fetched) == fault["batch"]
        if is_the_one and do is not cut:
            do()
        samples = fetch(self, indices)
        if is_the_one and do is cut:  # before it, the run would die of a bus error in the same moment
            do()
        return samples

    _MapDatasetFetcher.fetch = slow


def at_each_batch(do: Callable[[list[int]], None]) -> None:
    fetch = _MapDatasetFetcher.fetch

    def fetched(self: _MapDatasetFetcher, indices: list[int]) -> object:
        do(indices)
        return fetch(self, indices)

    _MapDatasetFetcher.fetch = fetched


def refuse_row(indices: list[int]) -> None:
    if fault["row"] in indices:
        raise ValueError(f"row {fault['row']} cannot be read")


def be_slow_if_few(indices: list[int]) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) == fault["ranks"]:
        time.sleep(fault["seconds"])


def sleep() -> None:
    time.sleep(3600)


def set_the_clock_back() -> None:
    told = time.time
    time.time = lambda: told() - 86_400


def cut() -> None:
    (name,) = (name for name in mapped_files().states if name.endswith(fault["file"]))
    os.truncate(name, 4096)


def poison() -> None:
    seen: list[int] = []
    marked: list[int] = []

    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> object:
        if not isinstance(module, torch.nn.Embedding) or inputs[0].dim() != 2 or inputs[0].shape[0] == 1:
            return None  # of positions
        key = hash(tuple(inputs[0].flatten().tolist()))
        if torch.is_grad_enabled() and module.training and not marked:
            seen.append(key)
            if len(seen) == fault["batch"]:
                marked.append(key)
        if key not in marked:
            return None
        if fault["kind"] == "nan":
            return output * torch.nan
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * torch.nan)
        return None

    torch.nn.modules.module.register_module_forward_hook(hook)


each = {"row": refuse_row, "few": be_slow_if_few}.get(fault["kind"])
if mine and each:
    at_each_batch(each)
elif mine:
    before = {"sleep": sleep, "clock": set_the_clock_back, "cut": cut}.get(fault["kind"])
    before_the_batch(before) if before else poison()
sys.argv[0] = fault["recipe"]
runpy.run_path(fault["recipe"], run_name="__main__")
