"""Two ranks, without a model: each has its share of a checkpoint's bytes, and what one meets all raise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import run_script

from finetune.training.checkpoints.manifest import problems, read_manifest

SCRIPT = Path(__file__).with_name("two_ranks.py")


@dataclass
class Scenes:
    folder: Path
    ranks: list[dict[str, Any]]

    def of(self, name: str) -> list[Any]:
        """What it came to on each rank."""
        return [rank[name] for rank in self.ranks]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    folder = tmp_path_factory.mktemp("scenes")
    run_script(SCRIPT, [folder], 2)
    return Scenes(folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)])


def test_each_reads_its_share_and_all_files_are_in_the_manifest(scenes: Scenes) -> None:
    first, second = map(set, scenes.of("shares"))
    assert not first & second
    assert first | second == {"rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"}
    place = scenes.folder / "shares" / "checkpoint-4"
    assert problems(place, hashes=True) == []
    assert set(read_manifest(place).files) == first | second


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_meets_while_it_flushes_ends_both_and_the_earlier_one_stays(rank: int, scenes: Scenes) -> None:
    for kind, said in scenes.of(f"disk {rank}"):
        assert kind == "RunError"
        assert "checkpoint-8 could not be saved: " in said
        assert "Input/output error" in said
    assert f"rank {rank}: " in scenes.ranks[1 - rank][f"disk {rank}"][1]
    run = scenes.folder / f"disk {rank}"
    assert problems(run / "checkpoint-4", hashes=True) == []
    assert (run / "latest").read_text() == "checkpoint-4\n"
    assert not (run / "checkpoint-8").exists()


def test_a_file_that_two_ranks_see_in_two_sizes_is_not_committed(scenes: Scenes) -> None:
    for kind, said in scenes.of("size"):
        assert kind == "RunError"
        assert "bytes, but rank 1 reads 1. " in said
    assert not (scenes.folder / "size" / "checkpoint-4").exists()


def test_both_go_on_from_the_same_where_one_finds_the_newest_altered(scenes: Scenes) -> None:
    first, second = scenes.of("altered")
    assert first == second
    assert first[0] == str(scenes.folder / "altered" / "checkpoint-4")
    assert "skipped: checkpoint-8/rng_state_1.pth has changed since it was saved" in first[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pickle_that_one_rank_refuses_is_a_wrong_request_on_both(rank: int, scenes: Scenes) -> None:
    for kind, said in scenes.of(f"pickle {rank}"):
        assert kind == "RequestError"
        assert f"rng_state_{rank}.pth" in said


def test_ranks_that_see_other_checkpoints_do_not_start(scenes: Scenes) -> None:
    for name, found in (("unseen", "checkpoint-4, rank 1 does not see it"), ("more", "no checkpoint, rank 1 one")):
        for kind, said in scenes.of(name):
            assert kind == "RequestError"
            assert found in said
            assert "that all hosts see" in said


def test_what_a_predecessor_saves_while_its_successor_starts_is_gone_on_from_by_all(scenes: Scenes) -> None:
    place = scenes.folder / "between"
    newest = str(place / "checkpoint-8")
    assert scenes.of("between") == [[newest, str(place / "checkpoint-4")], [newest, newest]]


def test_what_a_full_disk_keeps_of_a_teacher_ends_both_with_the_caches_name(scenes: Scenes) -> None:
    for kind, said in scenes.of("cache"):
        assert kind == "RunError"
        assert "is full" in said
        assert "FINETUNE_CACHE" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_one_rank_cannot_read_ends_both_with_one_message(rank: int, scenes: Scenes) -> None:
    kind, said = scenes.ranks[rank][f"read {rank}"]
    assert (kind, said) == tuple(scenes.ranks[1 - rank][f"read {rank}"])
    assert kind == "RunError"
    assert f"rank {rank} could not read checkpoint-4: [Errno 5] Input/output error" in said
