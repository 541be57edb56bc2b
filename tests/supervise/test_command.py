"""What `finetune supervise` makes of the command that it is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import REPO

from finetune.errors import RequestError
from finetune.supervise.command import read_command

ELASTIC = "torchrun --nnodes 1:4 --nproc_per_node 8"
RECIPE = "recipes/seq_cls.py --output_dir runs/mine"
PIPELINE = "recipes/causal_lm_pipeline.py --pipeline_parallel_size 2"
EXPERTS = "recipes/causal_lm.py --expert_parallel_size 2 --model_size moe-tiny --deepspeed zero2"
SHIPPED = REPO / "recipes" / "launch"
FAKE = Path(__file__).with_name("fake_recipe.py")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)


@pytest.mark.parametrize(
    ("launcher", "flags", "folder"),
    [
        ("deepspeed --num_gpus 2", "--output_dir runs/mine", "runs/mine"),
        ("accelerate launch --config_file zero2.yaml", "--resume allow", "runs/seq_cls"),
        (
            f"accelerate launch --config_file {SHIPPED}/accelerate_ddp.yaml",
            "--resume allow",
            "runs/seq_cls",
        ),
        ("python -m torch.distributed.run --nnodes=1", "--resume=allow", "runs/seq_cls"),
        ("torchrun --standalone --nproc-per-node 2 --max-restarts 0", "--output_dir=runs/other", "runs/other"),
    ],
)
def test_a_command_for_fixed_hosts_stays_as_it_is_but_resumes(launcher: str, flags: str, folder: str) -> None:
    words = f"{launcher} recipes/seq_cls.py {flags}".split()
    read = read_command(words)
    assert read.hosts is None
    assert read.folder == Path(folder)
    again = [] if "--resume" in flags else ["--resume", "allow"]
    assert read.words(Path("attempt-1")) == [*words, *again]


def test_a_recipe_without_output_dir_writes_into_its_own_folder() -> None:
    assert read_command(["python", "recipes/causal_lm.py"]).folder == Path("runs/causal_lm")


def test_what_accelerate_is_configured_to_do_counts_where_no_flag_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    words = f"accelerate launch {RECIPE}".split()
    assert read_command(words).hosts is None
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("num_machines: 2\n")
    with pytest.raises(RequestError, match=r"default_config\.yaml: num_machines"):
        read_command(words)
    assert read_command([*words[:2], "--num_machines", "1", *words[2:]]).hosts is None


@pytest.mark.parametrize(
    ("launcher", "recipe"),
    [
        ("torchrun --nnodes 2:3", f"{RECIPE} --fsdp True"),
        ("torchrun --nnodes 1:3 --nproc_per_node 2", PIPELINE),
        ("torchrun --nnodes 1:3 --nproc_per_node gpu", PIPELINE),
    ],
)
def test_layouts_may_shrink_to_what_still_fits_them(launcher: str, recipe: str) -> None:
    assert read_command(f"{launcher} {recipe}".split()).hosts in ((2, 3), (1, 3))


@pytest.mark.parametrize("nnodes", ["--nnodes 1:4", "--nnodes=1:4"])
def test_hosts_that_come_and_go_meet_through_the_folder_of_the_attempt(nnodes: str, tmp_path: Path) -> None:
    launcher = f"torchrun {nnodes} --nproc-per-node 8 --rdzv-conf last_call_timeout=9 --local_addr 10.0.0.7"
    read = read_command(f"{launcher} {RECIPE}".split())
    assert (read.hosts, read.address) == ((1, 4), "10.0.0.7")
    words = read.words(tmp_path / "attempt-3")
    place = words.index("--nnodes")
    assert words[0] == "torchrun"
    assert words[place + 1] == "1:4"
    assert words[words.index("--rdzv_endpoint") + 1] == str(tmp_path / "attempt-3" / "rendezvous")
    assert words[words.index("--rdzv_conf") + 1] == "store_type=file,last_call_timeout=9,keep_alive_interval=30"
    assert words[words.index("--max_restarts") + 1] == "0"  # a wrong request must not be tried again
    assert words[words.index("--local_addr") + 1] == "10.0.0.7"
    assert not any(word.startswith(("--nnodes=", "--rdzv-conf")) for word in words)
    assert words[-5:] == [*RECIPE.split(), "--resume", "allow"]
    assert read.words(tmp_path / "attempt-1", 4)[words.index("--nnodes") + 1] == "4:4"
    assert read.words(tmp_path / "attempt-1", None, 2)[words.index("--nnodes") + 1] == "1:2"
    assert read.words(tmp_path / "attempt-1", 4, 3)[words.index("--nnodes") + 1] == "3:3"


def test_the_digest_tells_flags_from_others_and_not_hosts_from_one_another() -> None:
    here, there, other = (
        read_command(f"torchrun --nnodes 1:2 --local_addr {address} {RECIPE} {flag}".split()).digest
        for address, flag in (("10.0.0.1", ""), ("10.0.0.2", ""), ("10.0.0.1", "--max_steps 7"))
    )
    assert here == there != other


def test_the_module_of_torchrun_is_known_too(tmp_path: Path) -> None:
    words = read_command(f"python -m torch.distributed.run --nnodes 2:3 {RECIPE}".split()).words(tmp_path / "attempt-1")
    assert words[:5] == ["python", "-m", "torch.distributed.run", "--nnodes", "2:3"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("deepspeed --num_gpus 2", "^The command names no recipe"),
        ("", "names no recipe"),
        (f"python {RECIPE} --save_strategy no", "--save_strategy no"),
        (f"python {RECIPE} --overwrite_output_dir True", "--overwrite_output_dir"),
        (f"python {RECIPE} --resume auto", "--resume auto"),
        (f"python {FAKE}", "Give --output_dir"),
        (f"python {FAKE} --output_dir x --save_strategy=no", "--save_strategy no"),
        (
            "python recipes/seq_clss.py",
            r"^recipes/seq_clss.py: there is no such file\. Did you mean recipes/seq_cls",
        ),
        ("deepspeed my_own.py --output_dir x", "^my_own.py: there is no such file"),
        (f"deepspeed --num_gpus 2 {RECIPE} --lerning_rate 3", "^--lerning_rate .* Did you mean --learning_rate"),
        (f"python {RECIPE} --max_steps many", "^--max_steps is 'many'"),
        (f"torchrn --nproc_per_node 2 {RECIPE}", r"^torchrn: there is no such command\. Did you mean torchrun\? Give"),
        (RECIPE, "^recipes/seq_cls.py: it may not be executed"),
        (f"deepspeed {RECIPE} --deepspeed zeor2", r"^--deepspeed is 'zeor2'.* no such .* Did you mean zero2"),
        (
            f"python {RECIPE} --deepspeed_config ds/mine.json",
            "^--deepspeed_config is 'ds/mine.json'.* Give a path",
        ),
        (f"torchrun --nproc_per_node 2 --max_restarts 3 {RECIPE}", "--max_restarts"),
        (f"torchrun --nnodes 2 {RECIPE}", "Give --nnodes 2:2"),
        (f"torchrun --nnodes=2 --node_rank 0 {RECIPE}", "drop --node_rank"),
        (f"torchrun --nnodes 0:4 {RECIPE}", "--nnodes 0:4"),
        (f"torchrun --nnodes 4:2 {RECIPE}", "--nnodes 4:2"),
        (f"torchrun --nnodes a:b {RECIPE}", "--nnodes a:b"),
        (f"{ELASTIC} --rdzv-endpoint here:29400 {RECIPE}", "--rdzv_endpoint is set by"),
        (f"{ELASTIC} --max_restarts=3 {RECIPE}", "--max_restarts is set by"),
        (f"{ELASTIC} --node_rank 0 {RECIPE}", "--node_rank is for a fixed set of hosts"),
        (f"{ELASTIC} --master_addr 10.0.0.1 {RECIPE}", "--master_addr is for a fixed set of hosts"),
        (f"{ELASTIC} --rdzv_conf store_type=tcp {RECIPE}", "store_type"),
        (
            f"torchrun --nnodes 1:2 {RECIPE} --fsdp True",
            r"on 1 host\(s\) .* shards over several",
        ),
        (
            f"torchrun --nnodes 1:4 {EXPERTS}",
            r"on 1 host\(s\) .*: --expert_parallel_size is 2 .* more than the 1 rank.* Or give another --nnodes",
        ),
        (f"torchrun --nnodes 1:2 {RECIPE} --lerning_rate 3", "^--lerning_rate"),
        (f"torchrun --nnodes 2:3 --nproc-per-node=1 {PIPELINE}", r"on 3 host\(s\) .* a multiple of 2"),
        (f"accelerate launch --num_machines 2 {RECIPE}", "--num_machines 2: .* Give `torchrun --nnodes 2:2"),
        (f"python -m accelerate.commands.launch --num-machines=3 {RECIPE}", "torchrun --nnodes 3:3"),
        (
            f"accelerate launch --config_file {SHIPPED}/accelerate_multi_node.yaml {RECIPE}",
            "multi_node.yaml: num",
        ),
        (f"deepspeed --hostfile hosts --no_ssh --node_rank 0 {RECIPE}", "--no_ssh: .* `torchrun --nnodes N:N"),
    ],
)
def test_what_could_not_be_continued_is_refused(words: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_command(words.split())


def test_flags_that_a_changed_copy_may_have_and_help_are_left_to_the_script(tmp_path: Path) -> None:
    copy = tmp_path / "seq_cls.py"
    copy.write_text((REPO / "recipes" / "seq_cls.py").read_text())
    for words in (f"python {copy} --own_flag 3", "python recipes/seq_cls.py --help"):
        assert read_command(words.split()).folder == Path("runs/seq_cls")


@pytest.mark.parametrize("script", ["/there/recipes/seq_cls.py", "recipes/seq_cls.py"])
def test_what_a_container_holds_need_not_be_here(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    words = f"docker run image torchrun --nproc_per_node 2 {script} --output_dir runs/mine --deepspeed /there/zero.json"
    assert read_command(words.split()).folder == Path("runs/mine")


def test_a_config_that_is_there_or_shipped_or_none_is_accepted() -> None:
    for config in ("zero2", "ds_configs/zero3.json", "none"):
        assert read_command(f"deepspeed {RECIPE} --deepspeed {config}".split()).folder == Path("runs/mine")
