"""LoRA through peft, for every text recipe: a few trained weights beside frozen ones (Hu et al., arXiv 2106.09685)."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from finetune.errors import RequestError, first_line, plain
from finetune.models.composite import freeze_unread, unread
from finetune.models.experts import mixture_of
from finetune.models.source import OF_LABELS, Kept, Named, from_pretrained, load_weights, with_labels
from finetune.run.facts import base_dtype, left_to_adapter
from finetune.run.files import GENERATION_CONFIG
from finetune.run.flags.adapter import TAKEN_BY_PEFT, AdapterArguments
from finetune.run.flags.text import ModelArguments
from finetune.run.run import Run
from finetune.safe_read import read_json_object

OWN_MODELS = ("gptlite", "alexnet", "resnet_group_norm")  # registered with transformers when their module is imported
MAX_SHOWN = 20
ALL_LINEAR = "all-linear"  # peft's word


def targets_of(model: Any, arguments: AdapterArguments) -> tuple[list[str] | str, list[str]]:
    """peft's `target_modules` and `target_parameters`. Raises RequestError for a name that the model does not have, and
    for flags that adapters of experts do not support."""
    wanted, tensors = arguments.lora_target_modules, expert_tensors(model)
    layers = {name: part for name, part in model.named_modules() if is_linear(part) or isinstance(part, nn.Embedding)}
    if wanted in (None, [ALL_LINEAR]):
        return (_linear_names(model) if tensors else ALL_LINEAR), []
    experts = sorted({_short(full) for full in tensors for name in wanted or () if matches(full, name)})
    rest = [name for name in wanted or () if not any(matches(full, name) for full in tensors)]
    missing = [name for name in rest if not any(matches(layer, name) for layer in layers)]
    taken = [name for name in rest if tensors and name.rpartition(".")[2] in TAKEN_BY_PEFT]
    if missing or taken:
        why = "no linear layer has this name" if missing else "peft takes this name for a part of the experts' tensors"
        raise RequestError(f"--lora_target_modules {(missing or taken)[0]}: {why}. The model has: {_known(model)}.")
    for name, value in (("lora_dropout", arguments.lora_dropout), ("lora_use_dora", arguments.lora_use_dora)):
        if experts and value:
            raise RequestError(
                f"--{name} {value}: peft has no such adapter for experts ({', '.join(experts)}). Drop it, or the "
                "experts from --lora_target_modules."
            )
    return rest, experts


def expert_tensors(model: Any) -> list[str]:
    """The full names of the tensors (experts, ...) that hold the matrices of experts."""
    mixture = mixture_of(model)
    found = mixture.modules.items() if mixture else ()
    return [
        f"{place}.{name}"
        for place, module in found
        for name, tensor in module.named_parameters(recurse=False)
        if len(getattr(tensor, "ds_shape", tensor.shape)) == 3
    ]


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's


def matches(full: str, wanted: str) -> bool:
    return full == wanted or full.endswith(f".{wanted}")


def _linear_names(model: Any) -> list[str]:
    """What all-linear means in a mixture: linear layers, without the head and those that peft takes for experts."""
    found = {name.rpartition(".")[2] for name, part in model.named_modules() if is_linear(part) and "." in name}
    return sorted(found - set(TAKEN_BY_PEFT))


def _known(model: Any) -> str:
    linear = Counter(name.rpartition(".")[2] for name, module in model.named_modules() if is_linear(module))
    there = ", ".join(f"{name} ({count})" for name, count in linear.most_common(MAX_SHOWN))
    experts = ", ".join(dict.fromkeys(map(_short, expert_tensors(model))))
    return f"{there}; of experts: {experts}" if experts else there


def _short(full: str) -> str:
    """model.layers.0.mlp.experts.down_proj as experts.down_proj."""
    return ".".join(full.split(".")[-2:])


MERGED_FOLDER = "merged"  # in the run folder
WITHOUT_NEW_HEAD = ("CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION")  # a pretrained head, or none at all
POOLER = "pooler"  # as in BERT; masked language models are pretrained without it


def check_adapter(run: Run, adapter: Path | None) -> list[str]:
    """Raises RequestError if the adapter flags do not fit the model. `adapter` is the adapter's folder if
    --model_name_or_path names one, else None; a YAML's lines yield to its settings, and the returned note names them.
    finetune.run.conflicts covers what the flags alone show."""
    if adapter is None:
        return []
    if importlib.util.find_spec("peft") is None:
        raise RequestError(f"{run.said('model_name_or_path')}, an adapter, which needs peft. pip install peft.")
    if run.value("do_train") and not run.value("use_peft"):
        raise RequestError(
            f"{run.said('model_name_or_path')}, which is an adapter. Add --use_peft True to train it further; to train "
            f"all weights, merge them first: finetune export {adapter} OUT --merge_adapter."
        )
    return [f"note: {text}" for text in left_to_adapter(run)]


def check_expert_adapter(model: Any) -> None:
    """Raises RequestError if an adapter is on experts' tensors, which peft 0.21 replaces for each forward pass
    (tuners/lora/layer.py, ParamWrapper): where weights are sharded, it would find empty ones."""
    for config in getattr(model, "peft_config", {}).values():
        if experts := getattr(config, "target_parameters", None):
            raise RequestError(
                f"an adapter on {', '.join(sorted(experts))}, but ZeRO-3 and FSDP shard weights, and peft replaces the "
                "experts' tensors as a whole. Use zero2, zero1 or no DeepSpeed, or adapt linear layers only."
            )


def kept_as(run: Run, adapter: Path | None, bf16: bool) -> Kept:
    """How the named model's weights are stored, in a run that computes in bf16 or not."""
    in_4bit = bool(run.value("use_peft") and run.value("load_in_4bit"))
    return Kept(base_dtype(run, bf16, adapter is not None), in_4bit, run.value("bnb_4bit_use_double_quant"))


