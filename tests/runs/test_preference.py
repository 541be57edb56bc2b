"""recipes/preference.py as people use it: losses, references, engines, resumption, rewards."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Finished, engine, gate_has, launch

from finetune.run.recipes.preference import BETAS

RECIPE = "recipes/preference.py"
OWN = {
    **{name: value for name, value in TINY.items() if name not in ("max_seq_length", "dropout")},
    "max_train_samples": 96,
    "max_eval_samples": 24,
    "max_steps": 6,
    "sample_tokens": 0,
}
ONE_BATCH = {"max_train_samples": 8, "max_steps": 15, "per_device_train_batch_size": 8, "learning_rate": 3e-3}


def run(launcher: str, folder: Path, values: dict[str, Any], **more: Any) -> Finished:
    return launch(launcher, folder, {**OWN, **values}, recipe=RECIPE, **more)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    flags = {"per_device_train_batch_size": 8, "save_strategy": "steps", "save_steps": 4}
    return run("python", tmp_path_factory.mktemp("one") / "run", flags)


@pytest.mark.nightly
def test_what_is_better_is_learnt_of_the_built_in_pairs(tmp_path: Path) -> None:
    flags = {"max_train_samples": 480, "max_eval_samples": 100, "max_steps": 60, "per_device_train_batch_size": 16}
    done = run("python", tmp_path / "run", flags)
    assert done.steps[0]["preference_accuracy"] == 0.5, "the policy is its reference"
    assert done.json("eval_results.json")["eval_preference_accuracy"] >= 0.9
    assert (done.folder / "training_curve.png").is_file()


def test_held_out_prompts_are_answered_before_and_after(one_rank: Finished, tmp_path: Path) -> None:
    """And nothing else changes by that."""
    flags = {"per_device_train_batch_size": 8, "sample_tokens": 5, "save_strategy": "steps", "save_steps": 4}
    done = run("python", tmp_path / "run", flags)
    said = (done.folder / "samples.md").read_text()
    assert re.findall(r"^## (.*)", said, re.MULTILINE) == ["Step 0", "Step 6"]
    assert said.count("prompt: ") == said.count("answer: ") == 6
    card = (done.folder / "README.md").read_text()
    assert "Before training" in card
    assert "After training" in card
    assert done.column("loss") == one_rank.column("loss")
    assert not (one_rank.folder / "samples.md").exists()
    again = run("python", done.folder, {**flags, "max_steps": 8, "resume": "auto"})
    assert "Before training" not in (again.folder / "README.md").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["zero3", "fsdp"])
@pytest.mark.usefixtures("built_ops")
def test_two_ranks_that_share_the_weights_answer_as_one_does(config: str, tmp_path: Path) -> None:
    flags = {"sample_tokens": 5}
    one = run("python", tmp_path / "one", {**flags, "per_device_train_batch_size": 8})
    two = run("torchrun", tmp_path / "two", {**flags, **engine(config), "per_device_train_batch_size": 4}, ranks=2)
    assert (one.folder / "samples.md").read_text() == (two.folder / "samples.md").read_text()


def test_the_best_model_can_be_the_one_that_left_its_reference_least(one_rank: Finished, tmp_path: Path) -> None:
    assert one_rank.steps[0]["kl"] == 0
    by_step = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    flags = {**by_step, "per_device_train_batch_size": 8, "load_best_model_at_end": True}
    done = run("python", tmp_path / "run", {**flags, "loss": "ipo", "metric_for_best_model": "eval_kl"})
    rows = map(json.loads, (done.folder / "metrics.jsonl").read_text().splitlines())
    found = [row["eval_kl"] for row in rows if "eval_kl" in row]
    assert 0 < found[0] < found[1]
    state = json.loads((done.folder / "trainer_state.json").read_text())
    assert state["best_global_step"] == 2
    assert done.json("eval_results.json")["eval_kl"] == pytest.approx(min(found), rel=1e-4)


def test_the_first_loss_is_that_of_a_policy_that_is_its_reference(one_rank: Finished) -> None:
    assert one_rank.steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert one_rank.steps[0]["reward_margin"] == pytest.approx(0, abs=1e-5)


LAYOUTS = [
    ("torchrun", "none", 4, 1),
    ("torchrun", "none", 2, 2),
    ("deepspeed", "zero2", 2, 2),
    ("deepspeed", "zero2", 4, 1),
    ("torchrun", "zero3", 2, 2),
    ("torchrun", "zero3", 4, 1),
    *(("torchrun", config, 2, 2) for config in ("zero0", "zero1", "zero2_offload", "zero3_offload", "fsdp")),
    ("torchrun", "fsdp", 4, 1),
]


@pytest.mark.parametrize(("launcher", "config", "batch", "accumulation"), gate_has(LAYOUTS[2], LAYOUTS))
@pytest.mark.usefixtures("built_ops")
def test_the_loss_is_the_same_however_the_pairs_are_spread(
    launcher: str, config: str, batch: int, accumulation: int, one_rank: Finished, tmp_path: Path
) -> None:
    """Texts of unlike lengths, a reference that two ranks compute, and log-probabilities in chunks."""
    flags: dict[str, Any] = {
        "loss_chunk_tokens": 100,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
    }
    two = run(
        launcher,
        tmp_path / "run",
        {**flags, **engine(config)},
        ranks=2,
        env={"FINETUNE_CACHE": str(tmp_path / "cache")},
    )
    for name in ("loss", "reward_margin", "logp_rejected", "kl"):
        assert two.column(name) == pytest.approx(one_rank.column(name), rel=1e-3, abs=1e-4)
    found = [one.json("eval_results.json") for one in (one_rank, two)]
    for name in ("eval_loss", "eval_reward_margin", "eval_preference_accuracy", "eval_kl"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-3)


@pytest.mark.parametrize("config", gate_has("none", ["none", "zero2", "zero3"]))
@pytest.mark.usefixtures("built_ops")
def test_a_second_model_says_what_the_cached_reference_says(config: str, one_rank: Finished, tmp_path: Path) -> None:
    flags = {"reference": "online", "per_device_train_batch_size": 8, "deepspeed": config}
    online = run("python" if config == "none" else "torchrun", tmp_path / "run", flags)
    assert online.column("loss") == pytest.approx(one_rank.column("loss"), rel=1e-6 if config == "none" else 1e-4)
    assert not (online.folder / "reference.npz").exists()


@pytest.mark.nightly
@pytest.mark.usefixtures("built_ops")
@pytest.mark.parametrize("config", ["zero3", "fsdp"])
def test_a_second_model_that_is_named_is_beside_a_sharded_one(config: str, one_rank: Finished, tmp_path: Path) -> None:
    flags = {"model_name_or_path": one_rank.folder, "reference": "online", **engine(config)}
    done = run("torchrun", tmp_path / "run", {**flags, "per_device_train_batch_size": 4}, ranks=2)
    assert done.steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


SHARED = [
    ("python", "none", 8, 1),
    ("torchrun", "zero2", 4, 1),
    ("torchrun", "zero3", 2, 2),
    ("torchrun", "fsdp", 4, 1),
]


@pytest.mark.parametrize(("launcher", "config", "batch", "accumulation"), gate_has(SHARED[0], SHARED))
@pytest.mark.usefixtures("built_ops")
def test_pairs_that_share_their_prompts_pass_are_learnt_as_others(
    launcher: str, config: str, batch: int, accumulation: int, one_rank: Finished, tmp_path: Path
) -> None:
    flags = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, **engine(config)}
    ranks = 1 if launcher == "python" else 2
    done = run(launcher, tmp_path / "run", {**flags, "share_prompt": True}, ranks=ranks)
    for name in ("loss", "logp_chosen", "logp_rejected", "grad_norm"):
        assert done.column(name) == pytest.approx(one_rank.column(name), rel=5e-5 if ranks == 1 else 1e-3, abs=1e-5)
    found = [one.json("eval_results.json")["eval_loss"] for one in (one_rank, done)]
    assert found[0] == pytest.approx(found[1], rel=1e-5 if ranks == 1 else 1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("loss", ["ipo", "orpo", "simpo"])
def test_other_losses_learn_of_shared_prompts_the_same(loss: str, one_rank: Finished, tmp_path: Path) -> None:
    """By an adapter, whose reference is asked in each step."""
    flags = {"model_name_or_path": one_rank.folder, "use_peft": True, "loss": loss, "loss_chunk_tokens": 100}
    runs = [run("python", tmp_path / str(shared), {**flags, "share_prompt": shared}) for shared in (False, True)]
    assert runs[1].column("loss") == pytest.approx(runs[0].column("loss"), rel=1e-5)


def test_a_run_goes_on_bit_by_bit_and_keeps_its_reference(one_rank: Finished, tmp_path: Path) -> None:
    shutil.copytree(one_rank.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    flags = {"per_device_train_batch_size": 8, "resume": "auto"}
    env = {"FINETUNE_CACHE": str(tmp_path / "cache")}
    again = run("python", tmp_path / "run", flags, env=env)
    assert "going on from" in again.output
    assert again.column("loss")[-2:] == one_rank.column("loss")[-2:]
    weights = [(one.folder / "model.safetensors").read_bytes() for one in (one_rank, again)]
    assert weights[0] == weights[1]

    (tmp_path / "run" / "reference.npz").unlink()
    lost = run("python", tmp_path / "run", flags, env={"FINETUNE_CACHE": str(tmp_path / "other")}, check=False)
    assert lost.status == 2
    assert "the model has moved on since" in lost.output


@pytest.mark.parametrize("loss", gate_has("reward", list(BETAS)))
def test_one_batch_is_learnt_by_heart(loss: str, tmp_path: Path) -> None:
    done = run("python", tmp_path / "run", {**ONE_BATCH, "loss": loss})
    assert done.column("loss")[-1] < 0.7 * done.column("loss")[0]
    assert done.column("reward_margin")[-1] > done.column("reward_margin")[0]


@pytest.mark.nightly
@pytest.mark.parametrize("loss", ["kto", "orpo", "reward"])
@pytest.mark.parametrize("config", ["none", "zero3", "fsdp"])
def test_other_losses_are_the_same_on_two_ranks(loss: str, config: str, tmp_path: Path) -> None:
    one = run("python", tmp_path / "one", {"loss": loss, "per_device_train_batch_size": 8})
    spread = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **engine(config)}
    two = run("torchrun", tmp_path / "two", {"loss": loss, **spread}, ranks=2)
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-3)
    found = [done.json("eval_results.json")["eval_loss"] for done in (one, two)]
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_an_adapters_reference_is_the_model_without_it(one_rank: Finished, tmp_path: Path) -> None:
    flags = {"model_name_or_path": one_rank.folder, "use_peft": True, "per_device_train_batch_size": 8}
    each = run("python", tmp_path / "each", flags)
    once = run("python", tmp_path / "once", {**flags, "reference": "cached"})
    assert each.steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert each.column("loss") == pytest.approx(once.column("loss"), rel=1e-5)
    assert each.column("loss")[1] != each.column("loss")[0]


@pytest.mark.nightly
def test_an_adapter_that_is_trained_further_is_measured_by_what_it_was(one_rank: Finished, tmp_path: Path) -> None:
    flags = {"use_peft": True, "per_device_train_batch_size": 8, "learning_rate": 3e-3}
    first = run("python", tmp_path / "first", {**flags, "model_name_or_path": one_rank.folder})
    further = run("python", tmp_path / "further", {**flags, "model_name_or_path": first.folder})
    assert further.steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert further.steps[0]["logp_chosen"] != pytest.approx(first.steps[0]["logp_chosen"], abs=1e-3)
    assert (further.folder / "reference.npz").is_file()


def test_a_second_model_beside_an_adapter_is_refused(one_rank: Finished, tmp_path: Path) -> None:
    flags = {"model_name_or_path": one_rank.folder, "use_peft": True, "reference": "online"}
    done = run("python", tmp_path / "run", flags, check=False)
    assert done.status == 2
    assert "needs no second model" in done.output


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["none", "zero2", "zero3", "fsdp"])
@pytest.mark.usefixtures("built_ops")
def test_adapters_learn_the_same_on_two_ranks(config: str, one_rank: Finished, tmp_path: Path) -> None:
    flags = {"model_name_or_path": one_rank.folder, "use_peft": True}
    one = run("python", tmp_path / "one", {**flags, "per_device_train_batch_size": 8})
    spread = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **engine(config)}
    two = run("torchrun", tmp_path / "two", {**flags, **spread}, ranks=2)
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-3)


@pytest.mark.nightly
def test_an_adapter_learns_rewards(one_rank: Finished, tmp_path: Path) -> None:
    flags = {"model_name_or_path": one_rank.folder, "use_peft": True, "loss": "reward"}
    done = run("python", tmp_path / "run", {**ONE_BATCH, **flags})
    assert done.column("loss")[-1] < 0.7 * done.column("loss")[0]
    assert (done.folder / "adapter_model.safetensors").is_file()


def test_a_model_of_rewards_opens_and_scores_the_better_answer_higher(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    import finetune.models.gptlite  # noqa: F401  (makes it known)

    rows = [{"prompt": f"{n} is ", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"loss": "reward", "train_file": tmp_path / "pairs.jsonl", "learning_rate": 3e-3, "max_steps": 12}
    done = run("python", tmp_path / "run", {**flags, "tokenizer": "byte"})
    model = AutoModelForSequenceClassification.from_pretrained(str(done.folder)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(done.folder))
    texts = [f"3 is {answer} 3{tokenizer.eos_token}" for answer in ("good", "bad")]
    with torch.no_grad():
        better, worse = (model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts)
    assert better > worse


def test_kto_says_nothing_of_a_kind_of_answer_that_a_log_has_not(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} is ", "completion": f"good {n}", "label": n > 1} for n in range(40)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"loss": "kto", "train_file": tmp_path / "answers.jsonl", "tokenizer": "byte", "validation_fraction": 0.1}
    done = run("python", tmp_path / "run", {**flags, "per_device_train_batch_size": 4})
    assert all("reward_chosen" in row and "kl" in row for row in done.steps)
    assert sum("reward_rejected" in row for row in done.steps) <= 2


def test_rows_of_another_recipe_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello"}]}) + "\n")
    done = run("python", tmp_path / "run", {"train_file": path}, check=False)
    assert done.status == 2
    assert "recipes/causal_lm.py" in done.output
