"""The parameters of each model family, by the `model_type` of its config. A new family is a few functions and a
row in a table; a test checks every tensor against transformers."""

from finetune.plan.families.decoders import DECODERS
from finetune.plan.families.encoders import ENCODERS
from finetune.plan.families.no_text import NO_TEXT
from finetune.plan.families.t5 import SEQ2SEQS

FAMILIES = {**ENCODERS, **DECODERS, **SEQ2SEQS, **NO_TEXT}
