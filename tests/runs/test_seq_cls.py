"""The recipe as people use it: their own files, resumption, predictions, streaming, trackers."""

from __future__ import annotations

import csv
import json
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import NOT_JUDGED, REPO, TINY, Finished, gate_has, launch

pytestmark = pytest.mark.usefixtures("built_ops")


def write_csv(path: Path, rows: int, seed: int, header: tuple[str, ...] = ("review", "sentiment")) -> str:
    """Reviews whose words tell their label; lengths differ, so that order matters."""
    words = {"good": ["fine", "great", "lovely", "superb"], "bad": ["poor", "awful", "dull", "boring"]}
    generator = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for i in range(rows):
            label = generator.choice(list(words))
            text = " ".join(generator.choices(words[label] + ["the", "film", "was"], k=generator.randint(2, 25)))
            writer.writerow([f"{text} {i}", label])
    return str(path)


@pytest.fixture(scope="module")
def own_csv(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("own")
    return {"train_file": write_csv(folder / "train.csv", 300, 1), "test_file": write_csv(folder / "test.csv", 45, 2)}


OWN = {**TINY, "max_steps": 40, "max_train_samples": 240, "learning_rate": 2e-3, "do_predict": True}
OWN |= {"save_strategy": "steps", "save_steps": 20}


@pytest.fixture(scope="module")
def own_run(own_csv: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return launch("python", tmp_path_factory.mktemp("own_run") / "run", {**OWN, **own_csv})


def predictions(run: Finished) -> list[dict[str, str]]:
    return list(csv.DictReader((run.folder / "predictions.csv").open()))


def test_a_csv_of_ones_own_is_learnt_and_predicted_in_its_order(own_run: Finished, own_csv: dict[str, Any]) -> None:
    truth = [row["sentiment"] for row in csv.DictReader(Path(own_csv["test_file"]).read_text().splitlines())]
    found = predictions(own_run)
    assert [row["index"] for row in found] == [str(i) for i in range(45)]
    assert [row["label"] for row in found] == truth
    right = sum(row["prediction"] == row["label"] for row in found)
    assert right >= 43
    results = own_run.json("all_results.json")
    assert results["predict_accuracy"] == pytest.approx(right / 45)
    assert {"train_loss", "eval_f1_macro", "eval_matthews", "real_tokens_per_second", "peak_memory_gib"} <= set(results)


def test_the_run_folder_is_complete_and_opens_with_label_names(own_run: Finished) -> None:
    from transformers import pipeline

    wanted = (
        "README.md all_results.json config.json confusion_matrix.png environment.json eval_results.json metrics.jsonl"
    )
    wanted += " model.safetensors predictions.csv recipe.yaml tokenizer.json train_results.json training_curve.png"
    wanted += " confusion_matrix.json"
    assert set(wanted.split()) <= {path.name for path in own_run.folder.iterdir()}
    classify = pipeline("text-classification", str(own_run.folder), device="cpu")
    assert classify("a great and superb film")[0]["label"] == "good"
    assert classify("an awful and dull film")[0]["label"] == "bad"
    figures = [row for row in own_run.steps if "padding_share" in row]
    assert len(figures) == OWN["max_steps"]
    assert all(0 <= row["padding_share"] < 0.5 and row["real_tokens_per_second"] > 0 for row in figures)


def test_a_run_is_reported_with_its_labels_and_all_that_it_logged(own_run: Finished, tmp_path: Path) -> None:
    from finetune.report.write import write

    (note,) = write([own_run.folder], html=tmp_path / "report.html", markdown=tmp_path / "report.md")
    assert "Planned for samples of 18 tokens" in note
    page = (tmp_path / "report.html").read_text()
    for words in (f"Done: {OWN['max_steps']} steps", " predicted as good: ", "Gradient norm", "macro F1"):
        assert words in page, words
    assert "| eval\\_f1\\_macro | " in (tmp_path / "report.md").read_text()


def test_a_trained_model_predicts_without_the_training_data(
    own_run: Finished, own_csv: dict[str, Any], tmp_path: Path
) -> None:
    saved = [own_run.folder, *own_run.folder.glob("checkpoint-*")]
    assert len(saved) > 1
    assert all(json.loads((path / "config.json").read_text())["text_columns"] == ["review"] for path in saved)
    bare = tmp_path / "bare.csv"
    texts = [row["review"] for row in csv.DictReader(Path(own_csv["test_file"]).read_text().splitlines())]
    bare.write_text("text,review\n" + "".join(f"other words,{text}\n" for text in texts))  # as trained: `review`
    values = {"do_train": False, "do_predict": True, "test_file": bare, "model_name_or_path": own_run.folder}
    values |= {"max_seq_length": TINY["max_seq_length"], "bf16": False}
    refused = launch("python", tmp_path / "run", values, check=False)
    assert refused.status == 2
    assert "--do_eval needs a validation split" in refused.errors[0]
    run = launch("python", tmp_path / "run", {**values, "do_eval": False})
    assert [row["prediction"] for row in predictions(run)] == [row["prediction"] for row in predictions(own_run)]
    assert set(predictions(run)[0]) == {"index", "prediction", "probability_bad", "probability_good"}
    assert "reads review as text, not text" in run.output
    bare.write_text("text\n" + "".join(f"{text}\n" for text in texts))
    values |= {"do_eval": False}
    refused = launch("python", tmp_path / "other", values, check=False)
    assert refused.status == 2
    assert "the test data has no column 'review', which the model was trained on. It has: text." in refused.errors[0]
    named = launch("python", tmp_path / "named", {**values, "text_column_names": ["text"]})
    assert [row["prediction"] for row in predictions(named)] == [row["prediction"] for row in predictions(run)]


def test_predictions_do_not_depend_on_the_number_of_ranks(
    own_run: Finished, own_csv: dict[str, Any], tmp_path: Path
) -> None:
    values = {
        **OWN,
        **own_csv,
        "do_train": False,
        "model_name_or_path": own_run.folder,
        "per_device_eval_batch_size": 8,
    }
    run = launch("torchrun", tmp_path / "run", values, ranks=2)
    one, two = predictions(own_run), predictions(run)
    assert [row["prediction"] for row in one] == [row["prediction"] for row in two]
    assert [float(r["probability_bad"]) for r in one] == pytest.approx(
        [float(r["probability_bad"]) for r in two], abs=1e-4
    )
    for name in ("eval_loss", "eval_accuracy", "predict_loss"):
        assert run.json("all_results.json")[name] == pytest.approx(own_run.json("all_results.json")[name], rel=1e-4)


@pytest.mark.parametrize("config", gate_has("none", ["none", "zero2"]))
def test_a_run_resumed_in_the_middle_of_an_epoch_ends_as_the_uncut_one(config: str, tmp_path: Path) -> None:
    # Six steps an epoch, so it is cut in the second.
    values = {**TINY, "deepspeed": config, "max_steps": 12, "save_strategy": "steps", "save_steps": 4}
    values |= {"per_device_train_batch_size": 16}
    uncut = launch("torchrun", tmp_path / "uncut", values, ranks=2)
    # The schedule must be that of twelve steps, so the cut run is stopped by taking its end away.
    cut = launch("torchrun", tmp_path / "cut", values, ranks=2)
    # Killed while it wrote the third checkpoint: the Trainer writes trainer_state.json last.
    (cut.folder / "checkpoint-12" / "trainer_state.json").unlink()
    resumed = launch("torchrun", tmp_path / "cut", {**values, "resume": "auto"}, ranks=2)
    assert resumed.column("loss") == pytest.approx(uncut.column("loss"), rel=1e-5)
    assert [row["step"] for row in resumed.steps] == list(range(1, 13))
    again = launch("torchrun", tmp_path / "cut", {**values, "resume": "auto"}, ranks=2, check=False)
    assert "nothing is left to do" in again.errors[0]
    values |= {"resume": "allow", "train_file": write_csv(tmp_path / "other.csv", 300, 3)}
    other = launch("torchrun", tmp_path / "cut", values, ranks=2, check=False)
    assert "has ended, and was trained on other files: --train_file has changed" in other.errors[0]


def test_a_run_that_was_cut_off_after_its_last_step_is_finished(tmp_path: Path) -> None:
    values = {**TINY, "save_strategy": "steps", "save_steps": 6}
    whole = launch("python", tmp_path / "run", values)
    before = whole.json("eval_results.json")["eval_loss"]
    for name in ("README.md", "model.safetensors", "all_results.json", "eval_results.json"):
        (whole.folder / name).unlink()
    finished = launch("python", tmp_path / "run", {**values, "resume": "auto"})
    assert (finished.folder / "model.safetensors").is_file()
    assert finished.json("eval_results.json")["eval_loss"] == pytest.approx(before)
    assert len(finished.steps) == 6


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "step 2 is not finite: first the output of distilbert.embeddings.LayerNorm"),
        ({"on_nan": "off"}, "has diverged"),
        ({"on_nan": "off", **NOT_JUDGED}, "has diverged"),
        ({"on_nan": "off", "task": "regression"}, "has diverged"),
    ],
    ids=str,
)
def test_a_run_that_diverges_fails(flags: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"words {i},{i % 2}\n" for i in range(60)))
    run = launch("python", tmp_path / "run", {**TINY, **flags, "train_file": path, "learning_rate": 1e30}, check=False)
    assert run.status == 1
    assert said in run.errors[0]


