"""Plans beside real runs, by the real launcher."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, tool

from finetune.dsconfig.config import Config
from finetune.measure.start import measure
from finetune.plan.job import DEEPSPEED, FSDP, Job
from finetune.plan.machine import find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import is_block_linear, model_of, with_lora
from finetune.plan.optimizers import Optimizer
from finetune.plan.values import Lora
from finetune.plan.zero import read_zero

pytestmark = pytest.mark.nightly
TINY = {"model_type": "gptlite", "vocab_size": 500, "num_hidden_layers": 3, "hidden_size": 128,
        "num_attention_heads": 4, "max_position_embeddings": 128}  # fmt: skip
HERE = ["--nodes", "1", "--gpus_per_node", "2", "--block_size", "128"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def plan(*words: str) -> str:
    done = subprocess.run([tool("finetune"), "plan", *words], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figures(text: str, name: str) -> tuple[float, float]:
    found = re.search(rf"^{name}.*? ([\d.]+) +([\d.]+) ", text, re.MULTILINE)
    assert found, text
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("experts", [None, 8], ids=["dense", "experts"])
@pytest.mark.parametrize("layout", ["none", "zero1", "zero2", "zero3", "zero3_offload", "pipeline"])
def test_the_plan_is_what_the_run_takes(layout: str, experts: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "num_experts": experts}))
    words = [str(tmp_path), *HERE, "--per_device_train_batch_size", "8", "--deepspeed", layout, "--verify"]
    if layout == "pipeline":
        words += ["--pipeline_parallel_size", "2", "--gradient_accumulation_steps", "4"]
    said = plan(*words)
    planned, measured = figures(said, "between steps")
    assert planned == pytest.approx(measured, rel=0.01)
    planned, measured = figures(said, "peak")
    assert planned == pytest.approx(measured, rel=0.03)


LLAMA = {"model_type": "llama", "vocab_size": 500, "num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 352,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 500, "n_layer": 3, "n_embd": 128, "n_head": 4, "n_positions": 128}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"precision": "bf16", "dtype": "bfloat16"},
        {"precision": "bf16"},
        {"accumulation": 2},
        {"checkpoint_interval": 1},
        {"loss_chunk_tokens": 256, "accumulation": 3, "precision": "bf16", "dtype": "bfloat16"},
    ],
    ids=lambda values: ", ".join(f"{name} {value}" for name, value in values.items()),
)
@pytest.mark.parametrize("config", [TINY, LLAMA, GPT2], ids=lambda config: config["model_type"])
def test_fsdp_with_adapters_takes_what_is_planned(
    config: dict[str, Any], values: dict[str, Any], tmp_path: Path
) -> None:
    """Also in bf16, which the shipped profile of a CPU does not compute in, and the command refuses."""
    assert_taken(config, {"micro_batch": 8, "tokens": 128, **values}, tmp_path)


@pytest.mark.parametrize("values", [{}, {"precision": "bf16", "dtype": "bfloat16"}], ids=["fp32", "bf16"])
def test_so_it_does_where_gathered_weights_outweigh_activations(values: dict[str, Any], tmp_path: Path) -> None:
    wide = {**LLAMA, "hidden_size": 512, "intermediate_size": 1376, "vocab_size": 4000}
    assert_taken(wide, {"micro_batch": 1, "tokens": 16, **values}, tmp_path)


def assert_taken(config: dict[str, Any], values: dict[str, Any], folder: Path) -> None:
    model = model_of(config)
    every = sorted({tensor.name.split(".")[-2] for tensor in model.tensors if is_block_linear(tensor)})
    adapted = with_lora(model, Lora(16, tuple(every)))
    job = Job(adapted, FSDP, world_size=2, ranks_per_node=2, device="cpu", **values)
    found, got = plan_memory(job, find_machine("cpu")), measure(job, None, folder)
    assert not isinstance(got, str), got
    assert found.resident_bytes == pytest.approx(max(got.resident_bytes), rel=0.01)
    assert found.step_peak.bytes == pytest.approx(max(got.peak_bytes), rel=0.01)


CPU_ADAM = Optimizer("cpu_adam")
SMALL = {"reduce_bucket_size": 100_000, "stage3_prefetch_bucket_size": 50_000, "stage3_max_live_parameters": 100_000,
         "stage3_param_persistence_threshold": 1000, "stage3_max_reuse_distance": 0,
         "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "heads", "values"),
    [
        (0, (4, 2), {"micro_batch": 2}),
        (1, (2, 1), {"world_size": 4}),
        (2, (4, 1), {"accumulation": 2, "loss_chunk_tokens": 64, "precision": "bf16"}),
        (3, (4, 4), {"checkpoint_interval": 1, "loss_chunk_tokens": 64, "tokens": 4096}),
        (2, (4, 2), {"checkpoint_interval": 1, "loss_chunk_tokens": 64, "tokens": 4096, "tiled_mlp_num_shards": 4}),
        (0, (4, 2), {"loss_chunk_tokens": 64, "tokens": 2048, "tiled_mlp_num_shards": 4, "micro_batch": 2}),
        (2, (4, 2), {"loss_chunk_tokens": 64, "document_mask": True, "micro_batch": 2}),
        (1, (2, 1), {"loss_chunk_tokens": 64, "document_mask": True, "checkpoint_interval": 1, "tokens": 1024}),
    ],
    ids=[
        "several rows",
        "two groups, keys copied",
        "a loss in chunks",
        "recomputed and sharded",
        "tiled and recomputed",
        "tiled",
        "documents",
        "documents, recomputed",
    ],
)
def test_ranks_that_share_texts_take_what_is_planned(
    stage: int, heads: tuple[int, int], values: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "max_position_embeddings": 4096}
    values = {"sequence_parallel_size": 2, "tokens": 512, **values}
    # What ZeRO-3 gathers is planned to 0.6 MB here, as it is without sharing.
    assert_shared({**LLAMA, **sizes}, stage, values, tmp_path, 0.02 if stage == 3 else 0.01)


def assert_shared(config: dict[str, Any], stage: int, values: dict[str, Any], folder: Path, exact: float) -> None:
    batch = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    deepspeed: dict[str, Any] = dict.fromkeys(batch, "auto")
    offload = {"offload_optimizer": {"device": "cpu"}} if values.get("optimizer") == CPU_ADAM else {}
    zero = {"stage": stage, **(SMALL if stage else {}), **offload}
    deepspeed |= {"bf16": {"enabled": "auto"}, "zero_optimization": zero}
    read = read_zero(Config(deepspeed), config["hidden_size"], 1.0, values.get("precision", "fp32"))
    job = Job(model_of(config), DEEPSPEED, read, device="cpu", **{"world_size": 2, **values})
    job = replace(job, ranks_per_node=job.world_size)
    ranks = [plan_memory(job, find_machine("cpu"), rank) for rank in range(job.world_size)]
    got = measure(job, deepspeed, folder)
    assert not isinstance(got, str), got
    assert [rank.resident_bytes for rank in ranks] == pytest.approx(got.resident_bytes, rel=0.01)
    # On busy cores gloo's threads release late what some ranks have sent: these take more for a moment, but none less.
    peaks = [rank.step_peak.bytes for rank in ranks]
    assert min(peaks) == pytest.approx(min(got.peak_bytes), rel=exact)
    assert all(measured >= (1 - exact) * planned for planned, measured in zip(peaks, got.peak_bytes, strict=True))


@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("config", [TINY, LLAMA], ids=lambda config: config["model_type"])
def test_documents_that_are_masked_from_one_another_take_what_is_planned(
    config: dict[str, Any], interval: int, tmp_path: Path
) -> None:
    values = {"document_mask": True, "checkpoint_interval": interval, "tokens": 512, "loss_chunk_tokens": 64}
    assert_shared({**config, "max_position_embeddings": 512}, 2, {**values, "micro_batch": 2}, tmp_path, 0.01)


# Each token goes to all experts, so that the load is even, as it is planned.
QWEN = {"model_type": "qwen3_moe", "vocab_size": 120, "num_hidden_layers": 3, "hidden_size": 64, "head_dim": 16,
        "intermediate_size": 96, "moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
MIXTRAL = {**QWEN, "model_type": "mixtral", "num_local_experts": 4, "sliding_window": None}
OLMOE = {"model_type": "olmoe", "vocab_size": 120, "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96,
         "num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": False, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "stage", "values"),
    [
        (QWEN, 2, {"micro_batch": 4}),
        (QWEN, 1, {"accumulation": 2, "micro_batch": 2}),
        (QWEN, 2, {"world_size": 4, "micro_batch": 2}),
        (MIXTRAL, 1, {"world_size": 4, "expert_parallel_size": 4, "micro_batch": 2}),
        (MIXTRAL, 2, {"checkpoint_interval": 1, "loss_chunk_tokens": 64, "micro_batch": 4}),
        (QWEN, 2, {"precision": "bf16", "micro_batch": 4}),
        (QWEN, 2, {"micro_batch": 4, "optimizer": CPU_ADAM}),
        (MIXTRAL, 1, {"world_size": 4, "accumulation": 2, "micro_batch": 2, "optimizer": CPU_ADAM}),
        (OLMOE, 2, {"micro_batch": 4}),
        (QWEN, 2, {"sequence_parallel_size": 2, "micro_batch": 8}),
        (MIXTRAL, 1, {"sequence_parallel_size": 2, "world_size": 4, "expert_parallel_size": 4, "micro_batch": 4}),
        (QWEN, 2, {"sequence_parallel_size": 4, "world_size": 4, "checkpoint_interval": 1, "micro_batch": 8}),
    ],
    ids="ZeRO-2;ZeRO-1;pairs of pairs;an expert a rank;recomputed;bf16;offload;offload, pairs;OLMoE;and texts;"
    "pairs for texts;pairs for experts, recomputed".split(";"),
)
def test_ranks_that_share_experts_take_what_is_planned(
    config: dict[str, Any], stage: int, values: dict[str, Any], tmp_path: Path
) -> None:
    assert_shared(config, stage, {"expert_parallel_size": 2, "tokens": 128, **values}, tmp_path, 0.01)


LATENT = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 500,
          "hidden_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4,
          "intermediate_size": 256, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1,
          "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2, "q_lora_rank": 48,
          "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
          "max_position_embeddings": 128, "tie_word_embeddings": False}  # fmt: skip


@pytest.mark.parametrize("layout", ["none", "zero2", "zero3"])
def test_deepseek_v3_takes_what_is_planned(layout: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LATENT))
    said = plan(str(tmp_path), *HERE, "--per_device_train_batch_size", "8", "--deepspeed", layout, "--verify")
    for name, error in (("between steps", 0.01), ("peak", 0.02)):
        planned, measured = figures(said, name)
        assert planned == pytest.approx(measured, rel=error)


def test_a_pipelines_loss_in_chunks_takes_what_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "vocab_size": 12_000}))
    words = [str(tmp_path), *HERE, "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "4"]
    said = plan(*words, "--pipeline_parallel_size", "2", "--verify")
    for name, error in (("between steps", 0.01), ("peak", 0.03)):
        planned, measured = figures(said, name)
        assert planned == pytest.approx(measured, rel=error)


@pytest.mark.parametrize(
    ("vocabulary", "flags"),
    [(500, ["--optim", "sgd"]), (12_000, [])],
    ids=["SGD, which has no states", "a loss in chunks"],
)
@pytest.mark.parametrize("layout", ["none", "zero1"])
def test_the_optimizer_and_the_loss_are_those_that_were_planned(
    layout: str, vocabulary: int, flags: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "vocab_size": vocabulary}))
    words = [*HERE, "--per_device_train_batch_size", "8", "--deepspeed", layout, "--no_search"]
    job = json.loads(plan(str(tmp_path), *words, *flags, "--json"))["job"]
    assert (job["optimizer"], job["loss_chunk_tokens"]) == (("sgd", 0) if flags else ("adam", 512))
    said = plan(str(tmp_path), *words, *flags, "--verify")
    planned, measured = figures(said, "between steps")
    assert planned == pytest.approx(measured, rel=0.01)
    planned, measured = figures(said, "peak")
    assert planned == pytest.approx(measured, rel=0.03)


def test_the_best_are_run_and_the_winner_is_written(model: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    words = ["--global_batch_size", "16", "--layouts", "zero1", "zero2", "--autotune", "2", "--write", str(path)]
    said = plan(model, *HERE, *words)
    measured = [float(speed) for speed in re.findall(r"planned [\d.]+, measured ([\d.]+) samples/s", said)]
    assert len(measured) == 2
    first = re.search(r"^1 .*", said, re.MULTILINE)  # of the table, which is by what was measured
    assert first
    assert float(first[0].split()[-2]) == pytest.approx(max(measured), abs=0.51)  # the table rounds
    assert json.loads(path.read_text())["zero_optimization"]["stage"] in (1, 2)


def test_a_run_out_of_memory_is_a_result(model: str) -> None:
    """In an address space of 6 GB, of which a batch of 4,096 would take more than all."""
    words = [model, *HERE, "--per_device_train_batch_size", "4096", "--deepspeed", "none", "--verify"]
    line = f"ulimit -v 6000000; {tool('finetune')} plan {' '.join(words)}"
    done = subprocess.run(["bash", "-c", line], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1
    found = re.search(r"ended: out of memory \(its log: (\S+/log.txt)\)", done.stderr)
    assert found, done.stderr
    assert "memory" in Path(found[1]).read_text()
    shutil.rmtree(Path(found[1]).parent)
