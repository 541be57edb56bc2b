"""A flag that another makes void is refused, implied or overruled, and never passed over in silence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO
from test_recipes import RECIPES

from finetune.entry.main import resolve_here
from finetune.errors import RequestError
from finetune.run.flag import GIVEN, Flag, Void
from finetune.run.launch import Launch
from finetune.run.parse import COMMAND_LINE, Setting
from finetune.run.recipe import Recipe
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.recipes.causal_lm_pipeline import CAUSAL_LM_PIPELINE
from finetune.run.recipes.image_cls import IMAGE_CLS
from finetune.run.recipes.seq2seq import SEQ2SEQ
from finetune.run.recipes.seq_cls import SEQ_CLS
from finetune.run.resolve import resolve
from finetune.run.run import Run
from finetune.run.void import OF_ENGINES, VOID, VOID_HERE, says, settle_void

YAML_LINE = "a.yaml line 1"


def value_of(flag: Flag) -> Any:
    """One that says something, and is not the flag's default."""
    others = [choice for choice in flag.choices if choice != flag.default and says(choice)]
    if others:
        return others[0]
    kinds = {"bool": True, "int": 7, "float": 0.25, "json": {"a": 1}, "str": "word"}
    return [kinds[flag.kind]] if flag.many else kinds[flag.kind]


def cases() -> Iterator[Any]:
    """Each row on each recipe that has both of its flags."""
    for recipe in RECIPES:
        for row in (*VOID, *recipe.void, *VOID_HERE):
            for name in (name for name in row.flags if {name, row.by} <= set(recipe.flags)):
                yield pytest.param(recipe, row, name, id=f"{recipe.name}-{name}-{row.by}")


def settled(recipe: Recipe, flags: dict[str, tuple[Any, str]]) -> tuple[Run, list[str]]:
    """As `resolve` does, before anything else is looked at."""
    run = resolve(recipe, [], Launch(), is_here=False)
    given = {name: Setting(value, source) for name, (value, source) in flags.items()}
    return settle_void(
        replace(run, settings={**run.settings, **given}, notes=()), (*VOID, *run.recipe.void, *VOID_HERE)
    )


def voiding(recipe: Recipe, row: Void) -> Any:
    return value_of(recipe.flags[row.by]) if row.values == GIVEN else row.values[0]


@pytest.mark.parametrize(("recipe", "row", "name"), list(cases()))
def test_a_pair_that_is_said_is_refused_with_both_and_their_sources(recipe: Recipe, row: Void, name: str) -> None:
    value, by = value_of(recipe.flags[name]), voiding(recipe, row)
    _, mistakes = settled(recipe, {row.by: (by, YAML_LINE), name: (value, COMMAND_LINE)})
    said = [one for one in mistakes if f"--{name} is {value!r} (command line)" in one]
    assert any(f"--{row.by} is {by!r} (a.yaml line 1)" in one for one in said)


@pytest.mark.parametrize(("recipe", "row", "name"), list(cases()))
def test_what_is_void_by_a_default_is_implied_or_refused(recipe: Recipe, row: Void, name: str) -> None:
    value = value_of(recipe.flags[name])
    run, mistakes = settled(recipe, {name: (value, COMMAND_LINE)})
    was = resolve(recipe, [], Launch(), is_here=False).value(row.by)
    is_void = says(was) if row.values == GIVEN else was in row.values
    if is_void and row.implies is not None:
        assert run.value(row.by) == row.implies
        assert any(f"--{row.by} is {row.implies!r} (follows from --{name})" in note for note in run.notes)
    elif is_void:
        assert any(f"--{name} is {value!r}" in one and f"--{row.by} is " in one for one in mistakes)
    else:
        assert run.value(row.by) == was