def test_a_regression_is_known_by_its_labels(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    generator = random.Random(0)
    rows = [(generator.choices(["up", "down"], k=8), i) for i in range(200)]
    path.write_text("sentence\tscore\n" + "".join(f"{' '.join(w)} {i}\t{w.count('up') / 2}\n" for w, i in rows))
    values = {**TINY, "train_file": path, "max_steps": 60, "learning_rate": 3e-3, "test_file": path, "do_predict": True}
    run = launch("python", tmp_path / "run", values)
    results = run.json("all_results.json")
    assert results["predict_pearson"] > 0.5
    assert results["predict_loss"] == results["predict_mse"]
    assert set(predictions(run)[0]) == {"index", "prediction", "label"}


def test_pairs_and_class_weights_and_smoothing_and_early_stopping_work_together(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"premise": f"it is {i % 7}", "hypothesis": f"it was {i % 5}", "label": int(i % 10 == 0)} for i in range(200)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"train_file": path, "class_weights": "balanced", "label_smoothing_factor": 0.1}
    values |= {
        "early_stopping_patience": 1,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
    }
    values |= {"learning_rate": 0, "max_steps": 40, "per_device_train_batch_size": 180}
    run = launch("python", tmp_path / "run", {**TINY, **values})
    # All rows at once: the weights make both classes count alike, so the loss of a model that knows nothing is ln 2.
    assert run.column("loss")[0] == pytest.approx(0.693, abs=0.02)
    assert len(run.steps) < 40, "at a rate of nothing nothing improves, and the run stops early"
    assert run.json("config.json")["id2label"] == {"0": "0", "1": "1"}


