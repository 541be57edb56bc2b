"""Recipes as far as their trainer is built: what it would train with, and nothing is trained.

python tests/run/built_trainers.py CASES.json     # [[recipe, [flag, ...]], ...]; one JSON object a case, in order

The stack is imported once; each case is a child of its own, where the recipe's real `main` runs up to `finish`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from finetune.entry.main import resolve_here
from finetune.run.choose import recipes
from finetune.run.launch import Launch
from finetune.training import chapters

REPO = Path(__file__).resolve().parents[2]
LOOKED_AT = 64  # samples


class Built(BaseException):
    """The trainer is there."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer


def trained_with(recipe: str, argv: list[str]) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location(recipe, REPO / "recipes" / f"{recipe}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def finish(session: Any, trainer: Any, **_: Any) -> None:
        raise Built(trainer)

    chapters.finish = finish
    try:
        module.main(resolve_here(recipes()[recipe], argv, Launch()))
    except Built as built:
        is_default = "--config" not in argv  # a YAML's model may be large
        return figures(built.trainer) | ({"unused": unused(built.trainer)} if is_default else {})
    raise AssertionError(f"recipes/{recipe}.py has not finished by finetune.training.chapters.finish")


def figures(trainer: Any) -> dict[str, Any]:
    """By the names of a plan's job."""
    args, engine = trainer.args, getattr(trainer, "engine", None)
    model = trainer.model if engine is None else engine.module
    recomputes = args.activation_checkpointing
    interval = (args.activation_checkpointing_kwargs or {}).get("every_n_layers", 1) if recomputes else 0
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        "micro_batch": args.train_batch_size if engine is None else engine.train_micro_batch_size_per_gpu(),
        "accumulation": args.gradient_accumulation_steps if engine is None else engine.gradient_accumulation_steps(),
        "eval_batch": args.eval_batch_size if args.do_eval or args.do_predict else 0,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "checkpoint_interval": interval if engine is None else engine.module.activation_checkpoint_interval,
        "loss_chunk_tokens": getattr(head, "chunk_tokens", 0),
        "optimizer": optimizer(trainer, engine),
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
        "trained": sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad),
        "frozen_bytes": sum(frozen_bytes(p) for p in model.parameters() if not p.requires_grad),
        **sample(trainer, engine),
    }


def unused(trainer: Any) -> list[str] | None:
    """The trained weights that get no gradient: DDP would wait for theirs in vain. None if it is told to look."""
    if trainer.args.ddp_find_unused_parameters is not False or hasattr(trainer, "engine"):
        return None
    model, rows = trainer.model.train(), [trainer.train_dataset[index] for index in range(4)]
    trainer.compute_loss(model, trainer.data_collator(rows)).backward()
    return [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]


def frozen_bytes(weight: Any) -> int:
    """With the scales of one that is packed, by absolute maximum."""
    scales = getattr(getattr(weight, "quant_state", None), "absmax", None)
    held = getattr(weight, "ds_numel", weight.numel()) * weight.element_size()
    return int(held + (0 if scales is None else scales.nbytes))


def optimizer(trainer: Any, engine: Any) -> str:
    """As `finetune.plan.optimizers.KINDS` calls it."""
    if engine is not None:
        kind, settings = type(trainer.optimizer), trainer.optimizer.defaults
    else:
        plugin = trainer.accelerator.state.deepspeed_plugin
        assert plugin is None or "optimizer" not in plugin.deepspeed_config, "DeepSpeed's own: which is not looked at"
        kind, settings = trainer.optimizer_cls_and_kwargs or Trainer.get_optimizer_cls_and_kwargs(trainer.args)
    if kind is torch.optim.AdamW:
        return "adam" if settings.get("fused") else "adam_foreach"
    return {"DeepSpeedCPUAdam": "cpu_adam", "SGD": "sgd", "Adafactor": "adafactor"}[kind.__name__]


def sample(trainer: Any, engine: Any) -> dict[str, int]:
    """Of the longest of some training samples the tokens, or a picture's side."""
    collate = trainer.data_collator if engine is None else trainer.collator
    data = trainer.train_dataset
    batches = [collate([data[index]]) for index in range(min(len(data), LOOKED_AT))]
    if "pixel_values" in batches[0]:
        return {"tokens": 1, "image_size": max(batch["pixel_values"].shape[-1] for batch in batches)}
    texts = {"texts": len(batches[0]["input_ids"])} if "places" in batches[0] else {}  # of a row of preferences
    return texts | {"tokens": max(batch["input_ids"].shape[-1] for batch in batches)}


def in_a_child(recipe: str, argv: list[str]) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)  # what a recipe says is no answer
        try:
            found = trained_with(recipe, argv)
        except BaseException:
            found = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w") as answer:
            answer.write(json.dumps(found))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"error": "the process ended without an answer"}


if __name__ == "__main__":
    for case in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(in_a_child(*case)), flush=True)
