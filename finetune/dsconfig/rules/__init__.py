"""What DeepSpeed, the Trainer or accelerate would trip over or quietly get wrong. One rule is one short function that
yields findings; its codes are explained in docs/check.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Finding
from finetune.dsconfig.rules import (
    batch,
    leftovers,
    offload,
    optimizer,
    parameters,
    pipeline,
    precision,
    quantized,
    refused,
    schedule,
    zero,
)

Rule = Callable[[Config, Context], Iterator[Finding]]

# Which of these hold depends on the stage.
STAGED = (*zero.RULES, *offload.RULES, *quantized.RULES, *pipeline.RULES)


def rules_for(config: Config) -> tuple[Rule, ...]:
    """All of RULES; where the stage is there and cannot be told, those that do not ask for it."""
    return RULES if config.stage_is_known else tuple(rule for rule in RULES if rule not in STAGED)


RULES: tuple[Rule, ...] = (
    *batch.RULES,  # DS2xx: batch sizes, "auto", and agreement with the Trainer's arguments
    *optimizer.RULES,  # DS3xx: optimizer and schedule
    *parameters.RULES,
    *schedule.RULES,
    *precision.RULES,  # DS4xx
    *zero.RULES,  # DS5xx
    *offload.RULES,  # DS6xx
    *quantized.RULES,  # DS7xx: ZeRO++
    *pipeline.RULES,  # DS8xx
    *leftovers.RULES,  # DS9xx: what was forgotten in the file
    *refused.RULES,
)