def test_a_stream_of_named_classes_is_learnt_with_their_names(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    rows = {
        "text": [f"{'good' if i % 2 else 'bad'} film {i}" for i in range(300)],
        "label": [i % 2 for i in range(300)],
    }
    (tmp_path / "hub").mkdir()
    for split in ("train", "test"):
        Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "hub" / f"{split}.parquet"))
    values = {"dataset_name": tmp_path / "hub", "streaming": True, "class_weights": "balanced", "max_steps": 30}
    run = launch("python", tmp_path / "run", {**TINY, **values})
    assert run.json("config.json")["id2label"] == {"0": "neg", "1": "pos"}
    assert run.json("eval_results.json")["eval_accuracy"] > 0.9


def test_a_stream_is_trained_on_alike_by_one_rank_and_by_two(own_csv: dict[str, Any], tmp_path: Path) -> None:
    # Twelve global batches and a half, with no --max_steps given: the last is filled up.
    values = {**TINY, "train_file": own_csv["train_file"], "streaming": True, "max_train_samples": 200}
    values |= {"max_steps": -1, "num_train_epochs": 1}
    one = launch("python", tmp_path / "one", {**values, "per_device_train_batch_size": 16})
    assert len(one.steps) == 13
    for name, launcher in (("two", "torchrun"), ("ds", "deepspeed")):
        two = launch(launcher, tmp_path / name, {**values, "per_device_train_batch_size": 8}, ranks=2)
        assert two.column("loss") == pytest.approx(one.column("loss"), rel=0.01)
        assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=0.01)


@pytest.mark.parametrize(
    "flags", [{"class_weights": "balanced", "label_smoothing_factor": 0.1}, {"task": "regression"}]
)
def test_our_own_losses_are_the_same_at_any_world_size(flags: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"{'ab'[i % 2]} word {i},{int(i % 5 == 0)}\n" for i in range(240)))
    values = {**TINY, **flags, "train_file": path}
    one = launch("python", tmp_path / "one", {**values, "per_device_train_batch_size": 32})
    spread = {**values, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    for name, config in (("ddp", "none"), ("zero2", "zero2")):
        two = launch("torchrun", tmp_path / name, {**spread, "deepspeed": config}, ranks=2)
        assert two.column("loss") == pytest.approx(one.column("loss"), rel=0.01)
        assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=0.01)


