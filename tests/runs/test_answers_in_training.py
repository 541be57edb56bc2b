"""Held-out prompts that a language model answers while it is trained: the same answers on any ranks and engine."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, Finished, engine, gate_has, launch

from finetune.cli import main

pytestmark = pytest.mark.usefixtures("built_ops")

RECIPE = "recipes/causal_lm.py"
WORDS = ["red", "green", "blue", "white", "black"]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 96}
OWN = {
    "max_steps": 12,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 6,
    "save_strategy": "no",
    "bf16": False,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "sample_tokens": 0,
    "packing": "none",
    "predict_with_generate": True,
    "generation_max_new_tokens": 16,
    "per_device_eval_batch_size": 4,
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(count: int, seed: int) -> list[dict[str, Any]]:
    """A list of words, and its last one: prompts of unlike lengths, answers that end at unlike times."""
    draw = random.Random(seed)
    lists = (draw.sample(WORDS, draw.randint(1, 5)) for _ in range(count))
    return [{"prompt": " ".join(some) + ":", "completion": f" {some[-1]}"} for some in lists]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-lite over bytes that knows already where an answer ends."""
    import torch

    from finetune.data.tokenizer import train_text_tokenizer
    from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM

    tokenizer = train_text_tokenizer("byte", [], 0, 96, with_end=True)
    torch.manual_seed(0)
    model = GPTLiteForCausalLM(GPTLiteConfig(vocab_size=len(tokenizer), **SHAPE))
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = write_rows(folder / "rows.jsonl", rows_of(200, 0))
    values = {"train_file": file, "model_name_or_path": folder, "predict_with_generate": None, "do_eval": False}
    values |= {"generation_max_new_tokens": None, "max_steps": 120, "eval_strategy": None, "eval_steps": None}
    return train("python", folder / "run", {**values, "per_device_eval_batch_size": None}).folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """19 held-out rows, so that the last batch of 4 is not full and one of two ranks has none."""
    folder = tmp_path_factory.mktemp("rows")
    files = {name: write_rows(folder / f"{name}.jsonl", rows_of(n, n)) for name, n in (("train", 120), ("held", 19))}
    return {"train_file": files["train"], "validation_file": files["held"]}


def train(launcher: str, folder: Path, values: dict[str, Any], ranks: int = 1, **more: Any) -> Finished:
    return launch(launcher, folder, {**OWN, **values}, ranks=ranks, recipe=RECIPE, **more)


