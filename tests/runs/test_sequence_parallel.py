"""Ranks that share texts train with the loss, the gradients and the norm of one process, and their checkpoints are
those of any run."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAUNCHERS, REPO, Finished, flags, gate_has, launch, run_warm
from durability_runs import different_weights
from exact_runs import GLOBAL_BATCH, ONE_A_BLOCK, PACKED, RECIPE, SHORT
from safetensors.torch import load_file

sys.path.append(str(REPO / "tests/generation"))
from tiny_models import saved

pytestmark = pytest.mark.usefixtures("built_ops")

WRAPPED = {"packing": "wrapped"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, which are not learnt, and answers of 1 to 9 words: the parts of a text, and micro-batches, have very
    different numbers of learnt tokens. And models of four heads; those of Llama and Qwen3 have two of keys."""
    folder = tmp_path_factory.mktemp("shared")
    draw = random.Random(0)
    words = "the cat sat on a mat and saw two birds in tall grass".split()
    rows = [(draw.choices(words, k=draw.choice([1, 4])), draw.choices(words, k=draw.choice([1, 9]))) for _ in range(90)]
    lines = [json.dumps({"prompt": " ".join(asked), "completion": f" {' '.join(said)}"}) for asked, said in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    for kind in ("llama", "qwen3"):
        saved(folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def trained(home: Path) -> Callable[..., Finished]:
    """A run of so many ranks in a folder of that name, of which all values alike are made once."""
    made: dict[str, Finished] = {}

    def train(ranks: int = 1, launcher: str = "torchrun", folder: Path | None = None, **values: Any) -> Finished:
        key = repr((ranks, launcher, folder, sorted(values.items())))
        if key not in made:
            launcher = "python" if ranks == 1 else launcher
            made[key] = launch(
                launcher,
                folder or Path(tempfile.mkdtemp(dir=home)) / "run",
                asked(home, **values),
                ranks=ranks,
                recipe=RECIPE,
            )
        return made[key]

    return train


def asked(home: Path, model: str = "llama", **values: Any) -> dict[str, Any]:
    """The flags of a run of `model` in `home`."""
    return {**SHORT, "train_file": home / "rows.jsonl", "model_name_or_path": home / model, **values}


def assert_same(run: Finished, truth: Finished) -> None:
    assert len(run.steps) == len(truth.steps) == SHORT["max_steps"]
    assert run.column("loss") == pytest.approx(truth.column("loss"), rel=1e-6)
    assert run.column("grad_norm") == pytest.approx(truth.column("grad_norm"), rel=2e-6)


CASES = [
    # model, ranks, ranks that share a text, DeepSpeed, accumulation, rows
    ("llama", 2, 2, "zero3", 2, PACKED),
    ("qwen3", 4, 4, "zero2", 1, ONE_A_BLOCK),
    ("llama", 2, 2, "zero0", 1, ONE_A_BLOCK),
    ("llama", 2, 2, "zero1", 2, WRAPPED),
    ("llama", 4, 2, "zero3", 2, PACKED),
    ("llama", 4, 2, "zero1", 1, ONE_A_BLOCK),
    ("llama", 2, 2, "zero2_offload", 1, PACKED),
    ("llama", 2, 2, "zero3_offload", 1, ONE_A_BLOCK),
]


@pytest.mark.parametrize(("model", "ranks", "size", "config", "steps", "rows"), gate_has(CASES[:1], CASES))
def test_loss_and_norm_are_those_of_one_process(
    model: str, ranks: int, size: int, config: str, steps: int, rows: Any, trained: Callable[..., Finished]
) -> None:
    truth = trained(model=model, per_device_train_batch_size=GLOBAL_BATCH, **rows)
    micro = GLOBAL_BATCH * size // (ranks * steps)
    run = trained(
        ranks,
        model=model,
        deepspeed=config,
        sequence_parallel_size=size,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=steps,
        **rows,
    )
    assert_same(run, truth)
    assert f"{ranks // size} group(s) of {size} that share each text" in run.output
    assert f"global batch {micro} x {steps} x {ranks // size} = {GLOBAL_BATCH}" in run.output
    assert "Gradient accumulation steps mismatch" not in run.output


def test_each_gradient_is_that_of_one_process(home: Path) -> None:
    found = []
    for ranks, values in ((1, {"per_device_train_batch_size": 4}), (2, {"per_device_train_batch_size": 2})):
        file, launcher = home / f"{ranks}.safetensors", "python" if ranks == 1 else "torchrun"
        if ranks > 1:
            values |= {"gradient_accumulation_steps": 2, "sequence_parallel_size": 2, "deepspeed": "zero3"}
        every = asked(home, output_dir=home / f"kept-{ranks}", max_steps=1, **PACKED, **values)
        script = ["tests/runs/keep_gradients.py", RECIPE, str(file), *flags(every)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        status, output = run_warm([*LAUNCHERS[launcher](ranks), *script], ranks, environment)
        assert status == 0, output[-3000:]
        found.append(load_file(file))
    truth, shared = found
    assert truth.keys() == shared.keys()
    for name, gradient in truth.items():
        assert torch.allclose(shared[name], gradient, rtol=1e-5, atol=1e-6), name


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["zero1", "zero3"])
def test_a_checkpoint_goes_on_bit_equal_and_at_another_layout(
    config: str, home: Path, trained: Callable[..., Finished], tmp_path: Path
) -> None:
    """The evaluation at the end, too, is that of one process. Ranks that begin to share texts draw different dropout
    masks, and so have different random states."""
    saves = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "do_eval": True, "eval_strategy": "no"}
    shared = {"sequence_parallel_size": 2, "deepspeed": config, "per_device_train_batch_size": 4}
    apart, alone = {"deepspeed": config, "per_device_train_batch_size": 2}, {"per_device_train_batch_size": 4}
    truth, whole = trained(**alone, **PACKED, **saves), trained(2, **PACKED, **saves, **shared)
    layouts = {"shared": (whole, 2, shared), "apart": (whole, 2, apart), "alone": (whole, 1, alone)}
    layouts["from whole texts"] = trained(2, **PACKED, **saves, **apart), 2, shared
    for name, (first, ranks, values) in layouts.items():
        folder = shutil.copytree(first.folder, tmp_path / name)
        shutil.rmtree(folder / "checkpoint-4")
        run = trained(ranks, folder=folder, resume="auto", **PACKED, **saves, **values)
        assert "going on from checkpoint-2" in run.output
        assert run.column("loss")[-2:] == pytest.approx(truth.column("loss")[-2:], rel=1e-5)
        eval_loss = truth.json("eval_results.json")["eval_loss"]
        assert run.json("eval_results.json")["eval_loss"] == pytest.approx(eval_loss, rel=1e-5)
        if name == "shared":
            assert different_weights(run.folder, whole.folder) == []
        if values is shared:
            states = (folder / f"checkpoint-4/rng_state_{rank}.pth" for rank in range(2))
            assert not torch.equal(*(torch.load(one, weights_only=False)["cpu"] for one in states)), name


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["deepspeed", "accelerate"])
def test_every_launcher_shares_texts(launcher: str, trained: Callable[..., Finished]) -> None:
    truth = trained(per_device_train_batch_size=GLOBAL_BATCH, **PACKED)
    shared = {"deepspeed": "zero2", "sequence_parallel_size": 2, "per_device_train_batch_size": GLOBAL_BATCH}
    assert_same(trained(2, launcher=launcher, **shared, **PACKED), truth)