@pytest.mark.nightly
def test_real_weights_are_fine_tuned_from_a_folder(minilm: Path, sst2: Path, tmp_path: Path) -> None:
    values = {"model_name_or_path": minilm, "train_file": sst2 / "train.tsv", "validation_file": sst2 / "dev.tsv"}
    settings = {
        "max_steps": 100,
        "max_train_samples": 1600,
        "max_eval_samples": 200,
        "learning_rate": 1e-4,
        "bf16": False,
    }
    run = launch("python", tmp_path / "run", {**TINY, **settings, **values, "per_device_train_batch_size": 16})
    assert run.json("eval_results.json")["eval_accuracy"] > 0.7  # always guessing the larger class: about 0.5


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of an offline run's file: a LevelDB log (github.com/google/leveldb, doc/log_format.md) after a header
    of seven bytes."""
    data, place, part = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        left_in_block = 32768 - place % 32768
        if left_in_block < 7:
            place += left_in_block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last of its parts
            yield part
            part = b""


def test_wandb_offline_holds_the_run(tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    run = launch("python", tmp_path / "run", {**TINY, "max_steps": 3, "report_to": "wandb"}, env=env)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    seen: dict[str, Any] = {}
    for content in wandb_records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        for item in record.history.item:
            seen.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
    assert seen["train/loss"] == pytest.approx(run.column("loss"))
    assert {"train/real_tokens_per_second", "train/padding_share", "train/step_seconds_p95"} <= set(seen)


@pytest.mark.nightly
def test_fsdp_shards_a_bert_with_the_loss_of_ddp(minilm: Path, tmp_path: Path) -> None:
    values = {**TINY, "model_name_or_path": minilm, "max_steps": 3, "per_device_train_batch_size": 4}
    ddp = launch("torchrun", tmp_path / "ddp", values, ranks=2)
    fsdp = launch("torchrun", tmp_path / "fsdp", {**values, "fsdp": True}, ranks=2)
    for name in ("loss", "grad_norm"):
        assert fsdp.column(name) == pytest.approx(ddp.column(name), rel=1e-3)


@pytest.mark.parametrize("tracker", ["tensorboard", "trackio"])
def test_other_trackers_work(tracker: str, tmp_path: Path) -> None:
    pytest.importorskip(tracker, reason=f"{tracker} (an extra) is not installed")
    env = {
        "HOME": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "TENSORBOARD_LOGGING_DIR": str(tmp_path / "tb"),
    }
    launch("python", tmp_path / "run", {**TINY, "max_steps": 2, "report_to": tracker}, env=env)
    pattern = "**/events.out.tfevents*" if tracker == "tensorboard" else "trackio/*.db"
    assert list(tmp_path.glob(pattern))


def shipped_yamls() -> list[Path]:
    return sorted((REPO / "recipes" / "configs").glob("seq_cls*.yaml"))


def test_there_are_shipped_yamls() -> None:
    assert len(shipped_yamls()) == 3


@pytest.mark.parametrize("path", shipped_yamls(), ids=lambda path: path.stem)
def test_every_shipped_yaml_runs(path: Path, minilm: Path, own_csv: dict[str, Any], tmp_path: Path) -> None:
    """Shortened by overrides, with local data and weights in place of the hub's."""
    from datasets import load_dataset

    # All else is as the file says: rates, schedule, strategies, the DeepSpeed config and what the best model is.
    values: dict[str, Any] = {"config": path, "max_steps": 2, "model_name_or_path": minilm, "logging_steps": 1}
    if "dataset_name" in path.read_text():
        folder = tmp_path / "hub"
        folder.mkdir()
        for split, file in (("train", "train_file"), ("test", "test_file")):
            load_dataset("csv", data_files=own_csv[file], split="train").to_parquet(str(folder / f"{split}.parquet"))
        values["dataset_name"] = folder
    else:
        values |= own_csv
    run = launch("python", tmp_path / "run", values)
    assert len(run.steps) == 2


TOPICS = {"art": "museum brush poem", "law": "court judge clause", "war": "tank siege truce"}


