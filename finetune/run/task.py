"""What a model is trained for, in the words of transformers and peft, and which models are not for it. A recipe's
description says its task; those of several recipes stand here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune.run.decoders import refuse_no_classifier, refuse_no_language_model, refuse_writer


@dataclass(frozen=True)
class Task:
    """`name` is that of transformers' `pipeline` (or was, of tasks that transformers 5 has dropped), `auto` the class
    that opens its models, by which the planner knows their head, and `adapter` peft's TaskType. `refuses` raises
    RequestError for a model that is not for it, and `refuses_teacher` for a teacher, where that is another rule: see
    `finetune.run.decoders`."""

    name: str
    auto: str
    adapter: str = ""
    refuses: Callable[[Callable[[str], Any], str], None] | None = None
    refuses_teacher: Callable[[Callable[[str], Any], str], None] | None = None

    def __str__(self) -> str:
        return self.name.replace("-", " ")


NO_TASK = Task("", "")  # of a script whose model nobody keeps
TEXT_GENERATION = Task("text-generation", "AutoModelForCausalLM", "CAUSAL_LM", refuse_no_language_model)
TEXT_CLASSIFICATION = Task(
    "text-classification", "AutoModelForSequenceClassification", "SEQ_CLS", refuse_writer, refuse_no_classifier
)
