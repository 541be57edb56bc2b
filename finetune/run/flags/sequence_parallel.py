"""The flags of long texts, sequence parallelism and tiled MLPs, and their checks before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.errors import RequestError
from finetune.run.flag import AT_LEAST_ONE, NOT_NEGATIVE, flag
from finetune.run.flags.groups import (
    drop_one,
    experts_in,
    group_faults_here,
    of_text,
    shape_shown,
    size_faults,
    size_to_give,
)
from finetune.run.on_resume import GOES_ON

if TYPE_CHECKING:
    from finetune.run.run import Run

# Implementations that compute causal attention over a whole sequence without a mask; deepspeed 0.19.8 (ulysses_sp.py)
# and accelerate 1.15 (DeepSpeedSequenceParallelConfig) accept them. Accelerate does not accept flex_attention either.
ATTENTIONS = ("sdpa", "flash_attention_2", "flash_attention_3")
# Flags that require ranks to read whole rows, or the model to be called with whole rows.
REFUSED = {
    "accelerator_config": "it distributes rows over ranks, but here some ranks read the same rows",
    "auto_find_batch_size": "the exchange between ranks is made for one micro-batch",
    "fsdp": "sequence parallelism is DeepSpeed's",
    "label_smoothing_factor": "the Trainer would shift labels that are already shifted",
    "neftune_noise_alpha": "its noise depends on how many tokens a rank has",
    "streaming": "a stream is distributed over all ranks, but here some ranks read the same rows",
    "teacher": "a teacher would see only a part of each text",
    "torch_compile": "compiled exchanges are untested here",
    "use_liger_kernel": "its loss is untested with parts of a text; --loss_chunk_tokens saves the same memory",
}
# Flags with which a tiled MLP would not be called as it is, or not with whole gradients.
NOT_TILED = {
    "fsdp": "its gradients would be reduced after the first part",
    "torch_compile": "compiled tiles are untested here",
    "use_liger_kernel": "it replaces the MLPs",
    "auto_find_batch_size": "it is untested with tiles",
}
OF_EXPERTS = "a part of the tokens of a mixture may not reach every expert"
OF_DROPOUT = "its MLPs have dropout, which the backward pass would draw again"
FULL, SLIDING = "full_attention", "sliding_attention"
# Keys of configs of state-space and linear attention layers: Mamba, Jamba, other hybrids, Qwen3-Next, RecurrentGemma.
OF_STATES = ("mamba_d_state", "state_size", "ssm_state_size", "linear_conv_kernel_dim", "lru_width")


@dataclass
class SequenceParallelArguments:
    """How a text is distributed over ranks (docs/long_context.md)."""

    sequence_parallel_size: int = flag(
        1,
        "ranks that share each text (DeepSpeed's Ulysses); the number of ranks must be a multiple of it",
        GOES_ON,
        range=AT_LEAST_ONE,
    )


@dataclass
class TileArguments:
    """What is computed on a part of the tokens at a time."""

    tiled_mlp_num_shards: int = flag(
        0,
        "compute each MLP on so many parts of the tokens in turn, and again in the backward pass (DeepSpeed's "
        "TiledMLP); 0: on all at once",
        GOES_ON,
        range=NOT_NEGATIVE,
    )


def sequence_faults(run: Run) -> Iterator[str]:
    """Errors that show in the flags alone."""
    if run.value("tiled_mlp_num_shards"):
        yield from drop_one(run, "tiled_mlp_num_shards", NOT_TILED)
    size, said = run.sequence_parallel_size, run.said("sequence_parallel_size")
    if size == 1:
        return
    yield from size_faults(run, "sequence_parallel_size", splits_heads)
    if (block := run.value("block_size")) and block % size:
        yield f"{said}, which does not divide {run.said('block_size')[2:]}: ranks must get equal parts. Change one."
    if run.value("attn_implementation") not in (None, *ATTENTIONS):
        shown = run.said("attn_implementation")
        yield f"{shown}, which --sequence_parallel_size does not support. Use one of {', '.join(ATTENTIONS)}."
    if run.value("average_tokens_across_devices") is False:
        shown = run.said("average_tokens_across_devices")
        yield f"{shown}, but {said}: a rank would divide by the learnt tokens of its own part. Drop one of the two."
    yield from drop_one(run, "sequence_parallel_size", REFUSED)


def sequence_faults_here(run: Run, deepspeed: str | None) -> Iterator[str]:
    """Further errors in a run that is to start on this machine; `deepspeed` is its config, if any."""
    tiled = run.value("tiled_mlp_num_shards") and run.said("tiled_mlp_num_shards")
    if tiled and not run.value("do_train"):
        yield f"{tiled}, which tiles MLPs in training, but {run.said('do_train')}. Drop it."
    elif tiled and not deepspeed:
        yield f"{tiled}, which needs DeepSpeed, but this run does not use it. Add --deepspeed zero2, for instance."
    if run.sequence_parallel_size > 1:
        yield from group_faults_here(run, "sequence_parallel_size", "splits texts", deepspeed)


def look_at_heads(run: Run) -> None:
    """Raises RequestError if a folder's config.json, or a GPT-lite's shape, shows that its attention heads cannot be
    divided among the ranks."""
    if run.sequence_parallel_size > 1 and (shape := shape_shown(run)):
        check_heads(shape.get, run.sequence_parallel_size, run.value("block_size"), run.launch.world_size)


def look_at_mlps(run: Run) -> None:
    """Raises RequestError if a folder's config.json, or the shape of a model from scratch, shows that its MLPs cannot
    be computed in tiles. Once the model is built, `finetune.models.tiled_mlp` tries it."""
    shape = (shape_shown(run) if run.value("tiled_mlp_num_shards") else None) or {}
    drops = shape.get("model_type") == "gptlite" and shape.get("dropout")
    if why := OF_EXPERTS if experts_in(shape.get) else OF_DROPOUT if drops else None:
        raise RequestError(f"{run.said('tiled_mlp_num_shards')}: {why}. Drop it.")


def splits_heads(read: Callable[[str], Any]) -> Callable[[int], bool]:
    """The test of `size_faults`."""
    heads, keys = _heads(read)
    return lambda size: not heads % size and not (keys % size and size % keys)


def _heads(read: Callable[[str], Any]) -> tuple[int, int]:
    """Attention heads and key-value heads; 0 if unknown."""
    read = of_text(read)
    heads = read("num_attention_heads") or read("n_head")
    keys = read("num_key_value_heads") or heads
    return heads if isinstance(heads, int) else 0, keys if isinstance(keys, int) else 0


def check_heads(read: Callable[[str], Any], size: int, block: int | None, ranks: int = 1) -> None:
    """Raises RequestError if `size` of the `ranks` (1: unknown) cannot share a model's attention; `read` returns the
    values of its config by name, None for missing ones. Each rank computes whole heads over the whole text."""
    said, (heads, keys), fits = f"--sequence_parallel_size {size}", _heads(read), splits_heads(read)
    if not fits(size):
        mend = size_to_give(heads or keys, ranks if ranks > 1 else 0, fits)
        if heads % size:
            raise RequestError(f"{said} does not divide the model's {heads} attention heads. {mend}")
        raise RequestError(
            f"{said}, but the model has {keys} key-value heads: one number must divide the other. {mend}"
        )
    read = of_text(read)
    plain, turned, values = (read(name) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if plain and values and plain + turned != values:
        raise RequestError(
            f"{said}: the heads of the model's queries and values differ in size ({plain + turned} and {values}), and "
            "ranks exchange only heads of one size. Drop it."
        )
    if read("layerdrop"):
        raise RequestError(
            f"{said}: the model skips layers at random (layerdrop), and each rank would skip others. Set layerdrop to "
            "0 in its config.json, or drop the flag."
        )
    kinds = set(read("layer_types") or ())
    if others := sorted(kinds - {FULL, SLIDING}):
        raise RequestError(f"{said}: the model has {others[0]} layers, which read a text in order. Drop it.")
    if key := next((name for name in OF_STATES if read(name)), None):
        raise RequestError(f"{said}: the model has layers with a state ({key}), which read a text in order. Drop it.")
    window = read("sliding_window") if read("use_sliding_window") is not False else None
    if isinstance(window, int) and SLIDING in (kinds or {SLIDING}) and (block or window + 1) > window:
        raise RequestError(
            f"{said}: the model's layers attend to the last {window} tokens (sliding_window), but shared attention to "
            f"all. Give a --block_size of {window} or less, or drop it."
        )
