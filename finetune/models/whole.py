"""That a checkpoint has all weights that a model of its kind has: transformers draws those that it lacks at random, and
goes on (5.23, modeling_utils.py, _finalize_model_loading)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from finetune.errors import RequestError, plain
from finetune.run.decoders import recipe_for

POOLER = "pooler"  # of BERT's kind: pretrained encoders may lack it, and a classifier learns it as it learns its head


def refuse_missing(
    model: Any, found: Mapping[str, Any], architectures: Sequence[str] | None, said: str, has_new_head: bool
) -> None:
    """Raises RequestError where `found`, transformers' loading info (tied weights and those that a model may lack are
    no longer among its missing keys), tells of weights of `model` that were not loaded, or, with `has_new_head`, of
    such that are not of its head. `architectures` are those that the checkpoint's config.json names."""
    of_other_shapes = [entry[0] for entry in found["mismatched_keys"]]
    drawn = sorted(_but_learnt_anew(model, {*found["missing_keys"], *of_other_shapes}, has_new_head))
    if not drawn:
        return
    kind, names = type(model).__name__, [plain(name) for name in architectures or ()]
    more = f" and {len(drawn) - 1:,} more" if len(drawn) > 1 else ""
    what = f"it is a {' and '.join(names)}, and" if names and kind not in names else "it"
    recipe = "" if kind in names else recipe_for(names)
    mend = f"A {names[0]} is for {recipe}; give here a whole {kind}." if recipe else f"Give a whole {kind}."
    raise RequestError(
        f"{said}: {what} has no weights {drawn[0]}{more} that fit a {kind}: they would be drawn at random. {mend}"
    )


def _but_learnt_anew(model: Any, names: Iterable[str], has_new_head: bool) -> Iterable[str]:
    """Buffers begin the same each time."""
    base = f"{model.base_model_prefix}."
    is_headless = model.base_model is model
    for name in {name for name, _ in model.named_parameters()}.intersection(names):
        is_pooler = POOLER in name.split(".")
        if is_pooler and (has_new_head or is_headless):
            continue
        if is_headless or not has_new_head or name.startswith(base):
            yield name
