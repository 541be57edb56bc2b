"""The recipes' descriptions, and what their files answer before anything heavy is imported."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

from finetune.bench.recipe import BENCHMARK
from finetune.errors import RequestError
from finetune.run.command_line import COMMON, help_of
from finetune.run.flag import OUTPUT, Range
from finetune.run.launch import Launch
from finetune.run.meanings import MEANINGS
from finetune.run.recipe import Recipe
from finetune.run.resolve import resolve

DESCRIPTIONS = sorted(path.stem for path in (REPO / "finetune" / "run" / "recipes").glob("[!_]*.py"))
HEAVY = ("torch", "transformers", "deepspeed", "datasets", "numpy", "accelerate")


def described(name: str) -> Recipe:
    return getattr(importlib.import_module(f"finetune.run.recipes.{name}"), name.upper())


RECIPES = [*map(described, DESCRIPTIONS), BENCHMARK]


def test_every_recipe_has_its_description_by_its_name() -> None:
    scripts = sorted(path.stem for path in (REPO / "recipes").glob("*.py") if path.stem != "generate")  # trains nothing
    assert sorted(recipe.name for recipe in RECIPES) == scripts
    assert len(scripts) > 4


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_defaults_are_of_flags_and_are_read_as_they_stand(recipe: Recipe) -> None:
    for name, value in {**recipe.defaults, **recipe.scratch_defaults}.items():
        assert recipe.flags[name].read(value) == value, name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_without_a_flag_is_a_run(recipe: Recipe) -> None:
    run = resolve(recipe, [], Launch())
    assert all(not setting.is_given for setting in run.settings.values())
    for group in run.groups:
        assert isinstance(run[group], group)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_flag_that_names_what_is_read_is_protected(recipe: Recipe) -> None:
    """By how such flags are named: a new one that says no `path` would be deleted by --overwrite_output_dir."""
    ends = ("_file", "_dir", "_or_path", "_path", "tokenizer_name", "dataset_name", "config", "deepspeed")
    none = ("overwrite_output_dir", "result_dir")
    for flag in recipe.flags.values():
        if flag.name.endswith(ends) and flag.name not in none:
            assert flag.path is not None, flag.name
    assert all(recipe.flags[name].path != OUTPUT for name in recipe.inputs)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_help_names_each_flag_once(recipe: Recipe) -> None:
    words = [line.split()[0] for line in help_of(recipe, "About.").splitlines() if line.startswith("  --")]
    assert sorted(words) == sorted(f"--{name}" for name in recipe.flags)


def test_common_flags_and_meanings_are_flags_of_some_recipe() -> None:
    known = {name for recipe in RECIPES for name in recipe.flags}
    assert set(COMMON) <= known
    assert {one for meant in MEANINGS.values() for one in meant if not one.startswith(":")} <= known


# What it costs: not seconds, which hang on the machine, but what is imported.
LIGHT = """
import json, os, runpy, sys
sys.argv = sys.argv[1:]
status = 0
real_exit = os._exit
def leave(code):
    sys.stdout.flush(); sys.stderr.flush()
    print(json.dumps(sorted(m for m in {heavy} if m in sys.modules)), file=sys.__stdout__, flush=True)
    real_exit(code)
