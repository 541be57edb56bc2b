"""Does a model do what a flag needs? Found by trying a small copy of it, since a model that ignores a mask, or mixes
tokens elsewhere, does not fail: packed documents, a prompt that two answers share, texts split over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from finetune.data.preference_batches import CHOSEN, PROMPT, REJECTED
from finetune.errors import RequestError, first_line
from finetune.run.flags.sequence_parallel import ATTENTIONS, check_heads

DOCUMENT_TOKENS = 3
PROMPT_TOKENS, ANSWER_TOKENS = 5, 3
# Config keys for how far back a token attends. An explicit mask replaces the window's (transformers 5.23,
# masking_utils.py, _preprocess_mask_arguments: a 4-d mask is returned unchanged).
WINDOWS = ("sliding_window", "attention_chunk_size")
TOLERANCE = 1e-5  # for a small copy's logits, which are below 1
PROBE_TOKENS = 6
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # their number, in a config
NARROW = {"intermediate_size": 16, "moe_intermediate_size": 16}  # or one layer of experts could take gigabytes
BY_HEAD = ("s_aux", "position_bias")  # arguments to attention that cover all heads (gpt-oss, T5)


def small_copy(model: Any, vocab_size: int, changes: Mapping[str, Any] | None = None) -> Any:
    """A copy of `model` with one layer of each type in its config, narrow experts, `vocab_size` tokens, `changes` to
    its config and new random weights, on the CPU, in evaluation mode. The run's random state is preserved. Raises
    whatever the shortened config or model raises."""
    config = copy.deepcopy(model.config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    text = shorten(config)
    types = list(dict.fromkeys(getattr(text, "layer_types", None) or ["attention"]))
    text.num_hidden_layers = len(types)
    if getattr(text, "layer_types", None):
        text.layer_types = types
    text.vocab_size = vocab_size
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    text.use_cache = False
    has_experts = any(getattr(text, name, None) for name in EXPERTS)
    narrow = {name: value for name, value in NARROW.items() if has_experts and hasattr(text, name)}
    for name, value in {**narrow, **(changes or {})}.items():
        setattr(text, name, value)
    if config._attn_implementation not in ("eager", "sdpa"):
        config._attn_implementation = "eager"  # the others do not run on CPU
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return type(model)(config).eval()


def shorten(config: Any) -> Any:
    """One layer in each part of a model's `config`; returns the config of its text part."""
    text = config.get_text_config()
    for part in (text, *(getattr(config, name, None) for name in config.sub_configs)):
        for name in ("num_hidden_layers", "depth"):
            if hasattr(part, name):
                setattr(part, name, 1)
    return text


def tried(model: Any, probe: Callable[..., str | None], *more: Any, failed: str = "could not be checked") -> str | None:
    """What `probe` finds wrong with `model`; None for nothing. A model that cannot be tried is at fault as well."""
    try:
        return probe(model, *more)
    except Exception as error:  # a shortened config or model can raise anything
        return f"{type(model).__name__} {failed} ({first_line(error)})"


def check_document_mask(model: Any, rows: int) -> None:
    """Raises RequestError if restarted positions do not separate documents in this model; `rows` is the size of a
    micro-batch.

    transformers builds the mask from `position_ids` (masking_utils.py, find_packed_sequence_indices) for models that
    let it build their masks; other models, and layers other than attention, mix the documents silently.
    """
    attention = str(model.config._attn_implementation)
    if "flash" in attention and rows > 1:
        # modeling_flash_attention_utils.py, _is_packed_sequence: positions are only read in batches of one row.
        raise RequestError(
            f"--document_mask: {attention} separates documents only with one row per micro-batch, not {rows}. Set "
            "--per_device_train_batch_size and --per_device_eval_batch_size to 1, or leave --attn_implementation out."
        )
    # The other kinds are not available on CPU, where the small copy runs.
    if attention in ("eager", "sdpa") and (reason := tried(model, mixed_documents)):
        raise RequestError(f"--document_mask: {reason}. Drop it, or use --packing none.")


def mixed_documents(model: Any) -> str | None:
    """In a small copy of `model`, a document must have the same logits in a block as alone."""
    twin = small_copy(model, 2 * DOCUMENT_TOKENS)
    ids = torch.arange(2 * DOCUMENT_TOKENS)[None]
    positions = torch.arange(DOCUMENT_TOKENS).repeat(2)[None]
    with torch.no_grad():
        packed = twin(input_ids=ids, position_ids=positions).logits[:, DOCUMENT_TOKENS:]
        alone = twin(input_ids=ids[:, DOCUMENT_TOKENS:], position_ids=positions[:, DOCUMENT_TOKENS:]).logits
    if torch.allclose(packed, alone, atol=1e-4):
        return None
    return f"{type(model).__name__} still lets the documents of a block attend to each other"


def shared_mask(segments: Tensor) -> Tensor:
    """The mask (B, 1, T, T) for rows of a prompt and its two answers, marked by `segments` (B, T): each token attends
    to itself and to earlier tokens of the prompt and its own segment. So does padding: an empty row would yield NaN."""
    own = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == PROMPT)
    return torch.tril(own)[:, None]


