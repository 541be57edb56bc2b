"""Flags of the text recipes for training an adapter instead of the whole model, and for the precision of the frozen
weights."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.run.flag import AT_LEAST_ONE, RATE, flag
from finetune.run.on_resume import APPLIED, GOES_ON, NEVER, VALUES

# Settings of a new adapter; one that is trained further, or evaluated, has its own.
OF_NEW_ADAPTERS = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    *("lora_modules_to_save", "lora_use_dora", "lora_use_rslora"),
)
# In a mixture, peft 0.21 takes these names, and all-linear, for tensors of the experts and routers, into which
# transformers 5 fused the linear layers of that name (utils/transformers_weight_conversion.py,
# _MOE_TARGET_MODULE_MAPPING); linear layers that still have the name would lose their adapter.
TAKEN_BY_PEFT = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
PURE = "pure_bfloat16"  # trained weights in bf16 that lose the rounding error of each step
DTYPES = ("auto", "bfloat16", "float16", "float32", PURE)


@dataclass
class AdapterArguments:
    """Train an adapter instead of the whole model."""

    use_peft: bool = flag(False, "train LoRA adapters, and freeze the model's own weights", NEVER)
    dtype: str = flag(
        "auto",
        f"precision of the weights: {', '.join(DTYPES)}; auto is bfloat16 for those under an adapter if the run uses "
        "bf16, and float32 for trained ones",
        APPLIED,
        choices=DTYPES,
    )
    lora_r: int = flag(16, "rank of the adapters", NEVER, range=AT_LEAST_ONE)
    lora_alpha: int = flag(32, "adapters are scaled by lora_alpha / lora_r", VALUES, range=AT_LEAST_ONE)
    lora_dropout: float = flag(0.0, "dropout on the input of the adapters", VALUES, range=RATE)
    lora_target_modules: list[str] | None = flag(
        None, "names of the linear layers that get an adapter; default: all-linear, which is all but the head", NEVER
    )
    lora_modules_to_save: list[str] | None = flag(
        None, "names of modules to train in full; a classifier's head always is", NEVER
    )
    lora_use_dora: bool = flag(False, "DoRA: train the magnitude of the weights separately from their direction", NEVER)
    lora_use_rslora: bool = flag(False, "rsLoRA: scale by lora_alpha / sqrt(lora_r)", VALUES)
    merge_adapter: bool = flag(False, "also write the model with the adapter merged into it, to merged/", GOES_ON)
    load_in_4bit: bool = flag(False, "QLoRA: load the frozen weights in 4 bits (bitsandbytes)", NEVER)
    bnb_4bit_use_double_quant: bool = flag(False, "QLoRA: quantize the scales of 4-bit weights, too", NEVER)
