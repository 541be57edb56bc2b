"""The model of a run: named, from scratch, or kept beside the run's recipe.yaml; and which recipe trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.plan.families.parts import CAUSAL, CLASSES, IMAGES, LABELLED, MASKED, SEQ2SEQ, SPANS, TAGS, VECTORS, Sizes
from finetune.plan.model import (
    KINDS,
    NO_TEXT,
    Model,
    head_of_class,
    heads_of_kind,
    is_block_linear,
    model_of,
    own_head,
    read_config,
)
from finetune.plan.named import CHARACTERS, Named, find_model, scratch_config
from finetune.plan.values import Lora
from finetune.run.choose import candidates, is_told, why_chosen
from finetune.run.conflicts import FILES
from finetune.run.facts import MOST_SIDE, left_to_adapter, tokens_flag
from finetune.run.files import ADAPTER_CONFIG, RUN_RECORD, without_base
from finetune.run.flags.adapter import TAKEN_BY_PEFT
from finetune.run.flags.images import ImageModelArguments
from finetune.run.flags.language import CausalModelArguments
from finetune.run.flags.text import CONLL
from finetune.run.launch import Launch
from finetune.run.paths import named_in
from finetune.run.resolve import resolve
from finetune.run.run import Run
from finetune.run.sizes import DISTILBERT_SIZES, causal_shape, distilbert_shape, resnet_shape
from finetune.safe_read import read_json_object
from finetune.safe_read.folders import check_model_folder

SHAPING = ("model_size", "config_overrides", "tokenizer", "bpe_vocab_size")  # flags of a model from scratch
BYTES = 256 + 1  # and the end-of-text token
KEPT = "kept by the run"  # the source of values that come from a run's own folder
PICTURE_CLASSES = 10  # of the built-in digits and of CIFAR-10


def described(argv: Sequence[str], launch: Launch, named: str | None = None) -> tuple[Run, list[str]]:
    """The run that flags describe, and notes on it. Its recipe is `named` by the user or by the YAML of their --config,
    or else the likeliest that takes all flags. Raises RequestError."""
    runs, refused = list[Run](), list[RequestError]()
    for recipe in candidates(argv, named):  # some may not take what others do, such as the size of a model
        try:
            runs.append(resolve(recipe, argv, launch, is_here=False))
        except RequestError as error:
            refused.append(error)
    if not runs:
        raise refused[0]
    odd = {run.recipe.name: head_of(run) not in _likely_heads(run) for run in runs}
    run = min(runs, key=lambda run: odd[run.recipe.name])
    if is_told(argv, named):
        return run, list(run.notes)
    why = "the one that reads tagged words" if _has_tagged_words(run) else why_chosen(argv, odd[run.recipe.name])
    return run, [f"planned as {run.recipe.script} trains it, {why}; --recipe NAME chooses another", *run.notes]


def _likely_heads(run: Run) -> tuple[str, ...]:
    """The heads that a recipe for the run's model would train."""
    given = run.value("model_name_or_path")
    if _has_tagged_words(run):
        return (TAGS,)
    if not given:
        return (CAUSAL,)
    config, own = dict[str, Any](), CAUSAL
    with suppress(RequestError):  # reported when the model is read
        config = _found(str(given)).config
        own = own_head(config, str(given))
    heads = heads_of_kind(str(config.get("model_type")))
    if not heads:
        return (SEQ2SEQ if config.get("is_encoder_decoder") else CAUSAL,)
    likely = (own, CAUSAL, CLASSES, TAGS, SPANS, IMAGES, SEQ2SEQ)
    return tuple(head for head in likely if head in heads and head != MASKED)[:1]


def head_of(run: Run) -> str | None:
    """By the class that loads the models of its task; None if the recipe trains no model."""
    return VECTORS if run.task.auto == "AutoModel" else head_of_class(run.task.auto)


def _has_tagged_words(run: Run) -> bool:
    return any(Path(path).suffix.lower() in CONLL for name in FILES for path in named_in(run.value(name)))


def run_of_record(folder: Path, launch: Launch) -> Run:
    """The run that recipe.yaml in a run folder describes, with the model kept there. Raises RequestError."""
    return with_kept_model(described(["--config", str(folder / RUN_RECORD)], launch)[0], folder)


def with_kept_model(run: Run, folder: Path) -> Run:
    """The run with the model of its folder, if there is one, instead of the recipe's default."""
    if (folder / "config.json").is_file():
        run = replace(run, settings={name: one for name, one in run.settings.items() if name not in SHAPING})
        run = run.settled(KEPT, model_name_or_path=str(folder))
    processor = folder / "preprocessor_config.json"
    side = read_config(processor).get("size") if processor.is_file() else None
    if isinstance(side, dict) and "height" in side and run.value("image_size") is None:
        run = run.settled(KEPT, image_size=Sizes(side, str(processor))("height"))
    return run


