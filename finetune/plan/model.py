"""A model's parameters, tensor by tensor, from its Hugging Face config.json. Never imports torch.

They come from traces of the model's classes on the meta device; those of ResNets are written down. Exact numbers
matter: ZeRO shards and the persistence threshold depend on tensors, not on totals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.plan.families.parts import CAUSAL, CLASSES, IMAGES, MASKED, SEQ2SEQ, SPANS, TAGS, VECTORS, Shape, Sizes
from finetune.plan.families.possible import refuse_impossible
from finetune.plan.forward import resnet
from finetune.plan.trace_files import KNOWN, file_of
from finetune.plan.tracing import found_of
from finetune.plan.values import FP32_BYTES, HALF_BYTES, Lora
from finetune.safe_read import read_json_object

MLP, RESNET = "mlp", "resnet"
NO_TEXT = (MLP, RESNET)
KINDS = tuple(sorted((RESNET, *KNOWN)))  # the values of model_type that are planned without torch
PACKED_BLOCK = 64  # weights that share a scale in 4 bits
SCALES_BLOCK = 256  # scales that share one of their own in double quantization
CODE_VALUES = 256  # of the table that decodes scales of 8 bits
NOT_LINEAR = {"gate", "router", "experts", "relative_attention_bias"}  # matrices of blocks that are not linear layers
HEADS = {  # by suffixes of class names
    "ForCausalLM": CAUSAL,
    "LMHeadModel": CAUSAL,
    "ForMaskedLM": MASKED,
    "ForSequenceClassification": CLASSES,
    "ForTokenClassification": TAGS,
    "ForQuestionAnswering": SPANS,
    "ForConditionalGeneration": SEQ2SEQ,
    "ForSeq2SeqLM": SEQ2SEQ,
    "ForImageClassification": IMAGES,
    "ForClassification": CLASSES,  # the benchmark MLP's
}


@dataclass(frozen=True)
class Tensor:
    """A parameter. `layer`: the block's index; None for embeddings, final norm and head."""

    name: str
    shape: Shape
    layer: int | None = None
    trains: bool = True
    is_packed: bool = False  # in 4 bits
    has_double_quant: bool = False  # if packed, its scales are quantized, too
    holders: int = 1  # ranks that hold as many other experts each, where this is a rank's part of a layer's
    is_reached: bool = True  # by a gradient, unlike a pooler whose output is not read

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def bytes(self, each: int) -> int:
        """bitsandbytes packs two weights in a byte, and keeps the maximum of each 64, its scale, in fp32. Double
        quantization keeps scales in 8 bits, and in fp32 the maximum of each 256, their mean and a table of 256 values
        (bitsandbytes 0.50, functional.py, quantize_4bit)."""
        if not self.is_packed:
            return self.elements * each
        scales = math.ceil(self.elements / PACKED_BLOCK)
        size = scales * FP32_BYTES
        if self.has_double_quant:
            size = scales + (math.ceil(scales / SCALES_BLOCK) + 1 + CODE_VALUES) * FP32_BYTES
        return math.ceil(self.elements / 2) + size


@dataclass(frozen=True)
class Buffer:
    """A tensor of a model that is not a parameter. `bytes_each`: 2 in the model's precision, whatever that is."""

    name: str
    shape: Shape
    bytes_each: int

    def bytes(self, each: int) -> int:
        return math.prod(self.shape) * (each if self.bytes_each == HALF_BYTES else self.bytes_each)


@dataclass(eq=False, frozen=True)
class Trace:
    """Operators of a model, as `finetune.measure.tracing` records them. `last`: of each
    storage, the operator after which no variable holds it. `kept`: values of the output; `result`: the loss. `beyond`:
    the trace for texts of at least `window` tokens, if the model has a sliding window. `in_fp32`: the trace for
    fp32, if layouts depend on the precision."""

    values: Sequence[Any]
    ops: Sequence[Any]
    last: Sequence[int]
    kept: Sequence[int]
    result: int
    window: int | None = None
    beyond: Trace | None = None
    in_fp32: Trace | None = None

    def of(self, tokens: int) -> Trace:
        return self if self.beyond is None or self.window is None or tokens < self.window else self.beyond

    def backwards(self, *ends: int) -> Iterator[tuple[Any, bool]]:
        """Operators from the last to the first, and whether a gradient of the values `ends` reaches each. By storage:
        what an operator writes into a view is read through others."""
        places = {self.values[number][2] for number in ends}
        for op in reversed(self.ops):
            is_reached = not places.isdisjoint(self.values[number][2] for number in op["out"])
            if is_reached:
                places.update(self.values[number][2] for number in op["in"] if self.values[number][3])
            yield op, is_reached


