"""A resumed run is the run that its checkpoint is of, or it is refused; what is applied shows in the logged rate."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPO, TINY, Finished, gate_has, launch
from durability_runs import SHAPE, different_weights

from finetune.training.checkpoints.identity import read_identity
from finetune.training.checkpoints.manifest import Manifest, files_of, read_manifest, record_of, write_manifest

pytestmark = pytest.mark.usefixtures("built_ops")

ROWS = 40
SAVES = {**TINY, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 8}
SAVES |= {"lr_scheduler_type": "linear", "max_train_samples": 64}


def rows(path: Path, more: int = 0) -> Path:
    """Texts whose words tell their label; `more` of them have words that the others lack."""
    lines = [
        f"{'fine great' if i % 2 else 'poor awful'} film number {i} and all that it says,{i % 2}" for i in range(ROWS)
    ]
    lines += [f"quite zany xylophones everywhere zany {i},{i % 2}" for i in range(more)]
    path.write_text("text,label\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    home = tmp_path_factory.mktemp("first")
    return launch("python", home / "run", {**SAVES, "train_file": rows(home / "rows.csv")})


@pytest.fixture
def cut(first: Finished, tmp_path: Path) -> Callable[..., Finished]:
    """Goes on with a copy of the run as it was after step 2, or after `step`."""

    def go_on(check: bool = False, step: int = 2, env: dict[str, str] | None = None, **flags: Any) -> Finished:
        folder = as_after(first.folder, step, tmp_path / "run")
        given = {**SAVES, "train_file": first.folder.parent / "rows.csv", "resume": "auto", **flags}
        given = {name: value for name, value in given.items() if value is not None}
        return launch("python", folder, given, check=check, env=env)

    return go_on


def as_after(run: Path, step: int, folder: Path) -> Path:
    if not folder.exists():
        shutil.copytree(run, folder)
    (folder / "README.md").unlink(missing_ok=True)
    for checkpoint in folder.glob("checkpoint-*"):
        if int(checkpoint.name.split("-")[1]) > step and not checkpoint.is_symlink():
            shutil.rmtree(checkpoint)
    return folder


def rehash(folder: Path) -> None:
    """As somebody does who has changed files and makes the manifest fit."""
    before = read_manifest(folder)
    names = [name for name in files_of(folder)[0] if name != "manifest.json"]
    write_manifest(folder, Manifest(**{**vars(before), "files": {name: record_of(folder / name) for name in names}}))


def test_run_and_checkpoints_have_one_id_and_say_what_decides_them(first: Finished) -> None:
    of_run = first.json("run.json")["run"]
    for step in (2, 4):
        identity = read_identity(first.folder / f"checkpoint-{step}")
        assert identity is not None
        assert (identity.run, identity.step) == (of_run, step)
        assert {"rows", "files", "tokenizer", "model"} <= identity.facts.keys()
        assert identity.flags["seed"] == 42
        assert {"model.safetensors", "optimizer.pt", "trainer_state.json"} <= identity.files.keys()


def test_what_was_not_changed_goes_on_to_the_bit_and_the_start_names_checkpoint_run_and_step(
    first: Finished, cut: Callable[..., Finished]
) -> None:
    run = cut(check=True)
    assert different_weights(run.folder, first.folder) == []
    assert f"going on from checkpoint-2, step 2 of run {first.json('run.json')['run'][:8]}" in run.output
    assert run.json("run.json")["run"] == first.json("run.json")["run"]
    assert len(run.json("run.json")["lineage"]) == 1


@pytest.mark.parametrize(
    ("flag", "value"), [("seed", 7), ("group_by_length", False), ("max_train_samples", 24), ("max_seq_length", 8)]
)
def test_what_makes_another_run_is_refused(flag: str, value: Any, cut: Callable[..., Finished]) -> None:
    run = cut(**{flag: value})
    assert run.status == 2, run.output[-2000:]
    assert "--resume_changed allow" in run.errors[0]


def test_other_validation_rows_go_on_and_are_said_unless_they_choose_the_best(
    first: Finished, cut: Callable[..., Finished]
) -> None:
    chooses = cut(max_eval_samples=2, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2)
    assert chooses.status == 2, chooses.output[-2000:]
    assert "validation rows" in chooses.errors[0]
    run = cut(check=True, max_eval_samples=2)
    assert "validation rows are not those of checkpoint-2" in run.output
    assert different_weights(run.folder, first.folder) == []
    assert list(run.json("run.json")["lineage"][1]["changed"]) == ["validation rows"]


def test_another_model_is_refused_whatever_is_said(cut: Callable[..., Finished]) -> None:
    run = cut(model_size="small", resume_changed="allow")
    assert run.status == 2
    assert "has another model than" in run.errors[0]


def test_more_rows_are_refused_and_if_allowed_are_read_by_the_tokenizer_of_the_checkpoint(
    first: Finished, cut: Callable[..., Finished], tmp_path: Path
) -> None:
    more = rows(tmp_path / "more.csv", more=8)
    refused = cut(train_file=more)
    assert refused.status == 2
    assert "--train_file" in refused.errors[0]
    run = cut(check=True, train_file=more, resume_changed="allow")
    assert (run.folder / "tokenizer.json").read_text() == (first.folder / "checkpoint-2" / "tokenizer.json").read_text()
    assert [stretch["from_step"] for stretch in run.json("run.json")["lineage"]] == [0, 2]
    assert "train rows" in (run.folder / "recipe.yaml").read_text()
    assert "Lineage" in (run.folder / "README.md").read_text()


def test_the_same_rows_in_another_file_go_on(first: Finished, cut: Callable[..., Finished], tmp_path: Path) -> None:
    run = cut(check=True, train_file=rows(tmp_path / "moved.csv"))
    assert different_weights(run.folder, first.folder) == []


@pytest.mark.parametrize(
    ("flags", "rates"),
    [
        ({"learning_rate": 5e-5}, [5e-5 * 2 / 4, 5e-5 * 1 / 4]),
        ({"lr_scheduler_type": "constant"}, [1e-3, 1e-3]),
        ({"max_steps": 8}, [1e-3 * (8 - step) / 8 for step in range(2, 8)]),
        ({"warmup_steps": 4, "max_steps": 6}, [1e-3 * 2 / 4, 1e-3 * 3 / 4, 1e-3, 1e-3 / 2]),
    ],
)
def test_the_rate_is_applied_from_the_first_step_on_and_said(
    flags: dict[str, Any], rates: list[float], cut: Callable[..., Finished]
) -> None:
    run = cut(check=True, **flags)
    assert run.column("learning_rate")[2:] == pytest.approx(rates, rel=1e-6)
    for flag in flags:
        assert f"resume: --{flag} is" in run.output
    assert set(run.json("run.json")["lineage"][1]["changed"]) == set(flags)


def test_a_precision_that_the_environment_asks_for_is_applied_and_said_unless_a_flag_overrules_it(
    first: Finished, cut: Callable[..., Finished]
) -> None:
    env = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    overruled = cut(check=True, env=env)
    assert different_weights(overruled.folder, first.folder) == []
    assert len(overruled.json("run.json")["lineage"]) == 1
    run = cut(check=True, env=env, bf16=None)
    assert "note: ACCELERATE_MIXED_PRECISION is 'bf16' in the environment" in run.output
    assert "resume: --bf16 is True from step 3 on (until then False)" in run.output
    assert run.json("run.json")["lineage"][1]["changed"] == {"bf16": [False, True]}
    assert different_weights(run.folder, first.folder) != []


def groups_of(checkpoint: Path) -> list[dict[str, Any]]:
    return list(torch.load(checkpoint / "optimizer.pt", weights_only=True)["param_groups"])


def test_decay_and_betas_are_the_optimizers(cut: Callable[..., Finished]) -> None:
    run = cut(check=True, weight_decay=0.3, adam_beta1=0.5, adam_epsilon=1e-6)
    decayed, other = groups_of(run.folder / "checkpoint-4")
    assert (decayed["weight_decay"], other["weight_decay"]) == (0.3, 0.0)
    for group in (decayed, other):
        assert (group["betas"], group["eps"]) == ((0.5, 0.999), 1e-6)


def test_a_checkpoint_of_another_run_is_passed_over_and_refused_by_its_path(
    first: Finished, cut: Callable[..., Finished], tmp_path: Path
) -> None:
    values = {**SAVES, "train_file": first.folder.parent / "rows.csv", "seed": 7}
    other = launch("python", tmp_path / "other", values)
    folder = as_after(first.folder, 2, tmp_path / "run")
    shutil.copytree(other.folder / "checkpoint-4", folder / "checkpoint-4")
    run = cut(check=True, step=4)
    assert "checkpoint-4 belongs to run" in run.output
    assert different_weights(run.folder, first.folder) == []
    shutil.copytree(other.folder / "checkpoint-2", folder / "checkpoint-9")
    refused = cut(resume=other.folder / "checkpoint-2", seed=7)
    assert refused.status == 2
    assert "belongs to run" in refused.errors[0]


def test_a_link_is_not_gone_on_with(first: Finished, cut: Callable[..., Finished], tmp_path: Path) -> None:
    folder = as_after(first.folder, 2, tmp_path / "run")
    shutil.copytree(first.folder / "checkpoint-4", tmp_path / "elsewhere")
    (folder / "checkpoint-4").symlink_to(tmp_path / "elsewhere")
    run = cut(step=4, resume=folder / "checkpoint-4")
    assert run.status == 2
    assert "is a link" in run.errors[0]
    run = cut(check=True, save_total_limit=1)
    assert "checkpoint-4 is a link" in run.output
    assert [path.is_symlink() for path in folder.glob("*checkpoint-*")] == [False]
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == sorted(
        path.name for path in (first.folder / "checkpoint-4").iterdir()
    )


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt"])
def test_parts_of_two_steps_are_refused_though_the_hashes_were_made_anew(
    name: str, first: Finished, cut: Callable[..., Finished], tmp_path: Path
) -> None:
    folder = as_after(first.folder, 4, tmp_path / "run")
    shutil.copy(folder / "checkpoint-2" / name, folder / "checkpoint-4" / name)
    rehash(folder / "checkpoint-4")
    run = cut(step=4, max_steps=6, resume=folder / "checkpoint-4")
    assert run.status == 2
    assert f"checkpoint-4/{name} is not the file that was saved at step 4" in run.errors[0]


@pytest.mark.parametrize("with_record", [True, False])
@pytest.mark.parametrize(
    ("name", "value"),
    [("global_step", 10**9), ("global_step", -3), ("logged_step", [1]), ("epoch", "one"), ("total", None)],
)
def test_a_state_whose_numbers_cannot_be_is_refused_in_words(
    name: str, value: Any, with_record: bool, first: Finished, cut: Callable[..., Finished], tmp_path: Path
) -> None:
    checkpoint = as_after(first.folder, 2, tmp_path / "run") / "checkpoint-2"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    losses = state["stateful_callbacks"]["RunningLoss"]["attributes"]
    (losses if name in losses else state)[name] = value
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    if not with_record:
        (checkpoint / "run.json").unlink()
    rehash(checkpoint)
    run = cut()
    assert run.status == 2
    assert name in run.errors[0]
    assert "Traceback" not in run.output


def test_a_checkpoint_without_a_record_goes_on_with_a_line(
    first: Finished, cut: Callable[..., Finished], tmp_path: Path
) -> None:
    folder = as_after(first.folder, 2, tmp_path / "run")
    (folder / "run.json").unlink()
    (folder / "checkpoint-2" / "run.json").unlink()
    rehash(folder / "checkpoint-2")
    run = cut(check=True)
    assert "has no run.json" in run.output
    assert different_weights(run.folder, first.folder) == []
    refused = cut(model_size="small", max_steps=6)
    assert refused.status == 2


PIPE = {
    "config_overrides": f"{SHAPE.rpartition('=')[0]}=0.0",
    "max_steps": 4,
    "max_train_samples": 3,
    "max_eval_samples": 8,
    "sample_tokens": 4,
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": 2,
    "logging_steps": 1,
    "bf16": False,
    "warmup_steps": 0,
    "lr_scheduler_type": "linear",
    "learning_rate": 1e-3,
}
DEEP = {key: value for key, value in SAVES.items() if key != "train_file"} | {"gradient_accumulation_steps": 1}
ENGINES = {
    "zero0": (DEEP | {"deepspeed": "zero0"}, "recipes/seq_cls.py"),
    "zero1": (DEEP | {"deepspeed": "zero1"}, "recipes/seq_cls.py"),
    "zero2_bf16": (DEEP | {"deepspeed": "zero2", "bf16": True}, "recipes/seq_cls.py"),
    "zero3": (DEEP | {"deepspeed": "zero3"}, "recipes/seq_cls.py"),
    "zero3_offload": (DEEP | {"deepspeed": "zero3_offload"}, "recipes/seq_cls.py"),
    "fsdp": (DEEP | {"fsdp": "full_shard"}, "recipes/seq_cls.py"),
    "pipeline": (PIPE | {"pipeline_parallel_size": 2}, "recipes/causal_lm_pipeline.py"),
}


@pytest.mark.parametrize("engine", gate_has(["zero2_bf16", "zero3", "fsdp", "pipeline"], list(ENGINES)))
def test_each_engine_applies_rate_and_decay_to_its_optimizer(engine: str, tmp_path: Path) -> None:
    flags, recipe = ENGINES[engine]
    folder = tmp_path / "run"
    launch("torchrun", folder, flags, ranks=2, recipe=recipe)
    as_after(folder, 2, folder)
    changed = {"learning_rate": 5e-5, "weight_decay": 0.3, "max_steps": 6, "adam_beta1": 0.5, "max_grad_norm": 0.25}
    run = launch("torchrun", folder, {**flags, **changed, "resume": "auto"}, ranks=2, recipe=recipe)
    assert run.column("learning_rate")[2:] == pytest.approx([5e-5 * (6 - step) / 6 for step in range(2, 6)], rel=1e-6)
    assert not math.isnan(run.column("loss")[-1])
    if "deepspeed" in flags:
        saved = [torch.load(path, weights_only=False) for path in (run.folder / "checkpoint-6").rglob("*states.pt")]
        groups = [group for one in saved for group in groups_in(one)]
        assert {group["weight_decay"] for group in groups} == {0.0, 0.3}
        assert {(group["betas"][0], group["eps"]) for group in groups} == {(0.5, 1e-8)}


SCHEDULES = [
    ("zero2_bf16", "polynomial", None),
    ("fsdp", "one_cycle", '{"pct_start": 0.5}'),
    ("pipeline", "one_cycle", None),
    ("zero3", "polynomial", None),
    ("pipeline", "polynomial", None),
    ("zero2_bf16", "step", '{"step_size": 3, "gamma": 0.5}'),
]


@pytest.mark.parametrize(("engine", "kind", "kwargs"), gate_has(SCHEDULES[:3], SCHEDULES))
def test_a_schedule_is_as_on_one_process(engine: str, kind: str, kwargs: str | None, tmp_path: Path) -> None:
    """transformers has no name for some, and asks ZeRO's optimizers for what only torch's have. And on it goes."""
    flags, recipe = ENGINES[engine]
    flags = flags | {"lr_scheduler_type": kind} | ({"lr_scheduler_kwargs": kwargs} if kwargs else {})
    run = launch("torchrun", tmp_path / "run", flags, ranks=2, recipe=recipe)
    if kind == "one_cycle":
        rates = one_cycle_of_torch(1e-3, 4, **json.loads(kwargs or "{}"))
    else:
        polynomial = [1e-7 + (1e-3 - 1e-7) * (4 - step) / 4 for step in range(4)]
        rates = polynomial if kind == "polynomial" else [1e-3, 1e-3, 1e-3, 5e-4]
    assert run.column("learning_rate") == pytest.approx(rates, rel=1e-6)
    as_after(run.folder, 2, run.folder)
    again = launch("torchrun", run.folder, {**flags, "learning_rate": 5e-4, "resume": "auto"}, ranks=2, recipe=recipe)
    if kind != "polynomial":  # whose end is a rate of its own
        assert again.column("learning_rate")[2:] == pytest.approx([rate / 2 for rate in rates[2:]], rel=1e-6)


def one_cycle_of_torch(rate: float, steps: int, **kwargs: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, cycle_momentum=False, **kwargs)
    rates = [schedule.get_last_lr()[0]]
    for _ in range(steps - 1):
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    return rates


def groups_in(saved: Any) -> list[dict[str, Any]]:
    """The groups of every optimizer in a file of DeepSpeed's."""
    if isinstance(saved, dict):
        own = saved.get("param_groups", [])
        return [*own, *(group for key, one in saved.items() if key != "param_groups" for group in groups_in(one))]
    return []


