"""What models and the meters of memory take of transformers, torch, bitsandbytes, and of Python."""

from __future__ import annotations

from conftest import REPO
from upstream.row import Row

MODEL = "transformers.modeling_utils:PreTrainedModel."
GPTLITE, ALEXNET, LAYERED = "models/gptlite.py", "models/alexnet.py", "models/pipeline.py"
# Ours, theirs, what it says, and the method that must go on asking.
OF_A_MODEL = (
    (GPTLITE, "_no_split_modules", "a block stays on one device, and is what FSDP wraps", "post_init"),
    (ALEXNET, "_no_split_modules", "a block stays on one device, and is what FSDP wraps", "post_init"),
    (GPTLITE, "_skip_keys_device_placement", "the cache lies with its layer", "post_init"),
    (GPTLITE, "_supports_flash_attn", "attention goes through ALL_ATTENTION_FUNCTIONS", "_flash_attn_can_dispatch"),
    (GPTLITE, "_supports_sdpa", "attention goes through ALL_ATTENTION_FUNCTIONS", "_sdpa_can_dispatch"),
    (LAYERED, "_supports_sdpa", "it has no attention, and the default is asked for", "_sdpa_can_dispatch"),
    (GPTLITE, "_supports_flex_attn", "attention goes through ALL_ATTENTION_FUNCTIONS", "_flex_attn_can_dispatch"),
    (GPTLITE, "_supports_attention_backend", "any attention function serves", "is_backend_compatible"),
    (GPTLITE, "_can_record_outputs", "routers' logits are recorded", "__init__"),
    (GPTLITE, "_tied_weights_keys", "the head is the embedding", "get_expanded_tied_weights_keys"),
)
WRITTEN = ("models/causal.py", "models/probes.py")

MODELS = (
    Row(
        "models/source.py",
        "transformers.core_model_loading:convert_and_load_state_dict_in_model._weight_conversions",
        "write",
        "a BERT that was loaded under ZeRO-3 is saved by its own names",
        "integrations/deepspeed.py, _load_state_dict_into_zero3_model: keeps renamings that no file needed",
        "it keeps those alone that were used, as core_model_loading.py does",
        called_from=("transformers.core_model_loading:revert_weight_conversion",),
    ),
    Row(
        "training/saving.py",
        "transformers.core_model_loading:convert_and_load_state_dict_in_model._weight_conversions",
        "write",
        "a checkpoint has the names that the model trains, by which it is loaded again",
        "trainer.py, _load_from_checkpoint: takes weights by their names, and warns of those that it does not find",
        "the Trainer loads a checkpoint as from_pretrained does",
        called_from=("transformers.core_model_loading:revert_weight_conversion",),
    ),
    *(
        Row(
            where,
            MODEL + name,
            "override",
            why,
            "modeling_utils.py",
            "a public name",
            "",
            (MODEL + by,),
        )
        for where, name, why, by in OF_A_MODEL
    ),
    *(
        Row(
            where,
            f"{MODEL}_init_weights",
            "override",
            "how a model draws its weights",
            "modeling_utils.py: the one way to say it",
            "a public name",
            "self, module",
            (f"{MODEL}_initialize_weights",),
        )
        for where in (GPTLITE, LAYERED)
    ),
    *(
        Row(
            where,
            "transformers.configuration_utils:PreTrainedConfig._attn_implementation",
            "write" if where in WRITTEN else "read",
            why,
            "configuration_utils.py: attn_implementation is an argument, and there is no public attribute",
            "a public attribute",
        )
        for where, why in (
            ("models/causal.py", "a config is settled before its model is built"),
            ("models/probes.py", "which masks and functions the attention takes, and a small copy attends alike"),
            (GPTLITE, "which function attends"),
            ("training/sequence_parallel.py", "which function is exchanged around"),
            ("training/chapters.py", "whether a model attends by SDPA, before that is replaced"),
        )
    ),
    Row(
        "models/composite.py",
        "transformers.models.auto.auto_factory:_BaseAutoModelClass._model_mapping",
        "read",
        "whether a class opens a model, before its weights are asked for",
        "models/auto/auto_factory.py, from_pretrained: a ValueError that lists all architectures",
        "a public question for it",
        called_from=("transformers.models.auto.auto_factory:_BaseAutoModelClass.from_pretrained",),
    ),
    Row(
        "training/saving.py",
        MODEL + "_keys_to_ignore_on_save",
        "read",
        "weights that are made anew, not saved, are not missing from a final model",
        "modeling_utils.py, save_pretrained",
        "a public name",
        called_from=(MODEL + "save_pretrained",),
    ),
    Row(
        "training/runtime.py",
        MODEL + "_no_split_modules",
        "read",
        "which modules FSDP shards as groups",
        "accelerate 1.15, utils/dataclasses.py, set_auto_wrap_policy, reads it too",
        "accelerate passes by embeddings that a group has already",
    ),
    Row(
        "models/batch_norm.py",
        "torch.nn.modules.batchnorm:_BatchNorm",
        "read",
        "the one class that all batch norms are of",
        "torch/nn/modules/batchnorm.py",
        "a public name for it",
    ),
    Row(
        "models/source.py",
        "bitsandbytes.nn.modules:Linear4bit.support_avx512bf16_for_cpu",
        "write",
        "weights stay trainable after an evaluation on a CPU",
        "autograd/_functions.py, matmul_4bit: packs weights for a kernel without a backward",
        "packing undone on train(), or a kernel with a backward",
        called_from=("bitsandbytes.nn.modules:Linear4bit.forward",),
    ),
)

