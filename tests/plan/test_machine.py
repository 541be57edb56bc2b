"""The shipped machines are whole and plausible, names are understood, and a bad file is refused with its reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

from finetune.dsconfig.context import GPU_CAPABILITY
from finetune.errors import RequestError
from finetune.plan.machine import SHIPPED, Machine, find_machine, machine_names, read_machine, write_machine

SHIPPED_NAMES = (
    "V100-16GB V100-32GB V100-PCIe-16GB V100-PCIe-32GB A100-40GB A100-80GB A100-PCIe-40GB A100-PCIe-80GB A800-80GB "
    "A30 H100-80GB H100-PCIe H100-NVL H800-80GB H20 GH200 H200 B200 B300 L4 L20 L40 L40S T4 P4 P100 A2 A10 A10G A40 "
    "A4000 A5000 A6000 Quadro-RTX8000 RTX6000-Ada RTX-PRO-6000 RTX2080Ti RTX3060 RTX3080 RTX3090 RTX3090-Ti "
    "RTX4060-Ti-8GB RTX4060-Ti-16GB RTX4070-Ti-SUPER RTX4080 RTX4080-SUPER RTX4090 RTX4090-D RTX5060-Ti-8GB "
    "RTX5060-Ti-16GB RTX5070-Ti RTX5080 RTX5090 MI210 MI250X MI300X MI325X MI355X cpu"
).split()
GIB = 2**30
OF_SOME = {"flash_attention_2", "board_power_watts", "sustained"}  # optional: unknown for other machines
NO_NUMBERS = {"name", "device", "sources", "step_factor"}

# name: peaks in TFLOP/s (fp32, tf32, fp16, bf16), dense, with sums in fp32, from the vendors' papers; GiB of
# memory, at least and at most.
EXPECTED = {
    "V100-16GB": ((15.7, None, 125, None), 15.7, 16),
    "V100-32GB": ((15.7, None, 125, None), 31.7, 32),
    "A100-40GB": ((19.5, 156, 312, 312), 39.3, 40),
    "A100-80GB": ((19.5, 156, 312, 312), 79.1, 80),
    "H100-80GB": ((66.9, 494.7, 989.4, 989.4), 79.1, 79.6),
    "H100-PCIe": ((51.2, 378, 756, 756), 79.1, 79.6),
    "H200": ((66.9, 494.7, 989.4, 989.4), 139, 141),
    "B200": ((75, 1125, 2250, 2250), 178, 180),
    "L4": ((30.3, 60, 121, 121), 21.9, 24),
    "T4": ((8.1, None, 65, None), 14.5, 16),
    "P4": ((5.5, None, 5.5, None), 7.4, 8),
    "RTX3090": ((35.6, 35.6, 71, 71), 23.4, 24),
    "RTX4090": ((82.6, 82.6, 165.2, 165.2), 23.4, 24),
    "MI300X": ((163.4, 653.7, 1307.4, 1307.4), 191, 192),
    "RTX5090": ((104.8, 104.8, 209.5, 209.5), 31.3, 32),
    "RTX5080": ((56.3, 56.3, 112.6, 112.6), 15.4, 16),
    "RTX4080": ((48.7, 48.7, 97.5, 97.5), 15.5, 16),
    "RTX4080-SUPER": ((52.2, 52.2, 104.4, 104.4), 15.5, 16),
    "L40S": ((91.6, 183, 362.05, 362.05), 44.3, 45),
    "A10": ((31.2, 62.5, 125, 125), 21.9, 24),
    "A10G": ((35, 35, 70, 70), 21.9, 24),
    "A6000": ((38.7, 77.4, 154.8, 154.8), 47.5, 48),
    "RTX6000-Ada": ((91.1, 182.1, 364.2, 364.2), 44.4, 48),
    "RTX-PRO-6000": ((125, 251.9, 503.8, 503.8), 94.9, 96),
    "H100-NVL": ((60, 417.5, 835.5, 835.5), 92.9, 94),
    "GH200": ((67, 494.5, 989.5, 989.5), 94.4, 96),
    "B300": ((75, 1125, 2250, 2250), 267, 288),
    "MI250X": ((47.9, None, 191.5, 191.5), 63.9, 64),  # one of a card's two devices
    "MI325X": ((163.4, 653.7, 1307.4, 1307.4), 255, 256),
    "V100-PCIe-16GB": ((14, None, 112, None), 15.7, 16),
    "V100-PCIe-32GB": ((14, None, 112, None), 31.7, 32),
    "A100-PCIe-40GB": ((19.5, 156, 312, 312), 39.3, 40),
    "A100-PCIe-80GB": ((19.5, 156, 312, 312), 79.1, 80),
    "A800-80GB": ((19.5, 156, 312, 312), 79.1, 80),
    "A30": ((10.3, 82, 165, 165), 23.4, 24),
    "H800-80GB": ((66.9, 494.7, 989.4, 989.4), 79.1, 79.6),
    "H20": ((44, 74, 148, 148), 94.9, 96),
    "L20": ((59.8, 59.8, 119.5, 119.5), 44.3, 48),
    "L40": ((90.5, 90.5, 181.05, 181.05), 44.3, 48),
    "P100": ((9.3, None, 9.3, None), 15.8, 16),
    "A2": ((4.5, 9, 18, 18), 14.4, 16),
    "A40": ((37.4, 74.8, 149.7, 149.7), 44.3, 48),
    "A4000": ((19.2, 38.3, 76.7, 76.7), 15.5, 16),
    "A5000": ((27.8, 55.6, 111.1, 111.1), 23.5, 24),
    "Quadro-RTX8000": ((16.3, None, 130.5, None), 47.4, 48),
    "RTX2080Ti": ((13.4, None, 53.8, None), 10.7, 11),
    "RTX3060": ((12.7, 12.7, 25.4, 25.4), 11.7, 12),
    "RTX3080": ((29.8, 29.8, 59.6, 59.6), 9.7, 10),
    "RTX3090-Ti": ((40, 40, 80, 80), 23.4, 24),
    "RTX4060-Ti-8GB": ((22.1, 22.1, 44.2, 44.2), 7.5, 8),
    "RTX4060-Ti-16GB": ((22.1, 22.1, 44.2, 44.2), 15.5, 16),
    "RTX4070-Ti-SUPER": ((44.1, 44.1, 88.2, 88.2), 15.5, 16),
    "RTX4090-D": ((73.5, 73.5, 147, 147), 23.4, 24),
    "RTX5060-Ti-8GB": ((23.7, 23.7, 47.4, 47.4), 7.5, 8),
    "RTX5060-Ti-16GB": ((23.7, 23.7, 47.4, 47.4), 15.4, 16),
    "RTX5070-Ti": ((43.9, 43.9, 87.8, 87.8), 15.4, 16),
    "MI210": ((45.3, None, 181, 181), 63.9, 64),
    "MI355X": ((157.3, None, 2516.6, 2516.6), 287, 288),
}
FASTER: dict[str, tuple[Callable[[Machine], float], str]] = {  # figures that grow, or stay, from left to right
    "memory": (
        lambda m: m.memory_bandwidth,
        "cpu P4 L4 T4 A10 V100-16GB A100-40GB H100-PCIe A100-80GB H100-80GB H100-NVL GH200 H200 MI325X B200 B300",
    ),
    "matrices": (
        lambda m: m.peak_flops["fp16"] * m.gemm_efficiency["fp16"],
        "P4 T4 A10 RTX4080 RTX4090 RTX5090 A100-80GB RTX-PRO-6000 H100-PCIe H100-NVL H100-80GB B200 B300",
    ),
    "within a node": (
        lambda m: m.intra_node.bandwidth_bytes_per_second,
        "cpu P4 T4 H100-PCIe V100-16GB A100-80GB H100-80GB B200",
    ),
    "host link": (lambda m: m.host_link.bandwidth_bytes_per_second, "cpu V100-16GB A100-80GB H100-80GB"),
}


def test_the_shipped_machines_are_those_that_are_promised() -> None:
    assert set(machine_names()) == set(SHIPPED_NAMES)


@pytest.mark.parametrize("name", SHIPPED_NAMES)
def test_every_number_has_a_source(name: str) -> None:
    machine = read_machine(SHIPPED / f"{name}.json")
    assert machine.name == name
    without = {key for key in OF_SOME if not getattr(machine, key)}
    assert set(machine.sources) == set(asdict(machine)) - NO_NUMBERS - without
    for source in machine.sources.values():
        assert "https://" in source or source.startswith(("measured", "assumed: "))
        assert "\n" not in source


@pytest.mark.parametrize("name", SHIPPED_NAMES)
def test_every_machine_is_plausible(name: str) -> None:
    machine = find_machine(name)
    assert 0.4 <= min(machine.gemm_efficiency.values()) <= max(machine.gemm_efficiency.values()) < 1
    assert 0.65 <= machine.memory_efficiency <= 0.95
    assert 5e-6 <= machine.launch_seconds <= 37e-6  # the longest that a source of theirs measured
    assert machine.inter_node.bandwidth_bytes_per_second < machine.intra_node.bandwidth_bytes_per_second
    assert machine.inter_node.latency_seconds > machine.intra_node.latency_seconds
    assert machine.nvme.bandwidth_write < machine.nvme.bandwidth_read <= 50e9
    assert machine.context_bytes + machine.workspace_bytes < 0.1 * machine.memory_bytes


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items(), ids=EXPECTED)
def test_peaks_and_memory_are_the_published_ones(
    name: str, expected: tuple[tuple[float | None, ...], float, float]
) -> None:
    peaks, least, most = expected
    machine = find_machine(name)
    wanted = {key: tera * 1e12 for key, tera in zip(("fp32", "tf32", "fp16", "bf16"), peaks, strict=True) if tera}
    assert machine.peak_flops == pytest.approx(wanted)
    assert least * GIB <= machine.memory_bytes <= most * GIB


@pytest.mark.parametrize(("figure", "names"), FASTER.values(), ids=FASTER)
def test_newer_and_larger_machines_are_faster(figure: Callable[[Machine], float], names: str) -> None:
    figures = [figure(find_machine(name)) for name in names.split()]
    assert figures[0] < figures[-1]
    assert figures == sorted(figures)


@pytest.mark.parametrize(
    ("name", "workspace_bytes"),
    [  # torch, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize
        *(
            (name, 2 * 4096 * 1024 + 8 * 16 * 1024)
            for name in (
                "V100-16GB",
                "A100-80GB",
                "L4",
                "T4",
                "RTX4090",
                "RTX4080",
                "L40S",
                "A10G",
                "A6000",
                "A800-80GB",
            )
        ),
        *(
            (name, 32 * 2**20)
            for name in (
                "H100-80GB",
                "H100-PCIe",
                "H100-NVL",
                "GH200",
                "H200",
                "B200",
                "B300",
                "RTX5090",
                "RTX-PRO-6000",
                "H20",
                "MI210",
                "MI250X",
            )
        ),
        *((name, 128 * 2**20) for name in ("MI300X", "MI355X")),
        ("cpu", 0),
    ],
)
def test_the_cublas_workspace_is_what_torch_allocates(name: str, workspace_bytes: int) -> None:
    assert find_machine(name).workspace_bytes == workspace_bytes


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("H100", "H100-80GB"),
        ("h100-80gb", "H100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("A100", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA H200", "H200"),
        ("nvidia l4", "L4"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("rtx-3090", "RTX3090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
        ("5080", "RTX5080"),
        ("NVIDIA GeForce RTX 4080 SUPER", "RTX4080-SUPER"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("AMD Instinct MI250X", "MI250X"),
        ("AMD Instinct MI325X", "MI325X"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32GB"),
        ("NVIDIA A800-SXM4-80GB", "A800-80GB"),
        ("A800", "A800-80GB"),
        ("NVIDIA H800", "H800-80GB"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA L20", "L20"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA A2", "A2"),
        ("NVIDIA A30", "A30"),
        ("NVIDIA A40", "A40"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("NVIDIA RTX A4000", "A4000"),
        ("NVIDIA RTX A5000", "A5000"),
        ("Quadro RTX 8000", "Quadro-RTX8000"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX2080Ti"),
        ("RTX 3060", "RTX3060"),
        ("NVIDIA GeForce RTX 3080", "RTX3080"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX3090-Ti"),
        ("3090 Ti", "RTX3090-Ti"),
        ("2080 ti", "RTX2080Ti"),
        ("4060Ti 16GB", "RTX4060-Ti-16GB"),
        ("6000 Ada", "RTX6000-Ada"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX4060-Ti-8GB"),  # the driver says the same of both sizes
        ("RTX 4060 Ti 16GB", "RTX4060-Ti-16GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX4070-Ti-SUPER"),
        ("NVIDIA GeForce RTX 4090 D", "RTX4090-D"),
        ("NVIDIA GeForce RTX 5060 Ti", "RTX5060-Ti-8GB"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX5070-Ti"),
        ("AMD Instinct MI210", "MI210"),
        ("AMD Instinct MI355X", "MI355X"),
        ("CPU", "cpu"),
    ],
)
def test_a_name_is_understood_as_people_and_drivers_spell_it(asked: str, name: str) -> None:
    assert find_machine(asked).name == name


@pytest.mark.parametrize(("asked", "hint"), [("H10O", "H100-80GB"), ("A100-80G", "A100-80GB"), ("RTX3091", "RTX3090")])
def test_an_unknown_name_is_refused_with_the_nearest(asked: str, hint: str) -> None:
    with pytest.raises(RequestError, match=rf"^{asked}: there is no such machine. Did you mean {hint}\? .*MI300X"):
        find_machine(asked)


def test_another_card_of_the_same_chip_is_not_taken_for_the_one_we_know() -> None:
    for name in (
        "NVIDIA A800 80GB PCIe",
        "NVIDIA H20-3e",
        "NVIDIA H800 PCIe",
        "Tesla V100S-PCIE-32GB",
        "NVIDIA GeForce RTX 3080 Laptop GPU",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "Quadro RTX 6000",
        "AMD Instinct MI250",
        "",
    ):
        with pytest.raises(RequestError):
            find_machine(name)


def test_every_gpu_of_nvidia_has_a_compute_capability() -> None:
    known = {re.sub(r"-\d+GB$", "", name).upper() for name in machine_names() if find_machine(name).device == "cuda"}
    assert known == set(GPU_CAPABILITY)


def test_only_geforce_cards_sustain_the_rate_of_products_alone() -> None:
    """Their power is not exhausted by products."""
    for name in SHIPPED_NAMES:
        machine = find_machine(name)
        is_geforce = name.startswith("RTX") and name not in ("RTX6000-Ada", "RTX-PRO-6000")
        assert machine.sustained == (1 if is_geforce else 0), name


def test_a_machine_that_is_written_reads_back_the_same(tmp_path: Path) -> None:
    for name in SHIPPED_NAMES:
        machine = replace(find_machine(name), step_factor=1.25)
        write_machine(machine, tmp_path / "here.json")
        assert find_machine(str(tmp_path / "here.json")) == machine


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be written"):
        write_machine(find_machine("cpu"), tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("memory_bytes", -1, "memory_bytes is -1, but it must be a whole number of 1 or more"),
        ("memory_bytes", 8e9, "memory_bytes is 8000000000.0, but it must be a whole number"),
        ("ranks_per_node", True, "ranks_per_node is True"),
        ("launch_seconds", "5e-6", "launch_seconds is '5e-6', but it must be a number of 0 or more"),
        ("launch_seconds", 10**350, "launch_seconds is 1000"),
        ("memory_bandwidth", 5e-324, "memory_bandwidth is 5e-324, but it must be a number above 0"),
        ("context_bytes", 10**18, "context_bytes and fragmentation leave nothing of memory_bytes"),
        ("fragmentation", 1, "fragmentation is 1, but it must be a share, 0 or more and below 1"),
        ("device", "tpu", "device is 'tpu', but it must be one of cuda, cpu, rocm"),
        ("name", " ", "name is ' '"),
        ("intra_node", 5e9, "intra_node is 5000000000.0, but it must be an object"),
        ("intra_node.latency_seconds", None, "intra_node.latency_seconds is None"),
        ("nvme.bandwidth_reed", 1, "'bandwidth_reed', which is not one of its keys. Did you mean bandwidth_read?"),
        ("peak_flops.fp8", 1, "peak_flops has 'fp8'"),
        ("peak_flops.bf16", 1e9, "gemm_efficiency has fp32, but peak_flops fp32, bf16"),
        ("peak_flops", {}, "peak_flops lacks fp32"),
        ("gemm_efficiency.fp32", 1.2, "gemm_efficiency.fp32 is 1.2, but it must be a share"),
        ("gemm_table", [], "has 'gemm_table', which is not one of its keys. Remove it, or calibrate again"),
        ("inter_node", {"latency_seconds": 0}, "inter_node lacks bandwidth"),
        ("sources.memory_bytes", "", "sources.memory_bytes is ''"),
        ("memory_byte", 1, "has 'memory_byte', which is not one of its keys. Did you mean memory_bytes?"),
    ],
)
def test_a_value_that_cannot_be_is_refused(tmp_path: Path, path: str, value: Any, said: str) -> None:
    content = json.loads((SHIPPED / "cpu.json").read_text())
    *groups, key = path.split(".")
    place = content
    for group in groups:
        place = place[group]
    place[key] = value
    assert said in _refusal(tmp_path / "bad.json", json.dumps(content))


@pytest.mark.parametrize("key", sorted(set(asdict(find_machine("cpu"))) - {"step_factor"} - OF_SOME))
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    content = json.loads((SHIPPED / "cpu.json").read_text())
    del content[key]
    assert f"the file lacks {key}." in _refusal(tmp_path / "bad.json", json.dumps(content))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is not a JSON object"),
        ('{"name": NaN}', "NaN is not valid JSON"),
        ('{"name": 1, "name": 2}', "a key is given twice"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "nested deeper than 50"),
    ],
)
def test_what_is_no_strict_json_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in _refusal(tmp_path / "bad.json", text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no such file"):
        find_machine(str(tmp_path / "none.json"))


def test_the_page_names_them_all() -> None:
    page = (REPO / "docs/plan.md").read_text()
    assert not [name for name in SHIPPED_NAMES if f"`{name}`" not in page]


def test_the_files_are_packaged() -> None:
    assert '"plan/machines/*.json"' in (REPO / "pyproject.toml").read_text()
    assert {path.stem for path in (REPO / "finetune").glob("plan/machines/*.json")} == set(SHIPPED_NAMES)


def _refusal(path: Path, text: str) -> str:
    """What is said of a file that holds `text`. It names the file."""
    path.write_text(text)
    with pytest.raises(RequestError) as caught:
        read_machine(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)