@dataclass(frozen=True)
class Model:
    """A model as its config describes it. A tied weight appears once. `family` is the config's `model_type`; `sizes` is
    the config itself, from which forward passes are recorded (finetune/plan/forward)."""

    family: str
    head: str
    tensors: tuple[Tensor, ...]
    layers: int
    hidden_size: int
    vocab_size: int
    sizes: Sizes
    buffers: tuple[Buffer, ...] = ()
    lora: Lora | None = None
    head_modules: tuple[str, ...] = ()  # of a classifier: what a base model may lack
    trace: Trace | None = None  # None for a ResNet

    @property
    def shards(self) -> bool:
        """Whether ZeRO-3 can shard it (finetune.run.facts.check_sharded)."""
        return not (self.lora and self.lora.is_dora) and not any(tensor.is_packed for tensor in self.tensors)

    @property
    def reads_text(self) -> bool:
        return self.head != IMAGES and self.family != MLP

    @property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """The values of a model folder's config.json, or of that file. Raises RequestError if it cannot be read."""
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        config = read_json_object(file, inside=folder if folder.is_dir() else None)
    except RequestError as error:
        raise RequestError(f"{error} Give a Hugging Face model's folder or its config.json.") from error
    for name, kind, what in (("architectures", list, "a list"), ("text_config", dict, "an object")):
        if not isinstance(config.get(name), kind | None):
            raise RequestError(f"{file}: {name} is {config[name]!r}, but it must be {what}. Correct it.")
    return config


def model_of(
    config: dict[str, Any],
    where: str = "the config",
    head: str | None = None,
    attention: str = "sdpa",
    notes: list[str] | None = None,
    code: Path | None = None,
) -> Model:
    """`head`: one of `HEADS`, or VECTORS; None: the config's own. `attention`: "sdpa" or "eager". Adds to `notes` how
    it was traced, if it was. `code`: the model's folder, if its own code is to run. Raises RequestError for an unknown
    architecture or head, or if a size is missing or invalid."""
    if (
        config.get("model_type") == "t5" and config.get("scale_decoder_outputs") is False
    ):  # T5 1.1 and Flan-T5, as transformers 5 saves them
        config = {**config, "tie_word_embeddings": False}
    kind, sizes = str(config.get("model_type")), Sizes(config, where)
    head = head or own_head(config, where)
    if heads_of_kind(kind):
        refuse_impossible(kind, sizes)
    if kind == RESNET:
        if head not in (IMAGES, VECTORS):
            raise RequestError(f"{where}: the known head of {kind} is {IMAGES}, not {head}.")
        return _resnet(sizes)
    found, how = found_of(config, head, attention, where, code)
    if notes is not None and how:
        notes.append(how)
    made = _traced(found, head, sizes)
    if notes is not None and (aside := sum(one.elements for one in made.tensors if not one.trains)):
        notes.append(
            f"{aside:,} parameters stay frozen: no text reaches them (a vision tower's), or the model never trains them"
        )
    return made


def _resnet(sizes: Sizes) -> Model:
    layers = len(resnet.layers(sizes))
    tensors = tuple(Tensor(*one) for one in resnet.tensors(sizes))
    buffers = tuple(Buffer(*one) for one in resnet.buffers(sizes))
    return Model(RESNET, IMAGES, tensors, layers, resnet.width(sizes), 0, sizes, buffers, head_modules=(resnet.HEAD,))