@pytest.mark.parametrize(("recipe", "row", "name"), list(cases()))
def test_the_command_line_overrules_a_yaml_and_says_so(recipe: Recipe, row: Void, name: str) -> None:
    by = voiding(recipe, row)
    given = {row.by: (by, COMMAND_LINE), name: (value_of(recipe.flags[name]), YAML_LINE)}
    run, mistakes = settled(recipe, given)
    assert not [one for one in mistakes if f"--{name} " in one and f"--{row.by} " in one]
    assert name not in run.given
    assert any(
        f"--{name} " in note and f"--{row.by} is {by!r} (command line) overrides it" in note for note in run.notes
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_flags_that_go_together_are_taken(recipe: Recipe) -> None:
    together = (
        "--eval_strategy steps --eval_steps 4 --save_strategy steps --save_steps 4 --warmup_steps 2 --do_eval True"
    )
    run = resolve(recipe, together.split(), Launch(), is_here=False)
    assert run.notes == ()
    assert run.value("save_steps") == 4


def test_every_flag_of_the_table_is_some_recipes() -> None:
    known = {name for recipe in RECIPES for name in recipe.flags}
    own = [row for recipe in RECIPES for row in recipe.void]
    assert {name for row in (*VOID, *VOID_HERE, *own) for name in (*row.flags, row.by, *row.unless)} <= known
    assert {name for flags in OF_ENGINES.values() for name in flags} <= known


def test_save_steps_alone_saves_by_steps() -> None:
    run = resolve(SEQ_CLS, ["--save_steps", "10"], Launch())
    assert run.value("save_strategy") == "steps"
    assert run.said("save_strategy") == "--save_strategy is 'steps' (follows from --save_steps)"


def test_what_asks_for_nothing_is_no_mistake() -> None:
    words = "--lr_scheduler_type constant --warmup_steps 0 --merge_adapter False --max_steps -1 --num_train_epochs 2"
    assert resolve(CAUSAL_LM, words.split(), Launch()).notes == ()


def test_a_runs_record_is_run_again_although_it_has_both(tmp_path: Path) -> None:
    """It holds the recipe's defaults beside what was said."""
    record = tmp_path / "recipe.yaml"
    record.write_text(yaml.safe_dump({"recipe": "seq_cls", "max_steps": 4, "num_train_epochs": 8.0}))
    run = resolve(SEQ_CLS, ["--config", str(record)], Launch())
    assert run.value("max_steps") == 4
    (tmp_path / "mine.yaml").write_text(record.read_text())
    with pytest.raises(RequestError, match=r"--num_train_epochs is 8\.0 .*mine\.yaml line 2.*--max_steps is 4"):
        resolve(SEQ_CLS, ["--config", str(tmp_path / "mine.yaml")], Launch())


DDP_FLAGS = "--ddp_find_unused_parameters True", "--ddp_bucket_cap_mb 25", "--ddp_static_graph True"
TWO = Launch(world_size=2, local_world_size=2, launcher="torchrun")


def starting(recipe: Recipe, words: str, launch: Launch, folder: Path) -> Run:
    return resolve_here(recipe, [*words.split(), "--output_dir", str(folder / "out")], launch)


@pytest.mark.parametrize("flag", [*DDP_FLAGS, "--ddp_broadcast_buffers True", "--ddp_backend gloo"])
def test_a_flag_of_ddp_is_refused_where_another_engine_trains(flag: str, tmp_path: Path) -> None:
    name, launcher = flag.split()[0], replace(TWO, launcher="deepspeed")
    with pytest.raises(RequestError, match=rf"{name} is .*\(command line\).*--deepspeed is 'zero3' \(command line\)"):
        starting(SEQ_CLS, f"{flag} --deepspeed zero3", TWO, tmp_path)
    with pytest.raises(RequestError, match=rf"{name} is .*--deepspeed is 'zero2' \(follows from the launch\)"):
        starting(SEQ_CLS, flag, launcher, tmp_path)
    with pytest.raises(RequestError, match=rf"{name} is .*: DeepSpeed's engine runs a pipeline"):
        starting(CAUSAL_LM_PIPELINE, f"{flag} --pipeline_parallel_size 2", launcher, tmp_path)
    if name != "--ddp_backend":  # by which FSDP's ranks meet, too
        with pytest.raises(RequestError, match=rf"{name} is .*--fsdp is True \(command line\)"):
            starting(SEQ_CLS, f"{flag} --fsdp True", TWO, tmp_path)
    for launch in (TWO, Launch()):  # one rank has no DDP, but the same line runs on more
        starting(SEQ_CLS, f"{flag} --deepspeed none", launch, tmp_path)


def test_a_recipes_own_flags_of_ddp_go_with_any_engine(tmp_path: Path) -> None:
    for recipe, name in ((CAUSAL_LM, "ddp_find_unused_parameters"), (IMAGE_CLS, "ddp_broadcast_buffers")):
        assert starting(recipe, "--deepspeed zero2", TWO, tmp_path).value(name) is False


def test_a_yaml_with_flags_of_ddp_serves_other_launches_unless_it_asks_for_them_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("ddp_bucket_cap_mb: 50\n")
    starting(SEQ_CLS, f"--config {path} --deepspeed zero2", TWO, tmp_path)
    starting(SEQ_CLS, f"--config {path}", replace(TWO, launcher="deepspeed"), tmp_path)
    both = "ddp_bucket_cap_mb: 50\ndeepspeed: zero2\n"
    path.write_text(both)
    with pytest.raises(RequestError, match=r"--ddp_bucket_cap_mb is 50 .*line 1.*--deepspeed is 'zero2' .*line 2"):
        starting(SEQ_CLS, f"--config {path}", TWO, tmp_path)
    record = tmp_path / "recipe.yaml"
    record.write_text(both)  # a run of before, which may have passed over it
    starting(SEQ_CLS, f"--config {record}", TWO, tmp_path)


@pytest.mark.parametrize(
    "flag",
    [
        "--debug underflow_overflow",
        "--skip_memory_metrics False",
        "--eval_accumulation_steps 2",
        "--accelerator_config a",
    ],
)
def test_a_pipeline_refuses_what_the_trainer_alone_does(flag: str) -> None:
    with pytest.raises(RequestError, match=rf"{flag.split()[0]} is .*\(command line\): .*Drop it"):
        resolve(CAUSAL_LM_PIPELINE, [*flag.split(), "--pipeline_parallel_size", "1"], Launch(), is_here=False)


def test_a_pipeline_saves_weights_alone() -> None:
    resolve(CAUSAL_LM_PIPELINE, "--save_only_model True".split(), Launch(), is_here=False)


def test_early_stopping_without_the_best_model_goes_by_the_loss() -> None:
    words = "--early_stopping_patience 2 --load_best_model_at_end".split()
    assert resolve(SEQ_CLS, [*words, "False"], Launch()).value("metric_for_best_model") == "loss"
    assert resolve(SEQ_CLS, [*words, "False", "--metric_for_best_model", "f1_macro"], Launch()).value(
        "metric_for_best_model"
    ) == "f1_macro"  # fmt: skip
    assert resolve(SEQ_CLS, [*words, "True"], Launch()).value("metric_for_best_model") is None


def test_a_folder_for_nvme_offload_is_refused_where_nothing_is_offloaded_to_it(tmp_path: Path) -> None:
    disk = f"--nvme_path {tmp_path}"
    with pytest.raises(RequestError, match=r"--nvme_path is .*does nothing: zero2 offloads nothing to a disk"):
        starting(SEQ_CLS, f"{disk} --deepspeed zero2", TWO, tmp_path)
    starting(SEQ_CLS, f"{disk} --deepspeed zero3_nvme", TWO, tmp_path)
    shipped = json.loads((REPO / "ds_configs" / "zero3_nvme.json").read_text())
    for what in ("optimizer", "param"):
        shipped["zero_optimization"][f"offload_{what}"]["nvme_path"] = str(tmp_path / "own")
    (tmp_path / "own.json").write_text(json.dumps(shipped))
    with pytest.raises(RequestError, match=r"--nvme_path is .*does nothing: own offloads to .*own"):
        starting(SEQ_CLS, f"{disk} --deepspeed {tmp_path}/own.json", TWO, tmp_path)
    (tmp_path / "a.yaml").write_text(f"nvme_path: {tmp_path}\n")
    starting(SEQ_CLS, f"--config {tmp_path}/a.yaml --deepspeed zero2", TWO, tmp_path)


@pytest.mark.parametrize("flag", ["--source_lang en", "--target_lang de", "--source_column_name a"])
def test_what_built_in_pairs_do_not_have_is_refused(flag: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=rf"{flag.split()[0]} is .*\(command line\).*Built-in data has "):
        starting(SEQ2SEQ, flag, Launch(), tmp_path)


@pytest.mark.parametrize("flag", ["--train_on last", "--chat_template chatml", "--reasoning strip"])
def test_built_in_data_has_no_conversations(flag: str, tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=rf"{flag.split()[0]} is .*\(command line\).*Built-in data has no conversations"
    ):
        starting(CAUSAL_LM, flag, Launch(), tmp_path)
    starting(CAUSAL_LM, "--train_on assistant --reasoning keep", Launch(), tmp_path)


def test_a_deepspeed_config_and_a_recipes_yaml_in_each_others_place_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 2}}')
    (tmp_path / "mine.yaml").write_text("max_steps: 3\n")
    for name in (f"{tmp_path}/mine.json", "zero2"):
        with pytest.raises(RequestError, match=f"that is a DeepSpeed config. Use --deepspeed {name}"):
            starting(SEQ_CLS, f"--config {name}", Launch(), tmp_path)
    for name in (f"{tmp_path}/mine.yaml", "lora_24gb"):
        with pytest.raises(RequestError, match=rf"--deepspeed is .*{name} is a recipe's YAML, for --config"):
            starting(SEQ_CLS, f"--deepspeed {name}", Launch(), tmp_path)


def test_ranks_without_a_place_to_meet_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(RequestError, match=r"RANK is 0 and WORLD_SIZE is 2 .* without MASTER_PORT, .*torchrun"):
        starting(SEQ_CLS, "", TWO, tmp_path)
    starting(SEQ_CLS, "", replace(TWO, world_size=1, local_world_size=1), tmp_path)
    monkeypatch.setenv("MASTER_PORT", "29500")
    starting(SEQ_CLS, "", TWO, tmp_path)
