"""What DeepSpeed, the Trainer or accelerate would fail on or silently get wrong. One rule is one short function that
yields findings; docs/check.md explains the codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Finding
from finetune.dsconfig.rules import (
    batch,
    experts,
    leftovers,
    offload,
    optimizer,
    pipeline,
    precision,
    quantized,
    schedule,
    zero,
)

Rule = Callable[[Config, Context], Iterator[Finding]]

# Rules that depend on the stage.
STAGED = (*zero.RULES, *experts.RULES, *offload.RULES, *quantized.RULES, *pipeline.RULES)


def rules_for(config: Config) -> tuple[Rule, ...]:
    """All of RULES; if the stage is invalid, only those that do not depend on it."""
    return RULES if config.stage_is_known else tuple(rule for rule in RULES if rule not in STAGED)


RULES: tuple[Rule, ...] = (
    *batch.RULES,  # DS2xx: batch sizes, "auto", and agreement with the Trainer's arguments
    *optimizer.RULES,  # DS3xx: optimizer and schedule
    *schedule.RULES,
    *precision.RULES,  # DS4xx
    *zero.RULES,  # DS5xx
    *experts.RULES,
    *offload.RULES,  # DS6xx
    *quantized.RULES,  # DS7xx: ZeRO++
    *pipeline.RULES,  # DS8xx
    *leftovers.RULES,  # DS9xx: leftovers in the file
)
