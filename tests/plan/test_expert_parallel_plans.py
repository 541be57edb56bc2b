"""Expert parallelism: what each rank holds, computes and exchanges, worked out here. tests/runs/test_plan.py
runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune.errors import RequestError
from finetune.plan.advice import cheaper, mends, notes
from finetune.plan.answers import flags_of, shared_by
from finetune.plan.engines.resident import MASTERS, PARAMETERS, STATES, Weights
from finetune.plan.exchange import exchanges_of
from finetune.plan.from_run import job_of
from finetune.plan.job import DEEPSPEED, Job, tape_of
from finetune.plan.machine import Link, find_machine
from finetune.plan.memory import BATCH, plan_memory
from finetune.plan.model import model_of
from finetune.plan.plan import plan
from finetune.plan.search import EXPERT_PARALLEL, Limits, scaling, search
from finetune.plan.seconds import plan_seconds
from finetune.plan.values import ALL_TO_ALL, DISPATCH
from finetune.plan.zero import Zero
from finetune.run.launch import Launch
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.resolve import resolve

H100 = find_machine("H100-80GB")
LAYERS, WIDTH, INNER, EXPERTS, CHOSEN, TOKENS = 3, 64, 96, 8, 2, 512
QWEN = {"model_type": "qwen3_moe", "vocab_size": 512, "num_hidden_layers": LAYERS, "hidden_size": WIDTH,
        "intermediate_size": 160, "moe_intermediate_size": INNER, "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN, "norm_topk_prob": True, "head_dim": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "decoder_sparse_step": 1}  # fmt: skip
OF_EXPERTS = LAYERS * EXPERTS * 3 * WIDTH * INNER  # elements
HALF, FULL = 2, 4  # bytes


def divided(size: int, **changes: Any) -> Job:
    job = Job(model_of(QWEN), DEEPSPEED, Zero(2, reduce_bucket_size=50_000), world_size=4, tokens=TOKENS,
              precision="bf16", expert_parallel_size=size)  # fmt: skip
    return replace(job, **changes)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_holds_its_part_of_the_experts_and_of_their_states(size: int) -> None:
    """Four ranks partition all other weights; each expert's states are partitioned over the ranks that hold it, so a
    rank has a quarter of all states, at any size."""
    job = divided(size)
    others = job.model.parameters - OF_EXPERTS
    held = plan_memory(job, H100).resident
    assert held[PARAMETERS] == HALF * (others + OF_EXPERTS // size)
    assert held[MASTERS] == FULL * job.model.parameters // 4
    groups = 2 if size == 1 else 3  # each with a counter of steps
    assert held[STATES] == 2 * FULL * job.model.parameters // 4 + FULL * groups
    assert sum(tensor.elements * tensor.holders for tensor in job.held.tensors) == job.model.parameters


def test_experts_are_a_group_of_their_own_and_routers_come_last() -> None:
    """As DeepSpeed puts what has replaced a layer back into the optimizer's groups."""
    decayed, plain, experts = Weights(divided(2).held.tensors, HALF).groups()
    assert [one.name for one in decayed[-LAYERS:]] == [f"model.layers.{i}.mlp.router.gate.weight" for i in range(3)]
    assert {len(one.shape) for one in plain} == {1}
    assert [one.name.rpartition(".")[2] for one in experts] == ["w1", "w2", "w3"] * LAYERS
    assert experts[0].shape == (EXPERTS // 2, INNER, WIDTH)
    assert experts[1].shape == (EXPERTS // 2, WIDTH, INNER)


def test_an_experts_gradients_belong_to_the_ranks_that_hold_it() -> None:
    """Of 4 ranks with 2 per set of experts, the first two have the first half of their group's experts, the last two
    the second half: gradients of whole parameters of which a rank owns a part."""
    owned = []
    for rank in range(4):
        (part,) = (one for one in Weights(divided(2).held.tensors, HALF).parts(4) if one.group[0].holders > 1)
        assert part.ranks == 2
        owned.append(part.owned(rank // 2))
    assert owned[0] == owned[1] != owned[2] == owned[3]


@pytest.mark.parametrize("rows", [1, 3])
def test_each_token_is_sent_to_its_experts_and_back(rows: int) -> None:
    ahead, back = exchanges_of(tape_of(divided(2, micro_batch=rows)))
    assert ahead == [HALF * rows * TOKENS * CHOSEN * WIDTH] * 2 * LAYERS
    assert sorted(back) == sorted(ahead)
    _, again = exchanges_of(tape_of(divided(2, micro_batch=rows, checkpoint_interval=1)))
    assert sum(again) == 2 * sum(ahead)
    assert exchanges_of(tape_of(divided(1))) == ([], [])


@pytest.mark.parametrize(("texts", "experts"), [(2, 2), (2, 4), (4, 2)])
def test_neighbors_that_share_texts_and_experts_exchange_both(texts: int, experts: int) -> None:
    """Each rank has a part of the tokens, so sends a part of them to experts; each exchange is in a group of its own,
    over a bus of 100 bytes a second. Of gradients and weights, three quarters cross it three times, of experts
    less."""
    job = divided(experts, sequence_parallel_size=texts, micro_batch=texts)
    alone = divided(1, sequence_parallel_size=texts, micro_batch=texts)
    sent, _ = exchanges_of(tape_of(job), DISPATCH)
    assert sent == [HALF * TOKENS * CHOSEN * WIDTH] * 2 * LAYERS
    assert exchanges_of(tape_of(job), ALL_TO_ALL) == exchanges_of(tape_of(alone))
    held, whole = (plan_memory(one, H100).resident for one in (job, divided(experts)))
    assert {**held, BATCH: 0} == {**whole, BATCH: 0}
    assert (job.global_batch, job.group) == (4, max(texts, experts))
    slow = replace(H100, name="slow bus", intra_node=Link(100.0, 0.0))
    traded = sum(
        (ranks - 1) / ranks * size
        for kind, ranks in ((ALL_TO_ALL, texts), (DISPATCH, experts))
        for way in exchanges_of(tape_of(job), kind)
        for size in way
    )
    moved = 3 * HALF * (0.75 * (job.model.parameters - OF_EXPERTS) + (1 / experts - 1 / 4) * OF_EXPERTS)
    exposed = plan_seconds(replace(job, zero=Zero(1, overlap_comm=False)), slow).exposed_communication
    assert exposed == pytest.approx((traded + moved) / 100, rel=1e-3)


def test_exchanges_and_gradients_take_their_time() -> None:
    """Half of each exchange crosses the bus, in one step of a second; gradients of experts are reduced by pairs, those
    of other weights by all four ranks."""
    slow = replace(H100, name="slow bus", intra_node=Link(100.0, 1.0))
    plain = replace(H100, name="no bus", intra_node=Link(1e30, 0.0))
    job = divided(2, zero=Zero(1, reduce_bucket_size=10**9, overlap_comm=False))
    ahead, back = exchanges_of(tape_of(job))
    traded = sum(0.5 * size / 100 + 1 for size in ahead + back)
    others, experts = HALF * (job.model.parameters - OF_EXPERTS), HALF * OF_EXPERTS // 2
    reduced = 2 * (0.75 * others / 100 + 3) + 2 * (0.5 * experts / 100 + 1)
    gathered = 0.75 * others / 100 + 2 * 3 + 0.5 * experts / 100 + 1  # two groups of others, and the experts
    more = plan_seconds(job, slow).exposed_communication - plan_seconds(job, plain).exposed_communication
    assert more == pytest.approx(traded + reduced + gathered, rel=1e-3)


def test_the_products_are_the_same_wherever_experts_are() -> None:
    one, two, four = (plan_seconds(divided(size), H100).model_flops for size in (1, 2, 4))
    assert one == two == four


@pytest.mark.parametrize(("device", "inner"), [("cpu", 4), ("cuda", 3)])
def test_a_rank_whose_experts_are_busier_takes_more_memory_and_time(device: str, inner: int) -> None:
    """It keeps each row that it gets, both products of it, what SiLU makes of one, unless in a kernel, and their
    product; and the places of the rows."""
    machine = find_machine("cpu") if device == "cpu" else H100
    even, busy = (divided(2, device=device, precision="fp32", expert_load=load) for load in (1.0, 2.0))
    kept = [sum({one: one.bytes for op in tape_of(job).ops for one in op.saved}.values()) for job in (even, busy)]
    rows = LAYERS * FULL * TOKENS * CHOSEN * (WIDTH + inner * INNER)
    assert rows < kept[1] - kept[0] < 1.1 * rows
    seconds = [plan_seconds(job, machine) for job in (even, busy)]
    assert seconds[1].forward > seconds[0].forward
    assert seconds[1].exposed_communication > seconds[0].exposed_communication
    assert any("2 times the mean" in note for note in notes(plan(even, machine)))
    assert not any("times the mean" in note for note in notes(plan(divided(1), H100)))


def test_a_search_ranks_layouts_with_and_without_expert_parallelism() -> None:
    every = ("none", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
    found = search(divided(2), H100, Limits(None, every))
    kinds = {(one.layout, one.plan.job.expert_parallel_size) for one in found.fitting}
    whole = {(layout, 1) for layout in every}
    assert kinds == whole | {(layout, 2) for layout in EXPERT_PARALLEL}
    best = next(one for one in found.fitting if one.plan.job.expert_parallel_size > 1)
    assert best.words.endswith("2 ranks per set of experts")
    shared = shared_by(*(one.plan.job for one in found.fitting))
    assert flags_of(best.plan.job, shared=shared).endswith("--expert_parallel_size 2")


def test_a_run_without_deepspeed_is_planned_with_it() -> None:
    argv = ["--expert_parallel_size", "4", "--model_size", "moe-tiny"]
    run = resolve(CAUSAL_LM, argv, Launch(world_size=8, local_world_size=8, launcher="torchrun"), is_here=False)
    job, config, notes = job_of(run, H100)
    assert (job.engine, job.zero.stage, job.expert_parallel_size) == (DEEPSPEED, 2, 4)
    assert config is not None
    assert any("--expert_parallel_size needs DeepSpeed" in note for note in notes)
    with pytest.raises(RequestError, match=r"--deepspeed is 'none'.*expert_parallel_size is 4.*needs DeepSpeed"):
        job_of(resolve(CAUSAL_LM, [*argv, "--deepspeed", "none"], run.launch, is_here=False), H100)


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_proposed_instead_goes_with_expert_parallelism(size: int) -> None:
    job = divided(size, micro_batch=4)
    found = plan(job, replace(H100, memory_bytes=plan(job, H100).peak_bytes // 4))
    proposed = [*mends(found), *cheaper(found)]
    kinds = {one.plan.job.zero.stage for one in proposed} | {one.plan.job.zero.offload_optimizer for one in proposed}
    assert kinds == {2, "none"}


def test_a_curve_begins_with_a_whole_group() -> None:
    """Also where a node has fewer ranks, or does not divide into groups."""
    for size, first in ((8, 8), (3, 3), (2, 4)):
        curve = scaling(divided(size, world_size=24, ranks_per_node=4), H100)
        assert [ranks for ranks, _, _ in curve[:2]] == [first, 2 * first]
        assert all(speed > 0 for _, speed, _ in curve)


def test_a_router_loss_takes_one_more_pass_of_each_micro_batch_under_accumulation() -> None:
    tiny = ["--model_size", "moe-tiny", "--deepspeed", "zero2", "--gradient_accumulation_steps"]

    def forward(steps: str, coefficient: str, *more: str) -> float:
        words = [*tiny, steps, "--router_aux_loss_coef", coefficient, *more]
        run = resolve(CAUSAL_LM, words, Launch(world_size=2, local_world_size=2))
        return plan_seconds(job_of(run, H100)[0], H100).forward

    assert forward("1", "0.01") == forward("1", "0")
    assert 1.5 < forward("4", "0.01") / forward("4", "0") < 2.0
