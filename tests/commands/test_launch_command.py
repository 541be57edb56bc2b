"""`finetune launch`: what it prints for each machine and cluster, and that the launchers take it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, free_port, tool

from finetune.cli import main

RECIPE = "recipes/seq_cls.py"
HOSTS = "worker-0 slots=2\nworker-1 slots=2\n"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    monkeypatch.setattr("finetune.commands.launch.gpus_here", lambda: 0)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["launch", *words]) == 0
    return capsys.readouterr().out.splitlines()


def commands(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    return [line for line in printed(capsys, *words) if not line.startswith("#")]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "deepspeed --num_gpus 2 recipes/seq_cls.py"),
        ("--launcher python", "python recipes/seq_cls.py"),
        ("--gpus_per_node 8 --launcher torchrun", "torchrun --standalone --nproc_per_node 8 recipes/seq_cls.py"),
        ("--launcher accelerate",
         "accelerate launch --config_file recipes/launch/accelerate_ddp.yaml --num_processes 2 recipes/seq_cls.py"),
        ("--launcher slurm --nodes 2 --gpus_per_node 8",
         "sbatch --nodes 2 --gpus-per-node 8 --exclusive recipes/launch/slurm.sbatch recipes/seq_cls.py"),
    ],
)  # fmt: skip
def test_one_line_is_typed(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands(capsys, *words.split(), RECIPE) == [line]


def test_torchrun_over_several_hosts_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = "--nodes 2 --gpus_per_node 8 --master_addr node1 --interface eth0".split()
    lines = printed(capsys, *cluster, RECIPE)
    assert lines[1::2] == ["# on host 0", "# on host 1"]
    assert lines[2::2] == [
        f"NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes 2 --node_rank {rank} --nproc_per_node 8 "
        "--master_addr node1 --master_port 29500 recipes/seq_cls.py"
        for rank in (0, 1)
    ]


def test_of_a_hostfile_only_the_chosen_gpus_are_seen(capsys: pytest.CaptureFixture[str]) -> None:
    some = ["--hostfile", "recipes/launch/hostfile", "--include", "worker-1:3,5"]
    assert printed(capsys, *some, "--launcher", "torchrun", RECIPE) == [
        "# on worker-1",
        "CUDA_VISIBLE_DEVICES=3,5 torchrun --standalone --nproc_per_node 2 recipes/seq_cls.py",
    ]
    assert "# on worker-1" in printed(capsys, *some, RECIPE)


def test_accelerate_gets_its_own_config_for_the_deepspeed_one(capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--launcher", "accelerate", RECIPE, "--deepspeed", "zero3", "--max_steps", "5"]
    (line,) = commands(capsys, *told)
    assert "accelerate_zero3.yaml" in line
    assert line.endswith("recipes/seq_cls.py --max_steps 5")
    assert main(["launch", "--launcher", "accelerate", RECIPE, "--deepspeed", "zeropp"]) == 2


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("recipes/causal_lm_pipeline.py",
         ["# before: finetune check pipeline --world_size 2 --pipeline_parallel_size 1"]),
        ("--gpus_per_node 4 recipes/causal_lm_pipeline.py --pipeline_parallel_size=2",
         ["# before: finetune check pipeline --world_size 4 --pipeline_parallel_size 2"]),
        ("recipes/causal_lm.py --deepspeed zero3 --sequence_parallel_size 2",
         ["# before: finetune check zero3 --world_size 2 --sequence_parallel_size 2"]),
        ("recipes/seq_cls.py --deepspeed_config=zero3", ["# before: finetune check zero3 --world_size 2"]),
        ("--launcher torchrun recipes/seq_cls.py", []),
        ("--launcher slurm --nodes 4 --gpus_per_node 8 recipes/seq_cls.py", []),
        ("--launcher accelerate recipes/seq_cls.py --fsdp False", []),
        ("--hostfile recipes/launch/hostfile --interface eth0 recipes/seq_cls.py", [
            "# before: finetune check zero2 --world_size 16 --ranks_per_node 8",
            "# CPU ranks: add GLOO_SOCKET_IFNAME=eth0 to .deepspeed_env; ssh forwards NCCL's only",
            "# before, on every host: finetune doctor --hostfile recipes/launch/hostfile --master_addr worker-0 "
            "--master_port 29500",
            "# on one of the hosts, from which ssh reaches the others",
        ]),
    ],
)  # fmt: skip
def test_the_notes_say_what_to_ask_before_and_where(
    words: str, notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [line for line in printed(capsys, *words.split()) if line.startswith("#")] == notes


def test_a_config_that_the_run_cannot_use_is_refused_and_that_of_a_yaml_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_size: moe-tiny\nexpert_parallel_size: 2\ndeepspeed: zero3\n")
    words = ["recipes/causal_lm.py", "--config", str(file)]
    assert main(["launch", *words]) == 2
    assert "error DS509: --expert_parallel_size is 2, but stage is 3" in capsys.readouterr().err
    assert printed(capsys, *words, "--deepspeed", "zero1")[0] == (
        "# before: finetune check zero1 --world_size 2 --expert_parallel_size 2"
    )
    copy = tmp_path / "mine.py"  # whose flags are unknown
    copy.touch()
    (before, _) = printed(capsys, str(copy), "--expert_parallel_size=2", "--deepspeed", "zero1")
    assert before == "# before: finetune check zero1 --world_size 2 --expert_parallel_size 2"
    assert main(["launch", "--launcher", "torchrun", *words, "--deepspeed", "none"]) == 2
    assert "--expert_parallel_size is 2" in (said := capsys.readouterr().err)
    assert "which needs DeepSpeed" in said
    file.write_text("deepspeed: zero2_offload\n")
    assert printed(capsys, *words)[0] == "# before: finetune check zero2_offload --world_size 2"


def test_each_host_of_a_hostfile_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(HOSTS)
    there = ["--hostfile", str(hostfile)]
    some = ["--include", "worker-0@worker-1:1"]
    (by_ssh,) = commands(capsys, *there, *some, RECIPE)
    meeting = "--master_addr worker-0 --master_port 29500"
    assert by_ssh == f"deepspeed --hostfile {hostfile} {' '.join(some)} {meeting} {RECIPE}"
    lines = printed(capsys, *there, "--no_ssh", RECIPE, "--deepspeed", "zero3")
    assert lines[0] == "# before: finetune check zero3 --world_size 4 --ranks_per_node 2"
    assert "# on worker-1" in lines
    assert "--no_ssh --node_rank 1" in lines[-1]
    torchrun = printed(capsys, *there, "--launcher", "torchrun", "--include", "worker-0@worker-1:1", RECIPE)
    assert [line.split("--nproc_per_node ")[1][0] for line in torchrun if "torchrun" in line] == ["2", "1"]
    accelerate = commands(capsys, *there, "--launcher", "accelerate", RECIPE)
    assert ["--machine_rank 0" in accelerate[0], "--machine_rank 1" in accelerate[1]] == [True, True]


def test_a_container_keeps_what_is_written_and_gets_the_memory_nccl_wants(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = commands(capsys, "--image", "finetune:ngc", RECIPE)
    assert line.startswith("docker run --rm --init --gpus all --ipc=host --ulimit memlock=-1")
    assert '--volume "$PWD":/workspace/finetune' in line
    assert line.endswith("finetune:ngc torchrun --standalone --nproc_per_node 2 recipes/seq_cls.py")


AWKWARD = ["--output_dir", 'it\'s $HOME; a `b` * ~ "c" \\\\ #', "--label_column_name", "", "--text_column_names=a b"]


@pytest.mark.parametrize(
    "words",
    [
        "--launcher python",
        "--launcher deepspeed",
        "--launcher deepspeed --no_ssh --hostfile",
        "--launcher torchrun",
        "--launcher torchrun --nodes 2 --master_addr a",
        "--launcher accelerate",
        "--launcher accelerate --nodes 2 --master_addr a",
        "--launcher slurm --gpus_per_node 2",
        "--image finetune:ngc",
    ],
)
def test_a_shell_hands_on_each_word_as_it_was_given(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a shell would make of it; a program that is started by the line says what it got."""
    hostfile = tmp_path / "my hosts; echo"
    hostfile.write_text(HOSTS)
    given = [*words.split(), *([str(hostfile)] if words.endswith("--hostfile") else [])]
    lines = printed(capsys, *given, RECIPE, *AWKWARD)
    typed = [line for line in lines if not line.startswith("#")]
    for name in ("python", "deepspeed", "torchrun", "accelerate", "sbatch", "docker"):
        (tmp_path / name).write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
        (tmp_path / name).chmod(0o755)
    for line in typed:
        shell = f"PATH={shlex.quote(str(tmp_path))}:$PATH; {line}"
        got = subprocess.run(["bash", "-c", shell], capture_output=True, check=True, text=True).stdout.split("\0")[:-1]
        assert got[-len(AWKWARD) - 1 :] == [RECIPE, *AWKWARD]
        assert "--hostfile" not in given or str(hostfile) in got
    asked = [line.split("finetune doctor ")[1] for line in lines if "finetune doctor --hostfile" in line]
    assert [shlex.split(line)[1] for line in asked] == [str(hostfile)] * ("--hostfile" in given)


