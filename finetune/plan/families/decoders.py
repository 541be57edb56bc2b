"""Decoders: GPT-2, GPT-lite, Llama and its descendants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from finetune.plan.families.parts import (
    CAUSAL,
    CLASSES,
    TAGS,
    Buffers,
    Family,
    Linear,
    Named,
    Sizes,
    closing,
    conv1d,
    embeddings,
    linear,
    lm_head,
    norm,
    score,
    tag_score,
)

LAYER_TYPES = FULL, WINDOW = ("full_attention", "sliding_attention")

# GPT-2 and GPT-lite


# A block's norms and linear layers, in order.
GPT2_PARTS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
GPTLITE_PARTS = ("norm_1", "attention.qkv", "attention.out", "norm_2", "mlp.up", "mlp.down")


def _gpt_block(name: str, parts: Sequence[str], layer: Linear, hidden: int, inner: int, bias: bool = True) -> Named:
    norm_1, joined, out, norm_2, up, down = (f"{name}.{part}" for part in parts)
    yield from norm(norm_1, hidden, bias)
    yield from layer(joined, hidden, 3 * hidden, bias)
    yield from layer(out, hidden, hidden, bias)
    yield from norm(norm_2, hidden, bias)
    yield from layer(up, hidden, inner, bias)
    yield from layer(down, inner, hidden, bias)


def _gpt2_block(sizes: Sizes, index: int) -> Named:
    hidden, inner = sizes("n_embd"), sizes("n_inner", default=4 * sizes("n_embd"))
    return _gpt_block(f"transformer.h.{index}", GPT2_PARTS, conv1d, hidden, inner)


def _gptlite_block(sizes: Sizes, index: int) -> Named:
    hidden, inner = sizes("hidden_size"), sizes("intermediate_size", default=4 * sizes("hidden_size"))
    bias = sizes.is_on("bias", True)
    return _gpt_block(f"transformer.blocks.{index}", GPTLITE_PARTS, linear, hidden, inner, bias)


# Llama and its descendants


LLAMA_EMBEDDINGS = embeddings({"model.embed_tokens": "vocab_size"})


@dataclass(frozen=True)
class Style:
    """What sets a Llama-like decoder apart, in its tensors and its forward pass. `biases`: whether query, key and value
    have them; None: the config's `attention_bias` decides, for the output projection too. `windows`: which layers have
    a sliding window if the config has no layer_types."""

    head_dim: int | None = None  # if the config has none; None: hidden_size / heads
    biases: bool | None = False
    attention_bias: bool = False  # if the config does not say
    act: str = "silu"
    is_gemma: bool = False  # embeddings are scaled, norms add one to their weight
    head_norms: bool = False  # of queries and keys
    closing_norms: bool = False  # after attention and after the MLP, before each residual sum
    window: int | None = None  # if the config has none
    windows: str = "all"  # or "switched" (use_sliding_window), "unrotated" (the same), "every second", "five of six"
    unrotated: bool = False  # SmolLM3: every fourth layer has no rotary positions
    two_rotations: bool = False
    attention_softcap: float = 0.0  # if the config has none
    final_softcap: float = 0.0
    expert_width: str | None = None  # its config key
    tied: bool = False
    joined: bool = False  # Phi-3: query, key and value in one matrix, gate and up in another
    is_oss: bool = False  # gpt-oss: attention has sinks, experts and their router have biases

    @property
    def casts_late(self) -> bool:
        """A norm's result is cast after the multiplication by its weight, not before."""
        return self.is_gemma or self.is_oss

    def head_width(self, sizes: Sizes) -> int:
        return sizes("head_dim", default=self.head_dim or sizes("hidden_size") // sizes("num_attention_heads"))

    def bias(self, sizes: Sizes) -> tuple[bool, bool]:
        """Whether query, key and value have biases, and whether the output projection has one."""
        asked = sizes.is_on("attention_bias", self.attention_bias)
        return asked if self.biases is None else self.biases, self.biases is None and asked

    def layer_kind(self, sizes: Sizes, index: int) -> str:
        types = sizes.config.get("layer_types")
        if self.window is None and sizes.maybe("sliding_window") is None:
            return FULL
        if types:
            return str(types[index])
        if self.windows == "unrotated":
            return WINDOW if sizes.is_on("use_sliding_window", False) and not self.rotates(sizes, index) else FULL
        if self.windows == "switched":
            used = sizes.is_on("use_sliding_window", False) and index >= sizes("max_window_layers", default=28)
            return WINDOW if used else FULL
        if self.windows == "all":
            return WINDOW
        period = 2 if self.windows == "every second" else sizes("sliding_window_pattern", default=6)
        return WINDOW if (index + 1) % period else FULL

    def rotates(self, sizes: Sizes, index: int) -> bool:
        """Whether a layer's queries and keys have positions (models/smollm3/configuration_smollm3.py)."""
        if not self.unrotated:
            return True
        said = sizes.config.get("no_rope_layers")
        return bool(said[index]) if said else (index + 1) % sizes("no_rope_layer_interval", default=4) != 0

    def is_sparse(self, sizes: Sizes, index: int) -> bool:
        """Qwen's MoE may keep some blocks dense (modeling_qwen3_moe.py, Qwen3MoeDecoderLayer)."""
        step = sizes("decoder_sparse_step", default=1)
        dense = sizes.config.get("mlp_only_layers") or []
        return bool(self.expert_width) and index not in dense and (index + 1) % step == 0


STYLES = {
    "llama": Style(biases=None),
    "mistral": Style(window=4096),
    "qwen2": Style(biases=True, window=4096, windows="switched"),
    "qwen3": Style(head_dim=128, biases=None, head_norms=True, window=4096, windows="switched"),
    "gemma": Style(head_dim=256, biases=None, act="gelu_pytorch_tanh", is_gemma=True, tied=True),
    "gemma2": Style(head_dim=256, biases=None, act="gelu_pytorch_tanh", is_gemma=True, closing_norms=True, window=4096,
                    windows="every second", attention_softcap=50.0, final_softcap=30.0, tied=True),
    "gemma3_text": Style(head_dim=256, biases=None, act="gelu_pytorch_tanh", is_gemma=True, head_norms=True,
                         closing_norms=True, window=4096, windows="five of six", two_rotations=True, tied=True),
    "mixtral": Style(expert_width="intermediate_size"),
    "qwen3_moe": Style(biases=None, head_norms=True, expert_width="moe_intermediate_size"),
    "phi3": Style(joined=True),
    "smollm3": Style(biases=None, windows="unrotated", unrotated=True, tied=True),
    "gpt_oss": Style(head_dim=64, biases=None, attention_bias=True, window=128, windows="every second",
                     expert_width="intermediate_size", is_oss=True),
}  # fmt: skip
_NORMS = ("input_layernorm", "post_attention_layernorm")
_CLOSING_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _llama_block(style: Style, sizes: Sizes, index: int) -> Named:
    name, hidden, heads = f"model.layers.{index}", sizes("hidden_size"), sizes("num_attention_heads")
    width, pairs = style.head_width(sizes), sizes("num_key_value_heads", default=heads)
    bias, closing_bias = style.bias(sizes)
    out = linear(f"{name}.self_attn.o_proj", heads * width, hidden, closing_bias)
    if style.is_oss:
        yield f"{name}.self_attn.sinks", (heads,)
    if style.joined:
        yield from out
        yield f"{name}.self_attn.qkv_proj.weight", ((heads + 2 * pairs) * width, hidden)
    else:
        for part, count in (("q_proj", heads), ("k_proj", pairs), ("v_proj", pairs)):
            yield from linear(f"{name}.self_attn.{part}", hidden, count * width, bias)
        yield from out
    for part in ("q_norm", "k_norm") if style.head_norms else ():
        yield f"{name}.self_attn.{part}.weight", (width,)
    if style.expert_width and style.is_sparse(sizes, index):
        yield from _experts(style, sizes, f"{name}.mlp")
    else:
        inner, bias = sizes("intermediate_size"), sizes.is_on("mlp_bias", False) and not style.joined
        up = {"gate_up_proj": 2 * inner} if style.joined else {"gate_proj": inner, "up_proj": inner}
        for part, wide in up.items():
            yield from linear(f"{name}.mlp.{part}", hidden, wide, bias)
        yield from linear(f"{name}.mlp.down_proj", inner, hidden, bias)
    for part in _CLOSING_NORMS if style.closing_norms else _NORMS:
        yield f"{name}.{part}.weight", (hidden,)


def _experts(style: Style, sizes: Sizes, name: str) -> Named:
    """gpt-oss stores its matrices transposed (modeling_gpt_oss.py, GptOssExperts)."""
    many, hidden, inner = (
        sizes("num_experts", "num_local_experts"),
        sizes("hidden_size"),
        sizes(str(style.expert_width)),
    )
    yield from linear(f"{name}.{'router' if style.is_oss else 'gate'}", hidden, many, style.is_oss)
    for part, fan_in, fan_out in (("gate_up_proj", hidden, 2 * inner), ("down_proj", inner, hidden)):
        yield f"{name}.experts.{part}", (many, fan_in, fan_out) if style.is_oss else (many, fan_out, fan_in)
        if style.is_oss:
            yield f"{name}.experts.{part}_bias", (many, fan_out)


def _phi_block(sizes: Sizes, index: int) -> Named:
    name, hidden, heads = f"model.layers.{index}", sizes("hidden_size"), sizes("num_attention_heads")
    width, pairs = sizes("head_dim", default=hidden // heads), sizes("num_key_value_heads", default=heads)
    for part, count in (("q_proj", heads), ("k_proj", pairs), ("v_proj", pairs)):
        yield from linear(f"{name}.self_attn.{part}", hidden, count * width)
    yield from linear(f"{name}.self_attn.dense", heads * width, hidden)
    if sizes.is_on("qk_layernorm", False):
        yield from norm(f"{name}.self_attn.q_layernorm", width)
        yield from norm(f"{name}.self_attn.k_layernorm", width)
    yield from linear(f"{name}.mlp.fc1", hidden, sizes("intermediate_size"))
    yield from linear(f"{name}.mlp.fc2", sizes("intermediate_size"), hidden)
    yield from norm(f"{name}.input_layernorm", hidden)


def _rotary(style: Style, part: float, sizes: Sizes) -> Buffers:
    """Inverse frequencies, stored twice; `part` of each head is rotated. Gemma scales its embeddings by a buffer; Gemma
    3
    rotates sliding-window layers with other frequencies (modeling_gemma3.py, Gemma3RotaryEmbedding)."""
    if style.is_gemma:
        yield "model.embed_tokens.embed_scale", (), 4
    turned = int(style.head_width(sizes) * sizes.share("partial_rotary_factor", part))
    kinds = {style.layer_kind(sizes, index) for index in range(sizes("num_hidden_layers"))}
    for name in [f"{kind}_" for kind in sorted(kinds, reverse=True)] if style.two_rotations else [""]:
        yield f"model.rotary_emb.{name}inv_freq", (turned // 2,), 4
        yield f"model.rotary_emb.{name}original_inv_freq", (turned // 2,), 4


def _llama(style: Style) -> Family:
    heads = {CAUSAL: lm_head(style.tied), CLASSES: score()}
    if not style.two_rotations:  # transformers has no Gemma 3 for token classification
        heads[TAGS] = tag_score("score")
    buffers = partial(_rotary, style, 1.0)
    return Family(LLAMA_EMBEDDINGS, partial(_llama_block, style), closing("model.norm"), heads, buffers=buffers)


DECODERS = {
    "gpt2": Family(
        before=embeddings({"transformer.wte": "vocab_size", "transformer.wpe": "n_positions"}, "n_embd"),
        block=_gpt2_block,
        after=closing("transformer.ln_f", "n_embd", bias=True),
        heads={CAUSAL: lm_head(True, "n_embd"), CLASSES: score("n_embd"), TAGS: tag_score("classifier", "n_embd")},
        layers=lambda sizes: sizes("n_layer"),
        hidden=lambda sizes: sizes("n_embd"),
    ),
    "gptlite": Family(
        before=embeddings(
            {
                "transformer.embeddings.tokens": "vocab_size",
                "transformer.embeddings.positions": "max_position_embeddings",
            }
        ),
        block=_gptlite_block,
        after=lambda sizes: norm("transformer.norm", sizes("hidden_size"), sizes.is_on("bias", True)),
        heads={CAUSAL: lm_head(False), CLASSES: score()},
    ),
    **{kind: _llama(style) for kind, style in STYLES.items()},
    "phi": Family(
        before=LLAMA_EMBEDDINGS,
        block=_phi_block,
        after=closing("model.final_layernorm", bias=True),
        heads={CAUSAL: lm_head(False, bias=True), CLASSES: score(), TAGS: tag_score("score")},
        buffers=partial(_rotary, Style(), 0.5),
    ),
}
