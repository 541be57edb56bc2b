"""`python -m finetune.measure`: a few steps of any model on synthetic tokens, to record their memory and time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from finetune.run.flag import AT_LEAST_ONE, NOT_NEGATIVE
from finetune.run.flags.common import RunArguments
from finetune.run.flags.experts import ExpertArguments
from finetune.run.flags.pipeline import PipelineArguments
from finetune.run.flags.sequence_parallel import SequenceParallelArguments, TileArguments
from finetune.run.recipe import PIPELINE, TRAINER, Recipe

# Defaults of every short real run; the trained model is not kept.
SHORT_RUN: dict[str, Any] = {
    "do_train": True,
    "report_to": ["none"],
    "save_strategy": "no",
    "logging_strategy": "no",
    "remove_unused_columns": False,
    "ddp_find_unused_parameters": False,
    "overwrite_output_dir": True,
}


@dataclass
class TrialArguments:
    """The model, its samples, and where to record the result."""

    model_config: str = field(default="", metadata={"help": "the config.json of a Hugging Face model"})
    head: str = field(default="causal_lm", metadata={"help": "causal_lm, masked_lm, sequence_classification, ..."})
    attn_implementation: str = field(default="sdpa", metadata={"help": "sdpa, eager or flash_attention_2"})
    sequence_tokens: int = field(default=128, metadata={"help": "tokens of each sample", "range": AT_LEAST_ONE})
    loss_chunk_tokens: int = field(
        default=0, metadata={"help": "rows of logits at a time; 0: all", "range": NOT_NEGATIVE}
    )
    document_mask: bool = field(default=False, metadata={"help": "a sample is two documents, masked from one another"})
    adapter: str = field(
        default="", metadata={"help": "a JSON object of flags of an adapter, and the dtype of its base; empty: none"}
    )
    planned_device: str = field(default="", metadata={"help": "cpu or cuda: another is refused; empty: any"})
    timed_steps: int = field(default=5, metadata={"help": "steps whose time counts", "range": AT_LEAST_ONE})
    result_dir: str = field(default="", metadata={"help": "where each rank writes its measurements"})


TRIAL = Recipe(
    name="trial",
    groups=(TrialArguments, SequenceParallelArguments, TileArguments, ExpertArguments, RunArguments),
    pipeline_groups=(PipelineArguments,),
    engines=(TRAINER, PIPELINE),
    defaults={**SHORT_RUN, "output_dir": "runs/trial"},
)
