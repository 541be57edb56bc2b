"""What a model is trained for, in the terms of transformers and peft, and which models do not fit. A recipe's
description states its task; tasks of several recipes are defined here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune.run.decoders import refuse_no_classifier, refuse_no_language_model, refuse_writer


@dataclass(frozen=True)
class Task:
    """`name` is the task's name in transformers' `pipeline` (before version 5 for tasks that it dropped), `auto` the
    class that opens its models, which tells the planner their head, and `adapter` peft's TaskType. `refuses` raises
    RequestError for a model that does not fit, and `refuses_teacher` for a teacher, if its rule differs: see
    `finetune.run.decoders`."""

    name: str
    auto: str
    adapter: str = ""
    refuses: Callable[[Callable[[str], Any], str], None] | None = None
    refuses_teacher: Callable[[Callable[[str], Any], str], None] | None = None

    def __str__(self) -> str:
        return self.name.replace("-", " ")


NO_TASK = Task("", "")  # for a script whose model is not kept
TEXT_GENERATION = Task("text-generation", "AutoModelForCausalLM", "CAUSAL_LM", refuse_no_language_model)
TEXT_CLASSIFICATION = Task(
    "text-classification", "AutoModelForSequenceClassification", "SEQ_CLS", refuse_writer, refuse_no_classifier
)
