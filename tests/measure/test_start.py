"""What a trial is started with, and what is not started."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.dsconfig.config import Config
from finetune.errors import RequestError, RunError
from finetune.host.hardware import cores_here
from finetune.measure import start
from finetune.measure.calibrate import calibrate
from finetune.measure.models import build
from finetune.measure.outcome import CRASHED, Outcome
from finetune.measure.recipe import TRIAL
from finetune.measure.start import Measured
from finetune.plan.families.parts import TAGS
from finetune.plan.from_run import job_of
from finetune.plan.job import DEEPSPEED, FSDP, PIPELINE, Job
from finetune.plan.machine import Machine, find_machine
from finetune.plan.model import in_4bit, model_of, with_lora
from finetune.plan.optimizers import KINDS, Optimizer
from finetune.plan.plan import plan
from finetune.plan.search import laid_out, shipped
from finetune.plan.values import Lora
from finetune.plan.zero import read_zero
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.launch import Launch
from finetune.run.resolve import resolve

LITE = {"model_type": "gptlite", "vocab_size": 65, "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip
BASE = Job(model_of(LITE), world_size=2, ranks_per_node=2, micro_batch=3, tokens=32, accumulation=4, device="cpu")
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-4}}


def test_a_model_without_fused_attention_is_tried_as_a_recipe_would_train_it() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    made = {kind: build({"model_type": kind, **small, "vocab_size": 50}, TAGS, "sdpa") for kind in ("bert", "deberta")}
    assert {kind: one.config._attn_implementation for kind, one in made.items()} == {"bert": "sdpa", "deberta": "eager"}


def flags(job: Job, config: dict[str, Any] | None, folder: Path) -> dict[str, str]:
    argv = start.arguments(job, config, folder, 5)
    assert all(name.startswith("--") for name in argv[::2])
    return dict(zip((name[2:] for name in argv[::2]), argv[1::2], strict=True))


def test_the_trainer_is_told_what_was_planned(tmp_path: Path) -> None:
    found = flags(replace(BASE, checkpoint_interval=2, attention="eager", precision="bf16"), None, tmp_path)
    assert {name: found[name] for name in found if not found[name].startswith(str(tmp_path))} == {
        "timed_steps": "5", "planned_device": "cpu", "use_cpu": "True", "head": "causal_lm",
        "attn_implementation": "eager",
        "sequence_tokens": "32", "loss_chunk_tokens": "0", "per_device_train_batch_size": "3",
        "gradient_accumulation_steps": "4", "bf16": "True", "fp16": "False", "deepspeed": "none",
        "activation_checkpoint_interval": "2", "optim": "adamw_torch_fused", "logging_nan_inf_filter": "True",
    }  # fmt: skip
    assert json.loads(Path(found["model_config"]).read_text()) == LITE


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("none", {}),
        ("none", {"checkpoint_interval": 2, "attention": "eager", "optimizer": Optimizer("sgd")}),
        ("none", {"engine": FSDP, "loss_chunk_tokens": 512}),
        ("none", {"looks_at_loss": False}),
        ("zero2", {"loss_chunk_tokens": 512}),
        ("zero2_offload", {}),
        ("zero3", {"micro_batch": 1, "accumulation": 1}),
        ("pipeline", {"stages": 2, "partition_method": "uniform"}),
    ],
)
def test_what_is_run_is_what_was_planned(layout: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """The trial's command line, read as its process reads it, is planned as the very job that it is run for."""
    job = replace(laid_out(BASE, layout), **changes)
    argv = start.arguments(job, None if layout == "none" else shipped(layout), tmp_path, 5)
    run = resolve(TRIAL, argv, Launch(world_size=2, local_world_size=2, launcher="torchrun"))
    subject = Job(job.model, tokens=job.tokens, loss_chunk_tokens=job.loss_chunk_tokens)
    assert job_of(run, find_machine("cpu"), subject=subject)[0] == job


def test_an_adapter_is_the_one_that_was_planned(tmp_path: Path) -> None:
    lora = Lora(8, ("qkv", "out"), 0.1, ("head",))
    job = replace(BASE, model=with_lora(BASE.model, lora), engine=FSDP, precision="bf16", dtype="bfloat16")
    found = flags(job, None, tmp_path)
    assert found["fsdp"] == "True"
    said = AdapterArguments(use_peft=True, **json.loads(found["adapter"]))
    assert (said.lora_r, said.lora_target_modules, said.lora_dropout) == (8, ["qkv", "out"], 0.1)
    assert (said.lora_modules_to_save, said.lora_use_dora, said.dtype) == (["head"], False, "bfloat16")


