"""What a grid in YAML says, and what is refused in it."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO

from finetune.bench.cell import command_of, machine_for, parameters_of, plan_of_cell, why_not
from finetune.bench.grid import LAYOUTS, Grid, read_grid
from finetune.bench.models import PRESETS, find_model
from finetune.errors import RequestError

ONE = {"models": "wide", "layouts": "ddp", "world_sizes": 2}
SHIPPED = sorted((REPO / "recipes" / "configs").glob("bench_*.yaml"))


def grid_of(folder: Path, *blocks: dict[str, Any], **settings: Any) -> Grid:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump({"scale": 0.05, **settings, "grid": list(blocks)}))
    return read_grid(str(path))


def names(grid: Grid) -> list[str]:
    return [cell.name for cell in grid.cells]


def test_a_block_is_the_product_of_its_lists(tmp_path: Path) -> None:
    block = {"models": ["wide", "gptlite"], "layouts": ["ddp", "zero2"], "world_sizes": 2, "micro_batches": [1, 8]}
    assert names(grid_of(tmp_path, block)) == [
        f"{model}-{layout}-2x{micro}"
        for model in ("wide", "gptlite")
        for layout in ("ddp", "zero2")
        for micro in (1, 8)
    ]


def test_names_say_what_differs_from_the_usual(tmp_path: Path) -> None:
    block = {"models": "gptlite", "layouts": ["pipeline", "checkpointing", "zero2"], "world_sizes": 4, "stages": 2,
             "micro_batches": 8, "accumulations": 4, "precisions": "bf16"}  # fmt: skip
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 2}}')
    block |= {"checkpoint_intervals": 2, "ds_configs": str(tmp_path / "mine.json")}
    assert names(grid_of(tmp_path, block)) == [
        "gptlite-pipeline2-mine-4x8-a4-c2-bf16",
        "gptlite-checkpointing-4x8-a4-c2-bf16",
        "gptlite-zero2-mine-4x8-a4-c2-bf16",
    ]


def test_accumulation_makes_up_for_the_ranks_of_the_same_global_batch(tmp_path: Path) -> None:
    block = {"models": "gptlite", "layouts": ["none", "ddp", "pipeline"], "world_sizes": 4, "stages": [1, 2, 4],
             "micro_batches": 2, "global_batch": 16}  # fmt: skip
    cells = grid_of(tmp_path, block).cells
    assert [cell.accumulation for cell in cells] == [8, 2, 2, 4, 8]
    assert {cell.samples for cell in cells} == {16}


def test_one_process_is_the_same_in_any_world(tmp_path: Path) -> None:
    block = {"models": "wide", "layouts": ["none", "ddp"], "world_sizes": [2, 4]}
    assert names(grid_of(tmp_path, block)) == ["wide-none-1x1", "wide-ddp-2x1", "wide-ddp-4x1"]


@pytest.mark.parametrize(
    ("block", "settings", "said"),
    [
        ({"layout": "ddp"}, {}, "'layout' is not a key of a block. Did you mean layouts"),
        ({}, {"repeat": 2}, "'repeat' is not a key of a grid. Did you mean repeats"),
        ({"layouts": "zero4"}, {}, "'zero4' is not a layout. Did you mean zero"),
        ({"models": "gpt-lite"}, {}, "'gpt-lite' is not a model of the benchmark. Did you mean gptlite"),
        ({"precisions": "bf61"}, {}, "Did you mean bf16"),
        ({"micro_batches": 0}, {}, "micro_batches is 0, but it must be a whole number of 1 or more"),
        ({"world_sizes": [2, True]}, {}, "world_sizes is True"),
        ({"models": []}, {}, "models is missing"),
        ({"layouts": [{"zero1": 2}]}, {}, "layouts holds {'zero1': 2}, but it must hold names"),
        ({"ds_configs": "zero1"}, {}, "no layout of the block is DeepSpeed's"),
        ({"layouts": "zero1", "ds_configs": "zero9"}, {}, "zero9: there is no such DeepSpeed config"),
        (
            {"layouts": "zero1", "ds_configs": "zero3"},
            {},
            "zero3 is ZeRO stage 3, but the layout zero1 is ZeRO stage 1",
        ),
        (
            {"layouts": "zero3", "ds_configs": "zeropp"},
            {},
            "zeropp is ZeRO++ stage 3, but the layout zero3 is ZeRO stage",
        ),
        ({"layouts": "zero3_offload", "ds_configs": "zero3"}, {}, "with offload of optimizer to cpu and param to cpu."),
        ({"layouts": "pipeline", "stages": 3}, {}, "2 ranks are not a multiple of 3 stages. Give world_sizes 3 or"),
        ({"layouts": "pipeline", "world_sizes": [4, 3], "stages": 2}, {}, "3 ranks are not a multiple of 2 stages"),
        ({"micro_batches": 3, "global_batch": 8}, {}, "global_batch 8 is not a multiple of 3 x 2 = 6"),
        ({"micro_batches": 3, "global_batch": 8}, {}, "Give 6, or another micro-batch"),
        ({"layouts": "deepspeed"}, {}, "the layout deepspeed needs ds_configs, and there are none"),
        ({"stages": 2}, {}, "no layout of the block is a pipeline"),
        ({"global_batch": 8, "accumulations": 2}, {}, "Drop one"),
        ({}, {"steps": 0}, "steps is 0"),
        ({}, {"scale": -1}, "scale is -1, but it must be a number above 0"),
        ({}, {"learning_rate": "1e-4"}, "learning_rate is '1e-4'"),
        ({}, {"models": {"wide": {"widht": 8}}}, "'widht' is not a size that can be changed. Did you mean width"),
        ({}, {"models": {"wide": {"width": "8"}}}, "width is '8', but it must be like 8192"),
        ({}, {"models": {"deep": {"width": 8}}}, "deep is changed, but no block of the grid has it"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place_and_mend(
    block: dict[str, Any], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as error:
        grid_of(tmp_path, {**ONE, **block}, **settings)
    assert said in str(error.value)
    assert str(error.value).startswith(str(tmp_path))


def test_a_cell_that_is_there_already_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="block 2: wide-ddp-2x1 is already in block 1"):
        grid_of(tmp_path, ONE, {**ONE, "layouts": ["zero1", "ddp"]})


@pytest.mark.parametrize("text", ["grid: []", "scale: 1", "- wide", "grid: [wide]", "", "# nothing yet"])
def test_a_yaml_that_is_no_grid_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(RequestError, match="must "):
        read_grid(str(path))


def test_an_empty_yaml_says_what_belongs_into_it(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.touch()
    with pytest.raises(RequestError, match=r"must hold `grid:`, a list of blocks \(docs/bench.md\), but is empty"):
        read_grid(str(path))


def test_a_file_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere\.yaml: cannot be read") as error:
        read_grid(str(tmp_path / "nowhere.yaml"))
    assert "--config" not in str(error.value)


@pytest.mark.parametrize(
    ("block", "gpus", "said"),
    [
        ({"layouts": "ddp", "world_sizes": 8}, 0, r"8 ranks are more than this machine's 4 core\(s\)"),
        ({"layouts": "ddp", "world_sizes": 4}, 2, r"4 ranks are more than this machine's 2 GPU\(s\)"),
        ({"layouts": "ddp", "world_sizes": 1}, 0, "it would be the same as `none`"),
        ({"models": "resnet", "layouts": "pipeline", "world_sizes": 2}, 0, "resnet cannot be cut into pipeline stages"),
        ({"layouts": "ddp"}, 0, None),
    ],
)
def test_what_cannot_be_is_known_before_it_is_started(
    block: dict[str, Any], gpus: int, said: str | None, tmp_path: Path
) -> None:
    (cell,) = grid_of(tmp_path, {**ONE, **block}).cells
    found = why_not(cell, gpus=gpus, cores=4)
    assert (found is None) == (said is None)
    assert said is None or re.search(said, str(found))


def test_the_grid_is_another_once_a_figure_may_be(tmp_path: Path) -> None:
    config = tmp_path / "mine.json"
    config.write_text('{"zero_optimization": {"stage": 1}}')
    block = {**ONE, "layouts": "zero1", "ds_configs": str(config)}
    first = grid_of(tmp_path, block).sha256
    config.write_text('{"zero_optimization":   {"stage": 1}}')
    assert grid_of(tmp_path, block, repeats=3, timeout_seconds=9).sha256 == first
    assert grid_of(tmp_path, block, steps=9).sha256 != first
    assert grid_of(tmp_path, block, models={"wide": {"layers": 9}}).sha256 != first
    config.write_text('{"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}')
    assert grid_of(tmp_path, block).sha256 != first


def test_every_layout_has_a_command_with_its_launcher_and_config(tmp_path: Path) -> None:
    usual = {"models": "gptlite", "world_sizes": 2, "micro_batches": 4}
    shipped = {**usual, "layouts": [name for name in LAYOUTS if name != "deepspeed"]}
    own = {**usual, "layouts": "deepspeed", "ds_configs": "zero2_offload"}
    grid = grid_of(tmp_path, shipped, own, models={"gptlite": {"num_hidden_layers": 2}})
    assert {cell.layout for cell in grid.cells} == set(LAYOUTS)
    for cell in grid.cells:
        words = command_of(cell, grid, tmp_path, on_cpu=True)
        flags = dict(pairwise(words))
        assert flags["--model_changes"] == '{"num_hidden_layers": 2}'
        assert flags["--per_device_train_batch_size"] == "4"
        config = cell.ds_config
        assert words[0] == sys.executable  # console scripts may lie anywhere
        assert ("deepspeed.launcher.runner" in words) == (config is not None)
        assert (flags.get("--deepspeed", "none") != "none") == (config is not None)
        assert ("torch.distributed.run" in words) == (cell.layout in ("ddp", "fsdp", "checkpointing"))
        assert ("--pipeline_parallel_size" in words) == (cell.layout == "pipeline")
        assert ("--activation_checkpoint_interval" in words) == (cell.layout == "checkpointing")


def test_the_shipped_grids_are_read_and_planned() -> None:
    assert [path.stem for path in SHIPPED] == ["bench_gptlite_post", "bench_gpu", "bench_laptop"]
    for path in SHIPPED:
        grid = read_grid(str(path))
        machine = machine_for("cpu" if path.stem == "bench_laptop" else "V100-32GB", [])
        looked_at = [*grid.cells[:4], *(cell for cell in grid.cells[4:] if cell.layout == "pipeline")]
        plans = [plan_of_cell(cell, grid.models[cell.model], machine) for cell in looked_at]
        assert all(plan and plan["peak_bytes"] > 0 and plan["step_seconds"] > 0 for plan in plans)


def test_the_studys_grid_has_its_sizes_and_a_bucket_axis() -> None:
    """brunomaga.github.io, assets/GPTlite-distributed: benchmark.py (in_size = out_size = W, L linear layers) and the
    post's config (train_batch_size 256, a sample a GPU, buckets of 4e5)."""
    grid = read_grid(str(SHIPPED[0]))
    assert {(cell.samples, cell.micro_batch, cell.world_size) for cell in grid.cells} == {(256, 1, 8)}
    sizes = {name: tuple(grid.models[name].config[key] for key in ("width", "num_labels")) for name in ("wide", "deep")}
    assert sizes == {"wide": (8192, 8192), "deep": (256, 256)}
    linear = {name: grid.models[name].config["layers"] + 1 for name in sizes}  # and the head
    assert linear == {"wide": 3, "deep": 2048}
    assert parameters_of(grid.models["wide"]) == 3 * (8192 * 8192 + 8192)
    for stage in (1, 2, 3):
        configs = {cell.ds_config for cell in grid.cells if cell.layout == f"zero{stage}"}
        assert configs == {f"zero{stage}", f"recipes/configs/bench_zero{stage}_4e5.json"}
        names = f"ds_configs/zero{stage}.json", f"recipes/configs/bench_zero{stage}_4e5.json"
        shipped, own = (json.loads((REPO / name).read_text()) for name in names)
        buckets = {key for key in shipped["zero_optimization"] if key.endswith("bucket_size")}
        assert {own["zero_optimization"].pop(key) for key in buckets} == {400_000}
        for key in buckets:
            del shipped["zero_optimization"][key]
        assert own == shipped


def test_the_laptop_grid_is_two_ranks_and_few_launches() -> None:
    cells = read_grid(str(SHIPPED[-1])).cells
    assert max(cell.world_size for cell in cells) == 2
    assert {"ddp", "zero0", "zero1", "zero2", "zero3", "zero3_offload", "zeropp", "checkpointing", "pipeline"} <= {
        cell.layout for cell in cells
    }
    assert len(cells) <= 26  # some 17 seconds each, on a quiet machine


def test_a_scale_makes_every_model_smaller_and_keeps_it_whole() -> None:
    for name in PRESETS:
        whole, small = find_model(name), find_model(name, scale=0.1)
        assert small.config != whole.config
        assert (small.sequence_tokens > 0, small.image_size > 0) == (whole.sequence_tokens > 0, whole.image_size > 0)
    assert find_model("wide", scale=0.5).config["width"] == 4096
    assert find_model("gptlite", scale=0.5).config["num_attention_heads"] == 6
    assert find_model("gptlite", changes={"sequence_tokens": 96}).config["max_position_embeddings"] == 96
    with pytest.raises(RequestError, match="hidden_size is 768, but it must be a multiple of num_attention_heads, 5"):
        find_model("gptlite", changes={"num_attention_heads": 5})
