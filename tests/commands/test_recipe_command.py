"""`finetune recipe` and `finetune train`: what comes with the toolkit is found from any folder, and from a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, free_port, tool

from finetune.cli import main
from finetune.run.choose import recipes
from finetune.shipped import files

WRITES = "import os, sys\nopen(f'{sys.argv[-1]}{os.environ.get(\"RANK\", 0)}', 'w').write(' '.join(sys.argv[1:-1]))\n"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_recipe_is_listed_and_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "list"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    assert {*recipes(), "lora_24gb", "slurm.sbatch"} <= lines.keys()
    assert lines["seq_cls"].startswith("Fine-tune a text classifier")
    assert lines["slurm.sbatch"].startswith("Train on a Slurm cluster")


def test_no_two_files_have_one_name() -> None:
    assert len(files()) == sum(len(files(kind)) for kind in ("*.py", "configs/*.yaml", "launch/*")) > 20


@pytest.mark.parametrize("name", ["seq_cls", "lora_24gb", "launch/slurm.sbatch", "recipes/configs/lora_24gb.yaml"])
def test_a_copy_is_the_file_and_nothing_is_overwritten(
    name: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe", "show", name]) == 0
    shown = capsys.readouterr().out
    assert main(["recipe", "copy", name]) == 0
    (copied,) = elsewhere.iterdir()
    assert copied.read_text() == shown
    copied.write_text("mine")
    assert main(["recipe", "copy", name]) == 2
    assert "the file exists already" in capsys.readouterr().err
    assert copied.read_text() == "mine"
    assert main(["recipe", "copy", name, "nowhere/it"]) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "meant"), [("seq_cl", "seq_cls"), ("lora24gb", "lora_24gb"), ("zzz", "list")])
def test_the_nearest_name_is_given(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["recipe", "show", word], ["launch", word], ["train", word]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert f"{word}: there is no such recipe" in said
        assert meant in said


def test_a_recipe_is_started_by_its_name_from_any_folder(elsewhere: Path) -> None:
    done = subprocess.run(
        [tool("finetune"), "train", "token_cls", "--help"], capture_output=True, text=True, check=True
    )
    assert "Common flags:" in done.stdout
    assert done.stderr.startswith("# python ")
    assert done.stderr.endswith("recipes/token_cls.py --help\n")


def test_train_starts_the_ranks_and_ends_as_they_do(elsewhere: Path) -> None:
    (elsewhere / "it.py").write_text(WRITES)
    words = [tool("finetune"), "train", "--launcher", "torchrun", "--gpus_per_node", "2", "--master_port", free_port()]
    bare = {**os.environ, "PATH": "/usr/bin:/bin"}  # no environment is activated
    subprocess.run([*words, "it.py", "--flag", "two words", "rank"], check=True, timeout=120, env=bare)
    assert [(elsewhere / f"rank{rank}").read_text() for rank in (0, 1)] == ["--flag two words"] * 2
    (elsewhere / "it.py").write_text("raise SystemExit(3)")
    assert (
        subprocess.run([tool("finetune"), "train", "--launcher", "python", "--gpus_per_node", "1", "it.py"]).returncode
        == 3
    )


def test_train_starts_nothing_where_each_host_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train --nodes 2 --gpus_per_node 8 --master_addr node1 seq_cls".split()) == 2
    assert "`finetune launch`, with the same arguments, prints them" in capsys.readouterr().err


def test_a_shipped_config_is_found_by_its_name(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--config", "lora_24gb", "--model_name_or_path", "Qwen3-8B", "--gpu", "RTX4090", "--no_search"]
    assert main(plan) == 0
    assert "8.234 billion parameters, bf16" in capsys.readouterr().out
    (elsewhere / "lora_24gb").write_text("nonsense: 1\n")  # what is there comes first
    assert main(plan) == 2


def test_a_wheel_has_the_recipes_and_needs_no_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "base")]
    subprocess.run([*build, "--build-lib", str(tmp_path / "lib")], cwd=REPO, check=True, capture_output=True)
    shipped = tmp_path / "lib/finetune/shipped"
    assert [(shipped / name).read_bytes() for name in ("recipes/seq_cls.py", "ds_configs/zero2.json")] == [
        (REPO / name).read_bytes() for name in ("recipes/seq_cls.py", "ds_configs/zero2.json")
    ]
    assert not list(shipped.rglob("*.pyc"))

    def said(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib"), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-c", "import sys; from finetune.cli import main; sys.exit(main())", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
        return done.stdout

    assert said("launch", "seq_cls").endswith("deepspeed --num_gpus 2 lib/finetune/shipped/recipes/seq_cls.py\n")
    assert said("check", "zero2", "--world_size", "2").startswith("0 errors")
    assert "Common flags:" in said("train", "seq_cls", "--help")