def test_a_loss_in_chunks_is_run_in_chunks(tmp_path: Path) -> None:
    assert flags(replace(BASE, loss_chunk_tokens=512), None, tmp_path)["loss_chunk_tokens"] == "512"


@pytest.mark.parametrize(
    ("kind", "optim"),
    [
        ("adam", "adamw_torch_fused"),
        ("adam_foreach", "adamw_torch"),
        ("sgd", "sgd"),
        ("adafactor", "adafactor"),
        ("adam8bit", "adamw_bnb_8bit"),
        *((kind, None) for kind in ("cpu_adam", "onebit_adam", "momentum")),
    ],
)
def test_the_optimizer_is_the_one_that_was_planned(kind: str, optim: str | None, tmp_path: Path) -> None:
    assert kind in KINDS
    assert flags(replace(BASE, optimizer=Optimizer(kind)), None, tmp_path).get("optim") == optim


@pytest.mark.parametrize(
    ("layout", "section", "optim"),
    [
        ("zero2", None, "sgd"),  # the shipped section is all "auto": it is left to the Trainer
        ("zero2", ADAMW, None),
        ("zero2_offload", None, None),
    ],
    ids=["left to the Trainer", "DeepSpeed's own", "offloaded"],
)
def test_a_config_that_makes_its_optimizer_is_given_none(
    layout: str, section: dict[str, Any] | None, optim: str | None, tmp_path: Path
) -> None:
    job = laid_out(replace(BASE, optimizer=Optimizer("sgd")), layout)
    config = shipped(layout) | ({"optimizer": section} if section else {})
    found = flags(replace(job, optimizer=Optimizer("sgd")), config, tmp_path)
    assert found.get("optim") == optim
    assert json.loads(Path(found["deepspeed"]).read_text()) == config
    assert found["max_grad_norm"] == "1.0"


def test_clipping_is_that_of_the_plan(tmp_path: Path) -> None:
    config = shipped("zero1")
    job = replace(BASE, engine=DEEPSPEED, zero=read_zero(Config(config), 64, 0.25))
    assert flags(job, config, tmp_path)["max_grad_norm"] == "0.25"


def test_a_pipeline_has_its_stages_and_no_folder_for_states(tmp_path: Path) -> None:
    job = replace(laid_out(BASE, "pipeline"), stages=2, partition_method="uniform")
    assert job.engine == PIPELINE
    found = flags(job, shipped("pipeline"), tmp_path)
    assert (found["pipeline_parallel_size"], found["partition_method"]) == ("2", "uniform")
    assert "nvme_path" not in found


@pytest.mark.parametrize("is_there", [True, False])
def test_states_go_to_the_users_disk_or_into_the_trials_folder(is_there: bool, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    if is_there:
        disk.mkdir()
    config = shipped("zero3_nvme")
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(disk)  # type: ignore[index]
    found = flags(laid_out(BASE, "zero3_nvme"), config, tmp_path)
    written = json.loads(Path(found["deepspeed"]).read_text())["zero_optimization"]["offload_optimizer"]["nvme_path"]
    assert written == (str(disk) if is_there else "auto")
    assert found["nvme_path"] == str(tmp_path / "nvme"), "the weights go there"
    assert "nvme_path" not in flags(laid_out(BASE, "zero3"), shipped("zero3"), tmp_path), "it would be refused"
    assert config["zero_optimization"]["offload_optimizer"]["nvme_path"] == str(disk)  # type: ignore[index]


def on(device: str, ranks: int, **changes: Any) -> tuple[Job, Machine]:
    machine = find_machine("cpu" if device == "cpu" else "T4")
    return replace(BASE, world_size=ranks, ranks_per_node=ranks, device=device, **changes), machine


def test_more_ranks_than_cores_are_refused() -> None:
    cores = cores_here()
    start.check_room(*on("cpu", cores))
    with pytest.raises(RequestError, match=rf"{cores} core\(s\) .* {cores + 1} ranks .* --gpus_per_node {cores};"):
        start.check_room(*on("cpu", cores + 1))


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "gpus_here", lambda: 4)
    start.check_room(*on("cuda", 4))
    with pytest.raises(RequestError, match=r"has 4 GPUs by nvidia-smi, but 8 rank\(s\) of T4 .* --gpus_per_node 4;"):
        start.check_room(*on("cuda", 8))
    monkeypatch.setattr(start, "gpus_here", lambda: 0)
    with pytest.raises(RequestError, match="Give --gpu cpu"):
        start.check_room(*on("cuda", 1))


