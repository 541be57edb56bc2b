"""What an unknown flag probably means, by other tools' names for it, else by its spelling."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from itertools import takewhile

IN_STAGES = ": stages are for recipes/causal_lm_pipeline.py and image_cls.py"
LENGTHS = "max_seq_length", "block_size", "max_source_length"
# What people write -> its names here; those that the recipe has are suggested, and `finetune plan` has those of all
# recipes. Text after ":" says what to do if no flag does it.
MEANINGS: dict[str, tuple[str, ...]] = {
    "accumulation_steps": ("gradient_accumulation_steps",),
    "adapter": ("use_peft",),
    "batch": ("per_device_train_batch_size",),
    "batch_size": ("per_device_train_batch_size",),
    "bs": ("per_device_train_batch_size",),
    "checkpoint": ("resume",),
    "context_length": LENGTHS,
    "cpu": ("use_cpu",),
    "cutoff_len": LENGTHS,
    "data": ("train_file", "train_dir"),
    "data_dir": ("train_dir", "train_file"),
    "data_path": ("train_file", "train_dir"),
    "dataset": ("dataset_name",),
    "ds_config": ("deepspeed",),
    "double_quant": ("bnb_4bit_use_double_quant",),
    "double_quantization": ("bnb_4bit_use_double_quant",),
    "dtype": ("bf16",),
    "epoch": ("num_train_epochs",),
    "epochs": ("num_train_epochs",),
    "eval_batch_size": ("per_device_eval_batch_size",),
    "eval_bs": ("per_device_eval_batch_size",),
    "eval_dataset": ("validation_file", "validation_dir"),
    "eval_file": ("validation_file", "validation_dir"),
    "evaluation_strategy": ("eval_strategy",),
    "fp32": (": use --bf16 False",),
    "generation_num_beams": ("num_beams",),
    "gas": ("gradient_accumulation_steps",),
    "grad_accum": ("gradient_accumulation_steps",),
    "grad_accum_steps": ("gradient_accumulation_steps",),
    "grad_clip": ("max_grad_norm",),
    "gradient_accumulation": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "init_lr": ("learning_rate",),
    "iters": ("max_steps",),
    "label_column": ("label_column_name",),
    "logging_dir": (": TensorBoard's files go to TENSORBOARD_LOGGING_DIR",),
    "lora": ("use_peft",),
    "lora_rank": ("lora_r",),
    "lr": ("learning_rate",),
    "lr_scheduler": ("lr_scheduler_type",),
    "max_iters": ("max_steps",),
    "max_len": LENGTHS,
    "max_length": LENGTHS,
    "max_seq_len": LENGTHS,
    "max_seq_length": ("block_size", "max_source_length"),
    "max_sequence_length": LENGTHS,
    "max_tokens": LENGTHS,
    "micro_batch_size": ("per_device_train_batch_size",),
    "mixed_precision": ("bf16",),
    "model": ("model_name_or_path",),
    "model_id": ("model_name_or_path",),
    "model_max_length": LENGTHS,
    "model_name": ("model_name_or_path",),
    "model_path": ("model_name_or_path",),
    "n_epochs": ("num_train_epochs",),
    "no_cuda": ("use_cpu",),
    "num_epochs": ("num_train_epochs",),
    "num_gpus": (": it is a flag of the launcher, before the recipe's name",),
    "num_stages": ("pipeline_parallel_size", IN_STAGES),
    "num_steps": ("max_steps",),
    "num_workers": ("dataloader_num_workers",),
    "optimizer": ("optim",),
    "output": ("output_dir",),
    "overwrite": ("overwrite_output_dir",),
    "patience": ("early_stopping_patience",),
    "peft": ("use_peft",),
    "per_device_batch_size": ("per_device_train_batch_size",),
    "pipeline_num_stages": ("pipeline_parallel_size", IN_STAGES),
    "pp": ("pipeline_parallel_size", IN_STAGES),
    "precision": ("bf16",),
    "prompt": ("sample_prompt",),
    "qlora": ("load_in_4bit",),
    "quantization_bit": ("load_in_4bit",),
    "resume_from": ("resume",),
    "resume_from_checkpoint": ("resume",),
    "save_dir": ("output_dir",),
    "scheduler": ("lr_scheduler_type",),
    "seq_len": LENGTHS,
    "seq_length": LENGTHS,
    "sequence_len": LENGTHS,
    "sequence_length": LENGTHS,
    "source_column": ("source_column_name",),
    "stages": ("pipeline_parallel_size", IN_STAGES),
    "steps": ("max_steps",),
    "summary_column": ("target_column_name",),
    "tags_column": ("label_column_name",),
    "target_column": ("target_column_name",),
    "teacher": (": a teacher is for recipes/causal_lm.py and seq_cls.py",),
    "teacher_top_k": (": only recipes/causal_lm.py caches a teacher's outputs",),
    "test": ("test_file", "test_dir"),
    "text_column": ("text_column_names", "text_column_name", "source_column_name"),
    "tokenizer": ("tokenizer_name",),
    "topk_ratio": (": top-k was removed: --ddp_comm_hook powersgd sends less and loses less",),
    "train_batch_size": ("per_device_train_batch_size",),
    "train_data": ("train_file", "train_dir"),
    "use_bnb_nested_quant": ("bnb_4bit_use_double_quant",),
    "use_lora": ("use_peft",),
    "val_file": ("validation_file", "validation_dir"),
    "val_max_target_length": (": --max_target_length truncates all targets, held-out ones too",),
    "valid_file": ("validation_file", "validation_dir"),
    "validation_data": ("validation_file", "validation_dir"),
    "warmup": ("warmup_steps",),
    "warmup_ratio": (": --warmup_steps also takes a fraction of all steps, such as 0.1",),
    "wd": ("weight_decay",),
    "weight_decay_rate": ("weight_decay",),
    "workers": ("dataloader_num_workers",),
    "world_size": (": the launcher sets the number of ranks",),
    "zero_stage": ("deepspeed",),
}
CLOSE, OF_FIRST = 0.6, 0.68  # least difflib ratio; weight of the ratio with only the other's first word
BEGINNING = 4  # letters


def meant(word: str, known: Collection[str]) -> str:
    """What to say after "unknown flag X": a sentence that names the flag, or where to look."""
    name = word.lstrip("-").replace("-", "_").lower()
    if name in known:
        return f" Did you mean --{name}?"
    words = {*known, *(one for one in MEANINGS if len(one) >= BEGINNING)}
    word = name if name in MEANINGS else nearest(name, words) or ""
    meanings = MEANINGS.get(word, ()) if word not in known else ()
    if found := [f"--{one}" for one in meanings if one in known]:
        return f" Did you mean {' or '.join(found)}?"
    if said := next((one for one in meanings if one.startswith(":")), None):
        return f" {said[2].upper()}{said[3:]}."
    near = nearest(name, known)
    return f" Did you mean --{near}?" if near else " `--help` lists them."


def nearest_choice(word: str, choices: Sequence[str]) -> str | None:
    """The choice with the longest common prefix, if long enough, else the nearest: `adamwx` is not `ademamix`."""

    def alike(other: str) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(word.lower(), other, strict=False)))

    best = max(choices, key=alike, default="")
    return best if alike(best) >= BEGINNING else nearest(word, choices)


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name most similar as a whole or by its parts, so that `gradient_step` matches by its words, too."""

    def likeness(other: str) -> float:
        parts, others = set(name.split("_")), set(other.split("_"))
        shared = len(parts & others) / len(parts | others)
        first = difflib.SequenceMatcher(None, name, other.partition("_")[0]).ratio()  # wrld of world_size
        return max(difflib.SequenceMatcher(None, name, other).ratio(), shared, OF_FIRST * first)

    best = max(sorted(known), key=likeness, default=None)
    return best if best is not None and likeness(best) >= CLOSE else None
