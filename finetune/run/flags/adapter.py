"""An adapter in place of the whole model, and the precision of the weights that it leaves as they are: flags of the
recipes of text."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    use_peft: bool = field(default=False, metadata={"help": "train LoRA adapters; the model's own weights stay"})
    dtype: str = field(
        default="auto",
        metadata={
            "help": f"of weights that are not trained: {', '.join(DTYPES)}; auto: bfloat16 in a run in bf16",
            "choices": DTYPES,
        },
    )
    lora_r: int = field(default=16, metadata={"help": "rank of the adapters", "range": AT_LEAST_ONE})
    lora_alpha: int = field(default=32, metadata={"help": "their scale is lora_alpha / lora_r", "range": AT_LEAST_ONE})
    lora_dropout: float = field(default=0.0, metadata={"help": "on their input", "range": RATE})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "names of linear layers; default: all-linear, which is all but the head"}
    )
    lora_modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "names of modules to train whole, beside a classifier's head"}
    )
    lora_use_dora: bool = field(
        default=False, metadata={"help": "DoRA: the length of each weight's rows is trained apart"}
    )
    lora_use_rslora: bool = field(default=False, metadata={"help": "rsLoRA: scale by lora_alpha / sqrt(lora_r)"})
    merge_adapter: bool = field(default=False, metadata={"help": "also write the full model, to merged/"})
    load_in_4bit: bool = field(default=False, metadata={"help": "QLoRA: frozen weights in 4 bits (bitsandbytes)"})