ARITHMETIC = [
    ("zero1", "prescale_gradients", False, True, None),
    ("zero2", "prescale_gradients", False, True, None),
    ("zero1", "communication_data_type", "bf16", None, 1e-2),
    ("zero2", "communication_data_type", "bf16", None, 1e-2),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "key", "value", "was", "apart"), ARITHMETIC)
def test_what_a_deepspeed_config_says_of_gradients_is_applied_from_the_checkpoint_on_and_said(
    stage: str, key: str, value: Any, was: Any, apart: float | None, tmp_path: Path
) -> None:
    """Of two ranks, dividing before the sum or after it is the same to the bit, for it is by 2; what is sent as bf16 is
    rounded, and shows in the weights."""
    shipped = json.loads((REPO / "ds_configs" / f"{stage}.json").read_text())
    assert shipped.get(key) == was
    (tmp_path / "other.json").write_text(json.dumps(shipped | {key: value}))
    uncut = launch("torchrun", tmp_path / "uncut", {**DEEP, "deepspeed": stage}, ranks=2)
    folder = as_after(uncut.folder, 2, tmp_path / "run")
    given = {**DEEP, "deepspeed": tmp_path / "other.json", "resume": "auto"}
    run = launch("torchrun", folder, given, ranks=2)
    changed = [was or None, value or None]  # None is what DeepSpeed takes by itself
    then, now = ("DeepSpeed's default" if one is None else one for one in changed)
    assert f"resume: DeepSpeed's {key} is {now} from step 3 on (until then {then})" in run.output
    assert run.json("run.json")["lineage"][1]["changed"] == {f"DeepSpeed's {key}": changed}
    assert (different_weights(run.folder, uncut.folder) == []) == (apart is None)
    assert run.column("loss") == pytest.approx(uncut.column("loss"), rel=apart or 1e-6)


