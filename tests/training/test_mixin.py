"""FinetuneMixin over Trainer classes that are not ours, by one rank and by two."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import run_script
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments

from finetune.errors import RequestError
from finetune.training.checkpoints.manifest import problems
from finetune.training.saving import check_push
from finetune.training.trainer import FinetuneTrainer

SCRIPT = Path(__file__).with_name("trainers_of_others.py")
HAS_TRL = find_spec("trl") is not None
TRL = pytest.mark.skipif(not HAS_TRL, reason="the extra `trl` is not installed")
KINDS = ["seq2seq", pytest.param("sft", marks=TRL), pytest.param("reward", marks=TRL)]
Found = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {ranks: tmp_path_factory.mktemp(f"on_{ranks}") for ranks in (1, 2)}


@pytest.fixture(scope="module")
def found(folders: dict[int, Path]) -> Found:
    """What came of it, by the number of ranks."""
    kinds = "seq2seq,sft,reward" if HAS_TRL else "seq2seq"
    for ranks, folder in folders.items():
        run_script(SCRIPT, [folder, kinds], ranks)
    return {ranks: json.loads((folder / "found.json").read_text()) for ranks, folder in folders.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_evaluations_are_the_same_at_any_world_size(kind: str, found: Found) -> None:
    one, two = found[1][kind], found[2][kind]
    assert len(one["losses"]) == 4
    assert one["losses"][-1] < one["losses"][0]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["eval"]["eval_loss"] == pytest.approx(one["eval"]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_a_checkpoint_that_verifies_as_if_not_cut(
    kind: str, ranks: int, found: Found, folders: dict[int, Path]
) -> None:
    it = found[ranks][kind]
    assert it["resumed"] == it["losses"]
    assert it["same"], "the weights at the end"
    assert it["resumed_train_loss"] == it["train_loss"] == pytest.approx(sum(it["losses"]) / 4)
    assert it["finished"] == 4, "a run that is resumed at its end takes no step more"
    run = folders[ranks] / kind
    for step in (2, 4):
        assert problems(run / f"checkpoint-{step}", hashes=True) == []
    assert (run / "model.safetensors").is_file()


@pytest.mark.parametrize("ranks", [1, 2])
def test_generated_tokens_are_what_is_evaluated_and_predicted(ranks: int, found: Found) -> None:
    it = found[ranks]["seq2seq"]
    assert it["eval"]["eval_rows"] == it["predicted"][0] == 8
    assert 0 < it["eval"]["eval_pads"] < 1


def test_a_model_that_nobody_settled_is_asked_whether_it_divides_its_loss(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    settled = [kind(model=t5(), args=args, train_dataset=[0]) for kind in (Trainer, FinetuneTrainer)]
    assert [trainer.model_accepts_loss_kwargs for trainer in settled] == [True, False]


def test_lengths_of_another_set_than_the_one_trained_on_are_refused(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = FinetuneTrainer(model=t5(), args=args, train_dataset=[{"x": 1}] * 3, lengths=[1, 2])
    with pytest.raises(RequestError, match="of 2 samples, but the training set has 3"):
        trainer.get_train_dataloader()


def test_several_evaluation_sets_are_evaluated_each(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}] * 2
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], max_steps=1, eval_strategy="steps", eval_steps=1
    )
    trainer = FinetuneTrainer(model=t5(), args=args, train_dataset=rows, eval_dataset={"a": rows, "b": rows[:1]})
    trainer.train()
    losses = [row for row in trainer.state.log_history if "eval_a_loss" in row or "eval_b_loss" in row]
    assert [row["step"] for row in losses] == [1, 1]
    assert trainer.evaluated is None, "neither is the run's last"


def test_evaluations_of_a_set_share_a_loader(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}] * 2
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = FinetuneTrainer(model=t5(), args=args, train_dataset=rows, eval_dataset={"a": rows, "b": rows[:1]})
    loaders = {name: trainer.get_eval_dataloader(name) for name in ("a", "b")}
    assert [len(loader.dataset) for loader in loaders.values()] == [2, 1]
    assert all(trainer.get_eval_dataloader(name) is loader for name, loader in loaders.items())
    other = trainer.get_eval_dataloader(rows[:1])
    assert trainer.get_eval_dataloader(rows[:1]) is not other, "another set"
    trainer.eval_dataset = rows
    assert trainer.get_eval_dataloader() is trainer.get_eval_dataloader(rows)


def t5() -> Any:
    sizes = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes))


def test_a_checkpoint_is_never_pushed() -> None:
    args = TrainingArguments("unused", push_to_hub=True, use_cpu=True, report_to=[])
    with pytest.raises(RequestError, match="hub_strategy is every_save"):
        check_push(args)
    args.hub_strategy = type(args.hub_strategy)("end")
    check_push(args)
