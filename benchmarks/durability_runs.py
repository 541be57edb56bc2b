"""The runs that benchmarks/resume.py, faults.py and long_run.py cut, kill and watch: every recipe and layout, so small
that a launch is mostly start-up. All randomness is on: dropout, shuffling, augmentation."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

REPO = Path(__file__).resolve().parents[1]
STEPS_PER_EPOCH = 5
GLOBAL_BATCH = 16
# Logged figures that measure the speed and the traffic of a launch. A resumed run must log all others the same.
TIMES = ("_per_second", "_runtime", "step_seconds", "peak_memory", "mfu", "padding_share", "comm_")

EVERY = {
    "logging_steps": 2,  # so that a cut at an odd step is inside a logging window
    "eval_strategy": "epoch",
    "bf16": False,
    "warmup_steps": 3,
    "lr_scheduler_type": "cosine",
    "per_device_eval_batch_size": 8,
    "max_eval_samples": 16,
}
CLASSIFIER = {
    "max_train_samples": STEPS_PER_EPOCH * GLOBAL_BATCH,
    "max_seq_length": 24,
    "group_by_length": True,
    "dropout": 0.1,
    "metric_for_best_model": "loss",
    "load_best_model_at_end": False,
    "early_stopping_patience": 50,  # never reached, but its counter must continue
}
SHAPE = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,max_position_embeddings=32,dropout=0.1"
LANGUAGE = {"config_overrides": SHAPE, "max_train_samples": 3, "sample_tokens": 4}
PIPELINE = {**LANGUAGE, "schedule_step": 0, "learning_rate": 1e-2}
MIXTURE = {
    "model_size": "moe-tiny",
    "config_overrides": "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,num_key_value_heads=2,head_dim=16,"
    "moe_intermediate_size=32,max_position_embeddings=32,attention_dropout=0.1",
    "max_train_samples": 3,
    "sample_tokens": 4,
}
PICTURES = {
    "max_train_samples": STEPS_PER_EPOCH * GLOBAL_BATCH,
    "crop_padding": 1,
    "horizontal_flip": True,
}
OWN_ROWS = "rows.csv"
# The end of an epoch of a stream is not known in advance.
STREAMED = {"streaming": True, "tokenizer": "byte", "train_file": OWN_ROWS, "max_train_samples": 80}
STREAMED |= {"eval_strategy": "steps", "eval_steps": 4}
SEQ, LM, PIPE, IMAGES = "seq_cls", "causal_lm", "causal_lm_pipeline", "image_cls"


@dataclass(frozen=True)
class Run:
    """One recipe in one layout, with the same global batch as the others, in two micro-batches per step if possible."""

    recipe: str
    ranks: int
    flags: dict[str, Any]
    accumulation: int = 2

    def command(self, folder: Path, **more: Any) -> list[str]:
        # Ranks, or groups of ranks, that read different samples.
        readers = self.ranks // max(self.flags.get(f"{kind}_parallel_size", 1) for kind in ("pipeline", "sequence"))
        values = {
            "output_dir": folder,
            "per_device_train_batch_size": GLOBAL_BATCH // (self.accumulation * readers),
            "gradient_accumulation_steps": self.accumulation,
            **EVERY,
            **self.flags,
            **more,
        }
        if values.get("train_file") == OWN_ROWS:
            values["train_file"] = own_rows(folder.parent)
        words = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
        return [*launcher(self.ranks), f"recipes/{self.recipe}.py", *words]


def own_rows(home: Path) -> Path:
    """A file to stream: texts whose words determine their label."""
    path, generator = home / OWN_ROWS, random.Random(0)
    if not path.is_file():
        home.mkdir(parents=True, exist_ok=True)
        words = {"good": "fine great lovely superb".split(), "bad": "poor awful dull boring".split()}
        lines = ["text,label"]
        for _ in range(STEPS_PER_EPOCH * GLOBAL_BATCH + 16):
            label = generator.choice(list(words))
            some = generator.choices([*words[label], "the", "film", "was"], k=generator.randint(3, 20))
            lines.append(f"{' '.join(some)},{label}")
        path.write_text("\n".join(lines) + "\n")
    return path


def classifier(ranks: int, **flags: Any) -> Run:
    return Run(SEQ, ranks, {**CLASSIFIER, **flags})


LAYOUTS = {
    "plain": classifier(1),
    "ddp": classifier(2),
    "zero0": classifier(2, deepspeed="zero0"),
    "zero1": classifier(2, deepspeed="zero1"),
    "zero2": classifier(2, deepspeed="zero2"),
    "zero3": classifier(2, deepspeed="zero3"),
    "zero2_offload": classifier(2, deepspeed="zero2_offload"),
    "zero3_offload": classifier(2, deepspeed="zero3_offload"),
    "zero3_nvme": classifier(2, deepspeed="zero3_nvme"),
    "fsdp": classifier(2, fsdp=True),
    "pipeline": Run(PIPE, 2, {**PIPELINE, "pipeline_parallel_size": 2}, accumulation=4),
    "pipeline_2x2": Run(PIPE, 4, {**PIPELINE, "pipeline_parallel_size": 2}, accumulation=4),
    "sequence": Run(LM, 2, {**LANGUAGE, "deepspeed": "zero3", "sequence_parallel_size": 2}),
    "experts": Run(LM, 2, {**MIXTURE, "deepspeed": "zero2", "expert_parallel_size": 2}),
    "experts_2x2": Run(LM, 4, {**MIXTURE, "deepspeed": "zero1", "expert_parallel_size": 2}),
}
# Other sources of trouble: other recipes, data orders, precisions, compressed gradients.
VARIETIES = {
    "causal_lm": Run(LM, 1, LANGUAGE),
    "causal_lm_packed": Run(LM, 2, {**LANGUAGE, "packing": "bfd", "document_mask": True}),
    "causal_lm_streaming": Run(LM, 2, {**LANGUAGE, **STREAMED}),
    "seq_cls_streaming": Run(
        SEQ, 2, {**CLASSIFIER, "streaming": True, "group_by_length": False, "train_file": OWN_ROWS}
    ),
    "seq_cls_workers": classifier(1, dataloader_num_workers=2),
    "image_cls": Run(IMAGES, 2, PICTURES),
    "image_cls_workers": Run(IMAGES, 1, {**PICTURES, "dataloader_num_workers": 1}),
    "image_cls_pipeline": Run(IMAGES, 2, {**PICTURES, "model_type": "alexnet", "pipeline_parallel_size": 2}),
    "zero2_bf16": classifier(2, deepspeed="zero2", bf16=True),
    "zero3_bf16": classifier(2, deepspeed="zero3", bf16=True),
    "plain_bf16": classifier(1, bf16=True),
    "ddp_powersgd": classifier(2, ddp_comm_hook="powersgd", powersgd_rank=2),
    "ddp_onebit_adam": classifier(2, ddp_comm_hook="onebit_adam"),
}
SMALL = {"max_train_samples": STEPS_PER_EPOCH * GLOBAL_BATCH}
SHORT = {**SMALL, "max_seq_length": 24, "dropout": 0.1}
TEXTS = {**SMALL, "max_source_length": 16, "max_target_length": 8, "dropout": 0.1, "deepspeed": "zero2"}
LONGER = SHAPE.replace("max_position_embeddings=32", "max_position_embeddings=64")
PAIRS = {**SMALL, "config_overrides": LONGER, "block_size": 64, "sample_tokens": 0, "deepspeed": "zero3"}
TASKS = {
    "token_cls": Run("token_cls", 2, {**SHORT, "fsdp": True}),
    "question_answering": Run("question_answering", 1, {**SHORT, "max_seq_length": 40, "doc_stride": 8}),
    "seq2seq": Run("seq2seq", 2, TEXTS),
    "embedding": Run("embedding", 2, SHORT),
    "preference": Run("preference", 2, PAIRS),
}
RUNS = LAYOUTS | VARIETIES | TASKS


def launcher(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable]
    return [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", str(ranks), "--master_port", port()]


def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def environment(cache: Path) -> dict[str, str]:
    """The environment of a launch: offline, one cache of prepared data, and a fixed order of summation."""
    path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {"HF_HUB_OFFLINE": "1", "FINETUNE_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return {**os.environ, **given}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model or an adapter, from all of its files."""
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*model*.safetensors") for name, tensor in load_file(path).items()}


