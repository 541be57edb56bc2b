"""Every hook on real ranks: whole gradients first, the same weights everywhere, resumed as if never cut, counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_script
from several_ranks import SAVED, START, STEPS

from finetune.run.flags.compression import HOOKS, KEEPS_ERRORS

SCRIPT = Path(__file__).with_name("several_ranks.py")
RANKS = 3  # chunks of the model that no rank count of two would show to be of unlike lengths

Trained = list[dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Of each rank, what came of each hook."""
    folder = tmp_path_factory.mktemp("ranks")
    run_script(SCRIPT, [folder], RANKS)
    return [torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("hook", HOOKS)
def test_all_ranks_hold_the_same_weights_to_the_bit(hook: str, trained: Trained) -> None:
    for rank in trained[1:]:
        assert torch.equal(rank[hook]["end"], trained[0][hook]["end"])
    assert trained[0][hook]["end"].isfinite().all()


@pytest.mark.parametrize("hook", KEEPS_ERRORS)
def test_before_the_start_it_is_plain_adamw(hook: str, trained: Trained) -> None:
    plain, found = trained[0]["none"]["start"], trained[0][hook]["start"]
    assert torch.allclose(found, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook != "none"])
def test_after_it_something_else_was_sent_yet_it_goes_the_same_way(hook: str, trained: Trained) -> None:
    plain, found = trained[0]["none"], trained[0][hook]
    assert not torch.equal(found["end"], plain["end"])
    whole, other = plain["end"] - plain["start"], found["end"] - found["start"]
    assert torch.cosine_similarity(whole, other, dim=0) > 0.5


@pytest.mark.parametrize("hook", ["none", *KEEPS_ERRORS])
def test_a_resumed_run_ends_as_the_uncut_one(hook: str, trained: Trained) -> None:
    for rank in trained:
        assert not rank[hook]["said_of_resumed"]
        assert not torch.equal(rank[hook]["saved"], rank[hook]["end"])
        assert torch.allclose(rank[hook]["resumed"], rank[hook]["end"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("hook", KEEPS_ERRORS)
def test_where_the_checkpoint_has_no_errors_all_begin_without_and_say_so(hook: str, trained: Trained) -> None:
    for rank in trained:
        assert f"has no compression errors of --ddp_comm_hook {hook} on {RANKS} ranks" in rank[hook]["said_of_none"]
        assert torch.equal(rank[hook]["without_errors"], trained[0][hook]["without_errors"])
        assert rank[hook]["without_errors"].isfinite().all()


def test_onebit_adam_sends_a_twentieth_of_fp32_after_the_freeze(trained: Trained) -> None:
    windows = trained[0]["onebit_adam"]["windows"]
    assert len(windows) == STEPS
    elements = trained[0]["onebit_adam"]["end"].numel()
    ring = 2 * (RANKS - 1) / RANKS
    for step, row in enumerate(windows):
        if step < START:
            assert row["comm_bytes_per_step"] == pytest.approx(ring * 4 * elements)
            assert row["comm_share_of_fp32"] == pytest.approx(1)
        else:  # 1.25 bits an element, and what fills up the last block
            assert row["comm_bytes_per_step"] == pytest.approx(ring * 1.25 / 8 * elements, rel=0.02)
            assert row["comm_share_of_fp32"] <= 1 / 20
    assert trained[0]["onebit_adam"]["summary"]["comm_compressed_share_of_fp32"] <= 1 / 20


def test_the_bytes_of_the_others_are_those_of_their_forms(trained: Trained) -> None:
    last = {hook: trained[0][hook]["windows"][-1]["comm_share_of_fp32"] for hook in HOOKS if hook != "none"}
    assert last["fp16"] == last["bf16"] == pytest.approx(0.5)
    weights = {(50, 96): 1, (96, 96): 4, (7, 96): 1}
    whole = sum(n * m * count for (n, m), count in weights.items()) + 4 * 96 + 7
    sent = sum((n + m) * 2 * count for (n, m), count in weights.items()) + 4 * 96 + 7
    assert last["powersgd"] == pytest.approx(sent / whole)


@pytest.mark.parametrize("hook", KEEPS_ERRORS)
def test_the_step_it_resumed_at_was_a_compressed_one(hook: str, trained: Trained) -> None:
    found = trained[0][hook]
    assert len(found["resumed_windows"]) == STEPS - SAVED
    for uncut, resumed in zip(found["windows"][SAVED:], found["resumed_windows"], strict=True):
        assert resumed["comm_share_of_fp32"] < 0.5
        assert resumed == pytest.approx(uncut)


def test_onebit_adam_without_its_errors_goes_on_from_the_freeze_that_was(trained: Trained) -> None:
    """As on another number of ranks: steps by the bias correction of step SAVED would be 1.5 times as long."""
    for rank in trained:
        found = rank["onebit_adam"]
        assert "has no compression errors of" in found["said_of_lost"]
        assert found["freeze_of_resumed"] == pytest.approx(
            found["freeze"]
        )  # each rank's gradients are longer by their own
        assert found["freeze_of_lost"] == pytest.approx(trained[0]["onebit_adam"]["freeze"])
        assert found["freeze"][0] == START
        assert found["freeze"][1] > 1
        assert torch.equal(found["lost"], trained[0]["onebit_adam"]["lost"])
