"""A plan counts what a recipe then trains with: every recipe by default, and every shipped YAML, as far as the built
trainer, beside the job of the same flags."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO
from PIL import Image
from transformers import (
    DistilBertConfig,
    DistilBertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from finetune.data.seq2seq import train_tokenizer
from finetune.data.tokenizer import train_text_tokenizer, train_wordpiece
from finetune.plan.engines.resident import Weights
from finetune.plan.from_run import job_of
from finetune.plan.machine import Machine, find_machine
from finetune.plan.run_model import described
from finetune.run import facts
from finetune.run.choose import recipes
from finetune.run.launch import Launch
from finetune.run.parse import RECIPE_KEY
from finetune.run.resolve import resolve
from finetune.training.runtime import choose_precision

YAMLS = {path.stem: path for path in sorted((REPO / "recipes" / "configs").glob("*.yaml"))}
OF_RECIPES = {name: yaml.safe_load(path.read_text()).get(RECIPE_KEY) for name, path in YAMLS.items()}
LORA = ["--use_peft", "True"]
ADAPTED = {
    "LoRA": ("causal_lm", [*LORA, "--bf16", "True"]),
    "LoRA, all in fp32": ("causal_lm", [*LORA, "--bf16", "False"]),
    "LoRA on a base in fp32": ("causal_lm", [*LORA, "--bf16", "True", "--dtype", "float32"]),
    "LoRA on a base in bf16": ("causal_lm", [*LORA, "--dtype", "bfloat16", "--lora_target_modules", "q_proj"]),
    "LoRA of texts' classes": ("seq_cls", [*LORA, "--bf16", "True"]),
    "LoRA of some layers": ("seq_cls", [*LORA, "--bf16", "False", "--lora_target_modules", "q_lin", "v_lin"]),
    "QLoRA": ("causal_lm", [*LORA, "--bf16", "True", "--load_in_4bit", "True"]),
}
CASES = [*recipes(), *(name for name, recipe in OF_RECIPES.items() if recipe), *ADAPTED]
# Whose vocabulary is that of the text, which no plan reads; or whose classes are.
# Packed weights are half as many to torch.
BY_THE_DATA = ("seq2seq", "causal_lm", "preference", "embedding", "causal_lm_pipeline", "seq_cls", "token_cls",
               "question_answering", "token_cls_conll", "gptlite_post", "gptlite_tinyshakespeare")  # fmt: skip
SENTENCE = "The quick brown fox jumps over the lazy dog. "
LARGE_VOCABULARY = 9000
FILES = {"instruction": "chats.jsonl", "gpt2_124m": "words.txt"}  # the latter enough for a BPE of 50,304 tokens


def recipe_of(case: str) -> str:
    return ADAPTED[case][0] if case in ADAPTED else OF_RECIPES.get(case) or case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models as small as can be, with the vocabularies and positions of large ones; and data that fills a sample."""
    folder = tmp_path_factory.mktemp("inputs")
    texts = [SENTENCE * (200 + row if row < 9 else 1) + str(row) for row in range(60)]
    rows = [{"text": text, "label": row % 2} for row, text in enumerate(texts)]
    for split in ("train", "test"):
        write(folder / "classes" / f"{split}.jsonl", rows)
    tags = [{"tokens": text.split(), "tags": ["O"] + ["B-x"] * (len(text.split()) - 1)} for text in texts]
    write(folder / "tags.jsonl", tags)
    write(folder / "sources.jsonl", [{"source": text, "target": text} for text in texts])
    write(folder / "translations.jsonl", [{"translation": {"en": text, "de": text}} for text in texts])
    answers = {"text": ["quick"], "answer_start": [4]}
    asked = [{"question": f"What is {row}?", "context": text, "answers": answers} for row, text in enumerate(texts)]
    write(folder / "questions.jsonl", asked)
    (folder / "text.txt").write_text(SENTENCE * 2000)
    chat = [{"role": "user", "content": SENTENCE}, {"role": "assistant", "content": SENTENCE * 3}]
    write(folder / "pairs.jsonl", [{"prompt": text, "chosen": text + "!", "rejected": "No."} for text in texts])
    longest = [chat[0], {**chat[1], "content": SENTENCE * 400}]
    write(folder / "chats.jsonl", [{"messages": longest}, *[{"messages": chat}] * 400])
    for split in ("train", "test"):
        for row in range(40):
            path = folder / "pictures" / split / f"class{row % 10}" / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (6 * row, 0, 0)).save(path)
    encoder = DistilBertConfig(n_layers=1, dim=32, hidden_dim=64, n_heads=2, vocab_size=LARGE_VOCABULARY)
    DistilBertForMaskedLM(encoder).save_pretrained(folder / "encoder")
    train_wordpiece(texts, 200, 512).save_pretrained(folder / "encoder")
    decoder = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        vocab_size=LARGE_VOCABULARY,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(decoder).save_pretrained(folder / "decoder")
    train_text_tokenizer("bpe", texts, 300, 2048, with_end=True).save_pretrained(folder / "decoder")
    both = T5Config(
        d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=LARGE_VOCABULARY, decoder_start_token_id=0
    )
    T5ForConditionalGeneration(both).save_pretrained(folder / "both")
    train_tokenizer(iter(texts), 300, 2048).save_pretrained(folder / "both")
    draw = random.Random(0)
    words = ("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(40_000))
    (folder / "words.txt").write_text(" ".join(words))
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def flags_of(case: str, folder: Path) -> list[str]:
    """The shipped YAML, with data that is here; and a small model in place of one that is large."""
    recipe, words = recipe_of(case), ["--output_dir", str(folder / "runs" / case), "--use_cpu", "True"]
    if case in YAMLS:
        words = ["--config", str(YAMLS[case]), *words]
    if recipe == "seq_cls":
        words += ["--dataset_name", str(folder / "classes")]
    elif recipe == "token_cls":
        words += ["--train_file", str(folder / "tags.jsonl")]
    elif recipe == "question_answering":
        words += ["--train_file", str(folder / "questions.jsonl")]
    elif recipe == "seq2seq":
        words += ["--train_file", str(folder / ("translations.jsonl" if "translation" in case else "sources.jsonl"))]
    elif recipe == "image_cls":
        words += ["--train_dir", str(folder / "pictures/train")]
        # The pictures' own size; the YAML predicts.
        words += ["--image_size", "32"] if case == recipe else ["--test_dir", str(folder / "pictures/test")]
    elif recipe.startswith("causal_lm"):
        words += ["--train_file", str(folder / FILES.get(case, "text.txt"))]
    elif recipe == "preference":
        words += ["--train_file", str(folder / "pairs.jsonl")]
    elif recipe == "embedding":
        words += ["--train_file", str(folder / "sources.jsonl"), "--column_mapping", "source=anchor", "target=positive"]
    if case in ("instruction", "preference_dpo", "lora_24gb", "lora_zero3") or (
        case in ADAPTED and recipe == "causal_lm"
    ):
        words += ["--model_name_or_path", str(folder / "decoder")]
    words += ADAPTED[case][1] if case in ADAPTED else []
    if case.startswith("seq2seq_"):
        words += ["--model_name_or_path", str(folder / "both")]
    if case.startswith(("seq_cls_", "token_cls_", "embedding_")) or (case in ADAPTED and recipe != "causal_lm"):
        words += ["--model_name_or_path", str(folder / "encoder")]
    return words


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, dict[str, Any]]:
    cases = folder / "cases.json"
    cases.write_text(json.dumps([(recipe_of(case), flags_of(case, folder)) for case in CASES]))
    command = [sys.executable, str(Path(__file__).with_name("built_trainers.py")), str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPO)
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


