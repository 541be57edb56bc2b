"""Every accelerate config that is shipped starts a recipe for real, with the loss of any other launcher."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from conftest import REPO, TINY, gate_has, launch

FOLDER = REPO / "recipes" / "launch"
SEVERAL_HOSTS = "accelerate_multi_node"  # test_hosts.py starts it
CONFIGS = sorted(path.stem for path in FOLDER.glob("accelerate_*.yaml") if path.stem != SEVERAL_HOSTS)


@pytest.fixture(scope="module")
def loss_of_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("alone") / "run"
    return launch("torchrun", folder, {**TINY, "max_steps": 3}, ranks=2).column("loss")


def test_they_are_these() -> None:
    assert [name.removeprefix("accelerate_") for name in CONFIGS] == "ddp fsdp zero1 zero2 zero3 zero3_offload".split()


@pytest.mark.parametrize("name", gate_has([name for name in CONFIGS if "offload" not in name], CONFIGS))
@pytest.mark.usefixtures("built_ops")
def test_it_trains_as_any_other_launcher(name: str, loss_of_torchrun: list[float], tmp_path: Path) -> None:
    words = ["--config_file", str(FOLDER / f"{name}.yaml")]
    run = launch("accelerate", tmp_path / "run", {**TINY, "max_steps": 3}, ranks=2, words=words)
    assert run.column("loss") == pytest.approx(loss_of_torchrun, rel=1e-2)
    said = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    engine = {"DEEPSPEED": "DeepSpeed ", "FSDP": "FSDP", "MULTI_GPU": "no DeepSpeed"}[said["distributed_type"]]
    assert f"run: 2 rank(s) on CPU, 1 thread(s) a rank; {engine}" in run.output
