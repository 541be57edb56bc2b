"""Models whose files have other names for their weights than the model trains: an old BERT, a ViT, a Mixtral."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import gate_has
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from finetune.errors import RequestError
from finetune.training.saving import own_names, trained_shapes
from finetune.training.trainer import FinetuneTrainer

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
WEIGHTS = "model.safetensors"


def old_bert(folder: Path) -> Any:
    """As those of 2018 are on the hub, opened."""
    BertForSequenceClassification(BertConfig(**SMALL, vocab_size=30)).save_pretrained(folder)
    named = load_file(folder / WEIGHTS)
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): weight
        for name, weight in named.items()
    }
    save_file(renamed, folder / WEIGHTS, metadata={"format": "pt"})
    return BertForSequenceClassification.from_pretrained(folder)


def vit(folder: Path) -> Any:
    ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=4)).save_pretrained(folder)
    return ViTForImageClassification.from_pretrained(folder)


def mixtral(folder: Path) -> Any:
    config = MixtralConfig(**SMALL, vocab_size=30, num_key_value_heads=1, num_local_experts=2)
    MixtralForCausalLM(config).save_pretrained(folder)
    return MixtralForCausalLM.from_pretrained(folder)


TEXT = {"input_ids": torch.arange(8) % 30}


def gpt2(folder: Path) -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=30))


MODELS = {
    "BERT": (old_bert, {**TEXT, "labels": torch.tensor(1)}),
    "ViT": (vit, {"pixel_values": torch.ones(3, 8, 8), "labels": torch.tensor(1)}),
    "Mixtral": (mixtral, {**TEXT, "labels": TEXT["input_ids"]}),
}


def trainer_of(kind: str, folder: Path, run: Path) -> FinetuneTrainer:
    make, sample = (gpt2, TEXT) if kind == "GPT-2" else MODELS[kind]
    args = TrainingArguments(
        output_dir=str(run),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=True,
    )
    return FinetuneTrainer(model=make(folder), args=args, train_dataset=[sample] * 8)


@pytest.mark.parametrize("kind", MODELS)
def test_the_names_of_the_file_are_those_that_a_final_model_is_looked_up_by(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind][0](tmp_path / "given")
    model.save_pretrained(tmp_path / "saved")
    there = {name: list(weight.shape) for name, weight in load_file(tmp_path / "saved" / WEIGHTS).items()}
    assert trained_shapes(model) == there
    assert set(there) != set(dict(model.named_parameters())), "it has no other names: this is no test"


@pytest.mark.parametrize("kind", gate_has(["BERT", "Mixtral"], list(MODELS)))
def test_a_resumed_run_ends_with_the_weights_of_the_uncut_one_and_saves_them_by_the_names_of_the_file(
    kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    whole = trainer_of(kind, tmp_path / "given", tmp_path / "run")
    whole.train()
    whole.save_model()
    ended = {name: weight.clone() for name, weight in whole.model.state_dict().items()}
    given, final = load_file(tmp_path / "given" / WEIGHTS), load_file(tmp_path / "run" / WEIGHTS)
    assert given.keys() == final.keys()
    other = trainer_of(kind, tmp_path / "other", tmp_path / "run")
    other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert other.state.global_step == 4
    resumed = other.model.state_dict()
    assert [name for name, weight in ended.items() if not torch.equal(weight, resumed[name])] == []


def test_a_checkpoint_with_the_names_of_the_file_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of("BERT", tmp_path / "given", tmp_path / "run")
    with pytest.raises(RequestError, match=r"lacks bert\.\w+\.LayerNorm\.bias and \d+ more.*--model_name_or_path"):
        trainer._load_from_checkpoint(str(tmp_path / "given"))


def test_names_are_the_files_again_after_a_checkpoint(tmp_path: Path) -> None:
    model = vit(tmp_path / "given")
    before = set(trained_shapes(model))
    with own_names(model):
        assert set(trained_shapes(model)) == set(dict(model.named_parameters()))
    assert set(trained_shapes(model)) == before


def test_of_copies_of_a_tied_weight_one_is_saved(tmp_path: Path) -> None:
    """As accelerate hands them over under ZeRO-1 and -2."""
    trainer = trainer_of("GPT-2", tmp_path, tmp_path / "run")
    copies = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    assert "lm_head.weight" in copies
    trainer._save(str(tmp_path / "saved"), copies)
    saved = load_file(tmp_path / "saved" / WEIGHTS)
    assert saved.keys() == dict(trainer.model.named_parameters()).keys()
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "saved").lm_head.weight.equal(copies["lm_head.weight"])