def with_adapter(model: Any, arguments: AdapterArguments, adapter: Path | None, task: str) -> Any:
    """`model` with the adapter from a folder, or with a new one under --use_peft; else itself, with what no text
    reaches frozen. `task` is peft's TaskType. Raises RequestError."""
    if adapter is not None:
        model = _opened(model, adapter, arguments.use_peft)
    elif arguments.use_peft:
        model = _new(model, arguments, task)
    else:
        return freeze_unread(model)
    for config in model.peft_config.values():
        base = Path(config.base_model_name_or_path or "").expanduser()
        if config.base_model_name_or_path and base.is_dir():
            # From another folder, a relative path would name another model, or a stranger's on the hub.
            config.base_model_name_or_path = str(base.absolute())
    for weight in model.parameters():  # peft leaves a copied module in its base's dtype
        if weight.requires_grad and weight.dtype in (torch.bfloat16, torch.float16) and not hasattr(weight, "ds_id"):
            weight.data = weight.data.float()
    return model


def open_trained(found: Named, auto: str, mend: str) -> Any:
    """A trained model as transformers' class `auto`, in fp32 and evaluation mode, on the CPU, with its adapter, if any.
    Its folder may be untrusted. Raises RequestError, with `mend` if there is none."""
    for module in OWN_MODELS:
        importlib.import_module(f"finetune.models.{module}")
    arguments = ModelArguments(model_name_or_path=found.base)
    config = from_pretrained(transformers.AutoConfig, found.flag, found.base, arguments, mend)
    config, kind = with_labels(config, found.adapter), getattr(transformers, auto)
    makes_head = found.adapter is not None
    model = load_weights(kind, found.place, config, arguments, flag=found.flag, has_new_head=makes_head)
    return with_adapter(model, AdapterArguments(), found.adapter, "").eval()


def _opened(model: Any, adapter: Path, is_trainable: bool) -> Any:
    from peft import PeftModel

    ends = _stored_ends(adapter)
    if ends is not None and getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = ends
    try:
        return PeftModel.from_pretrained(model, str(adapter), is_trainable=is_trainable)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a folder made to break it can raise
        raise RequestError(
            f"--model_name_or_path {adapter}: does not fit its base model ({plain(first_line(error, 300))})."
        ) from error


