"""Write what a language model answers to a file of prompts, on any number of ranks.

    finetune generate runs/causal_lm --prompts prompts.jsonl --output answers.jsonl       # the same, in one process
    torchrun --nproc_per_node 2 recipes/generate.py runs/causal_lm --prompts prompts.jsonl --output answers.jsonl
    deepspeed --num_gpus 8 recipes/generate.py FOLDER --prompts prompts.jsonl --output answers.jsonl --deepspeed zero3

The ranks share the prompts. With --deepspeed zero3 or zero3_offload they share the weights, too, for a model that is
larger than a card. `--help` lists all flags; docs/generate.md says the rest.
"""

from finetune.entry.main import run_script
from finetune.generation.flags import generate_parser
from finetune.generation.request import answer_file

if __name__ == "__main__":
    run_script(generate_parser(__doc__), answer_file)
