"""A plan of preferences counts both texts of a row, and the reference in each of its forms."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.data.tokenizer import train_text_tokenizer
from finetune.errors import RequestError
from finetune.plan.from_run import job_of
from finetune.plan.job import Job
from finetune.plan.machine import find_machine
from finetune.plan.memory import RankMemory, plan_memory
from finetune.plan.run_model import described
from finetune.plan.seconds import plan_seconds
from finetune.run.launch import Launch

A10 = find_machine("A10")
ALONE = ("--loss", "simpo")
ONLINE = ("--reference", "online")
IN_BF16 = ("--dtype", "bfloat16", "--optim", "stable_adamw")


def planned(*flags: str, recipe: str = "preference", ranks: int = 1) -> tuple[Job, list[str]]:
    words = ["--bf16", "True", "--do_eval", "False", "--per_device_train_batch_size", "2", *flags]
    model = [] if "--model_name_or_path" in flags else ["--model_name_or_path", "SmolLM2-135M"]
    run, _ = described([*words, *model], Launch(world_size=ranks, local_world_size=ranks), recipe)
    job, _, notes = job_of(run, A10)
    return job, notes


def memory(*flags: str, ranks: int = 1) -> RankMemory:
    return plan_memory(planned(*flags, ranks=ranks)[0], A10)


def test_a_row_is_two_texts_in_one_forward_pass_and_of_kto_one_with_gradients() -> None:
    rows = {loss: planned("--loss", loss)[0].batch.rows for loss in ("dpo", "simpo", "reward", "kto")}
    assert rows == {"dpo": 4, "simpo": 4, "reward": 4, "kto": 2}
    assert planned("--loss", "kto")[0].global_batch == 2
    assert memory("--loss", "kto").peak.bytes < memory(*ALONE).peak.bytes


def test_a_second_model_is_held_in_its_precision_and_sharded_under_zero3() -> None:
    parameters = planned(*ALONE)[0].model.parameters
    assert memory(*ONLINE).resident["reference"] == 4 * parameters  # the Trainer's alone is in fp32
    assert memory(*ONLINE, *IN_BF16).resident["reference"] == 2 * parameters
    assert memory(*ONLINE, "--deepspeed", "zero2", ranks=4).resident["reference"] == 2 * parameters
    sharded = memory(*ONLINE, "--deepspeed", "zero3", ranks=4).resident["reference"]
    assert sharded == pytest.approx(2 * parameters / 4, rel=1e-4)


@pytest.mark.parametrize("flags", [(), ("--reference", "cached"), ("--loss", "orpo"), ("--loss", "simpo")])
def test_other_forms_hold_no_second_model_in_training(flags: tuple[str, ...]) -> None:
    found = memory(*flags)
    assert "reference" not in found.resident
    assert "reference" not in found.peaks
    assert found.step_peak.bytes == memory(*ALONE).step_peak.bytes


def test_an_adapter_s_reference_is_a_forward_pass_without_weights_of_its_own() -> None:
    lora = ("--use_peft", "True")
    with_reference, without = memory(*lora), memory(*lora, *ALONE)
    assert with_reference.resident == without.resident
    assert with_reference.peaks["reference"].bytes > without.peaks["forward"].by_kind["activations"]
    with pytest.raises(RequestError, match="needs no second model"):
        planned(*lora, *ONLINE)


def test_a_reference_takes_the_time_of_its_forward_pass() -> None:
    alone, beside = (plan_seconds(planned(*flags, *IN_BF16)[0], A10) for flags in (ALONE, ONLINE))
    assert beside.forward == pytest.approx(2 * alone.forward, rel=0.01)
    assert beside.backward == alone.backward
    kto = planned("--loss", "kto", "--reference", "cached")[0]
    once = plan_seconds(replace(kto, baseline=False, texts=1), A10)
    assert plan_seconds(kto, A10).forward == pytest.approx(2 * once.forward)


def test_a_reference_that_is_computed_before_is_counted_as_an_evaluation() -> None:
    job, notes = planned("--reference", "cached", "--per_device_eval_batch_size", "64")
    assert job.eval_batch == 64
    assert any("runs once, before the first step" in note for note in notes)
    assert planned(*ALONE)[0].eval_batch == 0


def test_a_model_of_rewards_has_one_score_whatever_its_config_says() -> None:
    scratch, _ = described(["--loss", "reward"], Launch(), "preference")
    for job in (planned("--loss", "reward")[0], job_of(scratch, A10)[0]):
        assert [tensor.shape[0] for tensor in job.model.tensors if tensor.name == "score.weight"] == [1]
        assert plan_memory(job, A10).peak.bytes


def test_a_shared_prompt_is_said_not_to_be_counted() -> None:
    assert any("--share_prompt is not counted" in note for note in planned("--share_prompt", "True")[1])


@pytest.mark.parametrize(
    ("recipe", "flags", "why"),
    [
        ("preference", ("--model_name_or_path", "bert-base-uncased"), "--model_name_or_path is .* of an encoder"),
        ("causal_lm", ("--model_name_or_path", "gpt2", "--teacher", "bert-base-uncased"), "--teacher is .* an encoder"),
        ("causal_lm", ("--model_name_or_path", "t5-small"), "of an encoder with a decoder"),
        ("seq2seq", ("--model_name_or_path", "SmolLM2-135M"), "of a decoder"),
    ],
)
def test_what_the_recipe_refuses_is_refused_in_its_words(recipe: str, flags: tuple[str, ...], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        planned(*flags, recipe=recipe)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [ALONE, ONLINE, (*ONLINE, "--loss", "kto"), (*ONLINE, "--loss_chunk_tokens", "256"), ("--use_peft", "True")],
)
def test_a_real_run_takes_what_is_planned(flags: tuple[str, ...], tmp_path: Path) -> None:
    draw = random.Random(0)

    def text(size: int) -> str:
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=size))

    rows = [{"prompt": text(24), "chosen": text(900), "rejected": text(900)} for _ in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4}
    config = LlamaConfig(**shape, vocab_size=2048, max_position_embeddings=512)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    train_text_tokenizer("bpe", ["The quick brown fox. " * 50], 300, 512, with_end=True).save_pretrained(
        tmp_path / "llama"
    )
    words = [*"--per_device_train_batch_size 4 --block_size 512 --use_cpu True --bf16 False --max_steps 3".split(),
             *"--sample_tokens 0 --do_eval False --save_strategy no --report_to none --deepspeed none".split(),
             "--model_name_or_path", str(tmp_path / "llama"), "--train_file", str(tmp_path / "pairs.jsonl"),
             "--output_dir", str(tmp_path / "run"), *flags]  # fmt: skip
    script = Path(__file__).with_name("preference_memory.py")
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=True)
    resident, peak = json.loads(done.stdout.splitlines()[-1])
    run, _ = described(words, Launch(), "preference")
    cpu = find_machine("cpu")
    found = plan_memory(job_of(run, cpu)[0], cpu)
    assert found.resident_bytes == pytest.approx(resident, rel=1e-3)
    assert peak * 0.999 <= found.step_peak.bytes <= peak * 1.015
