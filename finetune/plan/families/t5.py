"""T5: an encoder and a decoder."""

from __future__ import annotations

from finetune.plan.families.parts import SEQ2SEQ, Family, Named, Sizes, embeddings, nothing


def _t5_block(sizes: Sizes, index: int) -> Named:
    """Encoder blocks come first, then decoder blocks."""
    encoders = sizes("num_layers")
    side, number = ("encoder", index) if index < encoders else ("decoder", index - encoders)
    name = f"{side}.block.{number}.layer"
    hidden, inner = sizes("d_model"), sizes("num_heads") * sizes("d_kv")
    attentions = ("SelfAttention",) if side == "encoder" else ("SelfAttention", "EncDecAttention")
    for place, attention in enumerate(attentions):
        for part in "qkv":
            yield f"{name}.{place}.{attention}.{part}.weight", (inner, hidden)
        yield f"{name}.{place}.{attention}.o.weight", (hidden, inner)
        if attention == "SelfAttention" and number == 0:
            buckets = sizes("relative_attention_num_buckets", default=32)
            yield f"{name}.{place}.{attention}.relative_attention_bias.weight", (buckets, sizes("num_heads"))
        yield f"{name}.{place}.layer_norm.weight", (hidden,)
    place, wide = len(attentions), sizes("d_ff")
    is_gated = str(sizes.config.get("feed_forward_proj", "relu")).startswith("gated")
    for part in ("wi_0", "wi_1") if is_gated else ("wi",):
        yield f"{name}.{place}.DenseReluDense.{part}.weight", (wide, hidden)
    yield f"{name}.{place}.DenseReluDense.wo.weight", (hidden, wide)
    yield f"{name}.{place}.layer_norm.weight", (hidden,)


def _t5_after(sizes: Sizes) -> Named:
    for side in ("encoder", "decoder"):
        yield f"{side}.final_layer_norm.weight", (sizes("d_model"),)


SEQ2SEQS = {
    "t5": Family(
        before=embeddings({"shared": "vocab_size"}, "d_model"),
        block=_t5_block,
        after=_t5_after,
        heads={SEQ2SEQ: nothing},  # tied whatever the config says (models/t5/configuration_t5.py)
        default_head=SEQ2SEQ,
        layers=lambda sizes: sizes("num_layers") + sizes("num_decoder_layers", default=sizes("num_layers")),
        hidden=lambda sizes: sizes("d_model"),
    ),
}
