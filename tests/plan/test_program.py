"""What a pass takes it gives back: whatever the family and the precision, and however many blocks stand for others."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.plan.forward.parts import Batch
from finetune.plan.job import build_tape
from finetune.plan.model import KINDS, model_of, with_lora
from finetune.plan.program import TEMPORARY, Stretch
from finetune.plan.step import Engine, Ledger, Pass
from finetune.plan.values import Lora, Numbers

# Where every second one is recomputed, only of eight like ones does any stand for another; T5's first two are unlike
# the rest.
LAYERS = 9
SMALL = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 96,
         "vocab_size": 300, "max_position_embeddings": 128}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
ROUTED = {"moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
          "first_k_dense_replace": 1}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"width": 64, "layers": LAYERS},
    "gptlite": SMALL,
    "gpt2": {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "vocab_size": 300, "n_positions": 64},
    "phi": SMALL,
    **{family: {**SMALL, "type_vocab_size": 2} for family in ("bert", "roberta")},
    "distilbert": {"dim": 64, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 96, "vocab_size": 300,
                   "max_position_embeddings": 128},
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"), GROUPED),
    "gemma3_text": {**GROUPED, "sliding_window": 32, "num_hidden_layers": 26},
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen3_moe": {**GROUPED, "num_experts": 4, "moe_intermediate_size": 40, "num_experts_per_tok": 2},
    "olmoe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**GROUPED, "num_experts": 4, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72},
    "glm4_moe": {**GROUPED, **ROUTED, "attention_bias": True},
    "deepseek_v3": {**SMALL, **ROUTED, "num_hidden_layers": LAYERS + 5, "first_k_dense_replace": 3, "n_group": 2,
                    "num_key_value_heads": 4, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
                    "qk_nope_head_dim": 16,
                    "qk_rope_head_dim": 8, "v_head_dim": 16},
    "gpt_oss": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    "smollm3": {**GROUPED, "num_hidden_layers": 18},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": LAYERS + 1, "num_heads": 4, "vocab_size": 300},
    "resnet": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [3, 4], "num_labels": 4},
}  # fmt: skip
NUMBERS = {"fp32": Numbers(), "half": Numbers(2), "autocast": Numbers(autocast=True)}
ALL_RECORDED = ("resnet",)  # its layers differ


class Watched(Ledger):
    """Of which nothing is given back that it does not hold."""

    def give(self, kind: str, size: int) -> None:
        super().give(kind, size)
        self.check()

    def run(self, stretch: Stretch) -> None:
        super().run(stretch)
        self.check()

    def check(self) -> None:
        assert min(self.live.values()) >= 0, (self.phase, self.place, self.live)


class Dropping(Engine):
    """Each gradient goes when it has come."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes

    def gradient_bytes(self, name: str) -> int:
        return self.sizes[name]

    def gradient(self, ledger: Ledger, name: str) -> None:
        ledger.give(TEMPORARY, self.sizes[name])


class Entering(Dropping):
    """So that no event of a program is left out."""

    enters_modules = True

    def before_module(self, ledger: Ledger, module: str) -> None:
        assert module


def check(family: str, numbers: Numbers, interval: int, lora: Lora | None = None, chunk: int = 0) -> None:
    model = model_of({"model_type": family, **MODELS[family]})
    model = with_lora(model, lora) if lora else model
    tape = build_tape(model, Batch(2, 64, 64), numbers, checkpoint_interval=interval, loss_chunk_tokens=chunk)
    assert any(segment.like is not None for segment in tape.segments) is (family not in ALL_RECORDED)
    sizes = {tensor.name: tensor.elements * numbers.bytes_each * tensor.trains for tensor in model.tensors}
    ledgers = []
    for kind in (Dropping, Entering):
        ledger, engine = Watched(), kind(sizes)
        ledgers.append(ledger)
        for _ in range(2):
            step = Pass(tape, ledger, engine)
            step.forward()
            step.backward()
            assert set(ledger.live.values()) == {0}, ledger.live
        Pass(tape, ledger, engine).evaluate()
        assert set(ledger.live.values()) == {0}, ledger.live
    joined, whole = ledgers
    assert (joined.peaks, joined.timeline) == (whole.peaks, whole.timeline)


@pytest.mark.parametrize("interval", [0, 1, 2])
@pytest.mark.parametrize("precision", NUMBERS)
@pytest.mark.parametrize("family", KINDS)
def test_nothing_is_left_of_a_micro_batch_or_an_evaluation(family: str, precision: str, interval: int) -> None:
    check(family, NUMBERS[precision], interval)


@pytest.mark.parametrize("interval", [0, 1, 2])
@pytest.mark.parametrize("precision", NUMBERS)
def test_nothing_is_left_of_adapters_and_a_loss_in_chunks(precision: str, interval: int) -> None:
    check("llama", NUMBERS[precision], interval, Lora(4, ("q_proj", "v_proj"), dropout=0.1), chunk=64)
    check("llama", NUMBERS[precision], interval, chunk=64)
