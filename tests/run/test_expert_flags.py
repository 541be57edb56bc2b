"""A mixture of experts from scratch, and the flag of its router's loss."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import RequestError
from finetune.plan.from_run import job_of
from finetune.plan.machine import find_machine
from finetune.run.flags import experts
from finetune.run.flags.expert_parallel import REFUSED, check_experts, expert_faults_here, look_at_experts
from finetune.run.launch import Launch
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.recipes.causal_lm_pipeline import CAUSAL_LM_PIPELINE
from finetune.run.resolve import resolve
from finetune.run.run import Run
from finetune.run.sizes import causal_shape

TINY = ("--model_size", "moe-tiny")


def run_of(*argv: str, recipe: Any = CAUSAL_LM, ranks: int = 1) -> Run:
    return resolve(recipe, list(argv), Launch(world_size=ranks, launcher="torchrun"), is_here=False)


def test_a_size_is_a_config_that_overrides_change() -> None:
    shape = causal_shape("moe-tiny", "num_experts=16, num_experts_per_tok=4")
    assert (shape["model_type"], shape["num_experts"], shape["num_experts_per_tok"]) == ("qwen3_moe", 16, 4)
    assert causal_shape("moe-tiny", None)["num_experts"] == 8
    assert causal_shape("tiny", None)["model_type"] == "gptlite"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("dropout=0.1", "a mixture of experts has no such setting. It has: num_hidden_layers"),
        ("num_experts=0", "num_experts=0: must be a whole number of 1 or more"),
        ("num_experts_per_tok=9", "num_experts_per_tok=9: there are 8 experts"),
        ("num_key_value_heads=3", "num_key_value_heads=3: must divide the 4"),
        ("head_dim=7", "head_dim=7: must be even"),
        ("attention_dropout=1", "attention_dropout=1.0: must be 0 or more"),
    ],
)
def test_an_impossible_mixture_is_refused(overrides: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        causal_shape("moe-tiny", overrides)


def test_a_pipeline_refuses_other_models_and_dropout_beside_a_router_loss(tmp_path: Path) -> None:
    """By their config, before anything is imported, and wherever the run will start."""
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "num_local_experts": 8}')
    dropout = ("--config_overrides", "num_experts=4,dropout=0.1")
    for words, said in (
        (TINY, r"model_size is 'moe-tiny'.*only a GPT-lite runs as a pipeline"),
        (("--model_name_or_path", str(tmp_path)), "model_name_or_path is.*is a mixtral, and only a GPT-lite"),
        ((*dropout, "--router_aux_loss_coef", "0.1"), "has a router loss, and dropout 0.1"),
        (("--config_overrides", "num_experts=4,dropout=0.1,output_router_logits=true"), "and dropout 0.1"),
    ):
        with pytest.raises(RequestError, match=said):
            run_of(*words, "--pipeline_parallel_size", "2", recipe=CAUSAL_LM_PIPELINE, ranks=2)
    run_of(*dropout, recipe=CAUSAL_LM_PIPELINE)
    run_of(*dropout, "--router_aux_loss_coef", "0.1")  # without stages it works
    (tmp_path / "config.json").write_text('{"model_type": "gptlite", "dropout": 0.1}')
    run_of("--model_name_or_path", str(tmp_path), recipe=CAUSAL_LM_PIPELINE)


def test_a_gpt_lite_with_experts_is_planned_in_a_pipeline() -> None:
    job, _, _ = job_of(run_of("--config_overrides", "num_experts=4", recipe=CAUSAL_LM_PIPELINE), find_machine("H100"))
    shapes = {tensor.name: tensor.shape for tensor in job.model.tensors}
    assert shapes["transformer.blocks.3.mlp.experts.down_proj"] == (4, 128, 512)
    assert not any(".mlp.down." in name for name in shapes)
    with pytest.raises(RequestError, match="num_experts_per_tok=2: there are 1 experts"):
        causal_shape("tiny", "num_experts=1")


def test_a_mixture_from_scratch_is_planned_with_all_its_experts_and_a_loss_in_chunks() -> None:
    job, _, _ = job_of(run_of(*TINY, "--tokenizer", "bpe", "--bpe_vocab_size", "9000"), find_machine("H100-80GB"))
    shapes = {tensor.name: tensor.shape for tensor in job.model.tensors}
    assert shapes["model.layers.3.mlp.experts.gate_up_proj"] == (8, 512, 128)
    assert job.loss_chunk_tokens == 2048


@pytest.mark.parametrize("name", experts.REFUSED)
def test_flags_that_the_loss_does_not_go_with_are_refused_before_anything_is_loaded(name: str) -> None:
    """Whether a flag asks for the loss, or the model's config."""
    flag = (f"--{name}", {"teacher": "a-model"}.get(name, "True"))
    mixed = ("--config_overrides", "num_experts=4", "--router_aux_loss_coef", "0.1")
    for words in (TINY, mixed):
        with pytest.raises(RequestError, match=f"--{name} is.*{experts.REFUSED[name]}. Drop it, or give --router_aux"):
            run_of(*words, *flag)
    run_of(*TINY, "--router_aux_loss_coef", "0", *flag)
    run_of(*flag)