@pytest.mark.nightly
def test_a_pipeline_goes_on_in_another_precision(tmp_path: Path) -> None:
    flags, recipe = ENGINES["pipeline"]
    launch("torchrun", tmp_path / "run", flags, ranks=2, recipe=recipe)
    for bf16 in (True, False):
        as_after(tmp_path / "run", 2, tmp_path / "run")
        run = launch("torchrun", tmp_path / "run", {**flags, "bf16": bf16, "resume": "auto"}, ranks=2, recipe=recipe)
        assert (f"resume: --bf16 is {bf16} from step 3 on" in run.output) == bf16
        assert all(map(math.isfinite, run.column("loss")))


def test_another_kind_of_tokenizer_is_refused_though_the_checkpoints_would_be_taken(tmp_path: Path) -> None:
    flags = {**PIPE, "tokenizer": "bpe", "bpe_vocab_size": 300}
    launch("python", tmp_path / "run", flags, recipe="recipes/causal_lm.py")
    for change in ({"bpe_vocab_size": 400}, {"tokenizer": "byte", "bpe_vocab_size": None}):
        folder = as_after(tmp_path / "run", 2, tmp_path / "run")
        given = {name: value for name, value in {**flags, **change, "resume": "auto"}.items() if value is not None}
        run = launch("python", folder, given, recipe="recipes/causal_lm.py", check=False)
        assert run.status == 2, run.output[-2000:]
        assert f"--{next(iter(change))} was " in run.errors[0]