def _new(model: Any, arguments: AdapterArguments, task: str) -> Any:
    """`model` with LoRA on linear layers, and on the experts that are named; only the LoRA weights and a classifier's
    head are trained. Raises RequestError if no layer matches."""
    from peft import LoraConfig, get_peft_model

    linear, experts = targets_of(model, arguments)
    config = LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=linear,
        target_parameters=experts or None,
        exclude_modules=_unread(model, task) or None,
        modules_to_save=saved_modules(model, arguments, task) or None,
        use_dora=arguments.lora_use_dora,
        use_rslora=arguments.lora_use_rslora,
        task_type=task,
    )
    return get_peft_model(model, config)


def _unread(model: Any, task: str) -> list[str]:
    """Linear layers that no loss depends on: an adapter there would get no gradient, and DDP would fail."""
    aside = {name.rpartition(".")[0] for name in unread(model)}
    poolers = (POOLER,) if task == "FEATURE_EXTRACTION" else ()
    linear = (name for name, module in model.named_modules() if is_linear(module))
    return [name for name in linear if name in aside or name.partition(".")[0] in poolers]


def saved_modules(model: Any, arguments: AdapterArguments, task: str) -> list[str]:
    """The modules to train in full. Raises RequestError for an unknown name and for tied weights."""
    asked = arguments.lora_modules_to_save or []
    both = (model.get_input_embeddings(), model.get_output_embeddings()) if asked else ()
    ends = [part for part in both if part is not None]
    is_tied = len(ends) > 1 and ends[0].weight is ends[1].weight
    for name in asked:
        found = [module for full, module in model.named_modules() if matches(full, name)]
        if not found:
            names = [name for name, _ in model.named_modules() if name and name.count(".") < 2]
            there = ", ".join(names[:MAX_SHOWN])
            raise RequestError(f"--lora_modules_to_save {name}: no module has this name. The model has: {there}.")
        if is_tied and any(module is end for module in found for end in ends):
            raise RequestError(
                f"--lora_modules_to_save {name}: this model's embeddings and head are one tensor, and only one of them "
                "would get the trained copy. Leave it out."
            )
    return list(dict.fromkeys([*asked, *(() if task in WITHOUT_NEW_HEAD else heads_of(model))]))


def heads_of(model: Any) -> list[str]:
    """The modules of a classifier that its pretrained base may lack."""
    own = [name for name, part in model.named_children() if next(part.parameters(), None) is not None]
    base = getattr(model, model.base_model_prefix, model)
    poolers = [] if getattr(base, POOLER, None) is None else [POOLER]
    return [name for name in own if name != model.base_model_prefix] + poolers


def labels_of(model: Any) -> dict[str, Any] | None:
    """The label settings to store beside a classifier's adapter; None for other models. They are absent from the base's
    config, and transformers treats an adapter with a config.json as a whole model (models/auto/auto_factory.py)."""
    if not hasattr(model, "peft_config") or model.active_peft_config.task_type in WITHOUT_NEW_HEAD:
        return None
    known = {name: value for name, value in model.config.to_dict().items() if name in OF_LABELS}
    return {**known, "architectures": [type(model.get_base_model()).__name__]}


def ends_of(model: Any) -> list[int] | None:
    """The tokens to store beside an adapter, at which its answers end: training may have added those of a chat template
    to the base's. None for other models, and where there is only the base's."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return ends if hasattr(model, "peft_config") and isinstance(ends, list) else None


def _stored_ends(adapter: Path) -> list[int] | None:
    file = adapter / GENERATION_CONFIG
    ends = read_json_object(file, inside=adapter).get("eos_token_id") if file.is_file() else None
    return ends if isinstance(ends, list) and all(isinstance(one, int) for one in ends) else None


def write_merged(folder: Path, build: Callable[[], Any], tokenizer: Any) -> Path:
    """Write the full model, with the adapter of `folder` merged into its weights; read from disk, so it works under any
    ZeRO stage. `build` returns the base in fp32.

    Call it on one rank, at the end: afterwards, models are no longer sharded as they are built.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    merged = _opened(build(), folder, is_trainable=False).merge_and_unload()
    merged.save_pretrained(str(folder / MERGED_FOLDER))
    tokenizer.save_pretrained(str(folder / MERGED_FOLDER))
    return folder / MERGED_FOLDER
