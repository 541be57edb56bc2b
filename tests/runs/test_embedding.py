"""recipes/embedding.py as people use it: layouts, resumption, kinds of rows, folders that open elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, Finished, engine, gate_has, launch

RECIPE = "recipes/embedding.py"
OWN = {**TINY, "max_train_samples": 96, "max_eval_samples": 24, "per_device_train_batch_size": 16}
COLOURS = ("red", "green", "blue", "white")


def run(launcher: str, folder: Path, values: dict[str, Any], **more: Any) -> Finished:
    return launch(launcher, folder, {**OWN, **values}, recipe=RECIPE, **more)


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run("python", tmp_path_factory.mktemp("one") / "run", {"matryoshka_dims": [128, 32]})


@pytest.mark.nightly
def test_a_docstring_finds_its_function(tmp_path: Path) -> None:
    flags = {"max_train_samples": 6000, "max_eval_samples": 100, "max_steps": 100, "per_device_train_batch_size": 64}
    done = run("python", tmp_path / "run", flags)
    assert done.json("eval_results.json")["eval_recall_at_10"] >= 0.6, "by chance 0.1"
    assert (done.folder / "training_curve.png").is_file()


LAYOUTS = [
    ("python", "none", 1, 4, 4),
    ("torchrun", "none", 2, 4, 2),
    ("torchrun", "none", 2, 8, 1),
    ("deepspeed", "zero0", 2, 4, 2),
    ("deepspeed", "zero1", 2, 4, 2),
    ("deepspeed", "zero2", 2, 4, 2),
    ("deepspeed", "zero2", 2, 8, 1),
    ("torchrun", "zero3", 2, 4, 2),
    ("torchrun", "zero3", 2, 8, 1),
    *(("torchrun", config, 2, 4, 2) for config in ("zero2_offload", "zero3_offload", "fsdp")),
]


@pytest.mark.parametrize(("launcher", "config", "ranks", "batch", "accumulation"), gate_has(LAYOUTS[5], LAYOUTS))
@pytest.mark.usefixtures("built_ops")
def test_loss_and_gradient_are_those_of_the_whole_batch_however_it_is_spread(
    launcher: str, config: str, ranks: int, batch: int, accumulation: int, one_rank: Finished, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {
        "matryoshka_dims": [128, 32],
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
    }
    flags |= engine(config)
    other = run(launcher, tmp_path / "run", flags, ranks=ranks)
    for name in ("loss", "grad_norm"):
        assert other.column(name) == pytest.approx(one_rank.column(name), rel=1e-4)
    found = [one.json("eval_results.json") for one in (one_rank, other)]
    for name in ("eval_loss", "eval_mrr_at_10", "eval_mrr_at_10_dim_32"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-3)


@pytest.mark.parametrize("accumulation", gate_has(2, [1, 2]))
def test_a_run_goes_on_bit_by_bit_with_dropout_and_the_negatives_that_were_mined(
    accumulation: int, tmp_path: Path
) -> None:
    flags = {"mined_negatives": 2, "dropout": 0.1, "save_strategy": "steps", "save_steps": 4}
    flags |= {"per_device_train_batch_size": 16 // accumulation, "gradient_accumulation_steps": accumulation}
    whole = run("python", tmp_path / "whole", flags)
    shutil.copytree(whole.folder, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoint-6")
    again = run("python", tmp_path / "cut", {**flags, "resume": "auto"})
    assert "going on from" in again.output
    assert again.column("loss")[-2:] == whole.column("loss")[-2:]
    weights = [(one.folder / "model.safetensors").read_bytes() for one in (whole, again)]
    assert weights[0] == weights[1]

    (tmp_path / "cut" / "negatives.npz").unlink()
    shutil.rmtree(tmp_path / "cut" / "checkpoint-6")
    lost = run("python", tmp_path / "cut", {**flags, "resume": "auto"}, check=False)
    assert lost.status == 2
    assert "the model has moved on since" in lost.output


@pytest.mark.nightly
def test_two_ranks_mine_the_same_negatives_and_one_goes_on_from_there(tmp_path: Path) -> None:
    flags = {"mined_negatives": 3, "save_strategy": "steps", "save_steps": 4}
    one = run("python", tmp_path / "one", flags)
    two = run("torchrun", tmp_path / "two", {**flags, "per_device_train_batch_size": 8, "deepspeed": "zero2"}, ranks=2)
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-4)
    mined = [np.load(done.folder / "negatives.npz")["rows"] for done in (one, two)]
    assert np.array_equal(*mined)
    shutil.rmtree(two.folder / "checkpoint-6")
    again = run("python", two.folder, {**flags, "resume": "auto"})
    assert again.column("loss")[-2:] == pytest.approx(one.column("loss")[-2:], rel=1e-4)


def test_one_batch_is_learnt_by_heart(tmp_path: Path) -> None:
    flags = {"max_train_samples": 16, "max_steps": 15, "learning_rate": 3e-3}
    done = run("python", tmp_path / "run", flags)
    assert done.column("loss")[-1] < 0.1 * done.column("loss")[0]


def rows_of(kind: str) -> list[dict[str, Any]]:
    texts = [(f"{COLOURS[n % 4]} thing number {n}", n % 4) for n in range(80)]
    if kind == "labels":
        return [{"text": text, "label": COLOURS[colour]} for text, colour in texts]
    if kind == "scores":
        pairs = [(texts[n], texts[(n * 7 + n // 4) % 80]) for n in range(80)]
        return [{"sentence1": a, "sentence2": b, "score": float(x == y)} for (a, x), (b, y) in pairs]
    return [
        {"anchor": text, "positive": f"{text} is {COLOURS[colour]}", "negative": f"{text} is {COLOURS[colour - 1]}"}
        for text, colour in texts
    ]


@pytest.mark.parametrize(
    ("kind", "figure", "least"),
    gate_has(("scores", "spearman", 0.6), [("labels", "recall_at_1", 0.9), ("scores", "spearman", 0.6),
                                           ("triplets", "triplet_accuracy", 0.7)]),
)  # fmt: skip
def test_each_kind_of_rows_is_learnt_and_has_its_figures(kind: str, figure: str, least: float, tmp_path: Path) -> None:
    flags = {"train_file": written(tmp_path, rows_of(kind)), "learning_rate": 3e-3, "max_steps": 40}
    flags |= {"validation_fraction": 0.25, "metric_for_best_model": figure, "load_best_model_at_end": True}
    flags |= {"eval_strategy": "steps", "eval_steps": 10, "save_strategy": "steps", "save_steps": 10}
    done = run("python", tmp_path / "run", {**flags, "max_eval_samples": None, "max_train_samples": None})
    rows = map(json.loads, (done.folder / "metrics.jsonl").read_text().splitlines())
    best = max(row[f"eval_{figure}"] for row in rows if f"eval_{figure}" in row)
    assert done.json("eval_results.json")[f"eval_{figure}"] == best, "more is better"
    assert best >= least


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["labels", "scores", "triplets"])
def test_each_kind_of_rows_has_the_same_loss_on_two_ranks(kind: str, tmp_path: Path) -> None:
    flags = {"train_file": written(tmp_path, rows_of(kind)), "max_train_samples": None, "max_eval_samples": None}
    one = run("python", tmp_path / "one", flags)
    spread = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "deepspeed": "zero2"}
    two = run("torchrun", tmp_path / "two", {**flags, **spread}, ranks=2)
    for name in ("loss", "grad_norm"):
        assert two.column(name) == pytest.approx(one.column(name), rel=1e-4)


def by_sentence_transformers(folder: Path, texts: list[str], is_query: bool = False) -> np.ndarray[Any, Any]:
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers (extra dev)")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    found: np.ndarray[Any, Any] = (model.encode_query if is_query else model.encode_document)(texts)
    return found


def by_transformers(folder: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    """The mean of the last hidden states, of length 1."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    made = []
    for text in texts:
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        made.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
    return np.stack(made)