os._exit = leave
runpy.run_path(sys.argv[0], run_name="__main__")
leave(0)
"""


@pytest.mark.parametrize("name", DESCRIPTIONS)
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        pytest.param(["--help"], 0, "--per_device_train_batch_size", id="help"),
        pytest.param(["--batch_size", "4", "--lr", "1"], 2, "--learning_rate", id="typos"),
        pytest.param(["--max_steps", "many"], 2, "--max_steps is 'many' (command line)", id="value"),
        pytest.param(["--model_name_or_path", "./nowhere"], 2, "--model_name_or_path is './nowhere'", id="path"),
        pytest.param(["--deepspeed", "./none.json"], 2, "none.json", id="config"),
        pytest.param(["--resume", "auto", "--overwrite_output_dir"], 2, "contradict", id="conflict"),
        pytest.param(["--config", "c.yaml"], 2, "--optim is 'adam' (c.yaml line 2)", id="YAML"),
    ],
)
def test_what_needs_no_model_is_answered_without_torch(
    name: str, words: list[str], status: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("max_steps: 3\noptim: adam\n")
    code = LIGHT.replace("{heavy}", repr(HEAVY))
    command = [sys.executable, "-c", code, str(REPO / "recipes" / f"{name}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert done.returncode == status, done.stderr
    assert said in (done.stdout if status == 0 else done.stderr)
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml"]


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_recipe_imports_at_most_fifteen_names_of_ours(name: str) -> None:
    tree = ast.parse((REPO / "recipes" / f"{name}.py").read_text())
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [alias.name for node in froms if (node.module or "").startswith("finetune") for alias in node.names]
    assert 5 < len(ours) <= 15


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_number_has_its_range_which_its_default_is_in(recipe: Recipe) -> None:
    numbers = [flag for flag in recipe.flags.values() if flag.kind in ("int", "float")]
    assert len(numbers) > 20
    for flag in numbers:
        assert flag.range is not None, flag.name
        assert flag.default is None or flag.range.holds(flag.default), flag.name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_number_out_of_its_range_is_refused_with_its_source(recipe: Recipe) -> None:
    numbers = [flag for flag in recipe.flags.values() if flag.kind in ("int", "float") and flag.name != "max_steps"]
    words = [f"--{flag.name}=-2" for flag in numbers]
    with pytest.raises(RequestError) as met:
        resolve(recipe, words, Launch(), is_here=False)
    for flag in (flag for flag in numbers if not flag.range.holds(-2)):
        assert f"--{flag.name} is {flag.read('-2')!r} (command line), but it must be {flag.range}." in str(met.value)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_no_step_is_endless_and_conflicts_do_not_count_on_numbers_out_of_range(recipe: Recipe) -> None:
    steps = [flag.name for flag in recipe.flags.values() if flag.range is not None and flag.range.share]
    assert {"save_steps", "eval_steps", "warmup_steps"} <= set(steps)
    words = [f"--{name}=inf" for name in steps if name != "logging_steps"]
    words += ["--logging_steps=0", "--load_best_model_at_end=True", "--save_strategy=steps", "--eval_strategy=steps"]
    with pytest.raises(RequestError) as met:
        resolve(recipe, words, Launch(), is_here=False)
    assert all(f"--{name} is" in str(met.value) for name in steps)


@pytest.mark.parametrize(
    ("taken", "refused", "said"),
    [
        (Range(least=1), (0, 0.5), "1 or more"),
        (Range(above=0, below=1), (0, 1), "more than 0 and less than 1"),
        (Range(above=0, most=1), (0, 1.5), "more than 0 and at most 1"),
        (Range(least=5, others={0: "to wait"}), (-1, 4), "5 or more, or 0 to wait"),
        (
            Range(above=0, share=True),
            (0, 1.5),
            "more than 0, a whole number, or less than 1 for a fraction of all steps",
        ),
    ],
)
def test_a_range_says_what_it_holds(taken: Range, refused: tuple[float, ...], said: str) -> None:
    assert not any(map(taken.holds, refused))
    assert str(taken) == said
    assert all(map(taken.holds, taken.others))


def test_a_range_holds_its_ends() -> None:
    assert Range(least=1, most=2).holds(1)
    assert Range(least=1, most=2).holds(2)
    assert Range(above=0, share=True).holds(0.3)
    assert Range(above=0, share=True).holds(20.0)


def test_help_says_how_a_switch_that_is_on_is_switched_off() -> None:
    assert "--no_group_by_length for False" in " ".join(help_of(RECIPES[0], "About.").split())
