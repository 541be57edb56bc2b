"""Runs that are killed by SIGKILL at random moments, also in their saves, go on from their last durable checkpoint and
end bit-equal to the run that nobody killed. The long form is benchmarks/faults.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import Chain

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("built_ops")]


@pytest.mark.parametrize(
    ("name", "kills", "seed"),
    [
        ("plain", 2, 2),
        ("zero2", 5, 2),
        ("pipeline", 5, 3),
        ("image_cls", 4, 4),
        ("experts", 4, 5),
        ("sequence", 4, 6),
    ],
)
def test_a_run_that_is_killed_again_and_again_loses_nothing(name: str, kills: int, seed: int, tmp_path: Path) -> None:
    *struck, closing = Chain(name, 0, seed, tmp_path).rows(kills)
    assert len(struck) == kills
    assert [row["resumed"] for row in struck] == [True] * kills, struck
    assert [row["lost_steps"] for row in struck] == [0] * kills, struck
    assert any(row["durable"] for row in struck), struck  # one at least came after a save
    assert closing["ended"]
    assert (closing["weights_apart"], closing["rows_apart"], closing["left_over"]) == ([], [], [])


@pytest.mark.parametrize(
    ("name", "kills", "seed"), [("ddp", 4, 5), ("zero2", 4, 6), ("zero3", 4, 7), ("pipeline", 4, 8), ("experts", 4, 9)]
)
def test_so_does_one_whose_checkpoints_are_written_beside_the_training(
    name: str, kills: int, seed: int, tmp_path: Path
) -> None:
    *struck, closing = Chain(name, 0, seed, tmp_path, async_save="on", aim="writes").rows(kills)
    assert any(row["hit"].startswith("save") for row in struck), struck
    assert [row["resumed"] for row in struck] == [True] * kills, struck
    assert [row["lost_steps"] for row in struck] == [0] * kills, struck
    assert [row["newest_is_whole"] for row in struck] == [True] * kills, struck
    assert closing["ended"]
    assert (closing["weights_apart"], closing["rows_apart"], closing["left_over"]) == ([], [], [])