def test_real_weights_are_trained_further_and_open_in_sentence_transformers(minilm: Path, tmp_path: Path) -> None:
    flags = {"model_name_or_path": minilm, "dropout": None, "query_prompt": "query: ", "max_steps": 3}
    done = run("python", tmp_path / "run", {**flags, "learning_rate": 1e-4})
    texts = ["Return the sum of two numbers.", "def add(a, b):\n    return a + b"]
    wanted = by_transformers(done.folder, texts)
    np.testing.assert_allclose(by_sentence_transformers(done.folder, texts), wanted, atol=1e-5)
    asked = by_transformers(done.folder, [f"query: {text}" for text in texts])
    np.testing.assert_allclose(by_sentence_transformers(done.folder, texts, is_query=True), asked, atol=1e-5)
    assert np.abs(wanted - by_transformers(minilm, texts)).max() > 1e-4, "it has learnt"
    figures = done.json("eval_results.json")
    assert figures["eval_recall_at_10"] >= 0.7, "what the model knew before"


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["none", "zero2", "zero3", "fsdp"])
def test_an_adapter_opens_and_so_does_the_model_that_it_is_merged_into(
    config: str, minilm: Path, tmp_path: Path
) -> None:
    flags = {"model_name_or_path": minilm, "dropout": None, "use_peft": True, **engine(config)}
    flags |= {} if config in ("zero3", "fsdp") else {"merge_adapter": True}
    done = run("torchrun", tmp_path / "run", {**flags, "per_device_train_batch_size": 8}, ranks=2)
    found = by_sentence_transformers(done.folder, ["One text."])
    assert np.abs(found - by_transformers(minilm, ["One text."])).max() > 1e-5
    if config == "none":
        np.testing.assert_allclose(found, by_sentence_transformers(done.folder / "merged", ["One text."]), atol=1e-5)


