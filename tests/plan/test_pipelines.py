"""Pipelines: the flat list of layers of each family that has one, and how it is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest

from finetune.plan.job import PIPELINE, Job, tape_of
from finetune.plan.machine import find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import Model, model_of
from finetune.plan.seconds import stage_bounds
from finetune.plan.zero import Zero

H100 = find_machine("H100")
LITE = model_of({"model_type": "gptlite", "vocab_size": 65, "num_hidden_layers": 6, "hidden_size": 64,
                 "num_attention_heads": 4, "max_position_embeddings": 64})  # fmt: skip


def mlp(layers: int, width: int) -> Model:
    return model_of({"model_type": "mlp", "width": width, "layers": layers, "num_labels": 10})


@pytest.mark.parametrize("name", ["mlp", "gptlite"])
def test_stages_together_do_what_the_whole_model_does(name: str) -> None:
    """Entries of the flat list: an MLP's layers and its head; of a GPT-lite also embeddings and the closing norm."""
    model = mlp(6, 64) if name == "mlp" else LITE
    one = Job(model, PIPELINE, Zero(stage=1), world_size=4, stages=4, micro_batch=8, accumulation=4, tokens=1)
    bounds = stage_bounds(one, H100)
    assert bounds[-1] == (7 if name == "mlp" else 10)
    tapes = [tape_of(one, range(first, last)) for first, last in pairwise(bounds)]
    used = [name for tape in tapes for name in {name for op in tape.ops for name in op.weights}]
    assert sorted(used) == sorted(tensor.name for tensor in model.tensors)
    forward = sum(gemm.flops for tape in tapes for op in tape.ops for gemm in op.gemms)
    assert forward == sum(gemm.flops for op in tape_of(one).ops for gemm in op.gemms)


def test_a_pipeline_of_two_thousand_layers_is_cut_evenly() -> None:
    one = Job(mlp(2048, 256), PIPELINE, Zero(stage=1), world_size=8, stages=8, accumulation=8, tokens=1)
    bounds = stage_bounds(one, H100)
    assert {last - first for first, last in pairwise(bounds)} <= {256, 257}


def test_a_stage_of_an_mlp_holds_its_layers_inputs_and_what_its_neighbours_send() -> None:
    """fp32, two stages of two layers: Adam's 8 bytes a weight and 4 of the master, over one rank a stage; and between
    steps a tensor to receive into from the one neighbour, two inputs in flight with their gradients on the second
    stage alone."""
    width, rows = 64, 32
    one = Job(mlp(3, width), PIPELINE, Zero(stage=1, reduce_bucket_size=1000), 2, stages=2, micro_batch=rows,
              accumulation=4, tokens=1, partition_method="uniform")  # fmt: skip
    first, second = (plan_memory(one, H100, stage) for stage in range(2))
    hidden, layer = 4 * rows * width, width * width + width
    assert first.resident["parameters"] == 4 * 2 * layer
    assert first.resident["optimizer states"] == pytest.approx(2 * 4 * 2 * layer, abs=64)
    assert first.resident["pipeline buffers"] == hidden
    assert second.resident["pipeline buffers"] == hidden + 2 * (2 * hidden + 4 * rows * 10)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
def test_a_stage_keeps_buffers_for_as_many_micro_batches_as_deepspeed_has_in_flight(micro_batches: int) -> None:
    """A tensor to receive into from each neighbour; of each micro-batch in flight its input and the input's gradient,
    but on the first stage; and its logits on the last."""
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    width, rows, stages = 20, 3, 4
    one = Job(mlp(7, width), PIPELINE, Zero(stage=1, reduce_bucket_size=1000), stages, stages=stages, micro_batch=rows,
              accumulation=micro_batches, tokens=1, partition_method="uniform")  # fmt: skip
    hidden, logits = 4 * rows * width, 4 * rows * 10
    for stage in range(stages):
        schedule = TrainSchedule(micro_batches, stages, stage)
        flying = min(schedule.num_pipe_buffers(), micro_batches)
        neighbours = 1 if stage in (0, stages - 1) else 2
        each = (2 * hidden if stage else 0) + (logits if stage == stages - 1 else 0)
        held = plan_memory(one, H100, stage).resident["pipeline buffers"]
        assert held == neighbours * hidden + flying * each
