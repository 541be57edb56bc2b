"""The sizes of a config, and the names of heads."""

from __future__ import annotations

from typing import Any

from finetune.errors import RequestError

Shape = tuple[int, ...]
CAUSAL, MASKED, CLASSES, SEQ2SEQ = "causal_lm", "masked_lm", "sequence_classification", "seq2seq_lm"
IMAGES, TAGS = "image_classification", "token_classification"
SPANS = "question_answering"  # where an answer begins and ends
LABELLED = (CLASSES, TAGS, SPANS)  # heads that a base model does not have
VECTORS = "embeddings"  # a head without parameters, for any text family
MOST = 100_000_000  # upper limit of any size in a config
MOST_LAYERS = 3_000  # of which a plan still takes seconds


class Sizes:
    """The integers of a config, each under the first of several names that is set."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def __call__(self, *names: str, default: int | None = None) -> int:
        found = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if found is None:
            raise RequestError(
                f"{self.where}: {' or '.join(dict.fromkeys(names))} is missing. Add it: shapes depend on it."
            )
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise RequestError(f"{self.where}: {names[0]} is {found!r}, but it must be a whole number of 1 or more.")
        if found > MOST:
            raise RequestError(f"{self.where}: {names[0]} is {found:,}. No model is that large. Mistyped?")
        return found

    def refuse_depth(self, layers: int) -> None:
        if layers > MOST_LAYERS:
            raise RequestError(f"{self.where}: {layers:,} layers are more than {MOST_LAYERS:,}. Mistyped?")

    def share(self, name: str, default: float = 0.0) -> float:
        """Any number, such as a dropout probability."""
        found = self.config.get(name)
        if isinstance(found, bool) or not isinstance(found, int | float | None):
            raise RequestError(f"{self.where}: {name} is {found!r}, but it must be a number.")
        return default if found is None else float(found)

    def word(self, name: str, default: str) -> str:
        found = self.config.get(name)
        return default if found is None else str(found)

    def is_on(self, name: str, default: bool) -> bool:
        found = self.config.get(name)
        return default if found is None else bool(found)

    @property
    def labels(self) -> int:
        names = self.config.get("id2label")
        return len(names) if isinstance(names, dict) and names else self("num_labels", default=2)
