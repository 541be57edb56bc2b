"""recipes/question_answering.py as people use it: SQuAD's files, engines, resumption, predictions, how to ask."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NOT_JUDGED, TINY, Finished, launch
from safetensors.torch import load_file

from finetune.training.answers import USE

RECIPE = "recipes/question_answering.py"
PLACES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Quito")
# At three times this rate all scores fall together and stay so, in plain torch with the model's own loss as well.
OWN = {**TINY, "max_steps": 120, "max_train_samples": 300, "max_seq_length": 40, "doc_stride": 8}
SHORT = {"max_steps": 30, "save_strategy": "steps", "save_steps": 20}


def rows(many: int, seed: int, without: float = 0.0) -> list[dict[str, Any]]:
    """Where somebody lives stands behind "lives in", and where they work behind "works in"; some contexts are longer
    than a window."""
    generator = random.Random(seed)
    found = []
    for i in range(many):
        home, work = generator.sample(PLACES, 2)
        more = " and so it has been for many years now" * (0 if without else generator.choice([0, 0, 1, 3]))
        context = f"Ada works in {work}{more} but lives in {home} ."
        asked, answer = generator.choice([("lives", home), ("works", work)])
        is_known = generator.random() >= without
        asked = asked if is_known else "sleeps"
        begins = context.index(f"{asked} in") + len(asked) + 4 if is_known else 0
        answers = {"text": [answer], "answer_start": [begins]} if is_known else {"text": [], "answer_start": []}
        found.append({"id": f"q{i}", "question": f"Ada {asked} where?", "context": context, "answers": answers})
    return found


def write(path: Path, found: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("squad")
    sizes = {"train_file": 340, "validation_file": 60, "test_file": 45}
    return {name: write(folder / f"{name}.jsonl", rows(many, many)) for name, many in sizes.items()}


def run(launcher: str, folder: Path, values: dict[str, Any], **more: Any) -> Finished:
    return launch(launcher, folder, {**OWN, **values}, recipe=RECIPE, **more)


@pytest.fixture(scope="module")
def one_rank(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    flags = {
        **files,
        "per_device_train_batch_size": 16,
        "do_predict": True,
        "save_strategy": "steps",
        "save_steps": 100,
    }
    return run("python", tmp_path_factory.mktemp("one") / "run", flags)


def predictions(done: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (done.folder / "predictions.jsonl").read_text().splitlines()]


def test_answers_are_learnt_and_written_in_the_order_of_the_questions(
    one_rank: Finished, files: dict[str, str]
) -> None:
    results = one_rank.json("all_results.json")
    assert {"eval_exact_match", "eval_f1", "eval_loss", "predict_f1"} <= set(results)
    asked = [json.loads(line) for line in Path(files["test_file"]).read_text().splitlines()]
    found = predictions(one_rank)
    assert [row["id"] for row in found] == [row["id"] for row in asked]
    assert [row["answers"] for row in found] == [row["answers"]["text"] for row in asked]
    right = sum(row["answer"] in row["answers"] for row in found) / len(found)
    assert results["predict_exact_match"] == pytest.approx(right)
    assert right > 0.8
    for row, one in zip(found, asked, strict=True):
        best = row["n_best"]
        assert 1 < len(best) <= 20
        assert sum(answer["score"] for answer in best) == pytest.approx(1, abs=1e-4)
        assert all(one["context"][answer["start"] : answer["end"]] == answer["text"] for answer in best)
        assert (row["answer"], row["score"]) == (best[0]["text"], best[0]["score"])
    assert (one_rank.folder / "training_curve.png").is_file()


def test_the_folder_answers_as_its_card_says(
    one_rank: Finished, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers 5 has no pipeline for it any more."""
    assert USE in (one_rank.folder / "README.md").read_text()
    short = next(json.loads(line) for line in Path(files["test_file"]).read_text().splitlines() if len(line) < 200)
    program = USE.replace("path/to/this/folder", str(one_rank.folder))
    program = program.replace("What is asked?", short["question"]).replace("A text that says it.", short["context"])
    with torch.no_grad():
        exec(compile(program, "card", "exec"), {})  # noqa: S102 - our own
    expected = next(row["answer"] for row in predictions(one_rank) if row["id"] == short["id"])
    assert capsys.readouterr().out.strip() == expected


def test_the_threshold_of_no_answer_is_chosen_kept_and_taken_up_again(tmp_path: Path) -> None:
    found = {name: write(tmp_path / f"{name}.jsonl", rows(many, many, without=0.3))
             for name, many in (("train_file", 340), ("validation_file", 60))}  # fmt: skip
    flags = {**found, "version_2_with_negative": True, "per_device_train_batch_size": 16}
    done = run("python", tmp_path / "run", flags)
    results = done.json("eval_results.json")
    assert results["eval_exact_match"] > 0.9  # with no answer at all a third would be right
    assert done.json("config.json")["thresholds"] == [results["eval_null_threshold"]]
    asked = [{name: row[name] for name in ("id", "question", "context")} for row in rows(30, 5, without=0.5)]
    test = {"test_file": write(tmp_path / "test.jsonl", asked), "do_predict": True, "do_train": False, **NOT_JUDGED}
    again = run(
        "python", tmp_path / "new", {**test, "model_name_or_path": done.folder, "version_2_with_negative": True}
    )
    found_none = [row["null_score_diff"] > results["eval_null_threshold"] for row in predictions(again)]
    assert [row["answer"] == "" for row in predictions(again)] == found_none
    assert all("answers" not in row for row in predictions(again))


