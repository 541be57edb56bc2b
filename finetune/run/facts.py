"""What follows once a run's model and machine are known: tokens, precision, activation checkpointing, the chunked loss.
Recipes train with these values, and `finetune plan` computes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.run.files import ADAPTER_CONFIG
from finetune.run.flags.adapter import OF_NEW_ADAPTERS, PURE
from finetune.run.flags.groups import of_text
from finetune.run.flags.language import LEAST_BLOCK
from finetune.run.flags.text import LEAST_TOKENS
from finetune.run.parse import COMMAND_LINE
from finetune.run.run import Run
from finetune.run.sizes import causal_shape
from finetune.safe_read import read_json_object

NO_LIMIT = 10**9
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")  # the last is MPT's, of its biases by distance
# The flag that sets how many tokens a sample has: the largest default, the minimum, and why no less.
TOKENS = {
    "max_seq_length": (512, LEAST_TOKENS, "which leaves no room for text"),
    "block_size": (1024, LEAST_BLOCK, "and there is nothing to predict"),
    "max_source_length": (512, LEAST_BLOCK, "which leaves no room for text"),
    "max_target_length": (128, LEAST_BLOCK, "which leaves no room for text"),
}
# RoBERTa's family reserves two positions (padding_idx + 1).
RESERVED = dict.fromkeys(("roberta", "xlm-roberta", "camembert", "longformer"), 2)
OF_DTYPE = {"bfloat16": "bf16", PURE: "bf16", "float16": "fp16", "float32": "fp32"}  # --dtype -> precision
LEAST_SIDE, MOST_SIDE = 32, 224  # pixels of images for a model from scratch, unless --image_size says otherwise
# Rows of logits at a time. On two CPU cores 512 rows were fastest at a vocabulary of 50,304 (3.3 s against 16 s with
# torch's own choice); on a GPU a chunk should hold enough rows to fill it.
CHUNK_TOKENS = {"cpu": 512, "cuda": 2048}
SCORED_PARTS = 4  # of such a chunk, whose logits in fp32 exist one after the other
SHORT_TOKENS = 256  # samples up to here attend faster without torch's fused kernel, in bf16 on a CPU
LARGE_VOCABULARY = 8_192  # below this, logits are small compared to activations, and plain cross entropy is faster


def positions_of(read: Callable[[str], Any]) -> int:
    """How many tokens a model can read; `read` returns the values of its config by name, None for missing ones. T5's
    positions are relative and unlimited; its config's n_positions only describes its training."""
    if read("relative_attention_num_buckets") and read("is_encoder_decoder"):
        return NO_LIMIT
    read = of_text(read)
    positions = next(filter(None, map(read, POSITIONS)), None)
    return int(positions) - RESERVED.get(str(read("model_type")), 0) if positions else NO_LIMIT


def tokens_flag(run: Run) -> str | None:
    """The flag in `TOKENS` that the run's recipe has; None if samples are not text."""
    return next((name for name in TOKENS if name in run.recipe.flags), None)


def check_scratch(run: Run) -> None:
    """Raises RequestError for an impossible model from scratch, or one that reads fewer tokens than are asked for."""
    flag = tokens_flag(run)
    if flag is None or run.value("model_name_or_path"):
        return
    asked, positions, otherwise = run.value(flag), NO_LIMIT, "."  # an encoder from scratch has as many as requested
    if flag == "block_size":
        said = f"--config_overrides ({run.source('config_overrides')})"
        shape = causal_shape(run.value("model_size"), run.value("config_overrides"), said)
        positions = int(shape["max_position_embeddings"])
        otherwise = f", or more by --config_overrides max_position_embeddings={asked}."
    tokens_of(flag, asked, positions, otherwise=otherwise, source=f" ({run.source(flag)})")


def tokens_of(
    flag: str, asked: int | None, positions: int, most: int = NO_LIMIT, otherwise: str = ".", source: str = ""
) -> int:
    """Maximum tokens of a sample: as `asked` for by `flag`, else what the model reads, up to a default. `most` is the
    tokenizer's own limit, `otherwise` the end of the error for more than the model reads. Raises RequestError."""
    default, least, why = TOKENS[flag]
    length = min(positions, default, most) if asked is None else asked
    if length > positions:
        raise RequestError(
            f"--{flag} is {length}{source}, but the model has {positions} positions. Give at most those{otherwise}"
        )
    if length < least:
        raise RequestError(f"--{flag} is {length}{source}, {why}. Give {least} or more.")
    return length


def loss_chunk_tokens(asked: int | None, vocab_size: int, device: str) -> int:
    """How many rows of logits a causal language model's loss is computed on at a time; 0 for all at once. `device` is
    "cpu" or "cuda"."""
    if asked is None and vocab_size >= LARGE_VOCABULARY:
        return CHUNK_TOKENS.get(device, CHUNK_TOKENS["cuda"])
    return asked or 0


def mixes_attention(run: Run, device: str, precision: str) -> bool:
    """Whether to attend without SDPA where that is faster (models/short_attention.py). `precision`: "bf16",
    "fp16" or "fp32". Sequence parallelism needs SDPA; pipelines, teachers and reference models keep it."""
    keeps = run.value("attn_implementation") or run.sequence_parallel_size > 1 or run.stages is not None
    others = run.value("teacher") or "reference" in run.recipe.flags
    return device == "cpu" and precision == "bf16" and not keeps and not others


def refuse_fp16_on_cpu(run: Run, trains: bool) -> None:
    """Raises RequestError for weights in fp16 or, if it `trains` so, mixed precision: accelerate would run fp32."""
    if run.value("dtype") == "float16":
        raise RequestError(f"{run.said('dtype')}, which is for GPUs without bf16. Give bfloat16 or float32 on a CPU.")
    if trains:
        raise RequestError(
            "fp16 is on (--fp16, or accelerate's mixed_precision), but there is no GPU, and fp16 does not train on a "
            "CPU. Drop it."
        )


