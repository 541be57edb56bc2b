"""The files for containers, held against the schemas that their tools publish; the image's RUN lines are tried by
tests/test_install.py. Without these tools, which `install.sh --dev` installs, they skip."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO, tool
from packaging.specifiers import SpecifierSet

FOLDER = REPO / "recipes" / "launch"


def run(name: str, *words: str) -> None:
    if not Path(tool(name)).exists():
        pytest.skip(f"{name} is not installed: bash install.sh --dev")
    done = subprocess.run([tool(name), *words], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def base() -> str:
    (found,) = re.findall(r"^ARG BASE=(\S+)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    return str(found)


def test_the_dockerfile_is_clean() -> None:
    run("hadolint", str(FOLDER / "Dockerfile"))


def test_the_dockerfile_and_compose_build_on_one_public_image_without_arguments() -> None:
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", base())
    text = (FOLDER / "Dockerfile").read_text()
    assert re.findall(r"^FROM (.*)", text, re.MULTILINE) == ["${BASE}"]
    assert re.findall(r"^RUN (.*)", text, re.MULTILINE) == ["bash install.sh --no-venv"]
    build = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["finetune"]["build"]
    assert build["args"] == {"BASE": f"${{BASE:-{base()}}}"}


def test_the_oldest_tag_named_has_a_torch_that_the_toolkit_takes() -> None:
    """The versions are those of NVIDIA's release notes (docs/launch.md): 25.01 has 2.6.0a0, 25.02 has 2.7.0a0."""
    (line,) = re.findall(r'"torch(>=[^"]+)"', (REPO / "pyproject.toml").read_text())
    takes = SpecifierSet(line, prereleases=True).contains
    assert not takes("2.6.0a0+ecf3bae40a.nv25.1")
    assert takes("2.7.0a0+6c54963f75.nv25.2")
    for path in (FOLDER / "Dockerfile", REPO / "docs" / "launch.md"):
        assert re.search(r"\b25\.02-py3\b", path.read_text()), path


def test_the_image_is_built_where_docker_runs() -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no docker daemon: its RUN lines are tried by tests/test_install.py")
    if subprocess.run(["docker", "image", "inspect", base()], capture_output=True, check=False).returncode:
        pytest.skip(f"{base()} is not here: docker pull it")
    subprocess.run(["docker", "build", "-f", "recipes/launch/Dockerfile", "."], cwd=REPO, check=True)


def test_the_compose_file_is_one() -> None:
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(FOLDER / "compose.yaml"))


def test_the_scripts_are_clean() -> None:
    # Info alone: what is sourced is not there, what a trap calls is called, and what a task expands is quoted.
    run("shellcheck", "--severity", "warning", str(FOLDER / "slurm.sbatch"), "install.sh", ".ci/run")


def job() -> Any:
    return yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())


def test_the_pods_of_the_kubernetes_job_are_pods() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="bash install.sh --dev installs kubernetes-validate")
    for replica in job()["spec"]["pytorchReplicaSpecs"].values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "it"}, "spec": replica["template"]["spec"]}
        kubernetes.validate(pod, kubernetes.latest_version(), strict=True)
        assert replica["template"]["spec"]["containers"][0]["name"] == "pytorch"


def test_the_kubernetes_job_has_the_fields_of_the_training_operator_alone() -> None:
    models = pytest.importorskip("kubeflow.training.models", reason="bash install.sh --dev installs kubeflow-training")
    assert unknown_fields(job(), "KubeflowOrgV1PyTorchJob", models) == []
    wrong = json.loads(json.dumps(job()).replace("nprocPerNode", "nprocPerNodes"))
    assert unknown_fields(wrong, "KubeflowOrgV1PyTorchJob", models) == ["nprocPerNodes"]


def unknown_fields(value: Any, kind: str, models: Any) -> list[str]:
    """Keys that the SDK's model of `kind` does not have, however deep; Kubernetes' own kinds are looked at above."""
    if inner := re.fullmatch(r"(?:dict\(str, |list\[)(\w+)[)\]]", kind):
        values = value.values() if isinstance(value, dict) else value
        return [name for each in values for name in unknown_fields(each, inner[1], models)]
    model = getattr(models, kind, None)
    if model is None or not kind.startswith("Kubeflow"):
        return []
    attributes = {key: name for name, key in model.attribute_map.items()}
    found = [key for key in value if key not in attributes]
    for key in value.keys() & attributes.keys():
        found += unknown_fields(value[key], model.openapi_types[attributes[key]], models)
    return found
