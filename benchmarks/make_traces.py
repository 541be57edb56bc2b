"""Record the forward passes of known architectures: `python benchmarks/make_traces.py [NAME ...]`.

Each gets a file in finetune/plan/traces/, from which `finetune.plan.trace_files` makes what `finetune.measure.tracing`
would record of a model of any size. A model whose sizes each have a prime factor of their own is traced, so that a
number tells the sizes that it is a product of. Layers and what lies between them are stored once each, with numbers of
values counted from their own beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, groupby, product
from math import isqrt
from pathlib import Path
from typing import Any

import transformers

from finetune.measure.tracing import traced
from finetune.plan.families.parts import CAUSAL, CLASSES, MASKED, SEQ2SEQ, SPANS, TAGS, VECTORS
from finetune.plan.forward.parts import Batch, terms

TRACES = Path(__file__).resolve().parents[1] / "finetune/plan/traces"
DECODER = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
# What a key means that the config may leave out, and its class too: sums of a factor, times and through other keys.
FALLBACKS: dict[str, Any] = {
    "head_dim": [[1, ["hidden_size"], ["num_attention_heads"]]],
    "num_key_value_heads": [[1, ["num_attention_heads"], []]],
    "heads_and_pairs": [[1, ["num_attention_heads"], []], [2, ["num_key_value_heads"], []]],
    "n_inner": [[4, ["n_embd"], []]],
    "num_decoder_layers": [[1, ["num_layers"], []]],
    "num_labels": 2,
    "qk_head_dim": [[1, ["qk_nope_head_dim"], []], [1, ["qk_rope_head_dim"], []]],
    "latent_and_rope": [[1, ["kv_lora_rank"], []], [1, ["qk_rope_head_dim"], []]],
    "key_and_value": [[1, ["qk_nope_head_dim"], []], [1, ["v_head_dim"], []]],
}
SUMS = {name: one for name, one in FALLBACKS.items() if isinstance(one, list) and len(one) > 1}
OPTIONAL = (*FALLBACKS, "num_experts_per_tok", "type_vocab_size", "relative_attention_num_buckets", "q_lora_rank")
TIED, WINDOW, GROUPED = "tie_word_embeddings", "sliding_window", "grouped"
GROUP = 11  # query heads of a key head; two more are prime as well
SDPA, EAGER = "sdpa", "eager"
PREFIX = 3  # first layers that are unlike all others
LARGEST_FACTOR = 64  # of a product of sizes
# Sizes that are their own prime, and those that get the smallest ones: wide heads have another attention.
COUNTS = ("num_experts_per_tok", "topk_group", "num_key_value_heads", "n_group")
SMALLEST = (*COUNTS, "head_dim")


@dataclass(frozen=True)
class Kind:
    """An architecture: the keys of its sizes, its depths, the heads that are recorded, and what else its operators
    depend on: values of the config, or whether one is set; "grouped": whether query heads share key heads. Keys joined
    by a comma have one value, or a tuple of values. A second `attention` is for language models alone.
    `period`: of unlike layers, with what lists in a config say. `prefix`: the key of the number of first layers, at
    least one, that are unlike all others. A choice of whether a size is set leaves it as it is. `usual`: as FALLBACKS,
    of this architecture alone."""

    sizes: tuple[str, ...] = DECODER
    depths: tuple[str, ...] = ("num_hidden_layers",)
    heads: tuple[str, ...] = (CAUSAL, CLASSES, TAGS, VECTORS)
    choices: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    attention: tuple[str, ...] = (SDPA,)
    period: int = 1
    prefix: str = ""
    lists: dict[str, list[Any]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    usual: dict[str, Any] = field(default_factory=dict)


PLAIN: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "attention_dropout": (False,)}
ENCODER = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings",
           "type_vocab_size")  # fmt: skip
OF_ENCODER = (MASKED, CLASSES, TAGS, SPANS, VECTORS)
BERT = Kind(ENCODER, heads=OF_ENCODER, choices={
    TIED: (True,), "hidden_act": ("gelu",),
    "hidden_dropout_prob,attention_probs_dropout_prob": (True, False), "classifier_dropout": (False,)})  # fmt: skip
EVERY_SECOND = ["sliding_attention", "full_attention"]
SILU = {"hidden_act": ("silu",)}
GELU = {"hidden_activation": ("gelu_pytorch_tanh",)}
NO_WINDOW = {"use_sliding_window": (False,)}
KINDS = {
    "bert": BERT,
    "roberta": BERT,
    "distilbert": Kind(
        ("dim", "n_heads", "hidden_dim", "vocab_size", "max_position_embeddings"), ("n_layers",), OF_ENCODER,
        {TIED: (True,), "activation": ("gelu",), "dropout,attention_dropout,seq_classif_dropout": (True, False)}),
    "gpt2": Kind(
        ("n_embd", "n_head", "n_inner", "vocab_size", "n_positions"), ("n_layer",), (CAUSAL, CLASSES, TAGS, VECTORS),
        {TIED: (True,), "activation_function,resid_pdrop,attn_pdrop,embd_pdrop": (
            ("gelu_new", True, True, True), ("gelu_new", False, False, False), ("gelu", False, False, False))}),
    "llama": Kind(choices={TIED: (False, True), **PLAIN, "mlp_bias": (False,), **SILU}, attention=(SDPA, EAGER)),
    "mistral": Kind(choices={TIED: (False,), "attention_dropout": (False,), WINDOW: (True, False), GROUPED: (True,),
                             **SILU}),
    "qwen2": Kind(choices={TIED: (False, True), "attention_dropout": (False,), **NO_WINDOW, **SILU},
                  attention=(SDPA, EAGER)),
    "qwen3": Kind(choices={TIED: (False, True), **PLAIN, **NO_WINDOW, **SILU}),
    "gemma": Kind(choices={TIED: (True,), **PLAIN, "hidden_act": ("gelu_pytorch_tanh",)}),
    "gemma2": Kind(choices={TIED: (True,), **PLAIN, **GELU, f"{WINDOW},{GROUPED}": (True,),
                            "attn_logit_softcapping,final_logit_softcapping": (True,)},
                   attention=(EAGER,), period=2, lists={"layer_types": EVERY_SECOND}),
    "gemma3_text": Kind(choices={TIED: (True,), **PLAIN, **GELU, f"{WINDOW},{GROUPED}": (True,),
                                 "attn_logit_softcapping,final_logit_softcapping": (False,),
                                 "sliding_window_pattern": (6,)},
                        period=6, heads=(CAUSAL, CLASSES, VECTORS),
                        lists={"layer_types": [*["sliding_attention"] * 5, "full_attention"]}),
    "phi3": Kind((*DECODER, "heads_and_pairs"),
                 choices={f"{TIED},{WINDOW},partial_rotary_factor,{GROUPED}": (
                     (False, True, 1.0, False), (False, True, 1.0, True), (False, False, 1.0, True),
                     (True, True, 0.75, True)), "attention_dropout,resid_pdrop,embd_pdrop": (False,), **SILU}),
    "phi": Kind(choices={TIED: (False,), "attention_dropout,embd_pdrop": (False,), "resid_pdrop": (False, True),
                         "partial_rotary_factor": (0.5,), "qk_layernorm": (False,), "hidden_act": ("gelu_new",)}),
    "smollm3": Kind(choices={TIED: (True, False), **PLAIN, "mlp_bias": (False,), **NO_WINDOW, **SILU,
                             "no_rope_layer_interval": (4,)}, period=4, lists={"no_rope_layers": [1, 1, 1, 0]}),
    "mixtral": Kind((*DECODER, "num_local_experts", "num_experts_per_tok"),
                    choices={TIED: (False,), "attention_dropout": (False,), WINDOW: (False,), **SILU}),
    "qwen3_moe": Kind((*DECODER, "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
                      choices={TIED: (False,), **PLAIN, **NO_WINDOW, **SILU, "norm_topk_prob": (True, False),
                               "mlp_only_layers": (False,), "decoder_sparse_step": (1,)}),
    "deepseek_v3": Kind(
        ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "num_experts_per_tok", "topk_group",
         "n_group", "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank",
         "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "qk_head_dim", "latent_and_rope", "key_and_value"),
        choices={TIED: (False,), **PLAIN, **SILU, "norm_topk_prob,rope_interleave": (True,),
                 "q_lora_rank,n_group,topk_group": ((True, 1, 1), (False, 1, 1), (True, True, True))},
        prefix="first_k_dense_replace", more={"num_key_value_heads": None}),
    "glm4_moe": Kind(
        (*DECODER, "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "moe_intermediate_size"),
        heads=(CAUSAL, VECTORS), prefix="first_k_dense_replace",
        choices={TIED: (False,), "attention_bias": (True,), "attention_dropout": (False,), **SILU,
                 "norm_topk_prob": (True,), "n_group,topk_group": (1,), "partial_rotary_factor": (0.5,),
                 "use_qk_norm": (True, False)}),
    "olmoe": Kind(("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
                   "num_experts", "num_experts_per_tok"), heads=(CAUSAL, VECTORS),
                  choices={TIED: (False,), **PLAIN, **SILU, "norm_topk_prob": (False,), "clip_qkv": (False,)}),
    "qwen2_moe": Kind((*DECODER, "num_experts", "num_experts_per_tok", "moe_intermediate_size",
                       "shared_expert_intermediate_size"),
                      choices={TIED: (False,), "qkv_bias": (True,), "attention_dropout": (False,), **NO_WINDOW, **SILU,
                               "norm_topk_prob": (False,), "mlp_only_layers": (False,), "decoder_sparse_step": (1,)}),
    "gpt_oss": Kind((*DECODER, "num_local_experts", "num_experts_per_tok"),
                    choices={TIED: (False,), "attention_dropout": (False,), "attention_bias": (True,),
                             WINDOW: (True,), GROUPED: (True,)},
                    attention=(EAGER,), period=2, lists={"layer_types": EVERY_SECOND}),
    "t5": Kind(("d_model", "num_heads", "d_kv", "d_ff", "vocab_size", "relative_attention_num_buckets"),
               ("num_layers", "num_decoder_layers"), (SEQ2SEQ,),
               {f"{TIED},feed_forward_proj": ((True, "relu"), (True, "gated-gelu"), (False, "gated-gelu")),
                "dropout_rate": (True,)},
               more={"decoder_start_token_id": 0}),
    "gptlite": Kind(
        ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings",
         "num_experts", "num_experts_per_tok"), heads=(CAUSAL, CLASSES, VECTORS), attention=(SDPA, EAGER),
        choices={TIED: (False, True), "num_experts,num_experts_per_tok,hidden_act,bias,dropout": (
            (False, True, "gelu", True, False), (False, True, "gelu", True, True), (False, True, "gelu", False, False),
            (False, True, "gelu", False, True), (False, True, "gelu_new", True, False),
            (False, True, "gelu_new", True, True), (True, 1, "gelu", True, False), (True, 1, "gelu", True, True),
            (True, True, "gelu", True, False), (True, True, "gelu", True, True))},
        usual={"intermediate_size": [[4, ["hidden_size"], []]], "num_experts": 1}),
    "mlp": Kind(("width",), ("layers",), (CLASSES,), {"bias": (True, False)}),
}  # fmt: skip


class Symbols:
    """Sizes of a model to trace, each with a prime factor of its own, and what a number is in terms of them."""

    def __init__(self, kind: Kind, is_grouped: bool = True) -> None:
        self.own: dict[str, int] = {}  # a size's own prime
        self.values: dict[str, int] = {}
        counts = ("num_attention_heads", "n_head", "n_heads", "num_heads")
        heads = next((name for name in kind.sizes if name in counts), "")
        single = [name for name in kind.sizes if name not in SUMS]
        for name in (*dict.fromkeys([*(name for name in SMALLEST if name in single), *single]), "num_labels"):
            self._name(kind, name, 1 if name in (*COUNTS, heads, "num_labels") else 8)  # as grouped products want
        if "num_key_value_heads" in self.values:
            self.own[heads], self.values[heads] = GROUP, GROUP * self.values["num_key_value_heads"]
        if heads and "d_kv" not in kind.sizes:
            self.values[kind.sizes[0]] *= self.values[heads]
        if "n_group" in self.values:
            self.values["n_routed_experts"] *= self.values["n_group"]
        if not is_grouped:
            self.values.pop("num_key_value_heads", None)
        assert self._add_sums(kind)
        # The last are divided out first: sizes that others are multiples of come after these.
        bases = ("n_group", "num_key_value_heads", heads)
        self.order = sorted(self.values, key=lambda name: bases[::-1].index(name) if name in bases else -1)

    def _name(self, kind: Kind, name: str, times: int) -> None:
        """Gives a size the next prime with which sums of sizes have one of their own, too."""
        for prime in filter(is_prime, range(17, 1000)):
            self.own[name], self.values[name] = prime, prime * times
            if list(self.own.values()).count(prime) == 1 and self._add_sums(kind):
                return
        raise ValueError(f"no prime is left for {name}")

    def _add_sums(self, kind: Kind) -> bool:
        """Adds the sums of the sizes that have a value; whether each has a prime of its own."""
        for name in [name for name in kind.sizes if name in SUMS]:
            self.own.pop(name, None), self.values.pop(name, None)
            if all(one in self.values for _, above, _ in SUMS[name] for one in above):
                value = sum(times * self.values[one] for times, (one,), _ in SUMS[name])
                factors = {prime for prime in filter(is_prime, range(2, value + 1)) if value % prime == 0}
                own = max(factors.difference(self.own.values()), default=0)
                if own <= GROUP:
                    return False
                self.own[name], self.values[name] = own, value
        return True

    def monomial(self, number: Fraction) -> tuple[float, list[str], list[str]]:
        """A factor, and the sizes above and below the line."""
        above, below = list[str](), list[str]()
        for name in self.order:
            own, value = self.own[name], self.values[name]
            while number and number.numerator % own == 0:
                number /= value
                above.append(name)
            while number.denominator % own == 0:
                number *= value
                below.append(name)
        if max(abs(number.numerator), number.denominator) > LARGEST_FACTOR:
            raise ValueError(f"{number} is left of a size, beside {above} and {below}")
        return float(number) if number.denominator > 1 else int(number), above, below


def is_prime(number: int) -> bool:
    return all(number % one for one in range(2, isqrt(number) + 1))


class Table:
    """Things by number, each once."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def place(self, thing: Any) -> int:
        return self.places.setdefault(json.dumps(thing), len(self.places))

    @property
    def things(self) -> list[Any]:
        return [json.loads(text) for text in self.places]


