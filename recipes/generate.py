"""Generate a language model's answers to a file of prompts, on any number of ranks.

    finetune generate runs/causal_lm --prompts prompts.jsonl --output answers.jsonl       # the same, in one process
    torchrun --nproc_per_node 2 recipes/generate.py runs/causal_lm --prompts prompts.jsonl --output answers.jsonl
    deepspeed --num_gpus 8 recipes/generate.py FOLDER --prompts prompts.jsonl --output answers.jsonl --deepspeed zero3

Each rank answers some of the prompts. --deepspeed zero3 or zero3_offload also shards the weights, for a model that is
larger than one GPU. `--help` lists all flags; docs/generate.md has the details.
"""

from finetune.entry.main import run_script
from finetune.generation.flags import generate_parser
from finetune.generation.request import answer_file

if __name__ == "__main__":
    run_script(generate_parser(__doc__), answer_file)
