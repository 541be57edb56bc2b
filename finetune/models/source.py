"""Open a model folder or hub id, with errors that say what is wrong and how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, PretrainedConfig

from finetune.data.hub import hub_is_reachable
from finetune.errors import RequestError, first_line, listed, plain
from finetune.models.composite import class_for
from finetune.run import facts
from finetune.run.decoders import recipe_for
from finetune.run.files import ADAPTER_CONFIG, LABELS, SETTLED, without_base
from finetune.safe_read import read_json_object
from finetune.safe_read.folders import check_model_folder, has_weights, refuse_code

PROBLEMS = (None, "regression", "single_label_classification", "multi_label_classification")  # of transformers
OF_LABELS = ("architectures", "id2label", "label2id", "problem_type", *SETTLED)
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def positions_of(config: Any) -> int:
    """How many tokens the model can take."""
    return facts.positions_of(lambda name: getattr(config.get_text_config(), name, None))


@dataclass(frozen=True)
class Named:
    """What --model_name_or_path names: `base` is the model with the weights, `adapter` the folder of an adapter for
    it, or None; `flag` is how errors about the base begin."""

    base: str
    adapter: Path | None = None
    flag: str = "model_name_or_path"

    @property
    def hub_id(self) -> str | None:
        """The base's; None for a folder."""
        return None if Path(self.base).expanduser().exists() else self.base

    @property
    def place(self) -> str:
        """The base as transformers opens it."""
        return self.hub_id or str(Path(self.base).expanduser())

    @property
    def words(self) -> str:
        return f"{self.adapter}, an adapter of {self.base}" if self.adapter else self.base

    @property
    def mend(self) -> str:
        """What to do if the base is not found; "" if it is not an adapter's."""
        return without_base(self.adapter) if self.adapter else ""

    @property
    def tokenizer(self) -> str:
        own = self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file()
        return str(self.adapter) if own else self.base


def named(name: str, trusts_code: bool) -> Named:
    """What `name` refers to. Raises RequestError for an adapter's folder that cannot be opened."""
    folder = Path(name).expanduser()
    if not (folder / ADAPTER_CONFIG).is_file() or has_weights(folder):
        return Named(name)
    check_model_folder(folder, f"--model_name_or_path {name}", trusts_code)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise RequestError(f"--model_name_or_path {name}: the folder has {ADAPTER_CONFIG} and no {ADAPTER_WEIGHTS}.")
    base = read_json_object(folder / ADAPTER_CONFIG, inside=folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise RequestError(f"--model_name_or_path {name}: its {ADAPTER_CONFIG} names no base model.")
    return Named(base, folder, f"model_name_or_path {name}, an adapter of")


def with_labels(config: Any, adapter: Path | None) -> Any:
    """The base's `config`, with the labels that the adapter's folder records."""
    if adapter is None or not (adapter / LABELS).is_file():
        return config
    known = read_json_object(adapter / LABELS, inside=adapter)
    names, kind, made = known.get("id2label"), known.get("problem_type"), known.get("architectures")
    numbered = isinstance(names, dict) and bool(names) and all(str(key).isdecimal() for key in names)
    if not numbered or kind not in PROBLEMS or not (isinstance(made, list) and all(isinstance(n, str) for n in made)):
        raise RequestError(f"--model_name_or_path {adapter}: its {LABELS} is not as a run writes it.")
    config.id2label = {int(key): str(name) for key, name in dict(names or {}).items()}
    config.label2id = {name: key for key, name in config.id2label.items()}
    config.problem_type, config.architectures = kind, made
    for name in known.keys() & set(SETTLED):
        setattr(config, name, known[name])
    return config


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """A model before its weights are loaded. `config` is that of a model from scratch if `pretrained` is None; then
    `tokenizer` is None, too, if one will be trained on the text."""

    config: Any
    tokenizer: Any | None = None
    description: str
    hub_id: str | None = None  # for the model card; None for a folder or a model from scratch
    pretrained: str | None = None  # the model whose weights are loaded
    adapter: Path | None = None  # an adapter's folder, whose base is `pretrained`


def find_text_source(
    arguments: Any, scratch: TextSource, refuse: Callable[..., None] | None = None, fast: bool = False
) -> TextSource:
    """The config and tokenizer of --model_name_or_path, or `scratch`, with the tokenizer of --tokenizer_name. `refuse`
    raises for a config, given by its `get`, of a wrong model. Raises RequestError, also for a slow tokenizer if it must
    be `fast`."""
    name, found, flag, place = arguments.model_name_or_path, scratch, "tokenizer_name", arguments.tokenizer_name
    if name:
        model = named(name, arguments.trust_remote_code)
        config = from_pretrained(AutoConfig, model.flag, model.base, arguments, model.mend)
        if refuse is not None:
            refuse(config.to_dict().get, f"--{model.flag} {model.base}")
        refuse_without_weights(model.base)
        found = TextSource(
            config=config, description=model.words, hub_id=model.hub_id, pretrained=model.place, adapter=model.adapter
        )
        flag, place = (flag, place) if place else ("model_name_or_path", model.tokenizer)
    if not place:
        return found
    tokenizer = from_pretrained(AutoTokenizer, flag, place, arguments)
    if fast and not getattr(tokenizer, "is_fast", False):
        raise RequestError(f"--{flag} {place}: has no tokenizer.json. Convert it to a fast one.")
    return replace(found, tokenizer=tokenizer)


def from_pretrained(auto: Any, flag: str, name: str, arguments: Any, mend: str = "") -> Any:
    """Load a folder or hub id with `auto` (AutoConfig, AutoTokenizer); `arguments` has the revision and whether to
    trust its code. Raises RequestError, naming `flag`; with `mend` if there is nothing of this name."""
    place = Path(name).expanduser()
    looks_local = place.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not place.is_dir():
        mend = mend or "Give one that holds config.json, or a hub id."
        raise RequestError(f"--{flag} {name}: there is no such folder. {mend}")
    if looks_local and auto is AutoConfig and not (place / "config.json").is_file():
        there = listed([plain(path.name) for path in sorted(place.iterdir())])
        raise RequestError(f"--{flag} {name}: the folder has no config.json; it holds {there}.")
    if looks_local:
        check_model_folder(place, f"--{flag} {name}", arguments.trust_remote_code)
    where = {"revision": arguments.model_revision, "local_files_only": not looks_local and not hub_is_reachable()}
    try:
        if auto is AutoConfig and not looks_local and not arguments.trust_remote_code:
            refuse_code(PretrainedConfig.get_config_dict(name, **where)[0], "config.json", f"--{flag} {name}")
        return auto.from_pretrained(
            str(place) if looks_local else name, trust_remote_code=arguments.trust_remote_code, **where
        )
    except RequestError:
        raise
    except ImportError as error:
        reason = plain(first_line(error, 300)).split(". ")[0]
        raise RequestError(
            f"--{flag} {name}: {reason}. Install it; the extra `sentencepiece` has what Marian's tokenizer and others "
            "without a tokenizer.json need."
        ) from error
    except Exception as error:  # a malicious folder can raise anything
        reason = plain(first_line(error, 300))
        tried = "the folder" if looks_local else "a folder of this name, the local cache and the hub"
        mend = mend or (
            "Offline? Give a folder with config.json, model.safetensors and tokenizer.json (for pictures "
            "preprocessor_config.json), or leave the flag out to train a small model from scratch."
        )
        raise RequestError(f"--{flag} {name}: cannot be loaded; tried {tried} ({reason}). {mend}") from error


@dataclass(frozen=True)
class Kept:
    """How weights are stored: in `dtype`; with `in_4bit`, linear layers outside the modules `whole` in 4 bits, and with
    `double_quant` their scales in 8."""

    dtype: str = "float32"  # transformers 5 would use the file's
    in_4bit: bool = False
    double_quant: bool = False
    whole: tuple[str, ...] | None = None  # None: the head of a language model

    def chosen(self) -> dict[str, Any]:
        """Keyword arguments for `from_pretrained`."""
        packed = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=self.double_quant,
            llm_int8_skip_modules=None if self.whole is None else list(self.whole),
        )
        return {"dtype": getattr(torch, self.dtype), **({"quantization_config": packed} if self.in_4bit else {})}


