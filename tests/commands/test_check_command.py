"""`finetune check` as it is used: its options, its files, its exit status."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

from finetune.cli import main

ZERO2 = '"zero_optimization": {"stage": 2}'
ZERO3PP = {
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 8,
    }
}
FAULTY = f'{{ {ZERO2},\n  "gradient_cliping": 1.0,\n}}\n'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "grid.yaml", "--onyl", "wide-*"], "unknown flag --onyl for `finetune bench`. Did you mean --only?"),
        (
            ["bench", "grid.yaml", "--treshold=1"],
            "unknown flag --treshold=1 for `finetune bench`. Did you mean --thre",
        ),
        (["supervise", "--max_restart", "3", "--", "x"], "for `finetune supervise`. Did you mean --max_restarts?"),
        (["checkpoint", "ls", "runs/one", "--ver"], "unknown flag --ver for `finetune checkpoint ls`."),
        (["report", "runs/one", "--markdwon", "a.md"], "for `finetune report`. Did you mean --markdown?"),
        (["plan", "gpt2", "--per_device_train_batch_sise", "8"], "Did you mean --per_device_train_batch_size?"),
        (["check", "lora_24gb"], "lora_24gb: a recipe's YAML that names no DeepSpeed config"),
        (["exprt"], "checkpoint, export, generate, chat, launch, train, supervise, recipe; you may mean export."),
        (["export", "a", "b", "--dtype", "bf17"], "--dtype is 'bf17', but it must be one of fp32, bf16; you may mean"),
        (
            ["checkpoint", "lst", "a"],
            "is 'lst', but it must be one of ls, verify; you may mean ls.",
        ),
        (["bench", "a", "--threshold", "x"], "--threshold is 'x', but it must be a number. `finetune bench --help`"),
        (["check", "--gpu", "--cpu"], "--cpu: not allowed with argument --gpu. `finetune check --help`"),
        (["export", "--dtpye", "bf16"], "unknown flag --dtpye for `finetune export`. Did you mean --dtype? And the"),
        (["report", "--htlm"], "unknown flag --htlm for `finetune report`. Did you mean --html?"),
        (["export", "--dtype", "bf16"], "finetune: the following arguments are required: CHECKPOINT, OUT."),
        (["plan", "gpt2", "--gpu", "0"], "finetune: --gpu 0: there is no such machine."),
        (["export"], "the following arguments are required: CHECKPOINT, OUT. `finetune export --help`"),
        (["doctor", "--xyzzy"], "unknown flag --xyzzy for `finetune doctor`. `finetune doctor --help` lists them."),
        (["doctor", "runs"], "runs: this is one argument too many for `finetune doctor`"),
        (["--verison", "doctor"], "unknown flag --verison for `finetune`. Did you mean --version?"),
        (
            ["launch", "--nodse", "2", "recipes/seq_cls.py", "--onyl"],
            "unknown flag --nodse for `finetune launch`. Did you",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_misspelt_flag_is_refused_with_the_nearest(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--help", "check --help", "doctor --help", "launch --help", "check zero2"])
def test_an_answer_needs_nothing_heavy(words: str) -> None:
    heavy = {"torch", "transformers", "deepspeed", "datasets", "numpy", "pydantic"}
    code = f"""
import sys
from finetune.cli import main
try:
    main({words.split()!r})
except SystemExit:
    pass
