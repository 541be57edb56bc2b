"""FinetuneMixin over the Trainer classes of others, for test_mixin.py: `trainers_of_others.py FOLDER KINDS`. Each kind
trains, evaluates, and goes on from its checkpoint; rank 0 prints what came of it as JSON."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

from finetune.run.flags.guards import GuardArguments
from finetune.training.loss import token_loss
from finetune.training.trainer import FinetuneMixin

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
WORDS = "a trainer of others keeps its loss its samples and its checkpoints under our mixin".split()
VOCABULARY = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *sorted(set(WORDS))])}
LLAMA = {"vocab_size": len(VOCABULARY), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64}
COMMON: dict[str, Any] = {
    "max_steps": 4,
    "save_steps": 2,
    "logging_steps": 1,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4 // WORLD,
    "per_device_eval_batch_size": 4 // WORLD,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": [],
}


def tokenizer() -> Any:
    bare = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=bare, **special)


def texts(count: int) -> list[str]:
    """Of 2 to 8 words."""
    return [" ".join(WORDS[(row + i) % len(WORDS)] for i in range(2 + row % 7)) for row in range(count)]


def seq2seq(folder: Path) -> Any:
    class Seq2Seq(FinetuneMixin, Seq2SeqTrainer):
        pass

    def share_of_pads(evaluated: Any) -> dict[str, float]:
        rows, _ = evaluated.predictions.shape  # of generated tokens; logits would have an axis more
        return {"pads": float((evaluated.predictions == 0).mean()), "rows": rows}

    words = tokenizer()
    rows = Dataset.from_list([{**words(text), "labels": words(text)["input_ids"][::-1]} for text in texts(24)])
    sizes = {
        "vocab_size": len(VOCABULARY),
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 16,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, eos_token_id=1, **sizes))
    generation = {"predict_with_generate": True, "generation_max_length": 6}
    return Seq2Seq(
        model=model,
        args=Seq2SeqTrainingArguments(str(folder), **COMMON, **generation),
        train_dataset=rows,
        eval_dataset=rows.select([6] * 8),  # of one length, for the eval_loss is a mean of means of batches
        data_collator=DataCollatorForSeq2Seq(words, model=model),
        compute_loss_func=token_loss,
        processing_class=words,
        compute_metrics=share_of_pads,
        lengths=[len(row) for row in rows["input_ids"]],
    )


def sft(folder: Path) -> Any:
    from trl import SFTConfig, SFTTrainer

    class Supervised(FinetuneMixin, SFTTrainer):
        pass

    rows = Dataset.from_list([{"text": text} for text in texts(24)])
    return Supervised(
        model=LlamaForCausalLM(LlamaConfig(**LLAMA)),
        args=SFTConfig(str(folder), bf16=False, **COMMON),
        train_dataset=rows,
        eval_dataset=rows.select([6] * 8),  # as above
        processing_class=tokenizer(),
        guards=GuardArguments(hang_timeout=60.0, on_nan="skip", stop_grace=30.0),
    )


def reward(folder: Path) -> Any:
    from trl import RewardConfig, RewardTrainer

    class Reward(FinetuneMixin, RewardTrainer):
        pass

    chosen = texts(24)
    rows = Dataset.from_list([{"chosen": text, "rejected": text[::-1]} for text in chosen])
    return Reward(
        model=LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=1)),
        args=RewardConfig(str(folder), bf16=False, **COMMON),
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        processing_class=tokenizer(),
    )


KINDS = {kind.__name__: kind for kind in (seq2seq, sft, reward)}


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def scene(kind: str, folder: Path) -> dict[str, Any]:
    set_seed(1)
    trainer = KINDS[kind](folder)
    output = trainer.train()
    found = {"losses": losses(trainer), "train_loss": output.training_loss, "eval": trainer.evaluate()}
    if kind == "seq2seq":
        shown = trainer.predict_in_input_order(trainer.eval_dataset)  # it has no column `length`
        found["predicted"] = list(shown.predictions.shape)
    weights = [weight.detach().clone() for weight in trainer.model.parameters()]
    set_seed(2)  # what it starts with does not matter: all comes from the checkpoint
    resumed = KINDS[kind](folder)
    again = resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    found["resumed"], found["resumed_train_loss"] = losses(resumed), again.training_loss
    found["same"] = all(map(torch.equal, weights, resumed.model.parameters()))
    finished = KINDS[kind](folder)
    finished.train(resume_from_checkpoint=True)  # the last, after which no step is left
    found["finished"] = finished.state.global_step
    resumed.save_model()
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    found = {kind: scene(kind, folder / kind) for kind in sys.argv[2].split(",")}
    if os.environ.get("RANK", "0") == "0":
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
