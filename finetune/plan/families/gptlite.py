"""GPT-lite (finetune/models/gptlite.py)."""

from __future__ import annotations

from finetune.plan.families.parts import CAUSAL, CLASSES, Family, Named, Sizes, linear, norm

# A block's norms and linear layers, in order; a mixture has a router and experts in place of the last two.
PARTS = ("norm_1", "attention.qkv", "attention.out", "norm_2", "mlp.up", "mlp.down")
ROUTER, UP, DOWN = "mlp.gate", "mlp.experts.up_proj", "mlp.experts.down_proj"
EMBEDDINGS, NORM = "transformer.embeddings", "transformer.norm"


def _before(sizes: Sizes) -> Named:
    for part, key in (("tokens", "vocab_size"), ("positions", "max_position_embeddings")):
        yield f"{EMBEDDINGS}.{part}.weight", (sizes(key), sizes("hidden_size"))


def _block(sizes: Sizes, index: int) -> Named:
    hidden, inner = sizes("hidden_size"), sizes("intermediate_size", default=4 * sizes("hidden_size"))
    bias = sizes.is_on("bias", True)
    norm_1, joined, out, norm_2, up, down = (f"transformer.blocks.{index}.{part}" for part in PARTS)
    yield from norm(norm_1, hidden, bias)
    yield from linear(joined, hidden, 3 * hidden, bias)
    yield from linear(out, hidden, hidden, bias)
    yield from norm(norm_2, hidden, bias)
    if not sizes.config.get("num_experts"):
        yield from linear(up, hidden, inner, bias)
        yield from linear(down, inner, hidden, bias)
        return
    block, experts = f"transformer.blocks.{index}", sizes("num_experts")
    yield from linear(f"{block}.{ROUTER}", hidden, experts, bias=False)
    yield f"{block}.{UP}", (experts, inner, hidden)
    yield f"{block}.{DOWN}", (experts, hidden, inner)


def _lm_head(sizes: Sizes) -> Named:
    if not sizes.is_on("tie_word_embeddings", False):
        yield "lm_head.weight", (sizes("vocab_size"), sizes("hidden_size"))


GPTLITE = Family(
    before=_before,
    block=_block,
    after=lambda sizes: norm(NORM, sizes("hidden_size"), sizes.is_on("bias", True)),
    heads={CAUSAL: _lm_head, CLASSES: lambda sizes: linear("score", sizes("hidden_size"), sizes.labels, bias=False)},
)
