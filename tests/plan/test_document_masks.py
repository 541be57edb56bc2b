"""The mask that keeps the documents of a text apart (--document_mask), in plans. tests/runs/test_plan.py runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune.plan.from_run import job_of
from finetune.plan.job import DEEPSPEED, PIPELINE, Job, tape_of
from finetune.plan.machine import find_machine
from finetune.plan.memory import BATCH, plan_memory
from finetune.plan.model import model_of
from finetune.plan.values import ATTENTION, INT64_BYTES
from finetune.plan.zero import Zero
from finetune.run.launch import Launch
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.resolve import resolve

H100 = find_machine("H100-80GB")
LAYERS, TOKENS, ROWS = 4, 2048, 3
LLAMA = {"model_type": "llama", "vocab_size": 256, "num_hidden_layers": LAYERS, "hidden_size": 64,
         "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4,
         "max_position_embeddings": TOKENS}  # fmt: skip
LITE = {"model_type": "gptlite", "vocab_size": 256, "num_hidden_layers": LAYERS, "hidden_size": 64,
        "num_attention_heads": 4, "max_position_embeddings": TOKENS}  # fmt: skip
HALF, PAIRS = 2, ROWS * TOKENS**2


def job(config: dict[str, Any], **changes: Any) -> Job:
    one = Job(model_of(config), DEEPSPEED, Zero(2, reduce_bucket_size=10_000), tokens=TOKENS, micro_batch=ROWS,
              precision="bf16", loss_chunk_tokens=64, world_size=4)  # fmt: skip
    return replace(one, **changes)


def more(one: Job, rank: int = 0) -> int:
    """Bytes by which the mask raises the peak of a step."""
    with_mask, without = (plan_memory(replace(one, document_mask=on), H100, rank).step_peak for on in (True, False))
    return with_mask.bytes - without.bytes


@pytest.mark.parametrize("config", [LLAMA, LITE], ids=lambda config: config["model_type"])
def test_each_layer_keeps_its_numbers_and_a_recomputed_one_for_a_moment(config: dict[str, Any]) -> None:
    """One byte for each pair of tokens, and two in half precision for each layer."""
    assert more(job(config)) == pytest.approx((1 + LAYERS * HALF) * PAIRS, rel=0.05)
    assert more(job(config, checkpoint_interval=1)) == pytest.approx((1 + HALF) * PAIRS, rel=0.1)
    assert more(job(config, attention="flash_attention_2")) == ROWS * TOKENS * INT64_BYTES  # positions


@pytest.mark.parametrize(("size", "repeats"), [(2, 1), (4, 2)])  # a single head of keys is viewed, not copied
def test_ranks_that_share_a_text_each_have_the_mask_of_all_of_it(size: int, repeats: int) -> None:
    one = job(LLAMA, sequence_parallel_size=size, checkpoint_interval=1)
    masked = replace(one, document_mask=True)
    positions = ROWS * TOKENS * INT64_BYTES
    held = [plan_memory(each, H100).resident[BATCH] for each in (one, masked)]
    assert held[1] - held[0] == PAIRS + positions
    assert more(one) == pytest.approx((1 + HALF) * PAIRS, rel=0.1)
    ops = [op for op in tape_of(masked).ops if op.name == ATTENTION]
    assert [op.inputs[3].bytes for op in ops] == [HALF * PAIRS] * LAYERS
    assert all(repeats * op.inputs[1].elements == op.inputs[0].elements for op in ops)
    assert more(replace(one, attention="flash_attention_2")) == positions


def test_each_layer_of_a_pipeline_makes_its_own() -> None:
    staged = job(LITE, engine=PIPELINE, zero=Zero(1, reduce_bucket_size=10_000), stages=2, checkpoint_interval=1)
    for stage in (0, 1):
        assert more(staged, stage) == pytest.approx((1 + HALF) * PAIRS, rel=0.1)


def test_the_flag_is_read() -> None:
    argv = ["--model_name_or_path", "Llama-3.2-1B", "--document_mask", "True", "--packing", "bfd"]
    run = resolve(CAUSAL_LM, argv, Launch(), is_here=False)
    assert job_of(run, H100, None)[0].document_mask