IN_FP32 = Kept()


def load_weights(
    auto: Any,
    name: str,
    config: Any,
    arguments: Any,
    kept: Kept = IN_FP32,
    flag: str = "model_name_or_path",
    has_new_head: bool = False,
    **chosen: Any,
) -> Any:
    """Load a folder or hub id with `auto` (AutoModelForCausalLM), or what stands in for it, from safetensors only; with
    `has_new_head`, a head that is missing or does not fit is initialized. Raises RequestError, naming `flag`, if the
    model is of another kind, or weights are missing or do not fit."""
    architectures = getattr(config, "architectures", None)
    try:
        model, found = class_for(auto.__name__, config).from_pretrained(
            name,
            config=config,
            revision=arguments.model_revision,
            trust_remote_code=arguments.trust_remote_code,
            use_safetensors=True,
            local_files_only=not Path(name).is_dir() and not hub_is_reachable(),
            output_loading_info=True,
            ignore_mismatched_sizes=has_new_head,
            **kept.chosen(),
            **chosen,
        )
    except torch.OutOfMemoryError:
        raise
    except RequestError as error:
        raise RequestError(f"--{flag} {name}: {error}") from error
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise RequestError(
            f"--{flag} {name}: its weights cannot be loaded ({plain(first_line(error, 300))}). Get them "
            "from their source again."
        ) from error
    refuse_missing(model, found, architectures, f"--{flag} {name}", has_new_head)
    if kept.in_4bit:
        _keep_trainable_after_evaluation(model)
    forget_unused_renamings(model)
    return model


def forget_unused_renamings(model: Any) -> None:
    """Under ZeRO-3, transformers reverts every renaming that it knows on saving, not only those that the files needed
    (5.23, integrations/deepspeed.py, _load_state_dict_into_zero3_model): a BERT's LayerNorm.weight would be saved as
    LayerNorm.gamma. Elsewhere it keeps only those it used (core_model_loading.py)."""
    if known := getattr(model, "_weight_conversions", None):
        model._weight_conversions = [renaming for renaming in known if renaming.was_used()]


def _keep_trainable_after_evaluation(model: Any) -> None:
    """On a CPU, an evaluation packs 4-bit weights for a kernel without a backward pass and leaves them packed: the next
    step fails at a bias or gets no gradient past the layer (bitsandbytes 0.50, autograd/_functions.py, matmul_4bit)."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def refuse_without_weights(name: str, flag: str = "model_name_or_path") -> None:
    """Raises RequestError for a folder without safetensors: pickles are never opened."""
    place = Path(name).expanduser()
    if place.is_dir() and not has_weights(place):
        there = listed([plain(path.name) for path in sorted(place.iterdir())])
        old = any(place.glob("pytorch_model*.bin"))
        mend = "Convert the .bin to safetensors." if old else "Give the folder of a trained model."
        raise RequestError(f"--{flag} {name}: the folder has no model.safetensors; it holds {there}. {mend}")


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