def different_weights(one: Path, other: Path) -> list[str]:
    """The names of tensors that are not bit-identical."""
    import torch  # imported here, because pages are rendered without it

    ours, theirs = weights(one), weights(other)
    if not ours or ours.keys() != theirs.keys():
        return sorted(ours.keys() ^ theirs.keys()) or ["no weights"]
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def farthest(one: Path, other: Path) -> float:
    """The largest difference of any weight; infinite if names or shapes differ."""
    ours, theirs = weights(one), weights(other)
    if not ours or ours.keys() != theirs.keys() or any(ours[name].shape != theirs[name].shape for name in ours):
        return float("inf")
    return max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours)


def logged(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without times and speeds."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [{k: v for k, v in row.items() if k != "time" and not any(t in k for t in TIMES)} for row in rows]


def different_rows(one: Path, other: Path) -> list[str]:
    """The logged figures that differ, as `step: names`."""
    ours, theirs = logged(one), logged(other)
    found = [f"{len(ours)} rows, {len(theirs)} rows"] if len(ours) != len(theirs) else []
    for mine, its in zip(ours, theirs, strict=False):
        names = [name for name in sorted(mine.keys() | its.keys()) if mine.get(name) != its.get(name)]
        found += [f"{its['step']}: {', '.join(names)}"] if names else []
    return found


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints under their final names, oldest first."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]))


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file; none if it does not exist."""
    for line in path.read_text().splitlines() if path.is_file() else ():
        yield json.loads(line)