def machine(trained: str) -> Machine:
    """A CPU that computes with what this one does, as --calibrate would write it, or in what a recipe trained in here:
    one that is asked for bf16 does so on any CPU."""
    cpu = find_machine("cpu")
    half = {"bf16": cpu.peak_flops["fp32"]} if "bf16" in (choose_precision(has_cuda=False), trained) else {}
    return replace(cpu, peak_flops=cpu.peak_flops | half)


def counted(run: Any, trained: dict[str, Any]) -> dict[str, Any]:
    job, _, _ = job_of(run, machine(trained["precision"]))
    weights = Weights(job.model.tensors, job.weight_bytes, job.frozen_bytes)
    names = ("micro_batch", "accumulation", "eval_batch", "precision", "checkpoint_interval", "loss_chunk_tokens")
    return {
        **{name: getattr(job, name) for name in (*names, "tokens", "image_size", "texts")},
        "optimizer": job.optimizer.kind,
        "parameters": job.model.parameters,
        "trained": weights.trained_elements,
        "frozen_bytes": weights.frozen_bytes,
    }


def differences(case: str, planned: dict[str, Any], trained: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    assert "error" not in trained, trained["error"]
    left_out = {"parameters", "trained"} if case in BY_THE_DATA else {"parameters"} if case == "QLoRA" else set()
    compared = {*trained} - left_out - {"unused"}
    return {name: (planned[name], trained[name]) for name in compared if planned[name] != trained[name]}


def test_a_yaml_says_whose_it_is() -> None:
    assert [name for name, recipe in OF_RECIPES.items() if not recipe] == [n for n in YAMLS if n.startswith("bench_")]
    assert len(CASES) > 12


@pytest.mark.parametrize("case", CASES)
def test_a_plan_counts_what_the_recipe_trains_with(case: str, folder: Path, trained: dict[str, Any]) -> None:
    run, _ = described(flags_of(case, folder), Launch(), recipe_of(case))
    assert differences(case, counted(run, trained[case]), trained[case]) == {}


def test_a_recipe_that_tells_ddp_so_uses_all_weights_of_its_model_from_scratch(trained: dict[str, Any]) -> None:
    told = {
        name for name, recipe in recipes().items() if recipe.scratch_defaults.get("ddp_find_unused_parameters") is False
    }
    assert {"seq_cls", "causal_lm", "image_cls"} <= told
    assert {name: trained[name]["unused"] for name in told} == {name: [] for name in told}


@pytest.mark.parametrize(
    ("name", "other", "counts"),
    [
        ("per_device_train_batch_size", 17, "micro_batch"),
        ("per_device_eval_batch_size", 17, "eval_batch"),
        ("gradient_accumulation_steps", 3, "accumulation"),
        ("optim", "adamw_torch", "optimizer"),
        ("activation_checkpoint_interval", 1, "checkpoint_interval"),
        ("max_seq_length", 256, "tokens"),
    ],
)
def test_another_default_would_be_seen(
    name: str, other: Any, counts: str, folder: Path, trained: dict[str, Any]
) -> None:
    recipe = recipes()["seq_cls"]
    changed = replace(recipe, defaults={**recipe.defaults, name: other})
    run = resolve(changed, flags_of("seq_cls", folder), Launch(), is_here=False)
    assert set(differences("seq_cls", counted(run, trained["seq_cls"]), trained["seq_cls"])) == {counts}


def test_another_fact_would_be_seen(monkeypatch: pytest.MonkeyPatch, folder: Path, trained: dict[str, Any]) -> None:
    """The drift that there was: a plan of 256 tokens beside a recipe that takes 512."""
    monkeypatch.setitem(facts.TOKENS, "max_seq_length", (256, 8, ""))
    run, _ = described(flags_of("seq_cls", folder), Launch(), "seq_cls")
    assert differences("seq_cls", counted(run, trained["seq_cls"]), trained["seq_cls"]) == {"tokens": (256, 512)}