def config_of(name: str, kind: Kind, head: str, chosen: dict[str, Any], symbols: Symbols) -> dict[str, Any]:
    config = {"model_type": name, "pad_token_id": 0, **kind.more, **symbols.values}
    config = {key: one for key, one in config.items() if key not in SUMS}
    config |= dict.fromkeys(kind.depths, PREFIX * bool(kind.prefix) + 2 * kind.period + 2)
    config |= {kind.prefix: PREFIX} if kind.prefix else {}
    of_class = transformers.CONFIG_MAPPING[name]()
    for key, value in chosen.items():
        usual = getattr(of_class, key, None)
        if isinstance(value, bool) and key in symbols.values:
            value = symbols.values[key] if value else None
        elif value is True and not isinstance(usual, bool):
            value = usual or (4096 if key == WINDOW else 0.1)
        elif value is False and not isinstance(usual, bool):
            value = None if usual is None or key == WINDOW or key.endswith("capping") else 0.0
            value = [] if isinstance(usual, list) else value
        config[key] = value
    if head == SPANS:
        config["num_labels"] = 2
    if not config.pop(GROUPED, True):
        config["num_key_value_heads"] = config["num_attention_heads"]
    return config


class Encoder:
    """Stores traces of an architecture; `part` numbers are places in its table."""

    def __init__(self, kind: Kind, sizes: Table, parts: Table, symbols: Symbols) -> None:
        self.kind, self.sizes, self.parts, self.symbols = kind, sizes, parts, symbols
        self.prefix = PREFIX * bool(kind.prefix)

    def size(self, fitted: Sequence[float]) -> int:
        found = [(at, Fraction(one).limit_denominator(10**6)) for at, one in enumerate(fitted)]
        return self.sizes.place([[at, *self.symbols.monomial(one)] for at, one in found if one])

    def buffers(self, found: list[Any], layer: str = "") -> list[Any]:
        return [[_short(name, layer), [self.size([side]) for side in shape], each] for name, shape, each in found]

    def body(self, trace: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """Parts in order, a stack of layers as one entry."""
        cut, entries = Cut(trace, _names(found)), list[Any]()
        loose = iter(
            [list(group) for layer, group in groupby(found["tensors"], key=lambda one: one[2]) if layer is None]
        )
        stacks = iter(self.kind.depths)
        for at, layer in enumerate(cut.names):
            made = cut.part(at, self.size)
            held = [one for one in found["tensors"] if one[0].startswith(f"{layer}.")] if layer else next(loose, [])
            made["tensors"] = [[_short(name, layer), [self.size([side]) for side in shape]] for name, shape, _ in held]
            if layer and (own := [one for one in found["buffers"] if one[0].startswith(f"{layer}.")]):
                made["buffers"] = self.buffers(own, layer)
            if at in cut.anchors and layer:
                name = layer.rpartition(".")[0]
                entries.append({"depth": next(stacks), "name": name, "parts": []})
            if layer:
                if len(entries[-1]["parts"]) >= self.kind.period and _stack(cut.names[at + 1]) != _stack(layer):
                    before = self.parts.things[entries[-1]["parts"][-self.kind.period]]
                    made = before if _sooner(before) == _sooner(made) else made
                entries[-1]["parts"].append(self.parts.place(made))
            else:
                entries.append(self.parts.place(made))
        for entry in entries:
            if isinstance(entry, dict):
                first, rest = entry["parts"][: self.prefix], entry["parts"][self.prefix :]
                entry |= {"first": _lead(first, 1)} if first else {}
                entry["parts"] = _lead(rest, self.kind.period)
        head = len(cut.names) - 1
        return {"body": entries, "kept": [cut.named(one, head, 0) for one in trace["kept"]],
                "result": cut.named(trace["result"], head, 0)}  # fmt: skip


def _sooner(part: dict[str, Any]) -> dict[str, Any]:
    """Without the storages that outlast the next segment: after the last layer that is the end, where they die."""
    return {**part, "dies": [one for one in part["dies"] if len(one) < 3]}


def _names(found: dict[str, Any]) -> dict[int, str]:
    """Of layers, by number."""
    return {layer: _layer_of(name) for name, _, layer in found["tensors"] if layer is not None}


def _layer_of(tensor: str) -> str:
    words = tensor.split(".")
    return ".".join(words[: next(at for at, word in enumerate(words) if word.isdigit()) + 1])


def _short(name: str, layer: str) -> str:
    return name[len(layer) :] if layer and name.startswith(f"{layer}.") else name


def _lead(parts: list[int], period: int) -> list[int]:
    """The first ones and one period, if all others repeat it."""
    for lead in range(len(parts) - 2 * period + 1):
        if all(parts[at] == parts[at + period] for at in range(lead, len(parts) - period)):
            return parts[: lead + period]
    raise ValueError(f"layers do not repeat: {parts}")


class Cut:
    """A trace in segments. Values and storages are numbered as they appear, so each segment's are a range."""

    def __init__(self, trace: dict[str, Any], layers: dict[int, str]) -> None:
        self.trace = trace
        groups = [(key, list(ops)) for key, ops in groupby(trace["ops"], key=lambda op: op["segment"])]
        self.names = [layers[key // 2] if key % 2 else "" for key, _ in groups]
        self.ops = [ops for _, ops in groups]
        if self.names[-1]:  # nothing comes after the layers
            self.names, self.ops = [*self.names, ""], [*self.ops, []]
        self.begins = [sum(map(len, self.ops[:at])) for at in range(len(self.ops))]
        self.anchors = dict[int, int]()  # segments that others may name, and their entries in the body
        for at, name in enumerate(self.names):
            if not name or _stack(name) != _stack(self.names[at - 1]):
                self.anchors[at] = len(self.anchors)
        values = [{one for op in ops for one in (*op["in"], *op["out"])} for ops in self.ops]
        storages = [
            {trace["values"][one][2] for one in seen} | {one for op in ops for one in op["saved"]}
            for seen, ops in zip(values, self.ops, strict=True)
        ]
        self.firsts = _firsts(values), _firsts(storages)

    def named(self, number: int, at: int, side: int) -> Any:
        """A value or storage as seen from a segment: from its first if it is of this segment or the one before, or else
        from the first of its own, which must be unlike others."""
        firsts = self.firsts[side]
        owner = bisect_right(firsts, number) - 1
        if owner >= at - 1:
            return number - firsts[at]
        if owner not in self.anchors:
            raise ValueError(f"{self.names[at] or at} reads of {self.names[owner]}")
        return [self.anchors[owner], number - firsts[owner]]

    def part(self, at: int, size: Callable[[Sequence[float]], int]) -> dict[str, Any]:
        def value(number: int) -> Any:
            return self.named(number, at, 0)

        def storage(number: int) -> Any:
            return self.named(number, at, 1)

        ops = [
            _short_op([op["name"], [*map(value, op["in"])], [*map(value, op["out"])], [*map(storage, op["saved"])],
                       op["part"] + 2 * op["inside"], [_short(one, self.names[at]) for one in op["weights"]],
                       [[*map(size, gemm)] for gemm in op["gemms"]], op.get("heads")])
            for op in self.ops[at]
        ]  # fmt: skip
        values = [
            [size(fitted), each, storage(place), grad]
            for fitted, each, place, grad in self.trace["values"][self._range(at, 0)]
        ]
        storages = range(len(self.trace["last"]))[self._range(at, 1)]
        return {"ops": ops, "values": values, "storages": len(storages), "dies": [*self._dying(at)]}

    def _range(self, at: int, side: int) -> slice:
        firsts = self.firsts[side]
        return slice(firsts[at], firsts[at + 1] if at + 1 < len(firsts) else None)

    def _dying(self, at: int) -> Iterator[list[int]]:
        """Storages of this segment or the one before that die in this one; and those of its own that outlast the next,
        with the entry in which they die, or that of which they die in the layer before, as a negative number."""
        for number, last in enumerate(self.trace["last"]):
            owner, dies = bisect_right(self.firsts[1], number) - 1, bisect_right(self.begins, last) - 1
            if dies == at and owner in (at, at - 1):
                yield [number - self.firsts[1][at], last - self.begins[at]]
            elif owner == at and dies > at + 1:
                entry = self.anchors[dies] if dies in self.anchors else -self.anchors[dies + 1]
                yield [number - self.firsts[1][at], last - self.begins[dies], entry]


def _short_op(op: list[Any]) -> list[Any]:
    """Without what is empty at its end."""
    while not op[-1]:
        op = op[:-1]
    return op


def _stack(layer: str) -> str:
    return layer.rpartition(".")[0]


def _firsts(seen: list[set[int]]) -> list[int]:
    """Of each segment. What no operator of a segment names is of the next."""
    tops = accumulate((max(numbers, default=0) for numbers in seen), max)
    return [0, *(top + 1 for top in tops)][:-1]


def recorded(name: str, kind: Kind) -> dict[str, Any]:
    """The contents of an architecture's file."""
    sizes, parts, programs = Table(), Table(), list[dict[str, Any]]()
    for attention, chosen in ways(kind):
        symbols = Symbols(kind, chosen.get(GROUPED, True))
        for head in kind.heads if attention == kind.attention[0] else kind.heads[:1]:
            when = {key: value for key, value in chosen.items() if key != TIED or head in (CAUSAL, MASKED, SEQ2SEQ)}
            which = {"head": head, "attention": attention, "when": when}
            if json.dumps(which) not in [json.dumps({key: one[key] for key in which}) for one in programs]:
                config = config_of(name, kind, head, chosen, symbols)
                programs.append({**which, **program(kind, config, which, sizes, parts, symbols)})
                print(name, which, flush=True)
    usual = transformers.CONFIG_MAPPING[name]()
    first = programs[0]["when"]
    return {
        "sizes": {key: default_of(usual, key) for key in (*kind.depths, *kind.sizes, "num_labels")} | kind.usual,
        **({"prefix": kind.prefix} if kind.prefix else {}),
        "choices": {key: getattr(usual, key, one) for key, one in first.items()},
        "depths": kind.depths, "period": kind.period, "lists": kind.lists,
        "terms": len(terms(kind.heads[0], Batch(1))),  # of which sizes are sums
        "programs": programs, "size": sizes.things, "parts": parts.things,
    }  # fmt: skip


def ways(kind: Kind) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each attention with all choices. An eager one copies keys that several query heads share."""
    for attention in kind.attention:
        again = attention != kind.attention[0] and "num_key_value_heads" in kind.sizes
        choices = {**kind.choices, GROUPED: (True, False)} if again else kind.choices
        for values in product(*choices.values()):
            chosen = dict[str, Any]()
            for keys, value in zip(choices, values, strict=True):
                names = keys.split(",")
                chosen.update(zip(names, value if isinstance(value, tuple) else [value] * len(names), strict=True))
            yield attention, chosen


def program(
    kind: Kind, config: dict[str, Any], which: dict[str, Any], sizes: Table, parts: Table, symbols: Symbols
) -> Any:
    found = traced(config, which["head"], which["attention"])
    layers = tuple(f"{layer}." for layer in _names(found).values())
    encoder = Encoder(kind, sizes, parts, symbols)
    beyond = encoder.body(found["beyond"], found) if found["beyond"] else None
    return {
        **encoder.body(found["trace"], found), "beyond": beyond, "head_modules": found["head_modules"],
        "buffers": encoder.buffers([one for one in found["buffers"] if not one[0].startswith(layers)]),
        "hidden_size": encoder.size([found["hidden_size"]]), "vocab_size": encoder.size([found["vocab_size"]]),
    }  # fmt: skip


def default_of(usual: Any, key: str) -> Any:
    """None: the config must say it."""
    if key not in OPTIONAL:
        return None
    found = getattr(type(usual), key, None)  # an instance has derived what it lacks
    return FALLBACKS[key] if found is None or key == "num_labels" else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures; all by default")
    names = parser.parse_args().names or KINDS
    if os.environ.get("PYTHONHASHSEED") != "0":  # as for `finetune plan` (finetune/plan/tracing.py)
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    TRACES.mkdir(exist_ok=True)
    for name in names:
        made = json.dumps(recorded(name, KINDS[name]), separators=(",", ":"))
        (TRACES / f"{name}.json").write_text(f"{made}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
