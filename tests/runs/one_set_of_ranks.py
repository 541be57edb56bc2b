"""Run recipes by several engines in one set of ranks, for importing takes long: one_set_of_ranks.py JSON, where
JSON is a list of runs, each a recipe and its words. Every run is the recipe's own `main`; what fails is told, and
the next begins."""

import gc
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable

import torch
from accelerate.state import AcceleratorState, PartialState
from torch import distributed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune.errors import FinetuneError

AS_LAUNCHED = dict(os.environ)


def main_of(script: str) -> Callable[[], None]:
    spec = importlib.util.spec_from_file_location(script.rsplit("/", 1)[-1].removesuffix(".py"), script)
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    found: Callable[[], None] = recipe.main
    return found


def start_anew() -> None:
    """As the launcher starts a process; the ranks stay joined."""
    gc.collect()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    unset_hf_deepspeed_config()
    os.environ.clear()
    os.environ.update(AS_LAUNCHED)
    torch.set_default_dtype(torch.float32)


for script, *words in json.loads(sys.argv[1]):
    start_anew()
    sys.argv = [script, *words]
    status = "0"
    try:
        main_of(script)()
    except FinetuneError as error:
        status = f"{error.exit_status} error: {error}"
    except Exception:
        traceback.print_exc()
        status = "1 error: " + traceback.format_exc().strip().splitlines()[-1]
    if os.environ.get("RANK", "0") == "0":
        folder = words[words.index("--output_dir") + 1]
        print(f"run {folder} ended with {status}", flush=True)
    if distributed.is_initialized():
        distributed.barrier()
sys.stdout.flush()
os._exit(0)
