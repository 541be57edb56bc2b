"""Impossible shapes: configs that transformers rejects, or that fail in the first forward pass. A test checks these
rules against the real models."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.errors import RequestError
from finetune.plan.families.parts import Sizes
from finetune.plan.trace_files import KNOWN, sizes_of
from finetune.run.flags.groups import EXPERTS

# Config keys of the width that the heads split, and of their number. Other families set the width of a head.
USUAL = ("bert", "roberta", "gptlite", "llama", "gemma2", "gemma3_text", "olmoe")
SHARED = {"gpt2": ("n_embd", "n_head"), "distilbert": ("dim", "n_heads"),
          **dict.fromkeys(USUAL, ("hidden_size", "num_attention_heads"))}  # fmt: skip
ENCODERS = ("bert", "roberta", "distilbert")
ACTIVATIONS = {  # config keys, for families where it is not hidden_act
    "distilbert": "activation",
    "gpt2": "activation_function",
    "gemma2": "hidden_activation",
    "gemma3_text": "hidden_activation",
}
FIXED_ACTIVATION = ("mlp", "gpt_oss")
KNOWN_ACTIVATIONS = """gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh
hardswish laplace leaky_relu linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh
xielu""".split()  # transformers 5.23, activations.py, ACT2FN
# What each kind of rotary embedding must say (modeling_rope_utils.py, _validate_*_rope_parameters).
ROPE_KEYS = {
    "default": (),
    "proportional": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
PHI3_ROPES = ("default", "longrope", "su", "yarn")  # its config maps the last two to the second
PARTIAL = {"phi": 0.5, "phi3": 1.0, "glm4_moe": 0.5}  # the share of each head that is rotated, if the config has none
LAYER_TYPES = ("full_attention", "sliding_attention")
ROTARY = tuple(kind for kind in KNOWN if kind not in (*ENCODERS, "gpt2", "gptlite", "mlp", "t5"))
LATENT = ("deepseek_v3",)  # with one latent vector for the keys and values of all heads
PADDED = {*ROTARY, *ENCODERS}  # families whose embedding has a row for the padding token


def refuse_impossible(kind: str, sizes: Sizes) -> None:
    """Raises RequestError with the first fault, or if a size is missing or invalid."""
    for fault in _faults(kind, sizes):
        raise RequestError(f"{sizes.where}: {fault}")


def _faults(kind: str, sizes: Sizes) -> Iterator[str]:
    found = sizes_of(kind, sizes) if kind in KNOWN else {}
    is_dense = kind == "gptlite" and not sizes.config.get("num_experts")
    if (chosen := found.get("num_experts_per_tok")) and not is_dense:
        many = next(found[name] for name in EXPERTS if name in found)
        if chosen > many:
            yield f"num_experts_per_tok is {chosen}, but there are {many} experts. Give at most that many."
    if kind in SHARED:
        width, heads = SHARED[kind]
        if sizes(width) % sizes(heads):
            yield f"{width} {sizes(width):,} is not a multiple of {heads} {sizes(heads)}. Change one of them."
    if kind in LATENT:
        yield from _latent(sizes, found)
    elif kind in ROTARY:
        yield from _decoder(kind, sizes, found)
    if kind in ROTARY:
        yield from _layers(sizes)
        yield from _rope(kind, sizes)
    yield from _words(kind, sizes)
    pad = sizes.config.get("pad_token_id")
    if kind in PADDED and isinstance(pad, int) and not -sizes("vocab_size") <= pad < sizes("vocab_size"):
        yield f"pad_token_id is {pad}, but the vocabulary has {sizes('vocab_size'):,} tokens. Give one of these."


def _decoder(kind: str, sizes: Sizes, found: dict[str, int]) -> Iterator[str]:
    heads, pairs = found["num_attention_heads"], found["num_key_value_heads"]
    width = sizes("head_dim", default=found.get("head_dim", found["hidden_size"] // heads))
    if "head_dim" not in found and width * heads != found["hidden_size"]:
        yield f"head_dim is {width}, but that of {kind} is hidden_size / num_attention_heads. Remove it."
    if heads % pairs:
        yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {pairs}. Change one of them."
    turned = int(width * sizes.share("partial_rotary_factor", PARTIAL.get(kind, 1.0))) if kind in PARTIAL else width
    turned += turned % 2 if kind == "glm4_moe" else 0  # it counts what is rotated in pairs of angles
    if turned % 2 or turned > width:
        yield (
            f"a head is {width} wide, of which {turned} are rotated, but that must be an even number, and at most the "
            "width. Change head_dim, or hidden_size and num_attention_heads."
        )
    if kind == "gpt_oss" and (share := sizes.share("partial_rotary_factor", 1.0)) != 1:
        yield f"partial_rotary_factor is {share}, but gpt_oss rotates whole heads. Remove it."


def _latent(sizes: Sizes, found: dict[str, int]) -> Iterator[str]:
    experts, groups, chosen = (found[name] for name in ("n_routed_experts", "n_group", "topk_group"))
    if experts % groups or experts == groups:
        yield f"n_routed_experts {experts} are not n_group {groups} groups of two or more. Change one of them."
    if chosen > groups:
        yield f"topk_group is {chosen}, but n_group is {groups}. Give at most that many."
    if (width := found["qk_rope_head_dim"]) % 2:
        yield f"qk_rope_head_dim is {width}, but the rotated part of a head must be an even number."
    if (other := sizes("head_dim", default=width)) != width:
        yield f"head_dim is {other}, but rotations are as wide as qk_rope_head_dim {width}. Remove it."


def _layers(sizes: Sizes) -> Iterator[str]:
    types, layers = sizes.config.get("layer_types"), sizes("num_hidden_layers")
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        yield f"layer_types must be a list of num_hidden_layers {layers} entries. Fix it, or remove it."
    elif strange := [one for one in types or () if one not in LAYER_TYPES]:
        yield f"layer_types has {strange[0]!r}, but the known types are {' and '.join(LAYER_TYPES)}."


def _rope(kind: str, sizes: Sizes) -> Iterator[str]:
    found = sizes.config.get("rope_parameters") or sizes.config.get("rope_scaling")
    if not isinstance(found, dict):
        if found is not None:
            yield f"rope_parameters is {found!r}, but it must be an object, like {{...}}."
        return
    by_layer = [one for name, one in found.items() if name in LAYER_TYPES]
    for one in by_layer or ([] if kind == "gemma3_text" else [found]):
        name = str(one.get("rope_type", one.get("type", "default"))) if isinstance(one, dict) else "default"
        known = PHI3_ROPES if kind == "phi3" else tuple(ROPE_KEYS)
        if name not in known:
            yield f"rope_parameters: rope_type is {name!r}, but the known types are {', '.join(known)}."
        elif missing := [key for key in ROPE_KEYS.get(name, ()) if key not in one]:
            yield f"rope_parameters: rope_type {name} needs {', '.join(missing)}. Add it."


def _words(kind: str, sizes: Sizes) -> Iterator[str]:
    key = ACTIVATIONS.get(kind, "hidden_act")
    act, place = sizes.word(key, "relu"), key
    if kind == "t5":
        place = "feed_forward_proj"
        gate, _, act = sizes.word(place, "relu").rpartition("-")
        if gate not in ("", "gated"):
            yield f"{place} is {sizes.word(place, '')!r}, but it must be an activation, or gated-ACTIVATION."
    if kind not in FIXED_ACTIVATION and act not in KNOWN_ACTIVATIONS:
        yield f"{place} is {act!r}, but transformers knows {', '.join(KNOWN_ACTIVATIONS)}."
    for name, share in sizes.config.items():
        if "drop" in name and isinstance(share, int | float) and not 0 <= share <= 1:
            yield f"{name} is {share}, but a probability is from 0 to 1."