def model_of_run(run: Run, params_per_layer: int | None, notes: list[str], flag: str = "model_name_or_path") -> Model:
    """The model without its adapter; `flag` named it. Adds assumptions to `notes`. Raises RequestError; if the model
    does not suit the run's task, with the recipe's own message."""
    given = run.value("model_name_or_path")
    if not given:
        return model_of(_as_scored(run, _scratch_config(run, notes)), "the model from scratch", head_of(run),
                        _attention(run))  # fmt: skip
    found = _found(str(given))
    if run.task.refuses is not None and run.source(flag) != KEPT and isinstance(found.config.get("model_type"), str):
        told = {"is_encoder_decoder": SEQ2SEQ in heads_of_kind(found.config["model_type"]), **found.config}
        run.task.refuses(told.get, run.said(flag))
    config = _as_scored(run, found.config)
    notes += found.notes
    if found.is_packed and not run.value("load_in_4bit"):
        notes.append("its weights are planned unquantized; --load_in_4bit True with --use_peft True plans 4 bits")
    if head_of(run) in (CLASSES, TAGS, IMAGES) and not config.get("id2label"):
        notes.append(f"{Sizes(config, str(given)).labels} labels are assumed; the data decides")
    if params_per_layer is not None and config.get("model_type") not in KINDS:
        config = _alike(config, str(given), params_per_layer, notes)
    kind, head = str(config.get("model_type")), head_of(run)
    if kind in NO_TEXT and tokens_flag(run):
        raise RequestError(f"{run.said(flag)}: a {kind} reads no text. Plan it with --recipe image_cls.")
    is_other = head not in (None, *heads_of_kind(kind), VECTORS)
    if kind not in KINDS:
        return _traced(config, run, found.name, notes)
    if is_other and kind not in NO_TEXT and head != IMAGES:
        with suppress(RequestError):  # transformers may have no such model
            return _traced(config, run, found.name, notes)
    if is_other:
        notes.append(f"the head that {run.recipe.script} trains is not known for a {kind}; its own is counted")
        head = None
    return model_of(config, str(given), head, _attention(run), notes)


def _attention(run: Run) -> str:
    return "eager" if run.value("attn_implementation") == "eager" else "sdpa"


def _as_scored(run: Run, config: dict[str, Any]) -> dict[str, Any]:
    """A reward model has one output, whatever the config says (finetune/training/preference_model.py)."""
    is_reward = "reference" in run.recipe.flags and run.value("loss") == "reward"
    return {**config, "id2label": {"0": "LABEL_0"}, "num_labels": 1} if is_reward else config


def is_adapter(run: Run) -> bool:
    """Whether an adapter is named, to be trained further."""
    return bool(run.value("model_name_or_path")) and bool(_adapter_of(str(run.value("model_name_or_path"))))


def _found(given: str) -> Named:
    """A model, or the base of an adapter."""
    path = Path(given).expanduser()
    base = _adapter_of(given).get("base_model_name_or_path")
    if isinstance(base, str) and Path(base).expanduser() != path:
        try:
            return _found(base)
        except RequestError as error:
            if Path(base).expanduser().exists():
                raise
            what = "there is no such folder, and no model is known by this name"
            raise RequestError(f"{given}, an adapter of {base}: {what}. {without_base(path)}") from error
    return Named(given, read_config(path)) if path.exists() else find_model(given)