def write_topics(path: Path, rows: int, seed: int) -> str:
    """Texts that hold a word of each of their topics: of none, of one or of several."""
    generator = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            labels = [name for name, share in zip(TOPICS, (0.5, 0.3, 0.3), strict=True) if generator.random() < share]
            words = [generator.choice(TOPICS[name].split()) for name in labels for _ in range(2)]
            words += generator.choices(["the", "of", "was"], k=generator.randint(2, 6))
            generator.shuffle(words)
            file.write(json.dumps({"text": " ".join(words), "labels": labels}) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("topics")
    files = {
        "train_file": write_topics(folder / "a.jsonl", 400, 1),
        "test_file": write_topics(folder / "b.jsonl", 60, 2),
    }
    return {**OWN, **files, "max_steps": 60, "max_train_samples": 320, "class_weights": "balanced"}


@pytest.fixture(scope="module")
def topics_on_two(topics: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("two") / "run"
    return launch("deepspeed", folder, {**topics, "deepspeed": "zero2", "per_device_train_batch_size": 8}, ranks=2)


def test_several_labels_a_text_are_learnt_alike_on_one_rank_and_on_two(
    topics: dict[str, Any], topics_on_two: Finished, tmp_path: Path
) -> None:
    """The losses of 60 steps; then what stands in the folder: thresholds, predictions by them, a table, a picture."""
    two = topics_on_two
    one = launch("python", tmp_path / "one", {**topics, "per_device_train_batch_size": 16})
    losses = [[step["loss"] for step in run.steps] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)

    results = two.json("all_results.json")
    assert {"eval_f1_micro", "eval_f1_macro", "eval_subset_accuracy"} <= set(results)
    thresholds = {row["label"]: row["threshold"] for row in two.json("per_label.json")}
    assert list(thresholds) == list(TOPICS)
    assert two.json("config.json")["thresholds"] == list(thresholds.values())
    assert two.json("config.json")["problem_type"] == "multi_label_classification"
    assert (two.folder / "per_label.png").is_file()
    right = 0
    for row in predictions(two):
        given = [name for name, cut in thresholds.items() if float(row[f"probability_{name}"]) >= cut]
        assert json.loads(row["prediction"]) == given
        right += row["prediction"] == row["label"]
    assert results["predict_subset_accuracy"] == pytest.approx(right / 60)
    assert results["predict_f1_micro"] > 0.8

    from transformers import pipeline

    scores = pipeline("text-classification", str(two.folder))("the court of the museum", top_k=None)
    assert {score["label"] for score in scores if score["score"] >= thresholds[score["label"]]} == {"art", "law"}


def test_a_trained_model_is_evaluated_at_the_thresholds_of_its_run(
    topics: dict[str, Any], topics_on_two: Finished, tmp_path: Path
) -> None:
    """The figures that the run ended with are at those, in whichever file."""
    trained = topics_on_two
    alone = {**topics, "do_train": False, "do_predict": False, "model_name_or_path": trained.folder}
    del alone["test_file"]
    again = launch("python", tmp_path / "again", alone)
    names = ("eval_f1_micro", "eval_f1_macro", "eval_subset_accuracy", "eval_loss")
    closing = {name: trained.json("eval_results.json")[name] for name in names}
    assert {name: again.json("eval_results.json")[name] for name in names} == pytest.approx(closing, rel=1e-5)
    rows = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    assert {name: [row for row in rows if name in row][-1][name] for name in names} == pytest.approx(closing)
    table = trained.json("per_label.json")
    assert sum(row["f1"] for row in table) / len(table) == pytest.approx(closing["eval_f1_macro"])


MOVES = [("accelerate", "none", "zero2"), ("torchrun", "zero1", "zero3")]


@pytest.mark.parametrize(("launcher", "config", "then"), gate_has(MOVES[0], MOVES))
def test_several_labels_a_text_go_on_from_two_ranks_to_one_at_another_stage(
    launcher: str, config: str, then: str, topics: dict[str, Any], tmp_path: Path
) -> None:
    saving = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "do_predict": False}
    flags = {**topics, **saving, "per_device_train_batch_size": 8}
    del flags["test_file"]
    two = launch(launcher, tmp_path / "run", {**flags, "deepspeed": config}, ranks=2)
    uncut = two.column("loss")
    shutil.rmtree(two.folder / "checkpoint-8")
    one = launch("python", two.folder, {**flags, "deepspeed": then, "resume": "auto"})
    assert "going on from" in one.output
    assert one.column("loss")[:4] == uncut[:4]
    assert one.column("loss")[4:] == pytest.approx(uncut[4:], rel=1e-4)


def test_a_batch_of_more_rows_than_there_are_is_noted(tmp_path: Path) -> None:
    values = {**TINY, "max_steps": 1, "max_train_samples": 20, "per_device_train_batch_size": 32, "eval_strategy": "no"}
    run = launch("python", tmp_path / "run", values)
    (note,) = (line for line in run.output.splitlines() if "each batch repeats some" in line)
    assert note.startswith("note: the global batch of 32 has more rows than the training data, ")