def answers(done: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (done.folder / "predictions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_rank(base: Path, rows: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    values = {**rows, "model_name_or_path": base, "per_device_train_batch_size": 8, "metrics": ["exact_match", "chrf"]}
    return train("python", tmp_path_factory.mktemp("one") / "run", values)


def test_answers_are_in_the_order_of_the_file_and_judged_at_each_evaluation(
    one_rank: Finished, rows: dict[str, Any]
) -> None:
    given = [json.loads(line) for line in rows["validation_file"].read_text().splitlines()]
    found = answers(one_rank)
    assert [(row["index"], row["prompt"], row["target"]) for row in found] == [
        (number, row["prompt"], row["completion"]) for number, row in enumerate(given)
    ]
    exact = sum(row["prediction"].strip() == row["target"].strip() for row in found) / len(found)
    results = one_rank.json("all_results.json")
    assert results["eval_exact_match"] == pytest.approx(exact)
    assert 0 < results["eval_chrf"] < 100
    assert len({len(row["prediction"]) for row in found}) > 1  # they end at unlike times
    log = map(json.loads, (one_rank.folder / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in log if "eval_exact_match" in row] == [6, 12]
    assert "evaluation: 19 prompts answered greedily, with at most 16 tokens" in one_rank.output
    assert "the reference answer, and the model's last answer" in (one_rank.folder / "README.md").read_text()


def test_the_run_folder_answers_the_same_afterwards_one_prompt_at_a_time(one_rank: Finished, tmp_path: Path) -> None:
    """Without any padding, and the model's folder says nothing of how it was asked in training."""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in answers(one_rank)])
    words = ["--prompts", str(prompts), "--output", str(tmp_path / "out.jsonl"), "--max_new_tokens", "16"]
    assert main(["generate", str(one_rank.folder), *words, "--batch_size", "1"]) == 0
    out = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert out == [row["prediction"] for row in answers(one_rank)]
    assert "do_sample" not in json.loads((one_rank.folder / "generation_config.json").read_text())


def test_what_is_learnt_does_not_depend_on_it(
    one_rank: Finished, base: Path, rows: dict[str, Any], tmp_path: Path
) -> None:
    values = {**rows, "model_name_or_path": base, "per_device_train_batch_size": 8}
    silent = {"predict_with_generate": False, "generation_max_new_tokens": None}
    plain = train("python", tmp_path / "run", {**values, **silent})
    assert plain.column("loss") == one_rank.column("loss")
    for name in ("model.safetensors", "generation_config.json"):
        assert (plain.folder / name).read_bytes() == (one_rank.folder / name).read_bytes()
    assert not (plain.folder / "predictions.jsonl").exists()


EVERYWHERE = ["none", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "fsdp"]


@pytest.mark.parametrize("config", gate_has(["zero3", "fsdp"], EVERYWHERE))
def test_two_ranks_of_any_engine_answer_alike_and_none_waits_for_good(
    config: str, one_rank: Finished, base: Path, rows: dict[str, Any], tmp_path: Path
) -> None:
    values = {**rows, **engine(config), "model_name_or_path": base, "per_device_train_batch_size": 4}
    two = train("torchrun", tmp_path / "run", {**values, "metrics": ["exact_match", "chrf"]}, ranks=2)
    assert two.column("loss") == pytest.approx(one_rank.column("loss"), rel=1e-3)
    assert answers(two) == answers(one_rank)
    for name in ("eval_exact_match", "eval_chrf"):
        assert two.json("all_results.json")[name] == one_rank.json("all_results.json")[name]


@pytest.mark.parametrize("config", gate_has([], ["none", "zero3", "fsdp"]))
def test_an_adapters_answers_are_the_same_on_two_ranks(
    config: str, base: Path, rows: dict[str, Any], tmp_path: Path
) -> None:
    values = {**rows, "model_name_or_path": base, "use_peft": True}
    one = train("python", tmp_path / "one", {**values, "per_device_train_batch_size": 8})
    two = {**values, **engine(config), "per_device_train_batch_size": 4}
    assert answers(train("torchrun", tmp_path / "two", two, ranks=2)) == answers(one)


def test_a_chat_is_answered_by_its_last_turn_and_what_has_none_is_left_out(base: Path, tmp_path: Path) -> None:
    """The prompt is what the template writes before the assistant's last turn."""
    pytest.importorskip("peft", reason="peft (extra peft) is not installed")

    def chat(number: int) -> dict[str, Any]:
        some = random.Random(number).sample(WORDS, 3)
        turns = [{"role": "user", "content": f"say {some[0]}"}, {"role": "assistant", "content": some[0]}]
        return {"messages": [*turns, {"role": "user", "content": "now?"}, {"role": "assistant", "content": some[1]}]}

    unlearnt = [{"role": "user", "content": "say red"}, {"role": "assistant", "content": "red", "weight": 0}]
    held = [chat(1), {"messages": unlearnt}, chat(2)]
    values = {
        "train_file": write_rows(tmp_path / "train.jsonl", [chat(n) for n in range(10, 40)]),
        "validation_file": write_rows(tmp_path / "held.jsonl", held),
        "model_name_or_path": base,
        "chat_template": "chatml",
        "max_steps": 2,
        "use_peft": True,
    }
    done = train("python", tmp_path / "run", values)
    found = answers(done)
    assert [(row["index"], row["target"].removesuffix("<|im_end|>")) for row in found] == [
        (number, held[number]["messages"][-1]["content"]) for number in (0, 2)
    ]
    assert found[0]["prompt"].endswith("<|im_start|>assistant\n")
    assert held[0]["messages"][1]["content"] in found[0]["prompt"]
    assert "2 prompts answered greedily" in done.output
    assert "of 3 held-out documents; the others have no question or no answer" in done.output
    card = (done.folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert '"role": "user"' in card  # and the base has no chat template: only the adapter's tokenizer does
    program = card.replace("path/to/this/folder", str(done.folder)).replace("max_new_tokens=100", "max_new_tokens=4")
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPO)


def test_plain_text_is_refused_for_it_has_no_answers(base: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"text": f"{word} and so on"} for word in WORDS * 10])
    done = train("python", tmp_path / "run", {"train_file": file, "model_name_or_path": base}, check=False)
    assert done.status == 2
    assert re.search("the data is plain text, which has no answers", done.errors[0])