def test_several_nodes_and_weights_of_4_bits_are_refused() -> None:
    job, machine = on("cpu", 2)
    with pytest.raises(RequestError, match="2 ranks are more than this machine has"):
        start.check_room(replace(job, ranks_per_node=1), machine)
    adapted = replace(job, model=with_lora(job.model, Lora(8, ("qkv",))))
    start.check_room(adapted, machine)
    with pytest.raises(RequestError, match="do not train weights in 4 bits"):
        start.check_room(replace(job, model=in_4bit(job.model)), machine)


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """In place of the launcher: what a run that takes half a minute would leave in its folder."""
    monkeypatch.setattr(start, "started", lambda launcher, ranks: ["sh", "-c", code, "sh"])


def test_on_a_gpu_bytes_are_those_of_its_allocator(tmp_path: Path) -> None:
    given = {"between_steps_bytes": 1, "step_peaks_bytes": {"forward": 2}, "seconds": [0.1, 0.3, 0.2]}
    of_allocator = {"resting_bytes": 10, "allocated_bytes": 20, "reserved_bytes": 30}
    (tmp_path / "rank-0.json").write_text(json.dumps({**given, **of_allocator}))
    assert start._read(tmp_path, 1) == Measured((10,), (20,), 0.2, (30,))
    (tmp_path / "rank-0.json").write_text(json.dumps(given))
    assert start._read(tmp_path, 1) == Measured((1,), (2,), 0.2)


FIGURES = '{"between_steps_bytes": 1048576, "step_peaks_bytes": {"forward": 2097152}, "seconds": [0.1]}'
GOOD = f"for rank in 0 1; do echo '{FIGURES}' > $6/rank-$rank.json; done"
BAD = "mkdir $6/nvme; echo '[rank1]: ValueError: no such layer'; echo 'errors.ChildFailedError: see above'; exit 1"


def test_a_trial_that_fails_keeps_its_log_and_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(start.tempfile, "tempdir", str(tmp_path))
    stand_in(monkeypatch, BAD)
    with pytest.raises(RunError, match=r"ended: failed: \[rank1\]: ValueError: no such layer \(its log: .*log.txt\)"):
        start.verify(plan(BASE, find_machine("cpu")), None)
    (folder,) = tmp_path.iterdir()
    assert "no such layer" in (folder / "log.txt").read_text()
    assert not (folder / "nvme").exists()


def test_a_trial_that_is_done_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start.tempfile, "tempdir", str(tmp_path))
    stand_in(monkeypatch, GOOD)
    assert start.verify(plan(BASE, find_machine("cpu")), None) == 0
    assert not list(tmp_path.iterdir())
    said = capsys.readouterr().out
    assert "two are not comparable" in said  # the shipped profile is of no machine here
    shipped = find_machine("cpu")
    here = replace(shipped, sources=shipped.sources | {"launch_seconds": "measured"})
    assert start.verify(plan(BASE, here), None) == 0
    assert "not comparable" not in capsys.readouterr().out


def test_the_peak_of_an_evaluation_is_not_compared_with_a_run_that_has_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, GOOD)
    rows = []
    for eval_batch in (0, 64):
        start.verify(plan(replace(BASE, eval_batch=eval_batch), find_machine("cpu")), None)
        rows.append(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("peak")))
    assert rows[0] == rows[1]


def test_a_run_that_is_not_done_in_time_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(start, "PATIENCE_SECONDS", 0.5)
    stand_in(monkeypatch, "sleep 100")
    assert start.measure(BASE, None, tmp_path) == "not done after 0 s"


def test_memory_that_ran_out_is_told_from_other_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, "kill -KILL $$")
    assert start.measure(BASE, None, tmp_path) == "out of memory"
    stand_in(monkeypatch, "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried'; exit 1")
    assert start.measure(BASE, None, tmp_path) == "out of memory"


def test_interrupted_trials_leave_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(start.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(start, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start.attempt(BASE, None)
    assert not list(tmp_path.iterdir())


def test_calibrating_passes_the_disk_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    failed = Outcome(CRASHED, "ValueError: no such layer")
    monkeypatch.setattr("finetune.measure.calibrate.run", lambda command, *_: asked.extend(command) or failed)
    with pytest.raises(RunError, match="the calibration failed: ValueError: no such layer"):
        calibrate(tmp_path / "here.json", 2, nvme_path=tmp_path)
    assert asked[asked.index("--nvme_path") + 1] == str(tmp_path)
    assert not list(tmp_path.iterdir())


def test_it_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    """And by the command line, too, in one line."""
    with pytest.raises(RequestError, match="cannot be written"):
        calibrate(tmp_path / "no such folder" / "here.json", 1)
    command = ["python", "-m", "finetune.measure.calibrate", str(tmp_path), "--ranks", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().startswith(f"error: {tmp_path}: cannot be written")
