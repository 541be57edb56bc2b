"""recipes/seq2seq.py as people use it: files of pairs, engines, written texts, resumption."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import NOT_JUDGED, TINY, Finished, gate_has, launch
from seq2seq_families import FAMILIES, OF_BART, save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

RECIPE = "recipes/seq2seq.py"
OWN = {name: value for name, value in TINY.items() if name != "max_seq_length"} | {
    "max_train_samples": 160,
    "max_steps": 20,
    "learning_rate": 3e-3,
    "max_source_length": 24,
    "max_target_length": 12,
    "per_device_eval_batch_size": 8,
}
WORDS = ["red", "green", "blue", "white", "black"]


def write_pairs(path: Path, pairs: int, seed: int) -> str:
    """Words, and the same the other way round: from one to five, so that no two batches are of one length."""
    generator = random.Random(seed)
    with path.open("w") as file:
        for _ in range(pairs):
            words = generator.sample(WORDS, generator.randint(1, 5))
            file.write(json.dumps({"document": " ".join(words), "summary": " ".join(reversed(words))}) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """21 test rows, so that the last batch of 8 is not full and one of two ranks has none."""
    folder = tmp_path_factory.mktemp("pairs")
    return {name: write_pairs(folder / f"{name}.jsonl", n, n) for name, n in (("train_file", 180), ("test_file", 21))}


def run(launcher: str, folder: Path, values: dict[str, Any], **more: Any) -> Finished:
    return launch(launcher, folder, {**OWN, **values}, recipe=RECIPE, **more)


def written(done: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (done.folder / "predictions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_rank(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    flags = {**files, "per_device_train_batch_size": 8, "do_predict": True, "save_strategy": "steps", "save_steps": 16}
    return run("python", tmp_path_factory.mktemp("one") / "run", {**flags, "label_smoothing_factor": 0.1})


def test_predictions_are_in_the_order_of_the_file_and_judged(one_rank: Finished, files: dict[str, str]) -> None:
    rows = [json.loads(line) for line in Path(files["test_file"]).read_text().splitlines()]
    found = written(one_rank)
    assert [row["index"] for row in found] == list(range(len(rows)))
    assert [row["source"] for row in found] == [row["document"] for row in rows]
    results = one_rank.json("all_results.json")
    for split in ("eval", "predict"):
        names = {"loss", "perplexity", "token_accuracy", "exact_match", "rouge1", "rougeL"}
        assert {f"{split}_{name}" for name in names} <= set(results)
    exact = sum(row["prediction"] == row["target"] for row in found) / len(found)
    assert results["predict_exact_match"] == pytest.approx(exact)
    card = (one_rank.folder / "README.md").read_text()
    assert "AutoModelForSeq2SeqLM.from_pretrained" in card


def test_the_folder_opens_and_writes_what_the_run_wrote(one_rank: Finished) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained(one_rank.folder)
    tokenizer = AutoTokenizer.from_pretrained(one_rank.folder)
    for row in written(one_rank)[:4]:
        made = model.generate(**tokenizer(row["source"], return_tensors="pt"), max_new_tokens=12)
        assert tokenizer.decode(made[0], skip_special_tokens=True) == row["prediction"]


WAYS = [("torchrun", "none", 4, 1), ("torchrun", "zero0", 4, 1), ("deepspeed", "zero1", 4, 1)]
WAYS += [("torchrun", "zero2", 2, 2), ("deepspeed", "zero3", 2, 2), ("accelerate", "none", 2, 2)]
WAYS += [("torchrun", "zero2_offload", 2, 2), ("deepspeed", "zero3_offload", 2, 2)]


@pytest.mark.parametrize(("launcher", "config", "batch", "accumulation"), gate_has(WAYS[0], WAYS))
@pytest.mark.usefixtures("built_ops")
def test_two_ranks_have_the_same_loss_write_the_same_and_one_goes_on_from_there(
    launcher: str, config: str, batch: int, accumulation: int, one_rank: Finished, files: dict[str, str], tmp_path: Path
) -> None:
    """Ranks and micro-batches hold unlike numbers of tokens, texts end at unlike times, and the last batch to write is
    not full."""
    flags = {**files, "deepspeed": config, "do_predict": True, "label_smoothing_factor": 0.1}
    saving = {"save_strategy": "steps", "save_steps": 16}
    spread = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    two = run(launcher, tmp_path / "run", {**flags, **saving, **spread}, ranks=2)
    assert one_rank.column("loss") == pytest.approx(two.column("loss"), rel=2e-4)
    assert one_rank.column("grad_norm") == pytest.approx(two.column("grad_norm"), rel=1e-3)
    found = [one.json("all_results.json") for one in (one_rank, two)]
    for name in ("eval_loss", "predict_loss", "predict_token_accuracy"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-3), name
    assert written(one_rank) == written(two)

    shutil.rmtree(two.folder / "checkpoint-20")
    again = run("python", two.folder, {**flags, **saving, "per_device_train_batch_size": 8, "resume": "auto"})
    assert "going on from checkpoint-16" in again.output
    assert again.column("loss")[-4:] == pytest.approx(one_rank.column("loss")[-4:], rel=1e-3)


def test_a_run_goes_on_to_the_last_bit_where_it_was_cut_off(
    one_rank: Finished, files: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(one_rank.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-20")
    flags = {**files, "per_device_train_batch_size": 8, "resume": "auto", "label_smoothing_factor": 0.1}
    again = run("python", tmp_path / "run", {**flags, "save_strategy": "steps", "save_steps": 16})
    assert again.column("loss")[-4:] == one_rank.column("loss")[-4:]
    names = ("model.safetensors",)
    assert all((one_rank.folder / name).read_bytes() == (again.folder / name).read_bytes() for name in names)


def test_one_batch_is_learnt_by_heart_and_beams_find_it(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    sources = [*WORDS, "red green", "blue white", "black red green"]  # no two of the same words in another order
    rows = [{"document": text, "summary": " ".join(reversed(text.split()))} for text in sources]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"train_file": str(path), "validation_file": str(path), "test_file": str(path), "do_predict": True}
    values |= {"max_steps": 160, "learning_rate": 1e-2, "logging_steps": 20, "num_beams": 2, "metrics": ["exact_match"]}
    values |= {"max_source_length": 40, "max_target_length": 40}  # of so few texts tokens are short
    done = run("python", tmp_path / "run", {**values, "per_device_train_batch_size": 8})
    assert done.column("loss")[-1] < 0.2 < 1 < done.column("loss")[0]
    assert done.json("all_results.json")["predict_exact_match"] == 1.0


def test_a_model_is_asked_for_sources_without_targets(one_rank: Finished, tmp_path: Path) -> None:
    (tmp_path / "new.jsonl").write_text('{"document": "red green"}\n{"document": "blue"}\n')
    flags = {"model_name_or_path": one_rank.folder, "test_file": tmp_path / "new.jsonl", "do_predict": True}
    done = run("python", tmp_path / "run", {**flags, "do_train": False, **NOT_JUDGED})
    assert [set(row) for row in written(done)] == [{"index", "source", "prediction"}] * 2
    assert not [name for name in done.json("all_results.json") if name.endswith(("loss", "exact_match"))]


def test_a_bart_whose_tokenizer_marks_no_end_is_asked_without_targets(tmp_path: Path) -> None:
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", "</s>", *WORDS])}, "<pad>")),
        pad_token="<pad>",
        eos_token="</s>",
    )
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "decoder_start_token_id": 1}
    config = BartConfig(vocab_size=len(words), **OF_BART, **marks)
    save(tmp_path / "bart", BartForConditionalGeneration(config), words)
    (tmp_path / "new.csv").write_text("document\nred green\nblue\n")
    flags = {"model_name_or_path": tmp_path / "bart", "test_file": tmp_path / "new.csv", "do_predict": True}
    done = run("python", tmp_path / "run", {**flags, "do_train": False, **NOT_JUDGED})
    assert [row["index"] for row in written(done)] == [0, 1]


def test_an_adapter_is_trained_merged_and_opened(one_rank: Finished, files: dict[str, str], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft (extra peft) is not installed")
    from transformers import AutoModelForSeq2SeqLM

    flags = {**files, "model_name_or_path": one_rank.folder, "use_peft": True, "lora_r": 4, "merge_adapter": True}
    done = run("python", tmp_path / "run", {**flags, "max_steps": 4, "predict_with_generate": False})
    assert done.column("loss")[-1] < one_rank.column("loss")[0]
    adapted = peft.AutoPeftModelForSeq2SeqLM.from_pretrained(str(done.folder)).merge_and_unload()
    merged = AutoModelForSeq2SeqLM.from_pretrained(str(done.folder / "merged"))
    for name, weight in merged.state_dict().items():
        assert weight.allclose(adapted.state_dict()[name], atol=1e-6), name
    assert "AutoPeftModelForSeq2SeqLM" in (done.folder / "README.md").read_text()


@pytest.mark.parametrize("use_peft", [False, True])
def test_a_model_keeps_the_prefix_of_its_sources(
    use_peft: bool, one_rank: Finished, files: dict[str, str], tmp_path: Path
) -> None:
    if use_peft:
        pytest.importorskip("peft", reason="peft (extra peft) is not installed")
    plain = {"predict_with_generate": False, "validation_file": files["test_file"]}
    flags = {**plain, "train_file": files["train_file"], "model_name_or_path": one_rank.folder, "use_peft": use_peft}
    asked = {"source_prefix": "blue blue: ", "lora_r": 4 if use_peft else None, "max_steps": 2}
    trained = run("python", tmp_path / "trained", {**flags, **asked})
    assert "is put before each source" not in trained.output

    def loss(name: str, **more: Any) -> tuple[float, bool]:
        values = {**plain, "model_name_or_path": trained.folder, "do_train": False, "do_eval": True, **more}
        done = run("python", tmp_path / name, values)
        note = 'note: "blue blue: " is put before each source, as in the model\'s training'
        return done.json("eval_results.json")["eval_loss"], note in done.output

    here = trained.json("eval_results.json")["eval_loss"]
    assert loss("again") == (pytest.approx(here, rel=1e-6), True)
    without, is_noted = loss("without", source_prefix="")
    assert without != pytest.approx(here, rel=1e-3)
    assert not is_noted


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["none", "zero2", "zero3"])
@pytest.mark.usefixtures("built_ops")
def test_adapters_learn_the_same_on_two_ranks(
    config: str, one_rank: Finished, files: dict[str, str], tmp_path: Path
) -> None:
    flags = {**files, "model_name_or_path": one_rank.folder, "use_peft": True, "lora_r": 4, "max_steps": 6}
    one = run("python", tmp_path / "one", {**flags, "per_device_train_batch_size": 8})
    spread = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "deepspeed": config}
    two = run("torchrun", tmp_path / "two", {**flags, **spread}, ranks=2)
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-3)
    assert one.column("loss")[-1] < one.column("loss")[0]


@pytest.mark.parametrize("family", gate_has(["mbart"], list(FAMILIES)))
def test_a_family_is_trained_writes_and_opens(family: str, files: dict[str, str], tmp_path: Path) -> None:
    make, languages = FAMILIES[family]
    make(tmp_path / "model")
    flags = {**files, **languages, "model_name_or_path": tmp_path / "model", "max_steps": 4, "do_predict": True}
    done = run("python", tmp_path / "run", {**flags, "max_source_length": 30, "metrics": ["chrf"]})
    assert done.column("loss")[-1] < done.column("loss")[0]
    assert len(written(done)) == 21
    more = {"do_train": False, **NOT_JUDGED, "do_predict": True, "generation_max_length": 33, **languages}
    again = run("python", tmp_path / "more", {**more, "model_name_or_path": done.folder, **files}, check=False)
    has_positions = family != "mt5"
    assert again.status == (2 if has_positions else 0)
    assert ("the model has 32 positions" in again.output) == has_positions


def test_what_a_model_cannot_do_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = run("python", tmp_path / "run", {"model_name_or_path": tmp_path}, check=False)
    assert done.status == 2
    assert "is for recipes/causal_lm.py" in "".join(done.errors)