def test_so_are_reentrant_checkpoints_and_a_model_without_experts(tmp_path: Path) -> None:
    reentrant = ("--activation_checkpointing", "True", "--activation_checkpointing_kwargs", '{"use_reentrant": true}')
    with pytest.raises(RequestError, match="use_reentrant: reentrant checkpointing gives the routers' loss no"):
        run_of(*TINY, *reentrant)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    for words in ((), ("--model_name_or_path", str(tmp_path))):
        with pytest.raises(RequestError, match=r"--router_aux_loss_coef is 0.1.*but the model has no experts"):
            run_of(*words, "--router_aux_loss_coef", "0.1")
    (tmp_path / "config.json").write_text('{"model_type": "jamba", "num_experts": 4}')
    run_of("--model_name_or_path", str(tmp_path), "--router_aux_loss_coef", "0.1")


PARALLEL = ("--expert_parallel_size", "2")


@pytest.mark.parametrize("name", REFUSED)
def test_flags_that_expert_parallelism_does_not_go_with_are_refused(name: str) -> None:
    values = {"teacher": "a-model"}
    more = ("--max_steps", "3", "--train_file", "a.txt") if name == "streaming" else ()
    with pytest.raises(RequestError, match=f"--{name} is.*--expert_parallel_size is 2.*{REFUSED[name]}"):
        run_of(*TINY, *PARALLEL, f"--{name}", values.get(name, "True"), *more, ranks=2)


def test_ranks_are_a_multiple_of_those_that_hold_all_experts() -> None:
    with pytest.raises(RequestError, match=r"has 3 ranks, which is not a multiple of 2. Launch with 4 ranks.$"):
        run_of(*TINY, *PARALLEL, ranks=3)
    with pytest.raises(RequestError) as refused:
        run_of(*PARALLEL, recipe=CAUSAL_LM_PIPELINE, ranks=2)
    assert "each stage of a pipeline holds all experts of its layers" in str(refused.value)
    assert "moe-tiny" not in str(refused.value)


@pytest.mark.parametrize(
    ("ranks", "experts", "size", "mend"),
    [
        (4, 6, 4, "6 experts. Give 2.$"),
        (12, 6, 4, "6 experts. Give 2, 3 or 6.$"),
        (3, 8, 3, "8 experts. Drop it.$"),
        (6, 8, 4, "not a multiple of 4. Give 2, or launch with 8 ranks.$"),
    ],
)
def test_a_proposed_size_suits_the_ranks_and_the_experts(ranks: int, experts: int, size: int, mend: str) -> None:
    words = (*TINY, "--config_overrides", f"num_experts={experts}", "--deepspeed", "zero2")
    with pytest.raises(RequestError, match=mend):
        run_of(*words, "--expert_parallel_size", str(size), ranks=ranks)
    for proposed in re.findall(r"\d+", mend.partition("Give")[2].partition("launch")[0]):
        run_of(*words, "--expert_parallel_size", proposed, ranks=ranks)


def test_expert_parallelism_needs_several_ranks_deepspeed_and_something_to_train() -> None:
    def faults(*argv: str, ranks: int = 2, config: str | None = "zero2") -> str:
        return " ".join(expert_faults_here(run_of(*TINY, *PARALLEL, *argv, ranks=ranks), config))

    assert faults() == ""
    assert "Launch with `deepspeed --num_gpus 2`" in faults(ranks=1)
    assert "Add --deepspeed zero2" in faults(config=None)
    assert "which divides experts among ranks in training" in faults("--do_train", "False")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((*TINY, "--config_overrides", "num_experts=5"), "does not divide the model's 5 experts"),
        ((), "the model has no experts"),
    ],
)
def test_ranks_share_experts_evenly(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        look_at_experts(run_of(*argv, *PARALLEL, ranks=2))
    look_at_experts(run_of(*TINY, *PARALLEL, ranks=2))
    with pytest.raises(RequestError, match="adds noise in training"):
        check_experts({"num_local_experts": 8, "router_jitter_noise": 0.1}.get, 2)


def test_a_plan_refuses_experts_that_a_run_could_not_divide() -> None:
    """Models other than the planned ones, too: gpt-oss and DeepSeek-V3 do not train in expert parallelism."""
    for words, said in (
        ((*TINY, "--config_overrides", "num_experts=5"), "does not divide the model's 5 experts"),
        ((*TINY, "--deepspeed", "zero3"), "DS509"),
        (
            ("--model_name_or_path", "DeepSeek-V3"),
            "planned for mixtral, qwen3_moe, olmoe only, and this is a deepseek_v3",
        ),
        (("--model_name_or_path", "gpt-oss-20b"), "planned for mixtral, qwen3_moe, olmoe only"),
        (("--model_name_or_path", "Llama-3.2-1B"), "the model has no experts"),
    ):
        with pytest.raises(RequestError, match=said):
            job_of(run_of(*PARALLEL, *words, ranks=2), find_machine("H100-80GB"))


def test_the_loss_is_only_for_training_and_not_negative() -> None:
    with pytest.raises(RequestError, match="router_aux_loss_coef"):
        run_of("--router_aux_loss_coef", "-1")
    with pytest.raises(RequestError, match=r"router_aux_loss_coef.*does nothing"):
        run_of("--router_aux_loss_coef", "0.1", "--do_train", "False")