WAYS = [
    ("deepspeed", "zero2"),
    *(
        pytest.param(*way, marks=pytest.mark.nightly)
        for way in (("torchrun", "none"), ("accelerate", "none"), ("torchrun", "zero0"), ("deepspeed", "zero1"),
                    ("torchrun", "zero3"), ("torchrun", "zero2_offload"), ("torchrun", "zero3_offload"))
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def short(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    flags = {**files, **SHORT, "per_device_train_batch_size": 16}
    return run("python", tmp_path_factory.mktemp("short") / "run", flags)


@pytest.mark.parametrize(("launcher", "config"), WAYS)
@pytest.mark.usefixtures("built_ops")
def test_the_loss_is_the_same_on_two_ranks_and_another_number_goes_on_from_there(
    launcher: str, config: str, short: Finished, files: dict[str, str], tmp_path: Path
) -> None:
    """Ranks and micro-batches hold windows of unlike lengths, and questions with one window or several."""
    flags = {**files, **SHORT, "deepspeed": config, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    two = run(launcher, tmp_path / "run", flags, ranks=2)
    assert short.column("loss") == pytest.approx(two.column("loss"), rel=1e-4)

    shutil.rmtree(two.folder / "checkpoint-30")
    del flags["gradient_accumulation_steps"]  # which is for the toolkit to find, so that the global batch stays
    again = run("python", two.folder, {**flags, "resume": "auto"})
    assert "going on from" in again.output
    assert again.column("loss")[-10:] == pytest.approx(two.column("loss")[-10:], rel=1e-4)


def test_two_ranks_answer_as_one_does(one_rank: Finished, files: dict[str, str], tmp_path: Path) -> None:
    """Of questions with unlike numbers of windows."""
    flags = {"test_file": files["test_file"], "do_train": False, "do_predict": True, **NOT_JUDGED}
    two = run("torchrun", tmp_path / "run", {**flags, "model_name_or_path": one_rank.folder}, ranks=2)
    found = [[(row["id"], row["answer"]) for row in predictions(done)] for done in (one_rank, two)]
    assert found[0] == found[1]


SPREADS = [(config, micro, steps) for config in ("none", "zero2") for micro, steps in ((4, 1), (2, 2))]


@pytest.mark.nightly
@pytest.mark.parametrize(("config", "micro", "steps"), SPREADS)
@pytest.mark.usefixtures("built_ops")
def test_each_gradient_is_that_of_one_process(config: str, micro: int, steps: int, tmp_path: Path) -> None:
    """A step of SGD at a rate of 1 takes the gradient from each weight. Of a global batch's 8 windows some are of one
    question, some of questions without an answer."""
    asked = [*rows(80, 3), *rows(80, 4, without=0.5)]
    flags = {"train_file": write(tmp_path / "rows.jsonl", asked), "version_2_with_negative": True, **NOT_JUDGED}
    flags |= {"max_steps": 1, "max_seq_length": 28, "max_train_samples": None}
    flags |= {"optim": "sgd", "learning_rate": 1, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    one = run("python", tmp_path / "one", {**flags, "per_device_train_batch_size": 8})
    spread = {"deepspeed": config, "per_device_train_batch_size": micro, "gradient_accumulation_steps": steps}
    two = run("torchrun", tmp_path / "two", {**flags, **spread}, ranks=2)
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-6)
    truth, found = (load_file(done.folder / "model.safetensors") for done in (one, two))
    assert truth.keys() == found.keys()
    for name, weight in truth.items():
        assert torch.allclose(found[name], weight, rtol=0, atol=1e-6), name


@pytest.mark.nightly
def test_fsdp_trains_as_one_rank_does(short: Finished, files: dict[str, str], tmp_path: Path) -> None:
    two = run("torchrun", tmp_path / "run", {**files, **SHORT, "fsdp": True, "per_device_train_batch_size": 8}, ranks=2)
    assert short.column("loss") == pytest.approx(two.column("loss"), rel=1e-4)


def test_a_run_goes_on_where_it_was_cut_off(one_rank: Finished, files: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(one_rank.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-120")
    flags = {**files, "per_device_train_batch_size": 16, "resume": "auto"}
    again = run("python", tmp_path / "run", flags)
    assert "going on from" in again.output
    assert again.column("loss")[-10:] == pytest.approx(one_rank.column("loss")[-10:], rel=1e-5)


@pytest.mark.nightly
def test_an_adapter_is_trained_merged_and_answers(one_rank: Finished, files: dict[str, str], tmp_path: Path) -> None:
    from transformers import AutoModelForQuestionAnswering

    flags = {**files, "model_name_or_path": one_rank.folder, "use_peft": True, "merge_adapter": True, "max_steps": 10}
    done = run("python", tmp_path / "run", flags)
    assert done.json("adapter_config.json")["task_type"] == "QUESTION_ANS"
    model = AutoModelForQuestionAnswering.from_pretrained(done.folder / "merged")
    assert model.qa_outputs.out_features == 2
    again = run("python", tmp_path / "again", {**files, "model_name_or_path": done.folder, "do_train": False})
    wanted, found = (one.json("eval_results.json")["eval_loss"] for one in (done, again))
    assert found == pytest.approx(wanted, rel=1e-4)


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    bad = [{**rows(1, 1)[0], "answers": {"text": ["Nowhere"], "answer_start": [3]}}]
    found = run("python", tmp_path / "run", {"train_file": write(tmp_path / "bad.jsonl", bad)}, check=False)
    assert found.status == 2
    assert "1 of 1 rows that are bad: the context does not have the answer's text at its answer_start" in found.output
