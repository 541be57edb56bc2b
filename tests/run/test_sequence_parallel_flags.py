"""What ranks that share texts cannot do is refused before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import RequestError
from finetune.run.facts import checkpoints_on_host
from finetune.run.flags.sequence_parallel import check_heads, look_at_heads, sequence_faults_here
from finetune.run.launch import Launch
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.recipes.causal_lm_pipeline import CAUSAL_LM_PIPELINE
from finetune.run.resolve import resolve
from finetune.run.run import Run

TWO = Launch(world_size=2, local_world_size=2, launcher="torchrun")
SHARED = ("--sequence_parallel_size", "2")


def run_of(*argv: str, launch: Launch = TWO) -> Run:
    return resolve(CAUSAL_LM, [*SHARED, *argv], launch, is_here=False)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--block_size", "63"], "does not divide block_size is 63"),
        (
            ["--attn_implementation", "eager"],
            "sequence_parallel_size does not support. Use one of sdpa, flash_attention_2",
        ),
        (["--streaming", "True", "--max_steps", "3", "--train_file", "a.txt"], "--streaming is True .* read the same"),
        (["--teacher", "folder"], "a teacher would see only a part of each text"),
        (["--torch_compile", "True"], "--torch_compile is True"),
        (["--use_liger_kernel", "True"], "--loss_chunk_tokens saves the same memory"),
        (["--neftune_noise_alpha", "5"], "--neftune_noise_alpha is 5.0"),
        (["--auto_find_batch_size", "True"], "made for one micro-batch"),
        (["--fsdp", "True"], "sequence parallelism is DeepSpeed's"),
        (["--average_tokens_across_devices", "False"], "would divide by the learnt tokens of its own part"),
    ],
)
def test_a_flag_that_counts_on_whole_rows_is_refused(argv: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        run_of(*argv)


TILED = ("--tiled_mlp_num_shards", "4")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--torch_compile", "True"], "compiled tiles are untested"),
        (["--use_liger_kernel", "True"], "it replaces the MLPs"),
        (["--fsdp", "True"], "reduced after the first part"),
        (["--auto_find_batch_size", "True"], "is untested with tiles"),
    ],
)
def test_a_flag_that_changes_mlps_or_their_gradients_does_not_go_with_tiles(argv: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=rf"tiled_mlp_num_shards.*{said}"):
        resolve(CAUSAL_LM, [*TILED, *argv], TWO, is_here=False)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "of a mixture may not reach every expert"),
        ({"text_config": {"n_routed_experts": 8}}, "of a mixture may not reach every expert"),
        ({"model_type": "gptlite", "dropout": 0.1}, "its MLPs have dropout"),
        ({"model_type": "gptlite", "dropout": 0.0, "num_experts": None}, None),
    ],
)
def test_tiles_of_a_mixture_or_with_dropout_are_refused_by_the_config(
    config: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = ["--model_name_or_path", str(tmp_path), "--deepspeed", "zero2"]
    resolve(CAUSAL_LM, named, TWO, is_here=False)
    if said is None:
        resolve(CAUSAL_LM, [*TILED, *named], TWO, is_here=False)
        return
    with pytest.raises(RequestError, match=said):
        resolve(CAUSAL_LM, [*TILED, *named], TWO, is_here=False)


def test_so_are_those_of_a_mixture_from_scratch() -> None:
    for recipe in (CAUSAL_LM, CAUSAL_LM_PIPELINE):
        with pytest.raises(RequestError, match="of a mixture may not reach every expert"):
            resolve(recipe, [*TILED, "--config_overrides", "num_experts=4"], TWO, is_here=False)


def test_tiles_need_deepspeed_but_no_shared_texts() -> None:
    run = resolve(CAUSAL_LM, TILED, Launch(), is_here=False)
    assert list(sequence_faults_here(run, "zero2")) == []
    (fault,) = sequence_faults_here(run, None)
    assert "needs DeepSpeed" in fault


def test_ranks_are_a_multiple_of_the_size() -> None:
    with pytest.raises(RequestError, match=r"has 3 ranks, which is not a multiple of 2. Launch with 4 ranks.$"):
        run_of(launch=Launch(world_size=3, launcher="torchrun"))
    assert run_of(launch=Launch(world_size=4, launcher="torchrun")).data_parallel_size == 2


def test_a_run_here_has_several_ranks_deepspeed_and_something_to_train() -> None:
    assert list(sequence_faults_here(run_of(), "zero2")) == []
    faults = {
        "Launch with `deepspeed --num_gpus 2`": (run_of(launch=Launch()), "zero2"),
        "Add --deepspeed zero2": (run_of(), None),
        "splits texts in training": (run_of("--do_train", "False"), None),
    }
    for said, (run, deepspeed) in faults.items():
        (fault,) = sequence_faults_here(run, deepspeed)
        assert said in fault


def test_a_pipeline_has_no_such_flag() -> None:
    argv = [*SHARED, "--pipeline_parallel_size", "2"]
    with pytest.raises(RequestError, match=r"sequence_parallel_size.*a pipeline's stages read whole texts"):
        resolve(CAUSAL_LM_PIPELINE, argv, TWO, is_here=False)


STAGED = ("--pipeline_parallel_size", "2", "--activation_checkpoint_interval", "1")


@pytest.mark.parametrize(
    "kwargs", ['{"use_reentrant": false}', '{"offload": true, "preserve_rng_state": false}', '{"every_n_layers": 2}']
)
def test_a_pipelines_checkpoints_can_be_offloaded_and_nothing_else(kwargs: str) -> None:
    name = "--activation_checkpointing_kwargs"
    assert checkpoints_on_host(resolve(CAUSAL_LM_PIPELINE, [*STAGED, name, '{"offload": true}'], TWO, is_here=False))
    with pytest.raises(RequestError, match=rf"{name[2:]}.*a pipeline reads only offload"):
        resolve(CAUSAL_LM_PIPELINE, [*STAGED, name, kwargs], TWO, is_here=False)


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8}


@pytest.mark.parametrize(
    ("config", "size", "block", "said"),
    [
        (HEADS, 3, None, "does not divide the model's 4 attention heads"),
        ({"n_head": 12}, 5, None, "12 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, None, "3 key-value heads"),
        ({"text_config": HEADS}, 8, None, "4 attention heads"),
        ({**HEADS, "sliding_window": 64}, 2, 128, "the last 64 tokens"),
        ({**HEADS, "sliding_window": 64}, 2, None, "the last 64 tokens"),
        ({**HEADS, "layer_types": ["full_attention", "linear_attention"]}, 2, None, "has linear_attention layers"),
        ({**HEADS, "linear_conv_kernel_dim": 4}, 2, None, "which read a text in order"),
        ({"state_size": 16}, 2, None, r"layers with a state \(state_size\)"),
        ({**HEADS, "layerdrop": 0.1}, 2, None, "layerdrop"),
        ({**HEADS, **LATENT, "v_head_dim": 16}, 2, None, r"differ in size \(24 and 16\)"),
    ],
)
def test_a_model_whose_attention_cannot_be_shared_is_refused_by_its_config(
    config: dict[str, Any], size: int, block: int | None, said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["--model_name_or_path", str(tmp_path), "--sequence_parallel_size", str(size)]
    argv += [] if block is None else ["--block_size", str(block)]
    launch = Launch(world_size=size, launcher="torchrun")
    with pytest.raises(RequestError, match=said):
        look_at_heads(resolve(CAUSAL_LM, argv, launch, is_here=False))


@pytest.mark.parametrize(
    ("config", "size", "block"),
    [
        (HEADS, 4, None),  # two key-value heads are copied
        ({**HEADS, "sliding_window": 64}, 2, 64),
        ({**HEADS, **LATENT, "v_head_dim": 24}, 2, 64),
        ({**HEADS, "sliding_window": 64, "use_sliding_window": False}, 2, 128),
        ({**HEADS, "sliding_window": 64, "layer_types": ["full_attention"]}, 2, 128),
    ],
)
def test_a_model_whose_attention_can_be_shared_is_taken(config: dict[str, Any], size: int, block: int | None) -> None:
    check_heads(config.get, size, block)


def test_a_proposed_size_suits_the_ranks_and_the_heads() -> None:
    four = Launch(world_size=4, launcher="torchrun")
    for size, mend in ((3, r"not a multiple of 3\. Give 2 or 4\.\n.*4 attention heads\. Give 2 or 4\.$"),
                       (8, r"not a multiple of 8\. Give 2 or 4\.")):  # fmt: skip
        with pytest.raises(RequestError, match=mend):
            resolve(CAUSAL_LM, ["--sequence_parallel_size", str(size)], four, is_here=False)
    heads = {"num_attention_heads": 12, "num_key_value_heads": 3}
    with pytest.raises(RequestError, match=r"3 key-value heads: one number must divide the other. Give 3, 6 or 12\.$"):
        check_heads(heads.get, 2, None)
    with pytest.raises(RequestError, match=r"12 attention heads\. Give 3\.$"):
        check_heads(heads.get, 9, None, ranks=9)


def test_a_model_from_scratch_is_looked_at_likewise() -> None:
    with pytest.raises(RequestError, match="3 attention heads"):
        look_at_heads(run_of("--config_overrides", "num_attention_heads=3,hidden_size=96"))
