"""FSDP: groups, what a rank holds, what a plan refuses. Bytes beside measured ones: tests/test_claims.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune.errors import RequestError
from finetune.plan.engines.fsdp import Fsdp, piece
from finetune.plan.engines.resident import BUCKETS, GATHERED, GRADIENTS, PARAMETERS, STATES, Weights
from finetune.plan.from_run import job_of
from finetune.plan.job import FSDP, Job, tape_of
from finetune.plan.machine import find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import Tensor, model_of, with_lora
from finetune.plan.optimizers import Optimizer
from finetune.plan.seconds import plan_seconds
from finetune.plan.step import Ledger
from finetune.plan.values import Lora
from finetune.plan.zero import Zero
from finetune.run.launch import Launch
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.recipes.seq2seq import SEQ2SEQ
from finetune.run.resolve import resolve

LLAMA = {"model_type": "llama", "vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 32}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 101, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
CPU = find_machine("cpu")


def job(config: dict[str, Any] = LLAMA, **values: Any) -> Job:
    given = {"world_size": 2, "micro_batch": 2, "tokens": 8, "device": "cpu"} | values
    return Job(model_of(config, "test"), FSDP, **given)


def traced(one: Job) -> Fsdp:
    engine = Fsdp(Weights(one.model.tensors, 4), Zero(), Optimizer("adam"), one.world_size, 0, Ledger())
    engine.trace(tape_of(one))
    return engine


def test_layers_embeddings_and_the_end_of_a_model_are_groups_in_the_order_of_a_pass() -> None:
    engine = traced(job())
    assert engine.order == ["embeddings", "model.layers.0", "model.layers.1", "tail"]
    assert sorted(engine.groups["tail"].names) == ["lm_head.weight", "model.norm.weight"]
    assert [engine.groups[key].stays for key in engine.order] == [False, False, False, True]


def test_a_head_that_is_the_embedding_is_in_one_group_with_it_and_positions_are_the_models_own() -> None:
    engine = traced(job(GPT2))
    assert engine.order == ["transformer.h.0", "transformer.h.1", "tail", "root"]
    assert "transformer.wte.weight" in engine.groups["tail"].names
    assert engine.groups["root"].names == ["transformer.wpe.weight"]


def test_a_piece_is_of_the_first_dimension_and_padded() -> None:
    assert [piece((101, 16), 2), piece((5,), 4), piece((), 2)] == [(51, 16), (2,), (1,)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_weights_and_states_are_shared_out_and_all_that_was_gathered_is_given_back(ranks: int) -> None:
    rank = plan_memory(job(world_size=ranks), CPU)
    weights = sum(tensor.elements for tensor in job().model.tensors)
    assert rank.resident[PARAMETERS] == pytest.approx(4 * weights / ranks, rel=0.03)
    assert rank.resident[STATES] == pytest.approx(8 * weights / ranks, rel=0.03)
    assert rank.timeline[-1][1:] == ("step", rank.resident_bytes)


def test_a_gathered_group_lives_twice_while_it_is_unpacked_and_is_gone_before_the_backward_pass() -> None:
    """The largest is a layer, of 2,592 weights; the head's, of 1,616, is summed when the layer before it begins."""
    peak = plan_memory(job(), CPU).peaks["backward"].by_kind
    assert peak[GATHERED] == 2 * 2592 * 4
    assert peak[BUCKETS] == 1616 * 4


def test_half_precision_halves_what_is_gathered_and_not_what_is_held() -> None:
    whole, half = plan_memory(job(), CPU), plan_memory(job(precision="bf16"), CPU)
    assert half.resident == whole.resident
    assert (
        2 * half.peaks["evaluation" if "evaluation" in half.peaks else "forward"].by_kind[GATHERED]
        == (whole.peaks["forward"].by_kind[GATHERED])
    )


def test_micro_batches_before_the_last_keep_whole_gradients() -> None:
    once, twice = plan_memory(job(), CPU), plan_memory(job(accumulation=2), CPU)
    weights = sum(tensor.elements for tensor in job().model.tensors)
    assert GRADIENTS not in once.peaks["forward"].by_kind
    assert twice.peaks["forward"].by_kind[GRADIENTS] == 4 * weights


def test_a_step_takes_longer_with_a_slower_network_and_sums_gradients_once() -> None:
    near = job(world_size=16, ranks_per_node=16, device="cuda")
    gpu = find_machine("A100-80GB")
    spread = plan_seconds(replace(near, ranks_per_node=8), gpu)
    assert spread.communication > plan_seconds(near, gpu).communication
    two = plan_seconds(replace(near, accumulation=2), gpu)
    assert two.communication < 2 * plan_seconds(near, gpu).communication


TWO_LAYERS = Lora(4, ("q_proj", "down_proj"))


def adapted(config: dict[str, Any] = LLAMA, lora: Lora = TWO_LAYERS, **values: Any) -> Job:
    one = job(config, **values)
    return replace(one, model=with_lora(one.model, lora))


ADAPTERS = 2 * 4 * (16 + 16 + 32 + 16)  # elements beside the two linear layers of both blocks


