"""`finetune export`: what comes out opens with transformers, and is what the run had in fp32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPO, TINY, gate_has, launch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, DistilBertConfig, GPT2Config, GPT2LMHeadModel

from finetune.cli import main

SAVING = {**TINY, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}


def export(*words: Any) -> int:
    return main(["export", *map(str, words)])


def weights_in(folder: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob(f"{stem}*.safetensors"):
        found |= load_file(path)
    return found


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A tiny GPT-2 with tied embeddings, as a run leaves it."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "run")
    return tmp_path / "run"


def test_tied_weights_are_written_once_and_the_forward_pass_is_the_same(gpt2: Path, tmp_path: Path) -> None:
    assert export(gpt2, tmp_path / "out", "--max_shard_size", "20KB") == 0
    before, after = (GPT2LMHeadModel.from_pretrained(folder).eval() for folder in (gpt2, tmp_path / "out"))
    assert after.lm_head.weight is after.transformer.wte.weight
    assert "lm_head.weight" not in weights_in(tmp_path / "out")
    tokens = torch.arange(16).unsqueeze(0)
    assert torch.equal(before(tokens).logits, after(tokens).logits)
    assert (tmp_path / "out" / "generation_config.json").is_file()


def test_a_run_folder_is_exported_though_its_latest_names_a_checkpoint(gpt2: Path, tmp_path: Path) -> None:
    (gpt2 / "recipe.yaml").write_text("max_steps: 3\n")
    (gpt2 / "latest").write_text("checkpoint-3\n")
    assert export(gpt2, tmp_path / "out") == 0
    assert weights_in(tmp_path / "out").keys() == weights_in(gpt2).keys()
    assert (tmp_path / "out/model.safetensors").stat().st_mode == (tmp_path / "out/config.json").stat().st_mode


@pytest.mark.parametrize(("names", "has"), [(("art", "law"), True), (("art", "war"), False)])
def test_a_checkpoint_gets_the_thresholds_of_its_run_where_the_labels_agree(
    names: tuple[str, str], has: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = {"id2label": {0: "art", 1: "law"}, "problem_type": "multi_label_classification"}
    config = DistilBertConfig(vocab_size=40, n_layers=1, dim=8, n_heads=2, hidden_dim=8, **labels)
    place = tmp_path / "run" / "checkpoint-2"
    AutoModelForSequenceClassification.from_config(config).save_pretrained(place)
    final = {**labels, "id2label": dict(enumerate(names)), "thresholds": [0.3, 0.7]}
    (tmp_path / "run" / "config.json").write_text(json.dumps(final))
    assert export(place, tmp_path / "out") == 0
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found.get("thresholds") == ([0.3, 0.7] if has else None)
    assert ("has no thresholds" in capsys.readouterr().out) is not has


def test_nothing_is_exported_into_a_checkpoint(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3/manifest.json").write_text("{}")
    assert export(gpt2, tmp_path / "checkpoint-3/out") == 2
    assert "is inside the checkpoint checkpoint-3" in capsys.readouterr().err


def test_shards_are_no_larger_than_asked(gpt2: Path, tmp_path: Path) -> None:
    assert export(gpt2, tmp_path / "out", "--max_shard_size", "20KB") == 0
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights_in(gpt2))


def test_bf16_is_the_rounded_fp32_and_whole_numbers_stay(gpt2: Path, tmp_path: Path) -> None:
    weights = {**weights_in(gpt2), "counts": torch.arange(5)}
    save_file(weights, gpt2 / "model.safetensors", metadata={"format": "pt"})
    assert export(gpt2, tmp_path / "out", "--dtype", "bf16") == 0
    after = weights_in(tmp_path / "out")
    assert torch.equal(after.pop("counts"), torch.arange(5))
    assert all(torch.equal(tensor, weights[name].bfloat16()) for name, tensor in after.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_it_came_from_is_recorded_without_a_path(gpt2: Path, tmp_path: Path) -> None:
    assert export(gpt2, tmp_path / "out") == 0
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (record["from"], record["layout"]) == ("run", "safetensors with whole weights")  # any layout's final model
    assert record["versions"]["torch"]
    for path in (tmp_path / "out").glob("*.json"):
        assert str(tmp_path) not in path.read_text()


@pytest.mark.parametrize("there", ["a file", "a folder with a file in it"])
def test_what_is_there_is_not_written_over(there: str, gpt2: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    if there == "a file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    assert export(gpt2, out) == 2
    assert "already exists" in capsys.readouterr().err
    assert "mine" in (out if out.is_file() else out / "mine").read_text()


LOOKS = """
import sys
from finetune.cli import main
status = main(["export", *sys.argv[1:]])
assert status == 2, status
print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("missing", "out"), "missing: not a folder"),
        (("run", "run"), "run: already exists"),
        (("run", "out", "--max_shard_size", "5 bananas"), "--max_shard_size is '5 bananas'"),
        (("run", "out", "--merge_adapter"), "run holds a whole model, not an adapter"),
        (("run", "out", "--base_model", "run"), "--base_model is for --merge_adapter"),
    ],
)
def test_a_wrong_request_is_refused_before_torch_is_imported(words: tuple[str, ...], said: str, gpt2: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", LOOKS, *words]
    done = subprocess.run(
        command, cwd=gpt2.parent, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert said in done.stderr
    assert done.stdout.splitlines() == ["[]"], done.stderr


def test_a_failed_export_leaves_nothing(gpt2: Path, tmp_path: Path, capsys: Any) -> None:
    (gpt2 / "config.json").write_text("{torn")
    assert export(gpt2, tmp_path / "out") == 2
    assert "config.json" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


WRONG: dict[str, tuple[dict[str, bytes], str]] = {
    "a folder with nothing in it": ({}, "holds no weights"),
    "safetensors that were cut off": ({"model.safetensors": b"\xff" * 40}, "not a complete safetensors file"),
    "an index that leads outside": (
        {"model.safetensors.index.json": b'{"weight_map": {"w": "../../secret.safetensors"}}'},
        "not a safetensors file in the same folder",
    ),
    "an index whose file is missing": (
        {"model.safetensors.index.json": b'{"weight_map": {"w": "model-1.safetensors"}}'},
        "which is missing",
    ),
    "a tag that leads outside": ({"latest": b"../other"}, "not a global_stepN folder"),
    "a tag that is not there": ({"latest": b"global_step9"}, "is incomplete or altered"),
    "a shard without its model states": ({"zero_pp_rank_0_mp_rank_00_optim_states.pt": b"x"}, "holds no weights"),
    "a manifest of nothing": ({"manifest.json": b"{}"}, "does not verify"),
    "a pickle that is none": ({"pytorch_model.bin": b"cos\nsystem\n"}, "pytorch_model.bin"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused_in_a_sentence(name: str, tmp_path: Path, capsys: Any) -> None:
    files, reason = WRONG[name]
    (tmp_path / "run").mkdir()
    for file, content in files.items():
        (tmp_path / "run" / file).write_bytes(content)
    assert export(tmp_path / "run", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert reason in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_one_altered_bit_is_found_by_the_manifest(tmp_path: Path) -> None:
    """Of a real checkpoint."""
    folder = launch("python", tmp_path / "run", SAVING).folder / "checkpoint-2"
    assert export(folder, tmp_path / "good") == 0
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert export(folder, tmp_path / "bad") == 2
    assert not (tmp_path / "bad").exists()


def test_zero_3_in_bf16_gives_the_fp32_weights_of_the_optimizer(tmp_path: Path) -> None:
    """The same, bit by bit, as DeepSpeed's own script, and another than the checkpoint's rounded safetensors."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    run = launch("deepspeed", tmp_path / "run", {**SAVING, "bf16": True, "deepspeed": "zero3"}, ranks=2).folder
    assert export(run / "checkpoint-2", tmp_path / "out", "--max_shard_size", "500KB") == 0
    theirs, ours = get_fp32_state_dict_from_zero_checkpoint(str(run / "checkpoint-2")), weights_in(tmp_path / "out")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    rounded = weights_in(run / "checkpoint-2")
    assert any(not torch.equal(rounded[name].float(), ours[name]) for name in ours)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in model.state_dict().items())


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one process": ("python", 1, {}),
    "DDP": ("torchrun", 2, {}),
    "FSDP": ("torchrun", 2, {"fsdp": "full_shard"}),
    "ZeRO-0": ("deepspeed", 1, {"deepspeed": "zero0"}),
    "ZeRO-1": ("deepspeed", 2, {"deepspeed": "zero1"}),
    "ZeRO-2": ("deepspeed", 2, {"deepspeed": "zero2"}),
    "ZeRO-2 with offload": ("deepspeed", 2, {"deepspeed": "zero2_offload"}),
    "ZeRO-3 with offload": ("deepspeed", 2, {"deepspeed": "zero3_offload"}),
}


@pytest.mark.usefixtures("built_ops")
@pytest.mark.parametrize("layout", gate_has([name for name in LAYOUTS if name != "ZeRO-2 with offload"], list(LAYOUTS)))
def test_every_layout_in_fp32_gives_the_weights_that_it_saved(layout: str, tmp_path: Path) -> None:
    launcher, ranks, values = LAYOUTS[layout]
    folder = launch(launcher, tmp_path / "run", {**SAVING, **values}, ranks=ranks).folder
    for source in (folder / "checkpoint-2", folder):  # the run is the same model, for it ended there
        out = tmp_path / f"out-{source.name}"
        assert export(source, out) == 0
        saved, ours = weights_in(folder), weights_in(out)
        assert saved.keys() == ours.keys()
        assert all(torch.equal(saved[name], ours[name]) for name in ours)


def test_a_pipeline_gives_the_weights_that_it_saved(tmp_path: Path) -> None:
    values = {"max_steps": 2, "max_train_samples": 64, "max_eval_samples": 8, "eval_strategy": "no",
              "save_strategy": "steps", "save_steps": 2, "pipeline_parallel_size": 2}  # fmt: skip
    folder = launch("deepspeed", tmp_path / "run", values, ranks=2, recipe="recipes/causal_lm_pipeline.py").folder
    assert export(folder / "checkpoint-2", tmp_path / "out") == 0
    saved, ours = weights_in(folder / "checkpoint-2"), weights_in(tmp_path / "out")
    assert saved.keys() == ours.keys()
    assert all(torch.equal(saved[name], ours[name]) for name in ours)


def test_an_adapter_is_kept_or_merged_into_its_base(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("peft", reason="peft (extra peft) is not installed")
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False)
    monkeypatch.chdir(gpt2.parent)
    adapted = get_peft_model(GPT2LMHeadModel.from_pretrained(gpt2.name), config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    assert export(tmp_path / "adapter", tmp_path / "kept") == 0
    assert export(tmp_path / "adapter", tmp_path / "merged", "--merge_adapter", "--base_model", gpt2) == 0
    written = json.loads((tmp_path / "kept" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(gpt2)  # was relative, and opens from anywhere now
    assert "Change it before you share it" in capsys.readouterr().out
    tokens = torch.arange(16).unsqueeze(0)
    kept = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(gpt2), str(tmp_path / "kept")).eval()
    merged = GPT2LMHeadModel.from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(adapted(tokens).logits, kept(tokens).logits)
    assert torch.allclose(adapted(tokens).logits, merged(tokens).logits, atol=1e-5)
    assert merged.lm_head.weight is merged.transformer.wte.weight


def test_a_merge_into_no_base_or_another_is_refused(gpt2: Path, tmp_path: Path, capsys: Any) -> None:
    assert export(gpt2, tmp_path / "out", "--merge_adapter") == 2
    assert "not an adapter" in capsys.readouterr().err
    assert export(gpt2, tmp_path / "out", "--base_model", gpt2) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", gate_has("zero2", ["zero2", "zero3"]))
def test_an_adapter_is_kept_or_merged(stage: str, tmp_path: Path) -> None:
    """Merged, its forward pass is that of the adapter on its base."""
    pytest.importorskip("peft", reason="peft (extra peft) is not installed")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    import finetune.models.gptlite  # noqa: F401  (makes the model known)

    small = {"max_steps": 2, "max_train_samples": 64, "max_eval_samples": 8, "eval_strategy": "no", "bf16": False}
    base = launch("python", tmp_path / "base", small, recipe="recipes/causal_lm.py").folder
    values = {**small, "save_strategy": "steps", "save_steps": 2, "use_peft": True, "lora_r": 4, "learning_rate": 0.1,
              "model_name_or_path": base, "deepspeed": stage}  # fmt: skip
    run = launch("deepspeed", tmp_path / "run", values, ranks=2, recipe="recipes/causal_lm.py").folder
    assert export(run / "checkpoint-2", tmp_path / "kept") == 0
    assert export(run / "checkpoint-2", tmp_path / "merged", "--merge_adapter") == 0
    for path in (*(tmp_path / "kept").glob("*.json"), *(tmp_path / "merged").glob("*.json")):
        assert str(tmp_path) not in path.read_text() or path.name == "adapter_config.json"  # which names its base
    on_base = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "kept")).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(16).unsqueeze(0)
    plain = AutoModelForCausalLM.from_pretrained(base).eval()(tokens).logits
    assert torch.allclose(on_base(tokens).logits, merged(tokens).logits, atol=1e-4)
    assert not torch.allclose(plain, merged(tokens).logits, atol=1e-4)


PEAK = """
import re, sys
from pathlib import Path
from finetune.cli import main
import torch, finetune.export.convert
def peak_kib():  # of this program: ru_maxrss would begin with that of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak_kib()
assert main(["export", sys.argv[1], sys.argv[2], "--max_shard_size", "32MiB"]) == 0
print(peak_kib() - before)
"""


@pytest.mark.nightly
@pytest.mark.skipif(
    not Path("/proc/self/status").is_file(), reason="/proc is absent, which has a program's peak memory"
)
def test_memory_is_that_of_the_model_and_a_shard(tmp_path: Path) -> None:
    """A model of 256 MiB in shards of 32 MiB."""
    (tmp_path / "run").mkdir()
    tensors = {f"w{i}": torch.randn(2**21) for i in range(32)}
    save_file(tensors, tmp_path / "run" / "model.safetensors", metadata={"format": "pt"})
    command = [sys.executable, "-c", PEAK, str(tmp_path / "run"), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) / 1024 < 256 + 2 * 32