def test_names_of_files_and_interfaces_are_quoted_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "my config.json"
    config.write_text('{"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}')
    lines = printed(capsys, RECIPE, "--deepspeed", str(config))
    assert shlex.split(lines[0])[4] == str(config)
    cluster = "--nodes 2 --gpus_per_node 2 --master_addr a --interface".split()
    for line in commands(capsys, *cluster, "eth0; true", RECIPE):
        assert shlex.split(line)[:2] == ["NCCL_SOCKET_IFNAME=eth0; true", "GLOO_SOCKET_IFNAME=eth0; true"]
        assert ";" not in line.replace("'eth0; true'", "")
    (line,) = commands(capsys, "--image", "a b", RECIPE)
    assert "a b" in shlex.split(line)
    assert shlex.split(line)[shlex.split(line).index("--volume") + 1] == "$PWD:/workspace/finetune"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipes/seqcls.py"], "Did you mean seq_cls.py?"),
        (["--nodes", "2", RECIPE], "Give --master_addr"),
        (["--nodes", "0", RECIPE], "must be 1 or more"),
        (["--nodes", "2", "--launcher", "deepspeed", "--master_addr", "a", RECIPE], "Give --hostfile"),
        (["--include", "a", RECIPE], "of a --hostfile. Give one"),
        (["--hostfile", "recipes/launch/hostfile", "--nodes", "2", RECIPE], "Leave out --nodes"),
        (["--launcher", "slurm", RECIPE], "Give --gpus_per_node"),
        (
            [RECIPE, "--lr", "3"],
            "--lr (command line): recipes/seq_cls.py has no such flag. Did you mean --learning_rate?",
        ),
        (
            ["--nodes", "2", "--launcher", "deepspeed", RECIPE, "--lr", "3"],
            "--nodes 2: the ranks must know where they meet",
        ),
        (["--nodes", "2", "--launcher", "deepspeed", RECIPE, "--lr", "3"], "\n--lr (command line)"),
        (["--launcher", "slurm", "--hostfile", "recipes/launch/hostfile", RECIPE], "chooses hosts by itself"),
        (["--launcher", "torchrun", "--no_ssh", RECIPE], "Leave it out"),
        (["--launcher", "accelerate", RECIPE, "--fsdp", "full_shard offload"], "takes FSDP's options from a file"),
        (["--image", "it", "/usr/lib/python3/it.py"], "there is no such recipe"),
        (["--image", "it", "--hostfile", "/etc/hosts", RECIPE], "is not a host"),
        ([RECIPE, "--nodes", "2"], "Put it before"),
        (["--nodes", "2", "--master_addr", "10.0.0.1:29500", RECIPE], "The port is --master_port"),
        (["--hostfile", "recipes/launch/hostfile", RECIPE, "--output_dir", '{"a":1}'], "would parse it again"),
        (["--launcher", "accelerate", RECIPE, "--fsdp", "True", "--deepspeed", "zero2"], "contradict each other"),
        (["--image", "it", "--launcher", "deepspeed", "--hostfile", "recipes/launch/hostfile", RECIPE], "Add --no_ssh"),
        (["--launcher", "python", "--gpus_per_node", "2", RECIPE], "starts one process"),
        (["--master_port", "0", RECIPE], "is not a valid port"),
    ],
)
def test_what_cannot_be_composed_is_said(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("page", ["README.md", "docs/launch.md", "docs/quickstart.md"])
def test_every_line_of_the_documentation_is_composed(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in (REPO / page).read_text().splitlines() if line.startswith("finetune launch ")]
    assert len(lines) >= 2
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, line
        assert capsys.readouterr().out


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "accelerate"])
def test_what_is_printed_runs(launcher: str, tmp_path: Path) -> None:
    """A script in the recipe's place, so that it is the launcher's words that are tried."""
    script = tmp_path / "it.py"
    script.write_text(
        "import os, sys\nopen(f'{sys.argv[-1]}{os.environ[\"RANK\"]}', 'w').write(os.environ['WORLD_SIZE'])\n"
    )
    words = [tool("finetune"), "launch", "--launcher", launcher, "--gpus_per_node", "2", "--master_port", free_port()]
    done = subprocess.run([*words, str(script), str(tmp_path / "rank")], capture_output=True, text=True, check=True)
    line = done.stdout.splitlines()[-1]
    shell = f". {shlex.quote(str(Path(sys.executable).with_name('activate')))}; {line}"
    subprocess.run(["bash", "-c", shell], check=True, timeout=120, capture_output=True)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
