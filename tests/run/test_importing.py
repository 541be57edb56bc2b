"""What a recipe's process imports, and what holds meanwhile."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from accelerate.utils import is_lomo_available
from conftest import REPO

from finetune.run.importing import CPP_LOG, EAGER, LOMO, begin_imports, end_imports, uses_bitsandbytes
from finetune.run.launch import Launch
from finetune.run.recipes.seq_cls import SEQ_CLS
from finetune.run.resolve import resolve

LOOKS = """
import gc, json, os, runpy, sys
from finetune.entry.main import run_recipe

recipe = runpy.run_path("recipes/seq_cls.py")

def main(run):
    import finetune.training.start as room
    real = room.start

    def start(run):
        before = {"collects": gc.isenabled(), "eager": os.environ.get("TORCHDYNAMO_DISABLE")}
        session = real(run)
        after = {"collects": gc.isenabled(), "eager": os.environ.get("TORCHDYNAMO_DISABLE")}
        print(json.dumps([before, after, gc.get_freeze_count(), sorted(sys.modules)]))
        os._exit(0)

    room.start = start
    recipe["main"](run)

run_recipe(recipe["SEQ_CLS"], main)
"""
UNUSED = {
    *("torch._inductor.compile_fx", "torch._functorch.aot_autograd"),
    *("sklearn.model_selection", "matplotlib", "tensorboard", "wandb", "trackio", "trl", "IPython"),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Before `start`, after it, how many objects are left out of collections, and the modules that are imported."""
    folder = tmp_path_factory.mktemp("run") / "out"
    env = {name: value for name, value in os.environ.items() if name != EAGER}
    done = subprocess.run(
        [sys.executable, "-c", LOOKS, "--output_dir", str(folder)],
        cwd=REPO, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    return found


def test_a_recipe_imports_nothing_that_its_first_step_has_no_use_for(started: list[object]) -> None:
    modules = started[3]
    assert isinstance(modules, list)
    assert "transformers.trainer" in modules, "the list is of a recipe that has imported the stack"
    assert not UNUSED & set(modules)


ENDS = """
import runpy, sys
try:
    runpy.run_path("recipes/seq_cls.py", run_name="__main__")
finally:
    print("imported", *sorted(sys.modules))
"""
MUON = "deepspeed.runtime.zero.muon.muon_optimizer"
ASKS = f"""
import json, os, sys
from finetune.training.runtime import leave_muon_uncompiled
leave_muon_uncompiled(json.loads(sys.argv[1]))
print("imported", *sorted(sys.modules), os.environ.get("{EAGER}"))
"""


def imported(*command: str) -> set[str]:
    env = {name: value for name, value in os.environ.items() if name != EAGER} | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", *command], cwd=REPO, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (words,) = (line.split()[1:] for line in done.stdout.splitlines() if line.startswith("imported "))
    return set(words)


def test_a_whole_run_under_zero_imports_no_compiler(tmp_path: Path) -> None:
    flags = "--deepspeed zero2 --max_steps 1 --max_train_samples 64 --eval_strategy no --save_strategy no".split()
    modules = imported(ENDS, *flags, "--output_dir", str(tmp_path / "out"))
    assert {"deepspeed.runtime.zero.stage_1_and_2", MUON} <= modules
    assert "torch._inductor.compile_fx" not in modules


@pytest.mark.parametrize(
    ("config", "uncompiled"),
    [
        ({"zero_optimization": {"stage": 1}}, True),
        ({"zero_optimization": {"stage": 1}, "optimizer": {"type": "Muon"}}, False),
        ({"optimizer": {"type": "AdamW"}}, False),
    ],
)
def test_muon_is_imported_uncompiled_only_for_runs_that_do_not_use_it(
    config: dict[str, object], uncompiled: bool
) -> None:
    modules = imported(ASKS, json.dumps(config))
    assert (MUON in modules) == uncompiled
    assert "torch._inductor.compile_fx" not in modules
    assert "None" in modules, "what is compiled later is compiled"


def test_garbage_is_not_looked_for_while_the_stack_is_imported_and_is_again_from_start_on(
    started: list[object],
) -> None:
    before, after, frozen, _ = started
    assert before == {"collects": False, "eager": "1"}
    assert after == {"collects": True, "eager": None}
    assert isinstance(frozen, int)
    assert frozen > 100_000


@pytest.mark.parametrize(
    "flags",
    [
        ["--use_peft", "True", "--model_name_or_path", "some/model"],
        ["--optim", "adamw_bnb_8bit"],
        ["--optim", "paged_adamw_32bit"],
    ],
)
def test_a_run_that_may_quantize_leaves_bitsandbytes_compiled(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(EAGER, raising=False)
    run = resolve(SEQ_CLS, ["--output_dir", str(tmp_path / "out"), *flags], Launch())
    assert uses_bitsandbytes(run)
    begin_imports(run)
    assert EAGER not in os.environ
    end_imports()
    gc.unfreeze()
    assert gc.isenabled()


@pytest.mark.parametrize("installed", [False, True])
def test_each_step_of_accelerates_optimizer_searches_for_no_package_that_is_not_there(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, LOMO, raising=False)
    if installed:
        (tmp_path / LOMO).mkdir()
        (tmp_path / LOMO / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    begin_imports(resolve(SEQ_CLS, ["--output_dir", str(tmp_path / "out")], Launch()))
    end_imports()
    gc.unfreeze()
    sought = []

    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            sought.append(name)

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    is_lomo_available()
    assert sought == [LOMO] * installed
    assert (find_spec(LOMO) is not None) == installed


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EAGER, "1")
    begin_imports(resolve(SEQ_CLS, ["--output_dir", str(tmp_path / "out")], Launch()))
    end_imports()
    gc.unfreeze()
    assert os.environ[EAGER] == "1"


def test_a_process_that_is_not_ours_alone_keeps_its_collector_as_it_is() -> None:
    frozen = gc.get_freeze_count()
    end_imports()
    assert gc.get_freeze_count() == frozen


@pytest.mark.parametrize(
    ("local_rank", "given", "meanwhile"),
    [(0, None, None), (1, None, "ERROR"), (1, "INFO", "INFO"), (0, "INFO", "INFO")],
)
def test_the_first_rank_of_a_host_alone_shows_torchs_warnings(
    local_rank: int, given: str | None, meanwhile: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CPP_LOG, raising=False)
    if given:
        monkeypatch.setenv(CPP_LOG, given)
    launch = Launch(rank=4 + local_rank, local_rank=local_rank, world_size=8, local_world_size=4)
    begin_imports(resolve(SEQ_CLS, ["--output_dir", str(tmp_path / "out")], launch))
    assert os.environ.get(CPP_LOG) == meanwhile
    end_imports()
    gc.unfreeze()
    assert os.environ.get(CPP_LOG) == given, "what starts later has it as the user set it"
