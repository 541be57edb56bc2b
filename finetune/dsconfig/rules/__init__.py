"""What DeepSpeed, the Trainer or accelerate would fail on or silently get wrong. One rule is one short function that
yields findings: every public generator in these modules. docs/check.md explains the codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import isgeneratorfunction
from types import ModuleType

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Finding
from finetune.dsconfig.rules import batch, leftovers, offload, optimizer, pipeline, precision, quantized, schedule, zero

Rule = Callable[[Config, Context], Iterator[Finding]]


def rules_for(config: Config) -> tuple[Rule, ...]:
    """All of RULES; if the stage is invalid, only those that do not depend on it."""
    return RULES if config.stage_is_known else tuple(rule for rule in RULES if rule not in STAGED)


def _rules_of(*modules: ModuleType) -> tuple[Rule, ...]:
    """The public generators that the modules define, in their order."""
    own = (
        one for module in modules for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__
    )
    return tuple(one for one in own if isgeneratorfunction(one) and not one.__name__.startswith("_"))


# DS2xx: batch sizes, "auto", and agreement with the Trainer's arguments; DS3xx: optimizer and schedule; DS4xx:
# precision; DS5xx: ZeRO; DS6xx: offload; DS7xx: ZeRO++; DS8xx: pipelines; DS9xx: leftovers in the file.
RULES = _rules_of(batch, optimizer, schedule, precision, zero, offload, quantized, pipeline, leftovers)
STAGED = _rules_of(zero, offload, quantized, pipeline)  # those that depend on the stage