def check_shared_prompt(model: Any, block_size: int) -> None:
    """Raises RequestError if sharing a prompt changes the logits of `model` for texts of up to `block_size` tokens."""
    if (attention := str(model.config._attn_implementation)) != "sdpa":
        raise RequestError(
            f"--share_prompt: {attention} attention cannot take a mask that hides one answer from the other. Give "
            "--attn_implementation sdpa, or drop it."
        )
    config = model.config.get_text_config()
    sees = {key: value for key in WINDOWS if isinstance(value := getattr(config, key, None), int)}
    short = {key: ANSWER_TOKENS for key, value in sees.items() if value < block_size}
    if reason := tried(model, mixed_answers, short):
        more = f", or give --block_size {min(sees.values())} at most" if short else ""
        raise RequestError(f"--share_prompt: {reason}. Drop it{more}.")


def mixed_answers(model: Any, windows: dict[str, int]) -> str | None:
    """In a small copy of `model` with these `windows`, two answers after one shared prompt must have the same logits as
    each in its own row."""
    twin = small_copy(model, PROMPT_TOKENS + 2 * ANSWER_TOKENS, windows)
    ids = torch.arange(PROMPT_TOKENS + 2 * ANSWER_TOKENS)
    prompt, *answers = ids.split([PROMPT_TOKENS, ANSWER_TOKENS, ANSWER_TOKENS])
    parts = zip((PROMPT, CHOSEN, REJECTED), (prompt, *answers), strict=True)
    segments = torch.cat([torch.full_like(some, part) for part, some in parts])[None]
    positions = torch.arange(PROMPT_TOKENS + ANSWER_TOKENS)
    both = torch.cat([positions, positions[PROMPT_TOKENS:]])[None]
    with torch.no_grad():
        shared = twin(input_ids=ids[None], attention_mask=shared_mask(segments), position_ids=both).logits[0]
        alone = [twin(input_ids=torch.cat([prompt, answer])[None]).logits[0, PROMPT_TOKENS:] for answer in answers]
    if torch.allclose(shared[PROMPT_TOKENS:], torch.cat(alone), rtol=0, atol=TOLERANCE):
        return None
    return f"the logits of {type(model).__name__} change if two answers share a prompt"


def check_sequence_parallel(model: Any, size: int, block_size: int, ranks: int = 1) -> None:
    """Raises RequestError if `size` of the `ranks`, each with a part of a text of `block_size` tokens, would not
    compute what one rank computes with all of it."""
    said, name, config = f"--sequence_parallel_size {size}", type(model).__name__, model.config
    check_heads(config.to_dict().get, size, block_size, ranks)
    if block_size % size:
        raise RequestError(f"{said} does not divide --block_size, which is {block_size} here. Change one of them.")
    if (kind := config._attn_implementation) not in ATTENTIONS:
        raise RequestError(
            f"{said}: {name} uses {kind} attention; sequence parallelism supports {', '.join(ATTENTIONS)}. Change "
            "--attn_implementation, or drop it."
        )
    if reason := tried(model, refusal):
        raise RequestError(f"{said}: {reason}. Drop it.")


def refusal(model: Any) -> str | None:
    """Why `model` does not support sequence parallelism; None if it does. Tests three things on a small copy: that all
    attention goes through the replaced function, that it is plain causal, and that nothing else mixes tokens."""
    name, twin = type(model).__name__, small_copy(model, PROBE_TOKENS)
    twin.config._attn_implementation = "sdpa"
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    seen: list[tuple[int, int, int]] = []
    by_head: set[str] = set()

    def causal(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((query.shape[-1], key.shape[-1], value.shape[-1]))
        by_head.update(name for name in BY_HEAD if kwargs.get(name) is not None)
        return sdpa(module, query, key, value, None, *args, **kwargs)

    def silent(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        return query.new_zeros(*query.transpose(1, 2).shape[:-1], value.shape[-1]), None

    ids = torch.arange(PROBE_TOKENS)[None]
    others = torch.cat([ids[:, -1:], ids[:, 1:]], dim=1)  # another first token
    plain = _logits(twin, ids)
    try:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = causal
        is_causal = torch.allclose(_logits(twin, ids), plain, atol=1e-4)
        ALL_ATTENTION_FUNCTIONS["sdpa"] = silent
        is_apart = torch.allclose(_logits(twin, ids)[:, 1:], _logits(twin, others)[:, 1:], atol=1e-4)
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
    if not seen:
        return f"{name} does not use transformers' AttentionInterface"
    if by_head:
        return f"{name} has attention weights per head ({by_head.pop()}), which sequence parallelism does not support"
    if len(set(seen)) > 1 or len(set(seen[0])) > 1:
        return f"the heads of {name} differ in size"
    if not is_apart:
        return f"{name} mixes tokens outside attention"
    return None if is_causal else f"{name}'s attention is not plain causal attention"


def _logits(twin: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = twin(input_ids=ids, position_ids=torch.arange(PROBE_TOKENS)[None]).logits
    return logits