def test_with_adapters_the_frozen_groups_are_gathered_too_and_a_norm_that_peft_hides_is_the_models_own() -> None:
    engine = traced(adapted())
    assert engine.order == ["embeddings", "model.layers.0", "model.layers.1", "tail", "root"]
    assert engine.groups["tail"].names == ["lm_head.weight"]
    assert engine.groups["root"].names == ["model.norm.weight"]
    assert "transformer.ln_f.weight" in traced(adapted(GPT2, Lora(4, ("c_attn",)))).groups["tail"].names
    assert [engine.groups[key].trained for key in engine.order] == [0, ADAPTERS // 2, ADAPTERS // 2, 0, 0]
    # Gradients flow to the second block's inputs and no further.
    assert [engine.groups[key].waits for key in engine.order] == [True, True, False, False, True]
    recomputed = traced(adapted(checkpoint_interval=1))
    assert not recomputed.groups["model.layers.0"].waits, "the embeddings then pass gradients on"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tower_that_no_text_reaches_is_held_in_fp32_and_only_what_lies_around_its_layers_is_gathered(
    precision: str,
) -> None:
    one = job(precision=precision)
    around, layer = "model.vision.merger.0.weight", "model.vision.layers.0.up.weight"
    tower = (Tensor(around, (10, 4), None, trains=False), Tensor(layer, (6, 4), 2, trains=False))
    with_tower = replace(one, model=replace(one.model, tensors=(*tower, *one.model.tensors)))
    engine = traced(with_tower)
    assert engine.order == ["embeddings", "model.layers.0", "model.layers.1", "tail", "root"]
    assert engine.groups["root"].names == [around]
    assert sorted(engine.groups["tail"].names) == ["lm_head.weight", "model.norm.weight"]
    held, alone = (plan_memory(each, CPU) for each in (with_tower, one))
    assert held.resident[PARAMETERS] - alone.resident[PARAMETERS] == 4 * (10 + 6) * 4 / 2
    assert held.resident[STATES] == alone.resident[STATES]
    assert held.timeline[-1][1:] == ("step", held.resident_bytes)


def test_what_a_trained_copy_replaces_is_gathered_with_it() -> None:
    engine = traced(adapted(lora=Lora(4, ("q_proj",), saved=("lm_head",))))
    assert sorted(engine.groups["tail"].names) == ["lm_head.original_module.weight", "lm_head.weight"]
    assert engine.groups["tail"].elements == 2 * engine.groups["tail"].trained == 2 * 100 * 16


@pytest.mark.parametrize(
    ("values", "frozen_bytes"),
    [
        ({}, 4),
        ({"precision": "bf16", "dtype": "bfloat16"}, 2),
        ({"precision": "bf16", "dtype": "float32"}, 4),
    ],
    ids=["fp32", "bf16", "bf16 beside a base in fp32"],
)
def test_a_frozen_base_is_held_in_its_dtype_and_adapters_and_their_states_in_fp32(
    values: dict[str, Any], frozen_bytes: int
) -> None:
    one = adapted(**values)
    base = sum(tensor.elements for tensor in one.model.tensors) - ADAPTERS
    rank = plan_memory(one, CPU)
    assert rank.resident[PARAMETERS] == (base * frozen_bytes + ADAPTERS * 4) / 2
    assert rank.resident[STATES] == ADAPTERS * 8 / 2 + 8 * 4, "and a step of each of the eight tensors"
    assert GRADIENTS not in rank.resident
    assert rank.timeline[-1][1:] == ("step", rank.resident_bytes)


def test_gradients_of_adapters_alone_are_kept_until_the_last_micro_batch() -> None:
    peak = plan_memory(adapted(accumulation=2), CPU).peaks["forward"].by_kind
    assert peak[GRADIENTS] == 4 * ADAPTERS
    peak = plan_memory(adapted(accumulation=2, precision="bf16", dtype="bfloat16"), CPU).peaks["forward"].by_kind
    assert peak[GRADIENTS] == 2 * ADAPTERS, "of weights gathered in bf16"


def test_adapters_send_little_and_gather_as_much_as_the_whole_model() -> None:
    gpu, near = find_machine("A100-80GB"), {"world_size": 16, "ranks_per_node": 8, "device": "cuda"}
    whole, few = (plan_seconds(one, gpu).communication for one in (job(**near), adapted(**near)))
    assert whole / 2 < few < whole


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--load_in_4bit True", "--load_in_4bit is True .* FSDP shard weights"),
        ("--lora_use_dora True", "--lora_use_dora is True .* FSDP shard weights"),
        ("", ""),
    ],
)
def test_adapters_that_cannot_be_sharded_are_refused_as_the_recipe_refuses_them(words: str, said: str) -> None:
    words = f"--model_name_or_path Llama-3.2-1B --fsdp True --use_peft True {words}"
    run = resolve(CAUSAL_LM, words.split(), Launch(world_size=2), is_here=False)
    if said:
        with pytest.raises(RequestError, match=said):
            job_of(run, find_machine("A100-80GB"))
    else:
        one, _, _ = job_of(run, find_machine("A100-80GB"))
        assert (one.engine, one.dtype, one.model.lora is not None) == (FSDP, "bfloat16", True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model_name_or_path Llama-3.2-1B --fsdp shard_grad_op", "only --fsdp True is planned"),
        ("--fsdp True --model_name_or_path t5-small", "an encoder with a decoder"),
    ],
)
def test_what_is_not_planned_is_refused_with_what_is(words: str, said: str) -> None:
    recipe = SEQ2SEQ if "t5" in words else CAUSAL_LM
    run = resolve(recipe, words.split(), Launch(world_size=2))
    with pytest.raises(RequestError, match=rf"--fsdp is .*{said}.*--deepspeed zero3 shards the same"):
        job_of(run, find_machine("A100-80GB"))