def _adapter_of(given: str) -> dict[str, Any]:
    """The config of an adapter's folder; empty for any other model."""
    path = Path(given).expanduser()
    is_adapter = (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()
    return read_json_object(path / ADAPTER_CONFIG, inside=path) if is_adapter else {}


def _scratch_config(run: Run, notes: list[str]) -> dict[str, Any]:
    size = str(run.value("model_size"))
    if run.recipe.scratch is not None:
        config: dict[str, Any] = run.recipe.scratch(run.value)
        notes.append(f"a vocabulary of {config['vocab_size']:,} tokens is assumed; the data decides")
        return config
    if CausalModelArguments in run.recipe.groups:
        return _causal(run, size, notes)
    if ImageModelArguments in run.recipe.groups:
        return _resnet(run, size, notes)
    config = {
        "model_type": "distilbert",
        "vocab_size": DISTILBERT_SIZES[size].vocab_size,
        **distilbert_shape(size, run.value("dropout"), run.value("max_seq_length")),
    }
    labels = f" and {Sizes(config, '').labels} labels are" if head_of(run) in (CLASSES, TAGS) else " is"
    notes.append(f"a vocabulary of {config['vocab_size']:,} tokens{labels} assumed; the data decides")
    return config


def _causal(run: Run, size: str, notes: list[str]) -> dict[str, Any]:
    kind = run.value("tokenizer")
    if kind == "char":
        notes.append(f"a vocabulary of {CHARACTERS} characters is assumed; the text decides")
    vocabularies = {"char": CHARACTERS, "byte": BYTES, "bpe": run.value("bpe_vocab_size")}
    said = f"--config_overrides ({run.source('config_overrides')})"
    return scratch_config(causal_shape(size, run.value("config_overrides"), said), vocabularies[kind])


def _resnet(run: Run, size: str, notes: list[str]) -> dict[str, Any]:
    for name, usual in (("model_type", "resnet"), ("norm", "batch")):
        if run.value(name) != usual:
            raise RequestError(f"{run.said(name)}: its memory is not known; that of {usual} is.")
    notes.append(f"{PICTURE_CLASSES} classes are assumed; the data decides")
    return {"model_type": "resnet", **resnet_shape(size), "num_labels": PICTURE_CLASSES}


def lora_of(run: Run, model: Model, notes: list[str]) -> Lora | None:
    """As in finetune.models.adapters: on all linear layers of the blocks, unless some are named. An adapter's folder
    sets its own; `notes` says what yields to it. Raises RequestError."""
    if not run.value("use_peft"):
        return None
    if not run.value("model_name_or_path"):
        raise RequestError(
            f"{run.said('use_peft')}: it adapts a trained model, and none is named. Add --model_name_or_path."
        )
    fused = {tensor.name for tensor in model.tensors if len(tensor.shape) == 3}
    taken = TAKEN_BY_PEFT if fused else ()
    every = sorted(
        {tensor.name.split(".")[-2] for tensor in model.tensors if is_block_linear(tensor)}.difference(taken)
    )
    asked = run.value("lora_target_modules")
    targets = tuple(every if asked in (None, ["all-linear"]) else asked)
    if of_experts := [name for name in targets if any(f".{full}".endswith(f".{name}") for full in fused)]:
        raise RequestError(
            f"{run.said('lora_target_modules')}: adapters of experts ({of_experts[0]}) are trained, but not planned. "
            "Plan without them."
        )
    if lost := [name for name in targets if name.rpartition(".")[2] in taken]:
        raise RequestError(f"--lora_target_modules {lost[0]}: peft takes this name for the experts' tensors. Drop it.")
    own = model.head_modules if model.head in LABELLED else ()
    saved = (*own, *(run.value("lora_modules_to_save") or ()))
    lora = Lora(run.value("lora_r"), targets, run.value("lora_dropout"), saved, run.value("lora_use_dora"))
    there = _adapter_of(str(run.value("model_name_or_path")))
    if not there:
        return lora
    notes += left_to_adapter(run)
    rank, names = there.get("r"), there.get("target_modules")
    if not isinstance(rank, int) or rank < 1 or not isinstance(names, list):
        raise RequestError(f"{run.value('model_name_or_path')}: its {ADAPTER_CONFIG} describes no LoRA.")
    copied = map(str, there.get("modules_to_save") or ())
    return Lora(rank, tuple(map(str, names)), lora.dropout, (*saved, *copied), bool(there.get("use_dora")))


def _traced(config: dict[str, Any], run: Run, given: str, notes: list[str]) -> Model:
    head = head_of(run) or CAUSAL
    if head == IMAGES:
        config = {**config, "image_size": config.get("image_size") or run.value("image_size") or MOST_SIDE}
    code = Path(given).expanduser() if run.value("trust_remote_code") and "auto_map" in config else None
    code = code.parent if code is not None and code.is_file() else code
    try:
        if code is not None:
            check_model_folder(code, run.said("model_name_or_path"), trusts_code=True)
        return model_of(config, given, head, _attention(run), notes, code)
    except RequestError as error:
        raise RequestError(
            f"{error} Give --params_per_layer N, the parameters of one of its layers: it is then planned as a Llama of "
            "that size, with its hidden_size, num_hidden_layers, num_attention_heads and vocab_size. "
            f"Known families: {', '.join(KINDS)}."
        ) from error


def _alike(config: Mapping[str, Any], where: str, params_per_layer: int, notes: list[str]) -> dict[str, Any]:
    """The config of a Llama in place of an unknown family: of the same width and depth, with a feed-forward part as
    wide as `params_per_layer` asks for."""
    kind = config.get("model_type")
    sizes = Sizes({**config, **(config.get("text_config") or {})}, where)
    hidden = sizes("hidden_size", "n_embd", "d_model")
    names = ("num_attention_heads", "n_head", "num_heads")
    heads = sizes(*names, default=1)
    inner = (params_per_layer - 4 * hidden**2 - 2 * hidden) // (3 * hidden)
    if inner < 1:
        raise RequestError(
            f"--params_per_layer {params_per_layer}: attention has {4 * hidden**2:,} at width {hidden}. Give more."
        )
    is_named = any(sizes.config.get(name) is not None for name in names)
    assumed = "" if is_named else " and one attention head, because its config names none"
    notes.append(
        f"{kind} is not a known family; it is planned as a Llama with {params_per_layer:,} parameters a layer{assumed}"
    )
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": sizes("num_hidden_layers", "n_layer", "num_layers"),
        "intermediate_size": inner,
        "vocab_size": sizes("vocab_size"),
        "tie_word_embeddings": sizes.is_on("tie_word_embeddings", False),
    }