@pytest.mark.nightly
def test_a_decoder_is_pooled_at_its_last_token(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from finetune.data.tokenizer import train_text_tokenizer

    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=300)).save_pretrained(tmp_path / "llama")
    tokenizer = train_text_tokenizer("byte", [], 300, 512, with_end=True)
    tokenizer.save_pretrained(tmp_path / "llama")
    done = run("python", tmp_path / "run", {"model_name_or_path": tmp_path / "llama", "dropout": None})
    from transformers import AutoModel

    model = AutoModel.from_pretrained(done.folder).eval()
    with torch.no_grad():
        hidden = model(**tokenizer("One text.", return_tensors="pt")).last_hidden_state[0, -1]
    wanted = torch.nn.functional.normalize(hidden, dim=0).numpy()[None]
    np.testing.assert_allclose(by_sentence_transformers(done.folder, ["One text."]), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"matryoshka_dims": [10_000]}, "the model's vectors have"),
        ({"per_device_train_batch_size": 1}, "it has no other rows to compare with"),
        ({"mined_negatives": 2, "rows": "labels"}, "the data are texts with labels, and only pairs have negatives"),
    ],
)
def test_what_cannot_be_is_refused(flags: dict[str, Any], words: str, tmp_path: Path) -> None:
    if kind := flags.pop("rows", None):
        flags["train_file"] = written(tmp_path, rows_of(kind))
    done = run("python", tmp_path / "run", {**flags, "max_eval_samples": None}, check=False)
    assert done.status == 2
    assert words in done.output


def test_a_test_file_is_measured(tmp_path: Path) -> None:
    path = written(tmp_path, rows_of("triplets"))
    flags = {"test_file": path, "train_file": path, "do_predict": True, "max_train_samples": None, "max_steps": 2}
    done = run("python", tmp_path / "run", flags)
    found = done.json("predict_results.json")
    assert found["predict_samples"] == 80
    assert 0 < found["predict_triplet_accuracy"] <= 1