def _traced(found: Mapping[str, Any], head: str, sizes: Sizes) -> Model:
    beyond = _trace(found["beyond"]) if found["beyond"] else None
    trace = _trace(found["trace"], window=found["window"], beyond=beyond)
    reached = {name for op, is_reached in trace.backwards(trace.result) if is_reached for name in op["weights"]}
    named = (Tensor(name, tuple(shape), *rest) for name, shape, *rest in found["tensors"])
    tensors = tuple(replace(tensor, is_reached=tensor.name in reached) for tensor in named)
    buffers = tuple(Buffer(name, tuple(shape), each) for name, shape, each in found["buffers"])
    return Model(
        str(sizes.config.get("model_type")), head, tensors, found["layers"], found["hidden_size"], found["vocab_size"],
        sizes, buffers, head_modules=tuple(found["head_modules"]), trace=trace,
    )  # fmt: skip


def _trace(found: Mapping[str, Any], **more: Any) -> Trace:
    whole = found.get("in_fp32")
    return Trace(**{**found, **more, "in_fp32": _trace(whole) if whole else None})


def in_4bit(model: Model, double_quant: bool = False) -> Model:
    """With its blocks' linear layers packed (transformers, quantizers/base.py, get_modules_to_not_convert)."""
    packed = [replace(t, is_packed=is_block_linear(t), has_double_quant=double_quant) for t in model.tensors]
    return replace(model, tensors=tuple(packed))


def is_block_linear(tensor: Tensor) -> bool:
    """Whether it is the weight of a block's linear layer, which adapters target by default."""
    return tensor.layer is not None and len(tensor.shape) == 2 and tensor.name.split(".")[-2] not in NOT_LINEAR


def with_lora(model: Model, lora: Lora) -> Model:
    """The model with an adapter's tensors beside each linear layer that it adapts, and everything else frozen. Names
    are the model's own, without peft's wrappers (`base_model.model.`, `.base_layer`, `.modules_to_save.default`); a
    trained copy replaces its module's `original_module`."""
    tensors = []
    for tensor in model.tensors:
        module, _, part = tensor.name.rpartition(".")
        if lora.saves(module):
            tensors.append(replace(tensor, name=f"{module}.original_module.{part}", trains=False))
            tensors.append(replace(tensor, is_packed=False))
            continue
        tensors.append(replace(tensor, trains=False))
        if part == "weight" and len(tensor.shape) == 2 and tensor.trains and lora.adapts(module):
            # GPT-2's Conv1D stores its weight transposed.
            is_turned = model.family == "gpt2"
            fan_out, fan_in = reversed(tensor.shape) if is_turned else tensor.shape
            for side, shape in (("A", (lora.rank, fan_in)), ("B", (fan_out, lora.rank))):
                tensors.append(Tensor(f"{module}.lora_{side}.default.weight", shape, tensor.layer))
            if lora.is_dora:
                tensors.append(Tensor(f"{module}.lora_magnitude_vector.default.weight", (fan_out,), tensor.layer))
    if not any(".lora_A." in tensor.name for tensor in tensors):
        raise RequestError(f"LoRA on {', '.join(lora.targets)}: no linear layer has that name.")
    return replace(model, tensors=tuple(tensors), lora=lora)


def head_of_class(name: str) -> str | None:
    """By the name of a transformers class; None if its head is not known."""
    return next((head for suffix, head in HEADS.items() if name.endswith(suffix)), None)


def heads_of_kind(kind: str) -> tuple[str, ...]:
    """Of a `model_type`, the usual one first; none if it is not known."""
    if kind == RESNET:
        return (IMAGES,)
    return tuple(dict.fromkeys(one["head"] for one in file_of(kind)["programs"])) if kind in KNOWN else ()


def own_head(config: dict[str, Any], where: str) -> str:
    """That of the config's `architectures`, or else the usual one. Raises RequestError if it is not known."""
    names = config.get("architectures") or []
    if not names or (str(names[0]).endswith("Model") and not str(names[0]).endswith("LMHeadModel")):
        return next(iter(heads_of_kind(str(config.get("model_type")))), CAUSAL)  # BertModel and the like have no head
    found = head_of_class(str(names[0]))
    if found is None:
        raise RequestError(f"{where}: architectures is {names[0]}, but it must end in one of {', '.join(HEADS)}.")
    return found
