"""DDP's gradients and those of which only some rows of an embedding are sent are the same, on real ranks over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_script
from torch import nn
from touched_rows_ranks import BUCKETS, ROWS, WIDTH, Model

from finetune.training import touched_rows
from finetune.training.touched_rows import tables_of

SCRIPT = Path(__file__).with_name("touched_rows_ranks.py")
RANKS = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_script(SCRIPT, [folder], RANKS)
    return [torch.load(folder / f"{rank}.result") for rank in range(RANKS)]


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("texts", ["few", "many"])
def test_gradients_are_those_of_ddp_on_all_ranks(texts: str, bucket: str, ranks: list[dict[str, Any]]) -> None:
    whole = 2 * sum(weight.nbytes for weight in Model().parameters())
    for found in ranks:
        plain, ours, sent = found[f"{texts}, {bucket}"]
        for one, other in zip(plain, ours, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
        assert all(map(torch.equal, ours, ranks[0][f"{texts}, {bucket}"][1]))
        assert (sent < 0.3 * whole) == (texts == "few")


@pytest.mark.parametrize("bucket", BUCKETS)
def test_what_is_not_finite_on_one_rank_is_so_on_all(bucket: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        plain, ours, _ = found[f"spoilt, {bucket}"]
        for one, other in zip(plain, ours, strict=True):
            assert torch.equal(one.isfinite(), other.isfinite())


def test_a_whole_run_of_two_ranks_logs_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    """With two, a sum has one order. More may add up in another one, depending on what is sent together."""
    run_script(SCRIPT.with_name("touched_rows_run.py"), [tmp_path], 2)
    one, other = (torch.load(tmp_path / f"{rank}.result") for rank in range(2))
    for found in (one, other):
        (logged, weights), (logged_by_ours, weights_by_ours) = found["whole"], found["touched"]
        assert found["times"] == len(logged) == 4, "once a step, however many micro-batches it has"
        assert logged == logged_by_ours
        assert all(torch.equal(weights[name], weights_by_ours[name]) for name in weights)
        assert all(torch.equal(weights[name], one["whole"][1][name]) for name in weights)


def test_tied_and_frozen_tables_are_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touched_rows, "WORTH_ELEMENTS", ROWS * WIDTH)
    model = Model()
    assert list(map(id, tables_of(model))) == [id(one.weight) for one in (model.words, model.others, model.unused)]
    model.words.weight.requires_grad = False
    model.out = nn.Linear(WIDTH, ROWS, bias=False)
    model.out.weight = model.others.weight
    assert list(map(id, tables_of(model))) == [id(model.unused.weight)]
