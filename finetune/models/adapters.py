"""LoRA: a few trained weights beside frozen ones (Hu et al., arXiv 2106.09685), by peft."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from torch import nn

from finetune.errors import RequestError
from finetune.models.causal import build_causal_lm
from finetune.run.flags.language import AdapterArguments

MERGED_FOLDER = "merged"  # in the run folder
MAX_SHOWN = 20


def check_adapter(arguments: AdapterArguments, shards: bool) -> None:
    """Raises RequestError for packed weights that ZeRO-3 or FSDP would have to shard. What flags alone show,
    finetune.run.conflicts has said."""
    if arguments.use_peft and arguments.load_in_4bit and shards:
        raise RequestError(
            "--load_in_4bit: packed 4-bit weights are not sharded here. Use zero2, zero1 or no DeepSpeed, or leave it "
            "out for plain LoRA under ZeRO-3 or FSDP."
        )


def add_adapter(model: Any, arguments: AdapterArguments) -> Any:
    """`model` with LoRA on its linear layers, which alone are trained. Raises RequestError where no layer matches."""
    from peft import LoraConfig, get_peft_model

    linear = Counter(name.rsplit(".", 1)[-1] for name, module in model.named_modules() if _is_linear(module))
    wanted = arguments.lora_target_modules
    layers = [name for name, module in model.named_modules() if _is_linear(module) or isinstance(module, nn.Embedding)]
    missing = [name for name in wanted or () if not any(_matches(layer, name) for layer in layers)]
    if missing:
        there = ", ".join(f"{name} ({count})" for name, count in linear.most_common(MAX_SHOWN))
        raise RequestError(
            f"--lora_target_modules {missing[0]}: no linear layer has this name. The model has: {there}."
        )
    config = LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=wanted or "all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def write_merged(folder: Path, arguments: Any, source: Any, tokenizer: Any) -> Path:
    """The full model with the adapter of `folder` in its weights, from disk, so that no ZeRO stage matters. In fp32.
    `arguments` say which model `source` is.

    One rank alone calls it, at the end: from here on models are no longer sharded as they are built.
    """
    from peft import PeftModel
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    base = build_causal_lm(arguments, source, tokenizer, seed=0)  # loaded, not drawn
    merged = PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    merged.save_pretrained(str(folder / MERGED_FOLDER))
    tokenizer.save_pretrained(str(folder / MERGED_FOLDER))
    return folder / MERGED_FOLDER


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's


def _matches(full: str, wanted: str) -> bool:
    return full == wanted or full.endswith(f".{wanted}")