print("loaded:", *sorted({heavy!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_shipped_names_and_paths_are_checked_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(FAULTY)
    assert main(["check", "zero2", "zero3", "--world_size", "8", "--gpu"]) == 0
    assert capsys.readouterr().out == "0 errors, 0 warnings in 2 files for 8 ranks\n"
    assert main(["check", "zero2", str(mine)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in lines[:-1]] == [
        [f"{mine}:1:1", "warning DS206"],
        [f"{mine}:2:3", "error DS101"],
        [f"{mine}:2:26", "error DS003"],
    ]
    assert lines[-1] == "2 errors, 1 warning in 2 files; --fix repairs 3"


def test_without_flags_what_depends_on_the_run_is_left_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config for eight GPUs is no fault on a laptop."""
    mine = tmp_path / "mine.json"
    content = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    mine.write_text(json.dumps({**content, "gradient_clipping": 1.0, "fp16": {"enabled": True}, **ZERO3PP}))
    assert main(["check", str(mine)]) == 0
    assert main(["check", str(mine), "--cpu"]) == 2
    assert "fp16 is on, but there is no GPU" in capsys.readouterr().out
    assert main(["check", str(mine), "--world_size", "4"]) == 2
    assert "4 x 2 x 4 = 32" in capsys.readouterr().out
    shipped = ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_nvme", "zero3_offload", "zeropp"]
    assert main(["check", *shipped]) == 0
    assert main(["check", "pipeline"]) == 0
    assert main(["check", "pipeline", "--pipeline_parallel_size", "2"]) == 0


def test_fix_shows_what_it_changes_and_replaces_the_file_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(FAULTY)
    mine.chmod(0o640)
    assert main(["check", str(mine), "--fix"]) == 0
    out = capsys.readouterr().out
    assert '-  "gradient_cliping": 1.0,\n+  "gradient_clipping": 1.0\n' in out
    assert mine.read_text() == FAULTY.replace("cliping", "clipping").replace("1.0,", "1.0")
    assert mine.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
    assert main(["check", str(mine), "--fix"]) == 0
    assert "---" not in capsys.readouterr().out


def test_without_fix_nothing_is_written(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(FAULTY)
    before = mine.stat()
    assert main(["check", str(mine)]) == 2
    assert mine.read_text() == FAULTY
    assert mine.stat().st_mtime_ns == before.st_mtime_ns


def test_fix_keeps_the_line_endings(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    before = f'{{\r\n  {ZERO2},\r\n  "gradient_clipping": "auto",\r\n  "wall_clock_breakdown": true\r\n}}\r\n'
    mine.write_bytes(before.encode())
    assert main(["check", str(mine), "--fix"]) == 0
    assert mine.read_bytes().decode() == before.replace("true", "false")


def test_fix_through_a_link_mends_what_it_points_to(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text(FAULTY)
    link.symlink_to(target)
    assert main(["check", str(link), "--fix"]) == 0
    assert link.is_symlink()
    assert "gradient_clipping" in target.read_text()


def test_nothing_is_mended_where_one_file_cannot_be_read(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(FAULTY)
    assert main(["check", str(mine), str(tmp_path / "none.json"), "--fix"]) == 2
    assert mine.read_text() == FAULTY


def test_a_recipes_numbers_are_read_as_flags_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.json"
    lr = {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.999]}}
    mine.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "optimizer": lr}))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"deepspeed: {mine}\nlearning_rate: 5e-5\nadam_beta1: 0.9\n")
    assert main(["check", "--config", str(recipe)]) == 0
    recipe.write_text(f"deepspeed: {mine}\nlearning_rate: 5e-4\nadam_beta2: 0.95\n")
    assert main(["check", "--config", str(recipe)]) == 2
    said = capsys.readouterr().out
    assert "lr is 5e-05, but the run asks for 0.0005" in said
    assert "betas is [0.9, 0.999], but the run asks for [0.9, 0.95]" in said
    for line in ("pipeline_parallel_size: two", "deepspeed_config: {zero_stage: 2}", "deepspeed: a\ndeepspeed: b"):
        recipe.write_text(line)
        assert main(["check", "--config", str(recipe)]) == 2


def test_a_recipe_gives_the_flags_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{\n  "gradient_clipping": 0.5\n}\n')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"deepspeed: {mine}\nmax_grad_norm: 0.1\n")
    assert main(["check", "--config", str(recipe)]) == 2
    assert "0.5, but the run asks for 0.1 (--max_grad_norm)" in capsys.readouterr().out
    assert main(["check", "--config", str(REPO / "recipes" / "configs" / "lora_zero3.yaml"), "--gpu"]) == 0
    assert main(["check", str(REPO / "recipes" / "configs" / "lora_zero3.yaml"), "--gpu"]) == 0


def test_a_model_gives_the_sizes_of_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [100, 64], "data_offsets": [0, 25600]},
            "b": {"dtype": "F32", "shape": [64], "data_offsets": [25600, 25856]},
        }
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(25856))
    mine = tmp_path / "mine.json"
    gather = '"stage3_gather_16bit_weights_on_model_save": true'
    mine.write_text(
        f'{{"gradient_clipping": "auto", "zero_optimization": {{"stage": 3, {gather},'
        ' "stage3_param_persistence_threshold": 10000}}'
    )
    assert main(["check", str(mine), "--model", str(tmp_path)]) == 2
    assert "the largest weight of the model has 6,400 elements" in capsys.readouterr().out
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    assert main(["check", str(mine), "--model", str(tmp_path)]) == 2
    assert "is not a safetensors file, or is damaged or cut short" in capsys.readouterr().err


def test_a_config_from_powershell_is_told_how_to_become_utf_8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.json").write_bytes('{"zero_optimization": {"stage": 2}}'.encode("utf-16"))
    assert main(["check", str(tmp_path / "mine.json")]) == 2
    assert "is UTF-16, as Windows PowerShell writes it, not UTF-8. Save it as UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "config", "message"),
    [
        ("--world_size 8 --sequence_parallel_size 8", {"num_attention_heads": 4}, "4 attention heads. Give 2 or 4."),
        ("--world_size 6 --expert_parallel_size 3", {"num_local_experts": 8}, "8 experts. Give 2."),
        ("--world_size 4 --expert_parallel_size 2", {"num_attention_heads": 4}, "the model has no experts"),
        ("--world_size 4 --expert_parallel_size 2", {"num_local_experts": 8}, None),
        ("--world_size 4 --sequence_parallel_size 4", {"num_attention_heads": 4}, None),
        ("--config YAML --world_size 6", {"num_attention_heads": 4}, "4 attention heads. Give 2."),
    ],
)
def test_a_model_that_a_runs_ranks_cannot_share_is_refused(
    words: str, config: dict[str, Any], message: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    (tmp_path / "config.json").write_text(json.dumps(config))
    yaml = tmp_path / "run.yaml"
    yaml.write_text("sequence_parallel_size: 3\nmodel_name_or_path: someone/on-the-hub\n")
    asked = ["zero2", *words.replace("YAML", str(yaml)).split()]
    assert main(["check", *asked]) == 0  # the model is unknown
    assert main(["check", *asked, "--model", str(tmp_path)]) == (2 if message else 0)
    assert (message or "") in capsys.readouterr().err


WRONG = [
    pytest.param([], "no file is given", id="nothing"),
    pytest.param(["zero2", "recipes/configs/lora_zero3.yaml"], "alone, or with --config", id="a YAML beside one"),
    pytest.param(["zerro2"], "Did you mean zero2?", id="nearly shipped"),
    pytest.param(["nowhere"], "there is no such DeepSpeed config", id="no such file"),
    pytest.param(["zero2", "--world_size", "0"], "--world_size is 0, but it must be 1 or more", id="no ranks"),
    pytest.param(
        ["pipeline", "--world_size", "3", "--pipeline_parallel_size", "2"],
        "--world_size 3 is not a multiple of 2 stage(s)",
        id="stages",
    ),
    pytest.param(
        ["zero2", "--world_size", "6", "--sequence_parallel_size", "4"],
        "--world_size 6 is not a multiple of --sequence_parallel_size 4",
        id="texts",
    ),
    pytest.param(
        ["zero2", "--expert_parallel_size", "0"], "--expert_parallel_size is 0, but it must be 1", id="experts"
    ),
    pytest.param(
        ["pipeline", "--pipeline_parallel_size", "2", "--sequence_parallel_size", "2"],
        "--sequence_parallel_size 2 cannot be combined with --pipeline_parallel_size 2",
        id="stages and texts",
    ),
    pytest.param(
        ["zero2", "--world_size", "6", "--ranks_per_node", "4"],
        "--ranks_per_node 4 does not divide --world_size 6",
        id="nodes",
    ),
    pytest.param(["zero2", "--gpu_name", "H1000"], "Give one of P100", id="unknown GPU"),
    pytest.param(["zero2", "--config", "nowhere.yaml"], "cannot be read", id="no recipe"),
    pytest.param(["zero2", "--model", "nowhere"], "there is no model.safetensors", id="no model"),
    pytest.param(["zero2", "--versions", "deepspeed"], "NAME==VERSION", id="half a version"),
    pytest.param(["zero2", "--versions", "deepspeed==abc"], "NAME==VERSION", id="no version"),
    pytest.param(["zero2", "--disable", "FOO"], "is not a code such as DS902", id="no code"),
    pytest.param(["zero2", "--ranks_per_node", "2"], "needs --world_size", id="a node of nothing"),
    pytest.param(["zero3", "--fix", "--engine", "deepspeed"], "Copy it, and fix the copy", id="a shipped file"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_wrong_request_is_refused_with_its_mend(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("finetune: ")
    assert len(said.err.splitlines()) == 1


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m finetune.cli check zeropp --format json | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=REPO, check=False)
    assert done.stderr == ""