def test_a_text_that_the_checkpoints_tokenizer_cannot_read_is_refused_as_another_text(tmp_path: Path) -> None:
    text = tmp_path / "text.csv"
    text.write_text("text\n" + "the cat sat on the mat and thought of it\n" * 60)
    flags = {name: value for name, value in PIPE.items() if name != "max_train_samples"} | {"train_file": text}
    launch("python", tmp_path / "run", flags, recipe="recipes/causal_lm.py")
    text.write_text("text\n" + "the cat sat on the mat! and thought of it\n" * 60)
    folder = as_after(tmp_path / "run", 2, tmp_path / "run")
    run = launch("python", folder, {**flags, "resume": "auto"}, recipe="recipes/causal_lm.py", check=False)
    assert run.status == 2, run.output[-2000:]
    assert run.errors[0].startswith("--resume: with the checkpoint's tokenizer, the text has '!'")


def adapter_flags(base: Path) -> dict[str, Any]:
    return {"use_peft": True, "lora_r": 2, "model_name_or_path": base}


@pytest.mark.parametrize(
    "flags_of",
    [
        pytest.param(lambda base: {"model_name_or_path": base}, id="full", marks=pytest.mark.nightly),
        pytest.param(adapter_flags, id="lora"),
    ],
)
def test_weights_of_another_model_of_the_same_shape_are_refused_wherever_the_same_lie(
    flags_of: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    recipe = "recipes/causal_lm.py"
    for seed, name in enumerate(("base", "other")):
        launch("python", tmp_path / name, {**PIPE, "seed": seed, "tokenizer": "byte"}, recipe=recipe)
    flags = {name: value for name, value in PIPE.items() if name != "config_overrides"}
    first = launch("python", tmp_path / "run", flags | flags_of(tmp_path / "base"), recipe=recipe)
    moved = shutil.copytree(tmp_path / "base", tmp_path / "moved")
    (moved / "report.html").write_text("of no weight")
    for base, status in ((tmp_path / "other", 2), (moved, 0)):
        folder = as_after(first.folder, 2, tmp_path / f"again-{base.name}")
        given = flags | flags_of(base) | {"resume": "auto"}
        run = launch("python", folder, given, recipe=recipe, check=False)
        assert run.status == status, run.output[-2000:]
        assert (f"began from other weights than those of --model_name_or_path {base}" in run.output) == bool(status)
    assert different_weights(run.folder, first.folder) == []


def test_a_stream_is_known_by_its_flags_its_files_and_the_rows_held_out_of_it(tmp_path: Path) -> None:
    flags = {name: value for name, value in SAVES.items() if name != "max_train_samples"}
    flags |= {"streaming": True, "group_by_length": False, "validation_fraction": 0.2}
    given = {**flags, "train_file": rows(tmp_path / "rows.csv")}
    first = launch("python", tmp_path / "first", given)
    for number, change in enumerate(({"validation_fraction": 0.4}, {"train_file": rows(tmp_path / "more.csv", 8)})):
        folder = as_after(first.folder, 2, tmp_path / f"changed-{number}")
        run = launch("python", folder, {**given, **change, "resume": "auto"}, check=False)
        assert run.status == 2, run.output[-2000:]
        assert "the train rows" in run.errors[0]
    again = launch("python", as_after(first.folder, 2, tmp_path / "again"), {**given, "resume": "auto"})
    assert different_weights(again.folder, first.folder) == []


def test_another_optimizer_or_schedule_of_deepspeeds_config_is_refused(tmp_path: Path) -> None:
    """Its optimizer would be given the states of before; the flags say nothing of it."""
    flags = {key: value for key, value in DEEP.items() if key != "lr_scheduler_type"}

    def config(name: str, **sections: Any) -> Path:
        shipped = json.loads((REPO / "ds_configs" / "zero1.json").read_text())
        (tmp_path / name).write_text(json.dumps(shipped | sections))
        return tmp_path / name

    none = {"optimizer": None, "scheduler": None}
    bare = config("bare.json", **none)
    bare.write_text(json.dumps({key: value for key, value in json.loads(bare.read_text()).items() if key not in none}))
    warms = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1, "warmup_type": "linear"}
    constant = config("constant.json", scheduler={"type": "WarmupLR", "params": warms})
    again = {"resume": "auto", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1}
    launch("python", tmp_path / "run", {**flags, "deepspeed": "zero1"})
    as_after(tmp_path / "run", 2, tmp_path / "run")
    refused = launch("python", tmp_path / "run", {**flags, **again, "deepspeed": constant}, check=False)
    assert refused.status == 2, refused.output[-2000:]
    assert "scheduler in DeepSpeed's config: None, here {'type': 'WarmupLR'" in refused.errors[0]
    launch("python", tmp_path / "run", {**flags, "resume": "auto", "deepspeed": bare})
