"""Tokens per second and peak memory of recipes/causal_lm.py on chats, compared with TRL's SFTTrainer: the same model,
chats, blocks, batch size and threads, with full fine-tuning and LoRA.

    python benchmarks/post_training.py                                     # two CPU cores, about twelve minutes
    python benchmarks/post_training.py --shape 8b --batch 1 --block_size 2048 --bf16 --kinds lora    # a GPU of 80 GB

See peers.py for how rounds and memory are measured. Without --model, the script creates a Llama with 4 layers and 256
dimensions, and a BPE tokenizer of 8,192 tokens trained on Python's reference manual: as many tokens per dimension as
Llama-3-8B. With --shape 8b the model is as large as that one, in bf16, with random weights and the same tokenizer.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers import OURS, WARMUP_STEPS, Peers, rows_of
from releases import in_words, this_machine, versions

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results" / "post_training.json"
CHATS, WORDS_MEDIAN, WORDS_SIGMA = 2000, 60, 0.9  # lengths of answers are log-normal, from a line to pages
# The generation markers tell TRL what the assistant said; the recipe reads them, too.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 2, "max_position_embeddings": 2048, "vocab_size": 8192},
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B, config.json
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 128_256},
}  # fmt: skip
NAMES = {"small": "A Llama of 4 layers, 256 dimensions and 8,192 tokens", "8b": "A Llama of Llama-3-8B's shape"}
NOT_SHOWN = """
What this does not show: a GPU, where flash attention and fused kernels change both figures; and models whose vocabulary
is small relative to their width."""
PEERS = {  # words of stock_sft.py
    "TRL": (),
    "TRL, its chunked loss": ("--loss_type", "chunked_nll"),
    "TRL, checkpointing as by default": ("--gradient_checkpointing",),
}
IMPORTS = {  # what each peer imports before it reads a row
    OURS: "torch, transformers, datasets, accelerate, peft, finetune.training.chapters, finetune.training.start",
    **dict.fromkeys(PEERS, "torch, transformers, datasets, accelerate, peft, trl; from trl import SFTTrainer"),
}


def make_model(folder: Path, shape: str = "small") -> None:
    from pydoc_data.topics import topics

    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    inner.train_from_iterator(topics.values(), trainers.BpeTrainer(vocab_size=8192, special_tokens=marks))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    is_large = shape != "small"  # where a CPU would draw weights for minutes
    with torch.device("cuda" if is_large and torch.cuda.is_available() else "cpu"):
        dtype = torch.bfloat16 if is_large else torch.float32
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape], **ends), dtype=dtype)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # the runs are other processes on the same GPU


def make_chats(path: Path) -> None:
    """Turns of real English, with lengths distributed as in real chats."""
    from pydoc_data.topics import topics

    words = " ".join(topics.values()).split()
    drawn = random.Random(0)

    def said(median: float) -> str:
        length = min(1500, max(3, round(median * drawn.lognormvariate(0, WORDS_SIGMA))))
        start = drawn.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    with path.open("w") as file:
        for _ in range(CHATS):
            turns = []
            for _ in range(drawn.choice((1, 1, 1, 2, 3))):
                turns += [{"role": "user", "content": said(WORDS_MEDIAN / 4)}]
                turns += [{"role": "assistant", "content": said(WORDS_MEDIAN)}]
            file.write(json.dumps({"messages": turns}) + "\n")


class Bench:
    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options, self.peers = options, Peers(scratch, IMPORTS, options.gpu)
        self.model, self.chats = options.model or scratch / "model", scratch / "chats.jsonl"
        if not options.model:
            make_model(self.model, options.shape)
        make_chats(self.chats)

    def turn(self, kind: str) -> dict[str, dict[str, float]]:
        options, lora = self.options, ["--use_peft"] if kind == "lora" else []
        ours = {"model_name_or_path": self.model, "train_file": self.chats, "packing": "wrapped", "sample_tokens": 0}
        ours |= {"block_size": options.block_size, "per_device_train_batch_size": options.batch, "bf16": options.bf16}
        ours |= {"max_steps": options.steps, "learning_rate": 1e-4, "validation_split_percentage": 1}
        theirs = {"model": self.model, "train_file": self.chats, "batch": options.batch, "max_steps": options.steps}
        theirs |= {"block_size": options.block_size}
        found = {OURS: self.peers.recipe("recipes/causal_lm.py", self.peers.folder(), ours, *lora)}
        for name, own in PEERS.items():
            words = (*lora, *own, *(["--bf16"] * options.bf16))
            found[name] = self.peers.peer(name, "benchmarks/stock_sft.py", self.peers.folder(), theirs, *words)
        rows = options.batch * options.block_size  # tokens
        return {name: {**figures, "rows": rows} for name, figures in found.items()}


def render(found: dict[str, Any]) -> str:
    setting = found["setting"]
    lines = [
        "# Fine-tuning on chats: the recipe compared with TRL",
        "",
        f"`{setting['command']}`, {setting['machine']}; {setting['versions']}.",
        f"{setting['model']}; blocks of {setting['block_size']} tokens, {setting['batch']} per step,",
        f"{setting['steps']} steps per process, excluding the first {WARMUP_STEPS}; {len(found['turns'])} interleaved",
        "rounds: medians, with the range in parentheses. The loss is over the assistant's tokens. Without gradient",
        "checkpointing, which it enables by default, TRL is faster. Ratios are ours divided by the peer's, within one",
        "round.",
        "",
        "| run | tokens/s | peak memory above imports, MiB | ratio, tokens/s | ratio, memory |",
        "|---|---|---|---|---|",
    ]
    for kind in found["turns"][0]:
        lines += [row.replace("| ", f"| {kind}: ", 1) for row in rows_of([turn[kind] for turn in found["turns"]], {})]
    lines += [*([] if setting["on_gpu"] else [NOT_SHOWN]), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder (default: a small Llama created here)")
    parser.add_argument("--shape", default="small", choices=list(SHAPES), help="of the model created here")
    parser.add_argument("--kinds", nargs="*", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--block_size", type=int, default=512)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    import torch

    options.gpu = torch.cuda.is_available()
    setting = {
        "command": "python benchmarks/post_training.py" + " ".join(["", *sys.argv[1:]]),
        "machine": this_machine(),
        "versions": in_words(versions()) + f", trl {version('trl')}, peft {version('peft')}",
        "on_gpu": options.gpu,
        "model": options.model or NAMES[options.shape],
        **{name: getattr(options, name) for name in ("batch", "block_size", "steps", "bf16")},
    }
    turns = []
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options, Path(scratch))
        for _ in range(options.repeats):
            turns.append({kind: bench.turn(kind) for kind in options.kinds})
            print(json.dumps(turns[-1]), flush=True)
            options.out.write_text(json.dumps({"setting": setting, "turns": turns}, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(render({"setting": setting, "turns": turns}))


if __name__ == "__main__":
    main()
