"""An adapter in place of the whole model, and the precision of the weights that it leaves as they are: flags of the
recipes of text."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.run.flag import flag
from finetune.run.on_resume import APPLIED, GOES_ON, NEVER, VALUES
from finetune.run.range import AT_LEAST_ONE, RATE

# What a new adapter is made with; one that is trained further, or evaluated, has its own.
OF_NEW_ADAPTERS = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    *("lora_modules_to_save", "lora_use_dora", "lora_use_rslora"),
)
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass
class AdapterArguments:
    """Train an adapter in place of the whole model."""

    use_peft: bool = flag(False, "train LoRA adapters; the model's own weights stay", NEVER)
    dtype: str = flag(
        "auto",
        f"of weights that are not trained: {', '.join(DTYPES)}; auto: bfloat16 in a run in bf16",
        APPLIED,
        choices=DTYPES,
    )
    lora_r: int = flag(16, "rank of the adapters", NEVER, range=AT_LEAST_ONE)
    lora_alpha: int = flag(32, "their scale is lora_alpha / lora_r", VALUES, range=AT_LEAST_ONE)
    lora_dropout: float = flag(0.0, "on their input", VALUES, range=RATE)
    lora_target_modules: list[str] | None = flag(
        None, "names of linear layers; default: all-linear, which is all but the head", NEVER
    )
    lora_modules_to_save: list[str] | None = flag(
        None, "names of modules to train whole, beside a classifier's head", NEVER
    )
    lora_use_dora: bool = flag(False, "DoRA: the length of each weight's rows is trained apart", NEVER)
    lora_use_rslora: bool = flag(False, "rsLoRA: scale by lora_alpha / sqrt(lora_r)", VALUES)
    merge_adapter: bool = flag(False, "also write the full model, to merged/", GOES_ON)
    load_in_4bit: bool = flag(False, "QLoRA: frozen weights in 4 bits (bitsandbytes)", NEVER)
