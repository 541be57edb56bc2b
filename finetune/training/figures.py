"""Whether greater is better for a metric, judged by its name where the metric's class does not say."""

from __future__ import annotations

LESS_IS_BETTER = ("loss", "error")  # endings of a metric's name
# Endings for metrics that do not come from --metrics: those of language models and preferences.
MORE_OF_OURS = ("accuracy", "reward_margin", "reward_chosen", "logp_chosen")
LESS_OF_OURS = (
    *LESS_IS_BETTER,
    "kl",
    "perplexity",
    "bits_per_byte",
    "bits_per_character",
    "reward_rejected",
    "logp_rejected",
)


def more_is_better(figure: str) -> bool | None:
    """For metrics of language models and preferences; None if neither is better."""
    return True if figure.endswith(MORE_OF_OURS) else False if figure.endswith(LESS_OF_OURS) else None