MEMORY = (
    *(
        Row(
            where,
            "torch.storage:UntypedStorage._cdata",
            "read",
            "which tensors share a storage",
            "torch/storage.py; data_ptr is 0 for all that are empty or on meta",
            "a public identity of storages",
        )
        for where in ("measure/memory.py", "measure/recording.py", "bench/meter.py")
    ),
    Row(
        "measure/recording.py",
        "torch._C:_FunctionBase._raw_saved_tensors",
        "read",
        "what a model's own function has saved is freed when it has run backward",
        "torch/csrc/autograd/python_function.cpp",
        "a public name",
    ),
    Row(
        "measure/recording.py",
        "torch:Tensor._base",
        "read",
        "what is written into a part is read of the whole",
        "torch/csrc/autograd/python_variable.cpp, THPVariable_get_base",
        "a public name",
    ),
    *(
        Row(
            where,
            "torch.autograd.graph:Node._sequence_nr",
            "read",
            "a model's own functions are in the order of their calls",
            "torch/autograd/graph.py, Node",
            "a public name",
        )
        for where in ("measure/recording.py", "measure/own_functions.py")
    ),
    *(
        Row(
            where,
            name,
            "read",
            "every operator passes by, those that torch has in Python as well",
            "torch/utils/_python_dispatch.py: documented only in notes",
            "public names",
        )
        for where in ("measure/recording.py", "measure/memory.py")
        for name in (
            "torch.utils._python_dispatch:TorchDispatchMode",
            "torch.utils._pytree:tree_iter",
        )
    ),
    Row(
        "safe_read/stand_ins.py",
        "torch:_storage_classes",
        "read",
        "names of storages that a pickle may hold",
        "torch/__init__.py",
        "torch.serialization tells which names are safe",
    ),
)

STANDARD_LIBRARY = (
    Row(
        "safe_read/pickles.py",
        "pickle:_Unpickler",
        "call",
        "the unpickler in C makes a memo as large as its largest index: five bytes are 64 GiB",
        "Modules/_pickle.c, _Unpickler_MemoPut",
        "a bound on the memo",
        "file, fix_imports=, encoding=, errors=, buffers=",
    ),
    Row(
        "run/command_line.py",
        "argparse:ArgumentParser._actions",
        "read",
        "all flags, to name the nearest",
        "argparse.py: no public list of arguments",
        "a public list",
    ),
)

METRIC = "evaluate.module:EvaluationModule."
METRIC_FILES = tuple(sorted(path.stem for path in (REPO / "finetune/metrics").glob("[a-z]*.py")))
METRICS = tuple(
    Row(
        f"metrics/{file}.py",
        METRIC + name,
        "override",
        why,
        "evaluate/module.py: the documented way to write a metric",
        "a public name",
        signature,
        (METRIC + by,),
    )
    for file in METRIC_FILES
    for name, why, signature, by in (
        ("_info", "what the metric is, and its features", "self", "__init__"),
        ("_compute", "the figures", "self, predictions=, references=, **kwargs", "compute"),
    )
)

ROWS = (*MODELS, *METRICS, *MEMORY, *STANDARD_LIBRARY)
