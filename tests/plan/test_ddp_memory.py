"""The peak of a step under DDP, planned and measured. One process suffices: its buckets are as large as with others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from measured import peaks
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments

from finetune.measure.models import build, samples
from finetune.plan.engines.resident import Plain, Weights
from finetune.plan.families.parts import CAUSAL
from finetune.plan.forward.parts import Batch
from finetune.plan.job import build_tape
from finetune.plan.model import model_of
from finetune.plan.optimizers import Optimizer
from finetune.plan.step import Ledger, Pass
from finetune.plan.values import FP32_BYTES, Numbers
from finetune.plan.zero import Zero
from finetune.training.trainer import FinetuneTrainer

ROWS, TOKENS = 4, 64
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def wrapped(folder: Path) -> tuple[Any, DistributedDataParallel]:
    """A model, and the same as the Trainer wraps it on several ranks."""
    torch.manual_seed(0)
    model = build(CONFIG, CAUSAL, "sdpa").train()
    args = TrainingArguments(str(folder), report_to=[], use_cpu=True, ddp_find_unused_parameters=False)
    trainer = FinetuneTrainer(model=model, args=args)
    return model, DistributedDataParallel(model, **trainer.accelerator.ddp_handler.to_kwargs())


def measured_bytes(folder: Path, accumulation: int) -> int:
    """At the peak of a step, above what is there between steps."""
    model, ddp = wrapped(folder)
    batch = {name: torch.stack([one] * ROWS) for name, one in samples(CONFIG, CAUSAL, TOKENS).items()}

    def call(**batch: Any) -> Any:
        for _ in range(accumulation - 1):
            with ddp.no_sync():
                ddp(**batch).loss.backward()
        return SimpleNamespace(loss=ddp(**batch).loss)

    call(**batch).loss.backward()  # the next forward pass lays buckets out anew, in the order in which gradients came
    model.zero_grad()
    return max(peaks(call, batch, model).values())


def planned_bytes(accumulation: int) -> int:
    model = model_of(CONFIG, "llama", CAUSAL)
    ledger = Ledger()
    weights = Weights(model.tensors, FP32_BYTES)
    engine = Plain(weights, Zero(), Optimizer("adam"), 2, 0, ledger, buckets=True, is_engine=False)
    engine.hold(ledger)
    between = ledger.total
    for micro in range(accumulation):
        engine.begin(micro == 0, micro == accumulation - 1)
        tape = build_tape(model, Batch(ROWS, TOKENS), Numbers(FP32_BYTES, "cpu"))
        one = Pass(tape, ledger, engine)
        one.forward()
        one.backward()
        engine.end(ledger)
    engine.step(ledger)
    assert ledger.total == between
    return ledger.peak.bytes - between


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_gradients_take_no_memory_beside_their_buckets_until_micro_batches_add_up(
    accumulation: int, tmp_path: Path
) -> None:
    assert planned_bytes(accumulation) == pytest.approx(measured_bytes(tmp_path, accumulation), rel=0.01)
    gradients = FP32_BYTES * model_of(CONFIG, "llama", CAUSAL).parameters
    assert (planned_bytes(accumulation) > planned_bytes(1) + gradients / 2) == (accumulation > 1)


def test_gradients_are_views_of_the_buckets(tmp_path: Path) -> None:
    model, ddp = wrapped(tmp_path)
    batch = {name: one[None] for name, one in samples(CONFIG, CAUSAL, TOKENS).items()}
    ddp(**batch).loss.backward()
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == 1  # a bucket is of 25 MiB
