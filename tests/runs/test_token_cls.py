"""recipes/token_cls.py as people use it: CoNLL files, engines, resumption, predictions."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import NOT_JUDGED, TINY, Finished, launch

RECIPE = "recipes/token_cls.py"
NAMES = {"PER": ["Ada", "Alan", "Grace"], "LOC": ["Paris", "Rome", "Oslo"]}
TAG = {"Ada": "B-PER", "Paris": "B-LOC"}
OWN = {**TINY, "max_steps": 50, "max_train_samples": 300, "learning_rate": 3e-3, "max_seq_length": 40}


def write_conll(path: Path, sentences: int, seed: int) -> str:
    """A name is a person after "met" and a place after "in", whatever it is called: the neighbours tell."""
    generator = random.Random(seed)
    everyone = [name for names in NAMES.values() for name in names]
    with path.open("w") as file:
        for _ in range(sentences):
            for _ in range(generator.randint(1, 4)):
                word, kind = generator.choice([("met", "PER"), ("in", "LOC")])
                file.write(f"{word} O\n{generator.choice(everyone)} B-{kind}\n")
                if generator.random() < 0.5:
                    file.write(f"Smith I-{kind}\n")
            file.write("today O\n\n")
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("conll")
    return {name: write_conll(folder / f"{name}.conll", n, n) for name, n in (("train_file", 340), ("test_file", 45))}


def run(launcher: str, folder: Path, values: dict[str, Any], **more: Any) -> Finished:
    return launch(launcher, folder, {**OWN, **values}, recipe=RECIPE, **more)


@pytest.fixture(scope="module")
def one_rank(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    flags = {**files, "per_device_train_batch_size": 16, "do_predict": True, "save_strategy": "steps", "save_steps": 40}
    return run("python", tmp_path_factory.mktemp("one") / "run", flags)


def test_entities_of_ones_own_files_are_learnt_and_written_in_their_order(
    one_rank: Finished, files: dict[str, str]
) -> None:
    results = one_rank.json("all_results.json")
    assert {"eval_precision", "eval_recall", "eval_f1", "eval_accuracy", "eval_loss"} <= set(results)
    rows = [json.loads(line) for line in (one_rank.folder / "predictions.jsonl").read_text().splitlines()]
    text = [block.split("\n") for block in Path(files["test_file"]).read_text().strip().split("\n\n")]
    assert [row["tokens"] for row in rows] == [[line.split()[0] for line in block] for block in text]
    assert [row["labels"] for row in rows] == [[line.split()[1] for line in block] for block in text]
    assert results["predict_f1"] > 0.9
    assert [row["label"] for row in one_rank.json("per_type.json")] == ["LOC", "PER"]
    assert (one_rank.folder / "confusion_matrix.png").is_file()


def test_the_folder_opens_with_the_pipeline_that_groups_entities(one_rank: Finished) -> None:
    from transformers import pipeline

    find = pipeline("token-classification", str(one_rank.folder), aggregation_strategy="simple")
    found = find("met Paris Smith in Ada today")
    assert [(entity["entity_group"], entity["word"]) for entity in found] == [("PER", "Paris Smith"), ("LOC", "Ada")]


WAYS = [
    ("deepspeed", "zero2"),
    *(
        pytest.param(*way, marks=pytest.mark.nightly)
        for way in (("torchrun", "none"), ("accelerate", "none"), ("torchrun", "zero0"), ("deepspeed", "zero1"),
                    ("torchrun", "zero3"), ("torchrun", "zero2_offload"), ("torchrun", "zero3_offload"))
    ),
]  # fmt: skip


def test_a_test_file_may_lack_the_tags(one_rank: Finished, tmp_path: Path) -> None:
    words = [["Anna", "met", "Berlin", "."], ["in", "Smith"]]
    (tmp_path / "words.conll").write_text("\n\n".join("\n".join(sentence) for sentence in words))
    flags = {"model_name_or_path": one_rank.folder, "test_file": tmp_path / "words.conll", "do_predict": True}
    said = run("python", tmp_path / "run", {**flags, "do_train": False, **NOT_JUDGED})
    rows = [json.loads(line) for line in (said.folder / "predictions.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == words
    assert all("labels" not in row and len(row["tags"]) == len(row["tokens"]) for row in rows)


def test_what_f1_leaves_out_is_counted_beside_it_and_a_dropped_word_is_no_cut(
    one_rank: Finished, tmp_path: Path
) -> None:
    rows = ["met Ada", "in Paris"] * 5, ["met Ada", "\u200b in Paris"]  # the first has more than 8 tokens
    text = "\n\n".join("\n".join(f"{word} {TAG.get(word, 'O')}" for word in " ".join(row).split(" ")) for row in rows)
    (tmp_path / "test.conll").write_text(text)
    flags = {"model_name_or_path": one_rank.folder, "test_file": tmp_path / "test.conll", "do_predict": True}
    said = run("python", tmp_path / "run", {**flags, "do_train": False, "max_seq_length": 8, **NOT_JUDGED})
    results = said.json("predict_results.json")
    # Of the first row's 20 words 6 are kept beside [CLS] and [SEP], which are 3 of its 10 entities.
    assert results["predict_entities_not_scored"] == 7
    assert results["predict_words_not_scored"] == 15
    assert "predict_entities_not_scored 7" in said.output
    card = (said.folder / "README.md").read_text()
    for words in ("1 rows cut to 8 tokens", "not learned or scored: 1", "7 of 12 test entities have no token within 8"):
        assert words in said.output
        assert words in card or "rows cut" in words


@pytest.mark.parametrize(("launcher", "config"), WAYS)
@pytest.mark.usefixtures("built_ops")
def test_the_loss_is_the_same_on_two_ranks_and_another_number_goes_on_from_there(
    launcher: str, config: str, one_rank: Finished, files: dict[str, str], tmp_path: Path
) -> None:
    """Ranks and micro-batches hold unlike numbers of words."""
    flags = {**files, "deepspeed": config, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    saving = {"save_strategy": "steps", "save_steps": 40}
    two = run(launcher, tmp_path / "run", {**flags, **saving}, ranks=2)
    assert one_rank.column("loss") == pytest.approx(two.column("loss"), rel=2e-4)
    found = [one.json("eval_results.json")["eval_loss"] for one in (one_rank, two)]
    assert found[0] == pytest.approx(found[1], rel=1e-3)

    shutil.rmtree(two.folder / "checkpoint-50")
    del flags["gradient_accumulation_steps"]  # which is for the toolkit to find, so that the global batch stays
    again = run("python", two.folder, {**flags, **saving, "resume": "auto"})
    assert "going on from" in again.output
    assert again.column("loss")[-10:] == pytest.approx(one_rank.column("loss")[-10:], rel=1e-3)


def test_a_run_goes_on_where_it_was_cut_off(one_rank: Finished, files: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(one_rank.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-50")
    flags = {**files, "per_device_train_batch_size": 16, "resume": "auto"}
    again = run("python", tmp_path / "run", flags)
    assert "going on from" in again.output
    assert again.column("loss")[-10:] == pytest.approx(one_rank.column("loss")[-10:], rel=1e-5)


def test_bad_input_is_one_sentence(tmp_path: Path, files: dict[str, str]) -> None:
    path = tmp_path / "bad.conll"
    path.write_text("Ada B-PER\nLovelace\n")
    found = run("python", tmp_path / "run", {"train_file": str(path)}, check=False)
    assert found.status == 2
    assert "line 2 has 1 columns, but the lines before it have 2" in found.output
