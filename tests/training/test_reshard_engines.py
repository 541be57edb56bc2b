"""What another layout wrote, loaded by name into live engines of DeepSpeed and FSDP, on one rank and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live_engines import ENGINES, SCALE
from test_reshard import DECAYS, STEPS

SCRIPT = Path(__file__).with_name("live_engines.py")
pytestmark = pytest.mark.usefixtures("built_ops")


COUNTS = [pytest.param(1, id="one rank", marks=pytest.mark.nightly), pytest.param(2, id="two ranks")]


@pytest.fixture(scope="module", params=COUNTS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the engines of each rank hold."""
    folder, count = tmp_path_factory.mktemp("engines"), request.param
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LOCAL_RANK": "0"}
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    words = [[sys.executable, str(SCRIPT), str(folder), str(rank), str(count)] for rank in range(count)]
    processes = [subprocess.Popen(of_rank, **pipes) for of_rank in words]
    try:
        ended = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, ended
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_holds_every_weight_and_state_to_the_bit(engine: str, ranks: list[dict[str, Any]]) -> None:
    for found in (rank[engine] for rank in ranks):
        assert found["other"] == []
        assert found["steps"] == [STEPS]
        assert found["decays"] == list(DECAYS)
        assert found["rates"] == [0.01, 0.01]
        assert found["buffer"] == [0.0, 1.0, 2.0]
        assert found["frozen"] == 6.0
        assert found["counters"] == [7, 1, 112]
        assert found["scale"] == (list(SCALE.values()) if "fp16" in engine else None)
        assert found["steps after one more"] == [STEPS + 1]


def test_a_state_that_one_rank_cannot_read_ends_all(ranks: list[dict[str, Any]]) -> None:
    assert [found["cannot read"] for found in ranks] == ["b.bias is gone"] * len(ranks)


def test_a_scale_that_overflows_have_lowered_goes_along(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["overflow"] for rank in ranks):
        scale, _, last = found["of"]
        assert scale < SCALE["cur_scale"]
        assert last > SCALE["last_overflow_iter"]
        assert found["steps"] == STEPS  # none of the three changed a weight
        assert len(found["others"]) == 4
        assert all(other == [*found["of"], 1 + 3] for other in found["others"].values()), found
