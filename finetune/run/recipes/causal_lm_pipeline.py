"""recipes/causal_lm_pipeline.py: a GPT-lite trained by DeepSpeed's pipeline engine."""

from __future__ import annotations

from finetune.run.flags.common import RunArguments
from finetune.run.flags.experts import ExpertArguments
from finetune.run.flags.guards import GuardArguments
from finetune.run.flags.language import BlockArguments, CausalModelArguments, CorpusArguments, SampleArguments
from finetune.run.flags.pipeline import PipelineArguments
from finetune.run.flags.profiling import ProfileArguments
from finetune.run.flags.sequence_parallel import TileArguments
from finetune.run.recipe import PIPELINE, USUAL, Recipe
from finetune.run.recipes.causal_lm import CAUSAL_LM, LANGUAGE_FIGURES
from finetune.run.task import TEXT_GENERATION

CAUSAL_LM_PIPELINE = Recipe(
    name="causal_lm_pipeline",
    task=TEXT_GENERATION,
    figures=LANGUAGE_FIGURES,
    groups=(
        CausalModelArguments,
        CorpusArguments,
        BlockArguments,
        ExpertArguments,
        TileArguments,
        SampleArguments,
        ProfileArguments,
        RunArguments,
        GuardArguments,
    ),
    engines=(PIPELINE,),
    pipeline_groups=(PipelineArguments,),
    reads=(CAUSAL_LM.name,),
    defaults={
        **USUAL,
        "output_dir": "runs/causal_lm_pipeline",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,  # micro-batches that fill the pipeline; with one pipeline, 32 blocks per step
        "num_train_epochs": 1,  # as in recipes/causal_lm.py
    },
    # The same model learns alike; only DDP's flags do not apply.
    scratch_defaults={k: v for k, v in CAUSAL_LM.scratch_defaults.items() if not k.startswith("ddp_")},
)
