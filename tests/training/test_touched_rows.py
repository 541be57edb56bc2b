"""DDP's gradients and those of which only some rows of an embedding are sent are the same, on real ranks over gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DDPCommunicationHookType
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from finetune.training import touched_rows
from finetune.training.touched_rows import TouchedRows, tables_of

ROWS, WIDTH, RANKS = 600, 16, 3
# Megabytes of a bucket: each weight has its own, all share one, or the table shares one with some.
BUCKETS = {"alone": 0.0001, "shared": 25.0, "some": 0.002}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.places = nn.Embedding(8, WIDTH)
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.others, self.unused = (nn.Embedding(ROWS, WIDTH) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.words(words) + self.places(words % 8)
        if distributed.get_rank() != 1:
            found = found + self.others(words)
        return self.head(found).square().sum()


def wrapped(megabytes: float, touched_alone: bool) -> DistributedDataParallel:
    layout = {"bucket_cap_mb": megabytes, "gradient_as_bucket_view": True, "find_unused_parameters": True}
    model = DistributedDataParallel(Model(), **layout)
    if touched_alone:
        accelerator = SimpleNamespace(ddp_handler=SimpleNamespace(comm_hook=DDPCommunicationHookType.NO))
        trainer = SimpleNamespace(model_wrapped=model, accelerator=accelerator, comm_hook=None)
        hook = TouchedRows(trainer)
        for _ in range(2):  # a Trainer may train twice
            hook.on_train_begin(None, None, None)
    return model


def gradients(model: DistributedDataParallel, rank: int, texts: int, spoils: bool) -> list[torch.Tensor]:
    """After two steps, as DDP lays out its buckets anew after the first, of two micro-batches each."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            model(torch.randint(ROWS, (texts, 7), generator=generator)).backward()
        loss = model(torch.randint(ROWS, (texts, 7), generator=generator))
        if spoils and rank == 1:
            loss = loss * float("nan")
        loss.backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def one_rank(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    touched_rows.WORTH_ELEMENTS = ROWS * WIDTH
    store = distributed.FileStore(str(folder / "store"), RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    sent, real, found = [0], distributed.all_reduce, {}

    def counted(tensor: torch.Tensor, *more: Any, **others: Any) -> Any:
        sent[0] += tensor.nbytes
        return real(tensor, *more, **others)

    distributed.all_reduce = counted
    for bucket, megabytes in BUCKETS.items():
        for name, texts, spoils in (("few", 2, False), ("many", 200, False), ("spoilt", 2, True)):
            plain = gradients(wrapped(megabytes, False), rank, texts, spoils)
            sent[0] = 0
            found[f"{name}, {bucket}"] = (plain, gradients(wrapped(megabytes, True), rank, texts, spoils), sent[0])
    torch.save(found, folder / f"{rank}.result")
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(one_rank, (folder,), nprocs=RANKS)
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


def test_tied_and_frozen_tables_are_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touched_rows, "WORTH_ELEMENTS", ROWS * WIDTH)
    model = Model()
    assert list(map(id, tables_of(model))) == [id(one.weight) for one in (model.words, model.others, model.unused)]
    model.words.weight.requires_grad = False
    model.out = nn.Linear(WIDTH, ROWS, bias=False)
    model.out.weight = model.others.weight
    assert list(map(id, tables_of(model))) == [id(model.unused.weight)]