EXTRAS = {
    "LoRA": {"use_peft": True, "lora_r": 4},
    "checkpointing": {"activation_checkpointing": True},
    "a loss in chunks": {"loss_chunk_tokens": 16},
    "lengths": {"group_by_length": True},
    "workers": {"dataloader_num_workers": 1},
}


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["zero2", "zero3"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_it_goes_with(extra: str, config: str, trained: Callable[..., Finished]) -> None:
    rows = {**ONE_A_BLOCK, **EXTRAS[extra]}
    truth = trained(per_device_train_batch_size=GLOBAL_BATCH, **rows)
    shared = {"deepspeed": config, "sequence_parallel_size": 2, "per_device_train_batch_size": GLOBAL_BATCH // 2}
    assert_same(trained(4, **shared, **rows), truth)


@pytest.mark.nightly
def test_it_goes_with_a_second_copy_of_the_weights_on_each_node(trained: Callable[..., Finished], home: Path) -> None:
    """ZeRO++'s hpZ; here a node has two of four ranks. Its quantization needs a GPU, and is refused."""
    config = json.loads((REPO / "ds_configs/zero3.json").read_text())
    config["zero_optimization"]["zero_hpz_partition_size"] = 2
    (home / "hpz.json").write_text(json.dumps(config))
    truth = trained(per_device_train_batch_size=GLOBAL_BATCH, **PACKED)
    layout = {"sequence_parallel_size": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    assert_same(trained(4, deepspeed=home / "hpz.json", **layout, **PACKED), truth)


@pytest.mark.nightly
@pytest.mark.usefixtures("built_async_io")
def test_it_goes_with_states_and_weights_on_a_disk(trained: Callable[..., Finished]) -> None:
    if not Path("/usr/include/libaio.h").exists():
        pytest.skip("libaio-dev is absent: DeepSpeed cannot build its async_io op")
    truth = trained(per_device_train_batch_size=GLOBAL_BATCH, **ONE_A_BLOCK)
    layout = {"sequence_parallel_size": 2, "per_device_train_batch_size": GLOBAL_BATCH}
    assert_same(trained(2, deepspeed="zero3_nvme", **layout, **ONE_A_BLOCK), truth)


@pytest.mark.nightly
def test_samples_are_written_while_it_trains(trained: Callable[..., Finished]) -> None:
    asks = {"sample_tokens": 8, "do_eval": True, "eval_strategy": "steps", "eval_steps": 2, **WRAPPED}
    truth = trained(per_device_train_batch_size=GLOBAL_BATCH, **asks)
    shared = {"deepspeed": "zero3", "sequence_parallel_size": 2, "per_device_train_batch_size": GLOBAL_BATCH}
    run = trained(2, **shared, **asks)
    assert_same(run, truth)
    assert (run.folder / "samples.md").read_text() == (truth.folder / "samples.md").read_text()
