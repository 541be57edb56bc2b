"""The language-model recipe by real launches: the same loss everywhere, to the token; a folder that writes text."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPO, Finished, engine, gate_has, launch

pytestmark = pytest.mark.usefixtures("built_ops")

RECIPE = "recipes/causal_lm.py"
TINY = {
    "config_overrides": "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,max_position_embeddings=64",
    "max_steps": 6,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "bf16": False,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "sample_tokens": 8,
    "max_train_samples": 200,
}
GLOBAL_BATCH = 8


def train(launcher: str, folder: Path, values: dict[str, Any], ranks: int = 1, check: bool = True) -> Finished:
    every = {**TINY, **values}
    if "model_name_or_path" in values:  # which has its own shape
        del every["config_overrides"]
    return launch(launcher, folder, every, ranks=ranks, recipe=RECIPE, check=check)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Documents of 2 to 60 words, one a row of the batch: micro-batches have very different numbers of tokens."""
    path = tmp_path_factory.mktemp("uneven") / "a.jsonl"
    generator = random.Random(0)
    words = "the cat sat on a mat and saw two birds in tall grass".split()
    rows = [" ".join(generator.choices(words, k=generator.choice([2, 3, 5, 12]))) for _ in range(240)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return {"train_file": path, "packing": "none", "group_by_length": False}


@pytest.fixture(scope="module")
def one_process(uneven: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("truth") / "run"
    return train("python", folder, {**uneven, "per_device_train_batch_size": GLOBAL_BATCH})


def assert_same(run: Finished, truth: Finished) -> None:
    assert len(run.steps) == len(truth.steps) == TINY["max_steps"]
    assert run.column("loss") == pytest.approx(truth.column("loss"), rel=1e-3)
    assert run.column("grad_norm") == pytest.approx(truth.column("grad_norm"), rel=1e-3)
    for name in ("eval_loss", "eval_bits_per_byte", "eval_token_accuracy"):
        assert run.json("eval_results.json")[name] == pytest.approx(truth.json("eval_results.json")[name], rel=1e-3)


def test_two_ranks_with_accumulation_take_the_mean_over_all_tokens(
    uneven: dict[str, Any], one_process: Finished, tmp_path: Path
) -> None:
    values = {**uneven, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    run = train("deepspeed", tmp_path / "run", values, ranks=2)
    assert_same(run, one_process)


ENGINES = ("none", "zero2", "zero3", "fsdp")


EVERYWHERE = [
    (config, chunk) for config in (*ENGINES, "zero0", "zero1", "zero2_offload", "zero3_offload") for chunk in (0, 16)
]


@pytest.mark.parametrize(("config", "chunk"), gate_has([(config, 16) for config in ENGINES], EVERYWHERE))
def test_loss_and_gradients_are_the_same_everywhere(
    config: str, chunk: int, uneven: dict[str, Any], one_process: Finished, tmp_path: Path
) -> None:
    values = {**uneven, **engine(config), "loss_chunk_tokens": chunk, "per_device_train_batch_size": 4}
    assert_same(train("torchrun", tmp_path / "run", values, ranks=2), one_process)
    if config in ("none", "zero3", "fsdp"):
        values |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        assert_same(train("torchrun", tmp_path / "accumulated", values, ranks=2), one_process)


def test_fsdp_shards_by_accelerate_too_and_its_folder_opens(
    uneven: dict[str, Any], one_process: Finished, tmp_path: Path
) -> None:
    """The Trainer asserts that it is FSDP indeed: Accelerate would train CPU ranks by DDP without a word."""
    words = ["--config_file", str(REPO / "recipes/launch/accelerate_fsdp.yaml")]
    values = {**TINY, **uneven, "per_device_train_batch_size": 4}
    run = launch("accelerate", tmp_path / "run", values, ranks=2, words=words, recipe=RECIPE)
    assert "; FSDP by accelerate;" in run.output
    assert_same(run, one_process)
    assert_same_weights(run.folder, one_process.folder)


def assert_same_weights(folder: Path, other: Path) -> None:
    from safetensors.torch import load_file

    found, wanted = (load_file(path / "model.safetensors") for path in (folder, other))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape
        assert torch.allclose(found[name], tensor, atol=1e-4), name


@pytest.mark.parametrize("packing", ["wrapped", "none"])
def test_a_stream_is_dealt_out_alike(packing: str, uneven: dict[str, Any], tmp_path: Path) -> None:
    values = {**uneven, "streaming": True, "tokenizer": "byte", "packing": packing, "max_eval_samples": 20}
    values["max_train_samples"] = 20  # so that several epochs are had
    truth = train("python", tmp_path / "truth", {**values, "per_device_train_batch_size": GLOBAL_BATCH})
    values |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "dataloader_num_workers": 1}
    run = train("torchrun", tmp_path / "run", values, ranks=2)
    assert_same(run, truth)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "how", [{"streaming": True, "tokenizer": "byte", "max_eval_samples": 20}, {"fsdp": True}], ids=["stream", "FSDP"]
)
def test_a_run_goes_on_inside_its_second_epoch_as_if_never_cut(
    how: dict[str, Any], uneven: dict[str, Any], tmp_path: Path
) -> None:
    values = {**uneven, **how, "max_train_samples": 20, "save_strategy": "steps", "save_steps": 4}
    values |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    whole = train("torchrun", tmp_path / "run", values, ranks=2)
    wanted = {name: whole.column(name) for name in ("loss", "grad_norm")}
    shutil.rmtree(whole.folder / "checkpoint-6")
    (whole.folder / "README.md").unlink()
    again = train("torchrun", whole.folder, {**values, "resume": "auto"}, ranks=2)
    for name, column in wanted.items():
        assert again.column(name) == pytest.approx(column, rel=1e-5)


def mixed(folder: Path) -> list[str]:
    """Two files of documents of uneven lengths, with weights."""
    for name, word, rows in (("a", "the cat sat on ", 40), ("b", "in 7 + 5 = ", 12)):
        lines = (json.dumps({"text": f"{word * (i % 3 + 1)}{i}"}) + "\n" for i in range(rows))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return [f"{folder}/a.jsonl:0.3", f"{folder}/b.jsonl:0.7"]


BY_FILE = ("loss_a", "loss_b", "learnt_tokens_a", "learnt_tokens_b")


def test_a_mixture_trains_alike_on_two_ranks_and_goes_on_inside_a_later_epoch_as_if_never_cut(tmp_path: Path) -> None:
    words = mixed(tmp_path)
    values = {"train_file": words, "packing": "none", "tokenizer": "byte", "save_strategy": "steps", "save_steps": 7}
    values |= {"max_steps": 9}  # an epoch has 6 steps
    truth = train("python", tmp_path / "truth", {**values, "per_device_train_batch_size": GLOBAL_BATCH})
    assert "mixed by blocks, an epoch of 47: a 30.0%, 14 of 36, the others in later epochs" in truth.output
    found = truth.json("eval_results.json")
    assert min(found["eval_a_loss"], found["eval_b_loss"]) < found["eval_loss"]
    assert found["eval_loss"] < max(found["eval_a_loss"], found["eval_b_loss"])
    gave = truth.json("train_results.json")["sources"]
    assert sum(one["blocks"] for one in gave.values()) == 9 * GLOBAL_BATCH
    assert abs(gave["a"]["blocks"] - 0.3 * 9 * GLOBAL_BATCH) < 1
    assert (
        f"Trained on (counting repetitions): a {gave['a']['blocks']} blocks" in (truth.folder / "README.md").read_text()
    )
    values |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    run = train("torchrun", tmp_path / "run", values, ranks=2)
    for name in ("eval_a_loss", "eval_b_loss"):
        assert run.json("eval_results.json")[name] == pytest.approx(found[name], rel=1e-3)
    for name in ("loss", "grad_norm", *BY_FILE):
        assert run.column(name) == pytest.approx(truth.column(name), rel=1e-3)
    assert_files_make_the_loss(truth)
    assert_files_make_the_loss(run)
    wanted = {name: run.column(name) for name in ("loss", *BY_FILE)}
    of_files = run.json("train_results.json")["sources"]
    shutil.rmtree(run.folder / "checkpoint-9")
    (run.folder / "README.md").unlink()
    same = {**values, "train_file": [word.replace(":0.", ":") for word in words], "resume": "auto"}
    again = train("torchrun", run.folder, same, ranks=2)
    assert "going on from checkpoint-7" in again.output
    for name, column in wanted.items():
        assert again.column(name)[-2:] == pytest.approx(column[-2:], rel=1e-6)
    for name, one in again.json("train_results.json")["sources"].items():
        assert one == pytest.approx(of_files[name], rel=1e-6)
        assert one == pytest.approx(gave[name], rel=1e-3)
    other = {**values, "train_file": [words[0], words[1].replace("0.7", "0.6")], "resume": "auto"}
    shutil.rmtree(run.folder / "checkpoint-9")
    refused = train("torchrun", run.folder, other, ranks=2, check=False)
    assert refused.status, "torchrun makes 1 of it"
    assert "train rows are not those of checkpoint-7 (a weight in --train_file has changed)" in refused.errors[0]


def assert_files_make_the_loss(run: Finished) -> None:
    """Weighted by their learnt tokens, the losses of a step's files are its loss."""
    sums = [[0.0, 0.0], [0.0, 0.0]]
    for row in run.steps:
        parts = [(row[f"loss_{name}"], row[f"learnt_tokens_{name}"]) for name in "ab"]
        made = sum(loss * tokens for loss, tokens in parts) / sum(tokens for _, tokens in parts)
        assert made == pytest.approx(row["loss"], rel=1e-6)
        sums = [[nats + loss * n, count + n] for (nats, count), (loss, n) in zip(sums, parts, strict=True)]
    for name, (nats, count) in zip("ab", sums, strict=True):
        whole = run.json("train_results.json")["sources"][name]
        assert whole["learnt_tokens"] == count
        assert whole["loss"] == pytest.approx(nats / count, rel=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "launcher", "flags"),
    [
        ("zero0", "torchrun", {}),
        ("zero2", "torchrun", {"loss_chunk_tokens": 16}),
        ("zero3", "deepspeed", {"loss_chunk_tokens": 16, "gradient_checkpointing": True}),
        ("zero3_offload", "torchrun", {}),
        ("fsdp", "torchrun", {"loss_chunk_tokens": 16}),
        ("fsdp", "torchrun", {}),
        ("zero2", "torchrun", {"sequence_parallel_size": 2, "per_device_train_batch_size": 4}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_each_file_s_loss_is_the_same_everywhere(
    packing: str, how: str, launcher: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    values = {"train_file": mixed(tmp_path), "packing": packing, "tokenizer": "byte", "document_mask": packing == "bfd"}
    truth = train("python", tmp_path / "truth", {**values, "per_device_train_batch_size": GLOBAL_BATCH})
    assert_files_make_the_loss(truth)
    values |= {**engine(how), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **flags}
    run = train(launcher, tmp_path / "run", values, ranks=2)
    assert_files_make_the_loss(run)
    for name in BY_FILE:
        assert run.column(name) == pytest.approx(truth.column(name), rel=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["none", "zero3", "fsdp"])
def test_each_file_s_loss_is_the_same_everywhere_with_an_adapter(config: str, base: Path, tmp_path: Path) -> None:
    values = {**LORA, "train_file": mixed(tmp_path), "packing": "none", "model_name_or_path": base}
    truth = train("python", tmp_path / "truth", {**values, "per_device_train_batch_size": GLOBAL_BATCH})
    values |= {**engine(config), "per_device_train_batch_size": 4, "loss_chunk_tokens": 16, "logging_steps": 2}
    run = train("torchrun", tmp_path / "run", values, ranks=2)
    for name in "ab":
        pairs = list(zip(truth.column(f"loss_{name}"), truth.column(f"learnt_tokens_{name}"), strict=True))
        for row, (one, other) in zip(run.steps, zip(pairs[::2], pairs[1::2], strict=True), strict=True):
            assert row[f"learnt_tokens_{name}"] == one[1] + other[1]
            loss = (one[0] * one[1] + other[0] * other[1]) / (one[1] + other[1])
            assert row[f"loss_{name}"] == pytest.approx(loss, rel=1e-3)


def test_checkpointing_changes_no_gradient_not_even_with_dropout(uneven: dict[str, Any], tmp_path: Path) -> None:
    values = {**uneven, "config_overrides": TINY["config_overrides"].replace("layers=2", "layers=4") + ",dropout=0.2"}
    plain = train("python", tmp_path / "plain", values)
    for name, flags in (
        ("all", {"gradient_checkpointing": True}),
        ("second", {"activation_checkpoint_interval": 2}),
    ):
        run = train("python", tmp_path / name, {**values, **flags})
        assert run.column("loss") == plain.column("loss")
        assert run.column("grad_norm") == pytest.approx(plain.column("grad_norm"), rel=1e-5)
        assert "deprecated" not in run.output


@pytest.mark.nightly
def test_a_compiled_model_and_an_8_bit_optimizer_learn_the_same(
    uneven: dict[str, Any], one_process: Finished, tmp_path: Path
) -> None:
    values = {**uneven, "per_device_train_batch_size": GLOBAL_BATCH}
    for chunk in (0, 128):
        compiled = {**values, "torch_compile": True, "loss_chunk_tokens": chunk}
        run = train("python", tmp_path / f"compiled{chunk}", compiled)
        assert run.column("loss") == pytest.approx(one_process.column("loss"), rel=1e-3)
    packed = {**values, "packing": "bfd", "document_mask": True, "block_size": 32, "tokenizer": "byte"}
    plain, run = (train("python", tmp_path / f"{on}", {**packed, "torch_compile": on}) for on in (False, True))
    for name in ("loss", "grad_norm"):
        assert run.column(name) == pytest.approx(plain.column(name), rel=1e-3)
    pytest.importorskip("bitsandbytes", reason="bitsandbytes (extra dev) is not installed")
    run = train("python", tmp_path / "8bit", {**values, "optim": "adamw_8bit"})
    assert run.column("loss") == pytest.approx(one_process.column("loss"), rel=0.03)


def test_a_run_folder_writes_text_and_two_runs_are_alike(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, pipeline

    run = train("python", tmp_path / "run", {"eval_strategy": "steps", "eval_steps": 3})
    write = pipeline("text-generation", str(run.folder), device="cpu", trust_remote_code=True)
    made = write("The ", max_new_tokens=10)[0]["generated_text"]
    assert made.startswith("The ")
    assert len(made) == 14
    wanted = (
        "README.md all_results.json config.json metrics.jsonl model.safetensors recipe.yaml samples.md tokenizer.json"
    )
    assert set(wanted.split()) <= {path.name for path in run.folder.iterdir()}
    assert (run.folder / "samples.md").read_text().count("## Step") == 2
    assert "## Sample\n\n```" in (run.folder / "README.md").read_text()
    again = train("python", tmp_path / "again", {"eval_strategy": "steps", "eval_steps": 3})
    assert again.column("loss") == run.column("loss")
    assert AutoModelForCausalLM.from_pretrained(run.folder).config.model_type == "gptlite"


def test_a_trained_model_is_evaluated_alone_on_a_file(tmp_path: Path, base: Path) -> None:
    path = tmp_path / "v.txt"
    path.write_text("The quick brown fox\n" * 100)
    values = {"model_name_or_path": base, "do_train": False, "validation_file": path}
    run = train("python", tmp_path / "run", values)
    assert "data: v.txt" in run.output
    assert run.json("eval_results.json")["eval_loss"] > 1


def test_held_out_text_in_which_nothing_is_predicted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("a")
    values = {"train_file": "README.md", "validation_file": tmp_path / "v.txt"}
    run = train("python", tmp_path / "run", values, check=False)
    assert run.status == 2
    assert "the validation data has no token to predict" in run.output
    assert "eval_loss" in train("python", tmp_path / "run", {**values, "validation_file": "README.md"}).output


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"validation_file": "README.md"}, "there is no --train_file"),
        ({"sample_prompt": "\u4e16"}, r"--sample_prompt has '\u4e16' \(U\+4E16\)"),
        ({"sample_prompt": "a" * 64}, "has 64 tokens, but the model has 64 positions"),
        ({"sample_tokens": -1}, "--sample_tokens is -1"),
        ({"config_overrides": "num_hidden_layers=2.5"}, "num_hidden_layers=2.5: must be a whole number"),
        ({"config_overrides": "num_attention_heads=0"}, "num_attention_heads=0: must be a whole number"),
        ({"config_overrides": "hidden_act=foo"}, "no such activation"),
        ({"config_overrides": "dropout=1.5"}, "dropout=1.5: must be 0 or more"),
        ({"config_overrides": "wide"}, "wide: write name=value"),
        ({"do_train": False}, "no trained model to evaluate"),
        ({"tokenizer": "bpe", "bpe_vocab_size": 10}, "must be 257 or more"),
        ({"loss_chunk_tokens": -4}, "--loss_chunk_tokens is -4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_requests_end_with_one_sentence(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = train("python", tmp_path / "run", values, check=False)
    assert run.status == 2, run.output[-2000:]
    assert len(run.errors) == 1
    assert re.search(message, run.errors[0])
    assert not run.folder.exists()


def test_one_batch_is_learnt_by_heart(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n" * 2)
    values = {"train_file": path, "block_size": 32, "max_steps": 150, "per_device_train_batch_size": 4}
    run = train("python", tmp_path / "run", {**values, "validation_split_percentage": 20, "sample_tokens": 0})
    assert run.steps[-1]["loss"] < 0.05


def test_a_pretrained_model_goes_on_and_a_long_block_is_refused(tmp_path: Path) -> None:
    first = train("python", tmp_path / "first", {})
    values = {"model_name_or_path": first.folder, "max_steps": 2, "packing": "bfd", "document_mask": True}
    second = train("python", tmp_path / "second", values)
    assert second.steps[0]["loss"] < first.steps[0]["loss"]
    refused = train("python", tmp_path / "third", {**values, "block_size": 100}, check=False)
    assert refused.status == 2
    assert "--block_size is 100, but the model has 64 positions" in refused.errors[0]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("python", tmp_path_factory.mktemp("base") / "run", {}).folder


LORA = {"use_peft": True, "lora_r": 4, "learning_rate": 1e-2, "merge_adapter": True}


@pytest.fixture(scope="module")
def adapted(base: Path, uneven: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    values = {**uneven, **LORA, "model_name_or_path": base, "tokenizer_name": base}
    folder = tmp_path_factory.mktemp("adapted") / "run"
    return train("python", folder, {**values, "per_device_train_batch_size": GLOBAL_BATCH})


def test_an_adapter_is_saved_alone_and_merged_as_it_is(base: Path, adapted: Finished) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    import finetune.models.gptlite  # noqa: F401  (makes it known to the Auto classes)

    assert (adapted.folder / "adapter_model.safetensors").stat().st_size < (base / "model.safetensors").stat().st_size
    assert not (adapted.folder / "model.safetensors").exists()
    ids = AutoTokenizer.from_pretrained(adapted.folder)("the cat sat", return_tensors="pt").input_ids
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(base).eval()(ids).logits
        beside = AutoPeftModelForCausalLM.from_pretrained(adapted.folder).eval()(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(adapted.folder / "merged").eval()(ids).logits
    assert torch.allclose(beside, merged, atol=1e-4)
    write = pipeline("text-generation", str(adapted.folder / "merged"), device="cpu")
    assert write("the cat", max_new_tokens=4)[0]["generated_text"].startswith("the cat")
    assert not torch.allclose(before, merged, atol=1e-2)


@pytest.mark.parametrize(
    "config", gate_has(["zero3", "fsdp"], ["none", "zero1", "zero2", "zero3", "zero3_offload", "fsdp"])
)
def test_adapters_train_alike_everywhere(
    config: str, base: Path, adapted: Finished, uneven: dict[str, Any], tmp_path: Path
) -> None:
    values = {**uneven, **LORA, "model_name_or_path": base, "tokenizer_name": base, **engine(config)}
    values |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "loss_chunk_tokens": 16}
    run = train("torchrun", tmp_path / "run", values, ranks=2)
    assert_same(run, adapted)
    assert (run.folder / "merged" / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def kept_half(base: Path, uneven: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A base in bf16, which has the run compute so."""
    values = {**uneven, **HALF_BASE, "model_name_or_path": base, "per_device_train_batch_size": GLOBAL_BATCH}
    return train("python", tmp_path_factory.mktemp("kept_half") / "run", values)


HALF_BASE = {**LORA, "merge_adapter": False, "dtype": "bfloat16", "bf16": True}
BF16_NOISE = 5e-3  # of a loss: sums are taken in another order, from numbers of eight bits


def test_an_adapter_learns_beside_a_base_in_bf16_as_beside_one_in_fp32(
    base: Path, adapted: Finished, kept_half: Finished, uneven: dict[str, Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    values = {**uneven, **HALF_BASE, "model_name_or_path": base, "per_device_train_batch_size": GLOBAL_BATCH}
    mixed = train("python", tmp_path / "run", {**values, "dtype": "float32"})
    for other in (mixed, adapted):
        assert kept_half.column("loss") == pytest.approx(other.column("loss"), rel=2 * BF16_NOISE)
        assert kept_half.column("loss") != other.column("loss")
    assert re.search("; bf16[;,]", kept_half.output)  # a CPU that emulates it is told so
    saved = load_file(kept_half.folder / "adapter_model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["none", "zero1", "zero2", "zero3", "fsdp"])
def test_an_adapter_beside_a_base_in_bf16_learns_alike_everywhere(
    config: str, base: Path, kept_half: Finished, uneven: dict[str, Any], tmp_path: Path
) -> None:
    values = {**uneven, **HALF_BASE, "model_name_or_path": base, **engine(config)}
    values |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    run = train("torchrun", tmp_path / "run", values, ranks=2)
    assert run.column("loss") == pytest.approx(kept_half.column("loss"), rel=BF16_NOISE)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_target_modules": ["q_proj"]}, r"q_proj: no linear layer has this name\. The model has: .*qkv \(2\)"),
        ({"resize_embeddings": True}, "an adapter does not train the embeddings"),
        ({"model_name_or_path": None}, "an adapter needs a trained model"),
    ],
    ids=["no such layer", "new tokens", "from scratch"],
)
def test_adapters_that_cannot_be_are_refused(values: dict[str, Any], message: str, base: Path, tmp_path: Path) -> None:
    asked = {**LORA, "model_name_or_path": base, **values}
    run = train("python", tmp_path / "run", {k: v for k, v in asked.items() if v is not None}, check=False)
    assert run.status == 2
    assert re.search(message, run.errors[0])
    assert not run.folder.exists()


def test_adapters_train_beside_weights_of_4_bits_also_after_an_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes (extra dev) is not installed")
    wide = TINY["config_overrides"].replace("hidden_size=32", "hidden_size=64")  # its blocks are 64 weights
    base = train("python", tmp_path / "base", {"config_overrides": wide, "max_steps": 30}).folder
    values = {**LORA, "model_name_or_path": base, "eval_strategy": "steps", "eval_steps": 2}
    plain = train("python", tmp_path / "plain", values)
    small = train("python", tmp_path / "small", {**values, "load_in_4bit": True})
    smaller = train("python", tmp_path / "smaller", {**values, "load_in_4bit": True, "bnb_4bit_use_double_quant": True})
    for packed in (small, smaller):
        assert packed.column("loss") == pytest.approx(plain.column("loss"), rel=0.02)
        assert (packed.folder / "merged" / "model.safetensors").is_file()
    assert plain.column("loss") != small.column("loss") != smaller.column("loss")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def outgrown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has three tokens more than it embeds."""
    from finetune.data.tokenizer import train_text_tokenizer
    from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM

    tokenizer = train_text_tokenizer("byte", [], 0, 64, with_end=True)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = GPTLiteConfig(vocab_size=len(tokenizer), tie_word_embeddings=request.param, **sizes)
    folder = tmp_path_factory.mktemp("outgrown")
    GPTLiteForCausalLM(config).save_pretrained(folder)
    tokenizer.add_tokens(["<|user|>", "<|tool|>", "<|end|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


def test_embeddings_grow_alike_under_zero3_and_tied_ones_come_back_whole(
    outgrown: Path, uneven: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    import finetune.models.gptlite  # noqa: F401  (makes it known to the Auto classes)

    values = {**uneven, "model_name_or_path": outgrown, "resize_embeddings": True, "save_strategy": "steps"}
    truth = train("python", tmp_path / "truth", {**values, "per_device_train_batch_size": GLOBAL_BATCH})
    run = train(
        "torchrun", tmp_path / "run", {**values, "deepspeed": "zero3", "per_device_train_batch_size": 4}, ranks=2
    )
    assert_same(run, truth)
    assert_same_weights(run.folder, truth.folder)
    for folder in (run.folder, run.folder / "checkpoint-6"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert tied == model.config.tie_word_embeddings
        assert model.get_input_embeddings().weight.shape == (260, 32)


def test_a_tokenizer_that_outgrew_its_model_is_offered_room(
    outgrown: Path, uneven: dict[str, Any], tmp_path: Path
) -> None:
    run = train("python", tmp_path / "run", {**uneven, "model_name_or_path": outgrown}, check=False)
    assert run.status == 2
    assert "260 tokens, but the model embeds 257" in run.errors[0]
    assert "--resize_embeddings True" in run.errors[0]


def shipped_yamls() -> list[Path]:
    every = sorted((REPO / "recipes" / "configs").glob("*.yaml"))
    return [path for path in every if "\nrecipe: causal_lm\n" in path.read_text()]


def test_there_are_shipped_yamls() -> None:
    assert len(shipped_yamls()) == 6


@pytest.mark.parametrize("path", shipped_yamls(), ids=lambda path: path.stem)
def test_every_shipped_yaml_runs(path: Path, base: Path, uneven: dict[str, Any], tmp_path: Path) -> None:
    """Shortened, and narrowed where the model is a large one; all else is as the file says."""
    values: dict[str, Any] = {"config": path, "max_steps": 2, "logging_steps": 1, "train_file": uneven["train_file"]}
    values |= {"sample_tokens": 4, "max_train_samples": 40, "max_eval_samples": 4, "output_dir": tmp_path / "run"}
    if path.stem == "instruction":
        answers = [json.loads(row)["text"] for row in uneven["train_file"].read_text().splitlines()]
        turns = [[{"role": "user", "content": "say"}, {"role": "assistant", "content": answer}] for answer in answers]
        values["train_file"] = tmp_path / "chats.jsonl"
        values["train_file"].write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))
    if "FOLDER" in path.read_text():
        values |= {"model_name_or_path": base, "block_size": 64}
    elif "model_size" in path.read_text():
        values |= {"config_overrides": "hidden_size=24,num_hidden_layers=2", "block_size": 32}
        values |= {"bpe_vocab_size": 300} if "tokenizer: bpe" in path.read_text() else {}
    run = launch("python", tmp_path / "run", values, recipe=RECIPE)
    assert len(run.steps) == 2


@pytest.mark.parametrize(("ranks", "config"), [(1, "none"), (2, "zero3")])
def test_a_tower_is_said_once_to_stay_frozen_and_keeps_its_weights(
    uneven: dict[str, Any], ranks: int, config: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText, LlavaConfig, LlavaForConditionalGeneration

    from finetune.data.tokenizer import train_text_tokenizer
    from finetune.models.composite import unread

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text = {"model_type": "llama", **sizes, "vocab_size": 300, "max_position_embeddings": 64}
    vision = {"model_type": "clip_vision_model", **sizes, "image_size": 16, "patch_size": 8}
    before = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision))
    before.save_pretrained(tmp_path / "llava")
    train_text_tokenizer("byte", [], 300, 64, with_end=True).save_pretrained(tmp_path / "llava")
    values = {**uneven, "model_name_or_path": tmp_path / "llava", "max_steps": 2, "deepspeed": config}
    run = train("torchrun", tmp_path / "run", values, ranks=ranks)
    count = sum(weight.numel() for weight in unread(before).values())
    said = f"\n{count:,} parameters that no text reaches (such as a vision tower's) stay frozen\n"
    assert run.output.count(said) == 1
    after = AutoModelForImageTextToText.from_pretrained(run.folder).state_dict()
    same = {name for name, weight in before.state_dict().items() if torch.equal(weight, after[name])}
    assert same & dict(before.named_parameters()).keys() == unread(before).keys()
