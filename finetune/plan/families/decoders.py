"""Decoders: GPT-2, GPT-lite, and Llama with what followed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from finetune.plan.families.parts import (
    CAUSAL,
    CLASSES,
    Buffers,
    Family,
    Named,
    Sizes,
    closing,
    conv1d,
    linear,
    lm_head,
    norm,
    score,
)

# GPT-2 and GPT-lite


def _gpt2_before(sizes: Sizes) -> Named:
    yield "transformer.wte.weight", (sizes("vocab_size"), sizes("n_embd"))
    yield "transformer.wpe.weight", (sizes("n_positions"), sizes("n_embd"))


def _gpt2_block(sizes: Sizes, index: int) -> Named:
    hidden, name = sizes("n_embd"), f"transformer.h.{index}"
    inner = sizes("n_inner", default=4 * hidden)
    yield from norm(f"{name}.ln_1", hidden)
    yield from conv1d(f"{name}.attn.c_attn", hidden, 3 * hidden)
    yield from conv1d(f"{name}.attn.c_proj", hidden, hidden)
    yield from norm(f"{name}.ln_2", hidden)
    yield from conv1d(f"{name}.mlp.c_fc", hidden, inner)
    yield from conv1d(f"{name}.mlp.c_proj", inner, hidden)


def _gptlite_before(sizes: Sizes) -> Named:
    name = "transformer.embeddings"
    yield f"{name}.tokens.weight", (sizes("vocab_size"), sizes("hidden_size"))
    yield f"{name}.positions.weight", (sizes("max_position_embeddings"), sizes("hidden_size"))


def _gptlite_block(sizes: Sizes, index: int) -> Named:
    hidden, bias, name = sizes("hidden_size"), sizes.is_on("bias", True), f"transformer.blocks.{index}"
    inner = sizes("intermediate_size", default=4 * hidden)
    yield from norm(f"{name}.norm_1", hidden, bias)
    yield from linear(f"{name}.attention.qkv", hidden, 3 * hidden, bias)
    yield from linear(f"{name}.attention.out", hidden, hidden, bias)
    yield from norm(f"{name}.norm_2", hidden, bias)
    yield from linear(f"{name}.mlp.up", hidden, inner, bias)
    yield from linear(f"{name}.mlp.down", inner, hidden, bias)


def _gptlite_after(sizes: Sizes) -> Named:
    yield from norm("transformer.norm", sizes("hidden_size"), sizes.is_on("bias", True))


# Llama and what followed it


def _llama_before(sizes: Sizes) -> Named:
    yield "model.embed_tokens.weight", (sizes("vocab_size"), sizes("hidden_size"))


@dataclass(frozen=True)
class Style:
    """What a decoder of this kind has that others have not, for its tensors and for its forward pass. `biases` are of
    query, key and value; None: as `attention_bias` says, of the closing projection too. `windows`: which layers have a
    sliding window where the config has no layer_types."""

    head_dim: int | None = None  # where the config says none; None: hidden_size / heads
    biases: bool | None = False
    act: str = "silu"
    is_gemma: bool = False  # embeddings are scaled, norms add one to their weight
    head_norms: bool = False  # of queries and keys
    closing_norms: bool = False  # behind attention and behind the MLP, before each is added
    window: int | None = None  # where the config says none
    windows: str = "all"  # or "switched" (use_sliding_window), "every second", "five of six"
    two_rotations: bool = False
    attention_softcap: float = 0.0  # where the config says none
    final_softcap: float = 0.0
    expert_width: str | None = None  # what the config calls it
    tied: bool = False
    joined: bool = False  # Phi-3: query, key and value in one matrix, gate and up in another

    def head_width(self, sizes: Sizes) -> int:
        return sizes("head_dim", default=self.head_dim or sizes("hidden_size") // sizes("num_attention_heads"))

    def bias(self, sizes: Sizes) -> tuple[bool, bool]:
        """Of query, key and value; and of the closing projection."""
        asked = sizes.is_on("attention_bias", False)
        return asked if self.biases is None else self.biases, self.biases is None and asked

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
}  # fmt: skip
_NORMS = ("input_layernorm", "post_attention_layernorm")
_CLOSING_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _llama_block(style: Style, sizes: Sizes, index: int) -> Named:
    name, hidden, heads = f"model.layers.{index}", sizes("hidden_size"), sizes("num_attention_heads")
    width, pairs = style.head_width(sizes), sizes("num_key_value_heads", default=heads)
    bias, closing_bias = style.bias(sizes)
    out = linear(f"{name}.self_attn.o_proj", heads * width, hidden, closing_bias)
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
        many, inner = sizes("num_experts", "num_local_experts"), sizes(style.expert_width)
        yield f"{name}.mlp.gate.weight", (many, hidden)
        yield f"{name}.mlp.experts.gate_up_proj", (many, 2 * inner, hidden)
        yield f"{name}.mlp.experts.down_proj", (many, hidden, inner)
    else:
        inner, bias = sizes("intermediate_size"), sizes.is_on("mlp_bias", False) and not style.joined
        up = {"gate_up_proj": 2 * inner} if style.joined else {"gate_proj": inner, "up_proj": inner}
        for part, wide in up.items():
            yield from linear(f"{name}.mlp.{part}", hidden, wide, bias)
        yield from linear(f"{name}.mlp.down_proj", inner, hidden, bias)
    for part in _CLOSING_NORMS if style.closing_norms else _NORMS:
        yield f"{name}.{part}.weight", (hidden,)


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


def _rotary(head_dim: int | None = None, part: float = 1.0, scaled: bool = False) -> Callable[[Sizes], Buffers]:
    """Inverse frequencies, twice; `part` of each head that is rotated. `scaled`: Gemma's embeddings, by a number."""

    def build(sizes: Sizes) -> Buffers:
        if scaled:
            yield "model.embed_tokens.embed_scale", (), 4
        width = sizes("head_dim", default=head_dim or sizes("hidden_size") // sizes("num_attention_heads"))
        turned = int(width * sizes.share("partial_rotary_factor", part))
        for name in rotary_kinds(sizes):
            yield f"model.rotary_emb.{name}inv_freq", (turned // 2,), 4
            yield f"model.rotary_emb.{name}original_inv_freq", (turned // 2,), 4

    return build


def rotary_kinds(sizes: Sizes) -> list[str]:
    """Gemma 3 turns layers with a sliding window by other angles (modeling_gemma3.py, Gemma3RotaryEmbedding)."""
    if sizes.config.get("model_type") != "gemma3_text":
        return [""]
    types = sizes.config.get("layer_types")
    if not types:
        period = sizes("sliding_window_pattern", default=6)
        layers = range(sizes("num_hidden_layers"))
        types = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in layers]
    return [f"{kind}_" for kind in sorted(set(types), reverse=True)]


def _llama(style: Style) -> Family:
    heads = {CAUSAL: lm_head(style.tied), CLASSES: score()}
    buffers = _rotary(style.head_dim, scaled=style.is_gemma)
    return Family(_llama_before, partial(_llama_block, style), closing("model.norm"), heads, buffers=buffers)


DECODERS = {
    "gpt2": Family(
        before=_gpt2_before,
        block=_gpt2_block,
        after=closing("transformer.ln_f", "n_embd", bias=True),
        heads={CAUSAL: lm_head(True, "n_embd"), CLASSES: score("n_embd")},
        layers=lambda sizes: sizes("n_layer"),
        hidden=lambda sizes: sizes("n_embd"),
    ),
    "gptlite": Family(_gptlite_before, _gptlite_block, _gptlite_after, {CAUSAL: lm_head(False)}),
    **{kind: _llama(style) for kind, style in STYLES.items()},
    "phi": Family(
        before=_llama_before,
        block=_phi_block,
        after=closing("model.final_layernorm", bias=True),
        heads={CAUSAL: lm_head(False, bias=True), CLASSES: score()},
        buffers=_rotary(part=0.5),
    ),
}