def precision_flags(
    run: Run, stated: Mapping[str, bool], fastest: Callable[[], str], by_deepspeed: bool
) -> dict[str, bool]:
    """The Trainer's `bf16` and `fp16`: as given by flag, or `stated` in the DeepSpeed config, or as --dtype implies, or
    the `fastest` that trains well, "bf16", "fp16" or "fp32". Raises RequestError if --dtype does not match the
    precision that the run computes in."""
    asked = {name: run.given[name] for name in ("bf16", "fp16") if name in run.given} or stated
    implied = OF_DTYPE.get(str(run.value("dtype")))
    if implied == "fp32" and not (by_deepspeed and run.value("use_peft")):
        implied = None  # a run can compute in any precision with fp32 weights
    best = implied or ("" if asked else fastest())
    found = {"bf16": best == "bf16", "fp16": best == "fp16"}
    if not asked:
        return found
    flags = {"bf16": False, "fp16": False} | {name: bool(value) for name, value in asked.items()}
    if implied and flags != found:
        here = next((name for name, value in flags.items() if value), "fp32")
        why = "DeepSpeed keeps weights in that precision" if by_deepspeed else "such weights need the same precision"
        raise RequestError(f"{run.said('dtype')}, but the run computes in {here}: {why}. Drop one of them.")
    return flags


def left_to_adapter(run: Run) -> list[str]:
    """For a run that names an adapter: which settings of new adapters it was given, as a note if they are a YAML's.
    Raises RequestError if they are on the command line."""
    given = [name for name in OF_NEW_ADAPTERS if name in run.given]
    if told := next((name for name in given if run.source(name) == COMMAND_LINE), None):
        raise RequestError(f"{run.said(told)}, but the adapter in --model_name_or_path sets its own. Drop it.")
    said = f"{', '.join(given)} of --config {run.value('config')}"
    return [f"{said} do not apply: the adapter in --model_name_or_path has its own"] * bool(given)


def check_sharded(run: Run) -> None:
    """For a run under ZeRO-3 or FSDP. Raises RequestError for an adapter that needs unsharded base weights."""
    whole = {
        "load_in_4bit": "quantized weights would be split without the scales that belong to them",
        "lora_use_dora": "it reads each frozen weight after its layer has released it",
        "model_name_or_path": "its adapter, DoRA, reads each frozen weight after its layer has released it",
    }
    folder = Path(str(run.value("model_name_or_path"))).expanduser()
    known = read_json_object(folder / ADAPTER_CONFIG, inside=folder) if (folder / ADAPTER_CONFIG).is_file() else {}
    for name, why in whole.items():
        if run.value("use_peft") and (known.get("use_dora") if name == "model_name_or_path" else run.value(name)):
            raise RequestError(
                f"{run.said(name)}, but ZeRO-3 and FSDP shard weights: {why}. Use zero2, zero1 or no DeepSpeed, or "
                "leave it out."
            )


def base_dtype(run: Run, bf16: bool, has_adapter: bool = False) -> str:
    """The dtype to load a named model's weights in: "bfloat16", "float16" or "float32". Trained weights are in fp32
    unless another dtype is asked for (`optimizer.dtype_mistakes`). `has_adapter`: the named model is an adapter."""
    asked = "bfloat16" if run.value("dtype") == PURE else str(run.value("dtype") or "auto")
    if asked != "auto":
        return asked
    return "bfloat16" if bf16 and (run.value("use_peft") or has_adapter) else "float32"


def checkpointing_kwargs(run: Run) -> dict[str, Any] | None:
    """The Trainer's `activation_checkpointing_kwargs`, given under this or its older name, or by
    --activation_checkpoint_interval; None if activations are not recomputed."""
    interval = run.value("activation_checkpoint_interval")
    if not (interval or run.value("activation_checkpointing") or run.value("gradient_checkpointing")):
        return None
    given = run.value("activation_checkpointing_kwargs") or run.value("gradient_checkpointing_kwargs") or {}
    return {**given, "every_n_layers": interval} if interval else dict(given)


def object_of(run: Run, name: str) -> dict[str, Any] | None:
    """The value of a flag that takes an object, or the file that holds it. Raises RequestError."""
    value = run.value(name)
    return read_json_object(Path(value).expanduser()) if isinstance(value, str) else value


def checkpoint_interval(run: Run) -> int:
    """Activations are recomputed for every N-th layer; 0 for none."""
    kwargs = checkpointing_kwargs(run)
    return 0 if kwargs is None else int(kwargs.get("every_n_layers", 1))


def checkpoints_on_host(run: Run) -> bool:
    """Whether recomputed layers keep their inputs in host memory (transformers 5.23, modeling_utils.py,
    activation_checkpointing_enable)."""
    return bool((checkpointing_kwargs(run) or {}).get("offload"))


def check_offloaded(run: Run) -> None:
    """Raises RequestError on a machine without a GPU: torch 2.13 tries to pin the memory that it copies to, and fails
    (autograd/graph.py, save_on_cpu with device_type "cpu")."""
    if checkpoints_on_host(run) and run.value("do_train"):
        flags = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
        said = run.said(next(name for name in flags if run.value(name)))
        raise RequestError(f"{said}: offload needs a GPU; on a CPU activations are in host memory anyway. Drop it.")


def eval_batch_of(run: Run) -> int:
    """Evaluation samples per rank and batch; 0 for a run without evaluation."""
    return int(run.value("per_device_eval_batch_size")) if run.value("do_eval") or run.value("do_predict") else 0
