"""Check that a checkpoint has all of its model's weights: transformers initializes missing ones at random and continues
(5.23, modeling_utils.py, _finalize_model_loading)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from finetune.errors import RequestError, plain
from finetune.run.decoders import recipe_for

POOLER = "pooler"  # as in BERT: pretrained encoders may lack it, and a classifier learns it along with its head


def refuse_missing(
    model: Any, found: Mapping[str, Any], architectures: Sequence[str] | None, said: str, has_new_head: bool
) -> None:
    """Raises RequestError if `found`, transformers' loading info, lists weights of `model` that were not loaded; with
    `has_new_head`, the head's may be missing. Tied weights and those a model may lack are no longer among its missing
    keys. `architectures` are those in the checkpoint's config.json."""
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
        f"{said}: {what} has no weights {drawn[0]}{more} that fit a {kind}: they would be initialized at random. {mend}"
    )


def _but_learnt_anew(model: Any, names: Iterable[str], has_new_head: bool) -> Iterable[str]:
    """`names` without those of a new head; without buffers, too, which always start the same."""
    base = f"{model.base_model_prefix}."
    is_headless = model.base_model is model
    for name in {name for name, _ in model.named_parameters()}.intersection(names):
        is_pooler = POOLER in name.split(".")
        if is_pooler and (has_new_head or is_headless):
            continue
        if is_headless or not has_new_head or name.startswith(base):
            yield name
