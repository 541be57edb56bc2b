"""The parameters of the families that are written down, by the `model_type` of their configs: the toolkit's own models
and ResNets. All others are traced (finetune.plan.trace_files)."""

from finetune.plan.families.gptlite import GPTLITE
from finetune.plan.families.no_text import NO_TEXT

FAMILIES = {"gptlite": GPTLITE, **NO_TEXT}
