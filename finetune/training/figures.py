"""Whether more of a figure is better, by its name: of those for which no metric's class says it."""

from __future__ import annotations

LESS_IS_BETTER = ("loss", "error")  # at the end of a figure's name
# The same of figures that no metric of --metrics makes: of language models and preferences.
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
    """Of a language model's or a preference's figure; None where neither is better."""
    return True if figure.endswith(MORE_OF_OURS) else False if figure.endswith(LESS_OF_OURS) else None
