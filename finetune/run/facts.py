"""What a run comes to once its model and its machine are known: tokens, precision, recomputing, the loss in chunks.
Recipes train by these functions, and `finetune plan` counts by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.run.flags.adapter import PURE
from finetune.run.flags.language import LEAST_BLOCK
from finetune.run.flags.text import LEAST_TOKENS
from finetune.run.run import Run
from finetune.run.sizes import gptlite_shape
from finetune.safe_read import read_json_object

NO_LIMIT = 10**9
# The flag that says how many tokens a sample has: the most that a recipe takes unasked, the least, and why no less.
TOKENS = {
    "max_seq_length": (512, LEAST_TOKENS, "which leaves no room for text"),
    "block_size": (1024, LEAST_BLOCK, "and there is nothing to predict"),
    "max_source_length": (512, LEAST_BLOCK, "which leaves no room for text"),
    "max_target_length": (128, LEAST_BLOCK, "which leaves no room for text"),
}
# RoBERTa's family keeps two positions for itself (padding_idx + 1).
RESERVED = dict.fromkeys(("roberta", "xlm-roberta", "camembert", "longformer"), 2)
OF_DTYPE = {"bfloat16": "bf16", PURE: "bf16", "float16": "fp16", "float32": "fp32"}  # of --dtype, the precision
LEAST_SIDE, MOST_SIDE = 32, 224  # pixels of pictures for a model from scratch, unless --image_size says otherwise
# Rows of logits at a time. On two CPU cores 512 rows were fastest at a vocabulary of 50,304 (3.3 s against 16 s with
# torch's own choice); on a GPU a chunk should hold enough rows to fill it.
CHUNK_TOKENS = {"cpu": 512, "cuda": 2048}
LARGE_VOCABULARY = 8_192  # below, all logits are small beside the activations, and plain cross entropy is faster


def positions_of(read: Callable[[str], Any]) -> int:
    """How many tokens a model can read; `read` gives the values of its config by name, None for what is not there. A T5
    has positions that are relative, and no last one, whatever its config's n_positions says of its training."""
    if read("relative_attention_num_buckets") and read("is_encoder_decoder"):
        return NO_LIMIT
    positions = read("max_position_embeddings") or read("n_positions")
    return int(positions) - RESERVED.get(str(read("model_type")), 0) if positions else NO_LIMIT


def tokens_flag(run: Run) -> str | None:
    """The one of `TOKENS` that the run's recipe has; None where samples are no text."""
    return next((name for name in TOKENS if name in run.recipe.flags), None)


def check_scratch(run: Run) -> None:
    """Raises RequestError for a model from scratch that cannot be, or that reads fewer tokens than are asked for."""
    flag = tokens_flag(run)
    if flag is None or run.value("model_name_or_path"):
        return
    asked, positions, otherwise = run.value(flag), NO_LIMIT, "."  # an encoder from scratch has as many as are asked for
    if flag == "block_size":
        said = f"--config_overrides ({run.source('config_overrides')})"
        shape = gptlite_shape(run.value("model_size"), run.value("config_overrides"), said)
        positions = int(shape["max_position_embeddings"])
        otherwise = f", or more by --config_overrides max_position_embeddings={asked}."
    tokens_of(flag, asked, positions, otherwise=otherwise, source=f" ({run.source(flag)})")


def tokens_of(
    flag: str, asked: int | None, positions: int, most: int = NO_LIMIT, otherwise: str = ".", source: str = ""
) -> int:
    """Tokens of a sample, at most: as `asked` for by `flag`, else what the model reads within reason. `most` is what
    its tokenizer makes unasked, `otherwise` the end of the error for more than the model reads. Raises RequestError."""
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
    """Rows of logits at a time that a causal language model's loss is to be computed in; 0 for all at once. `device` is
    "cpu" or "cuda"."""
    if asked is None and vocab_size >= LARGE_VOCABULARY:
        return CHUNK_TOKENS.get(device, CHUNK_TOKENS["cuda"])
    return asked or 0


def precision_flags(
    run: Run, stated: Mapping[str, bool], fastest: Callable[[], str], by_deepspeed: bool
) -> dict[str, bool]:
    """The Trainer's `bf16` and `fp16`: as asked for by flag, or `stated` in the DeepSpeed config, or as --dtype has it,
    or the `fastest` that trains well, "bf16", "fp16" or "fp32". Raises RequestError where --dtype is of another
    precision than the run computes in."""
    asked = {name: run.given[name] for name in ("bf16", "fp16") if name in run.given} or stated
    implied = OF_DTYPE.get(str(run.value("dtype")))
    if implied == "fp32" and not (by_deepspeed and run.value("use_peft")):
        implied = None  # weights in fp32 are computed with in any precision
    best = implied or ("" if asked else fastest())
    found = {"bf16": best == "bf16", "fp16": best == "fp16"}
    if not asked:
        return found
    flags = {"bf16": False, "fp16": False} | {name: bool(value) for name, value in asked.items()}
    if implied and flags != found:
        here = next((name for name, value in flags.items() if value), "fp32")
        why = "DeepSpeed keeps weights as it computes with them" if by_deepspeed else "such weights are for such a run"
        raise RequestError(f"{run.said('dtype')}, but the run computes in {here}: {why}. Drop one of them.")
    return flags


def check_sharded(run: Run) -> None:
    """Of a run under ZeRO-3 or FSDP. Raises RequestError for an adapter that needs its base's weights whole."""
    whole = {
        "load_in_4bit": "packed weights would be cut into pieces without the scales that belong to them",
        "lora_use_dora": "it reads each frozen weight when its layer has handed it back",
    }
    for name, why in whole.items():
        if run.value("use_peft") and run.value(name):
            raise RequestError(
                f"{run.said(name)}, but ZeRO-3 and FSDP shard weights: {why}. Use zero2, zero1 or no DeepSpeed, or "
                "leave it out."
            )


def base_dtype(run: Run, bf16: bool, has_adapter: bool = False) -> str:
    """What the weights of a named model are loaded as: "bfloat16", "float16" or "float32". Those that are trained are
    in fp32 unless another is asked for (`optimizer.dtype_mistakes`). `has_adapter`: what is named is one."""
    asked = "bfloat16" if run.value("dtype") == PURE else str(run.value("dtype") or "auto")
    if asked != "auto":
        return asked
    return "bfloat16" if bf16 and (run.value("use_peft") or has_adapter) else "float32"


def checkpointing_kwargs(run: Run) -> dict[str, Any] | None:
    """The Trainer's `activation_checkpointing_kwargs`, asked for by this or its older name, or by
    --activation_checkpoint_interval; None where no activation is computed again."""
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
    """Every how many layers activations are computed again; 0 for none."""
    kwargs = checkpointing_kwargs(run)
    return 0 if kwargs is None else int(kwargs.get("every_n_layers", 1))


def eval_batch_of(run: Run) -> int:
    """Samples a rank of an evaluation; 0 for a run without one."""
    return int(run.value("per_device_eval_batch_size")) if run.value("do_eval") or run.value("do_predict") else 0
