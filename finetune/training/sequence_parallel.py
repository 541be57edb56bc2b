"""Sequence parallelism under the Trainer: neighbouring ranks share each text, and exchange heads for tokens around
attention (DeepSpeed's Ulysses, arXiv 2309.14509).

To everything else these ranks are data parallel. Each has a part of the tokens; the loss is a sum over them divided by
the learnt tokens of the global batch, which the Trainer counts over all ranks; ZeRO adds up gradients and shards states
over all ranks, and so a checkpoint is that of a data-parallel run.

transformers 5.23 and accelerate 1.15 have a way of their own to the same exchange (`ParallelismConfig`), which is not
used: it divides by the learnt tokens of one micro-batch (integrations/deepspeed.py, deepspeed_sp_compute_loss), so that
uneven masks make a mean of means; its loader (deepspeed, UlyssesSPDataLoaderAdapter) gives a step other rows than one
process takes, and cannot be resumed within an epoch; and evaluations lose their masks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from finetune.data.sampling import GlobalBatchSampler
from finetune.data.shares import WHOLE_POSITIONS, SharedRows, SharedTexts


class SequenceParallel:
    """Of one trainer; `size` ranks share a text, and 1 changes nothing."""

    def __init__(self, size: int, args: Any, accelerator: Any) -> None:
        self.size, self.args = size, args
        if size > 1:  # accelerate's own config has been filled in by now
            settle_batch(accelerator.state.deepspeed_plugin.deepspeed_config, size, args.world_size)
        self.positions: Any = None  # of the micro-batch that is computed with, on this rank: (B, T / size)
        self.mask: Any = None  # of all its tokens (B, 1, T, T), where it holds documents that are to be kept apart

    @property
    def readers(self) -> int:
        """Groups of ranks that read different rows."""
        return int(self.args.world_size) // self.size

    @property
    def reader(self) -> int:
        return int(self.args.process_index) // self.size

    def sampler(self, sampler: GlobalBatchSampler) -> Any:
        return sampler if self.size == 1 else SharedRows(sampler, self.args.train_batch_size, self.size)

    def collator(self, collate: Any) -> Any:
        return collate if self.size == 1 else SharedTexts(collate, self.size, self.args.process_index % self.size)

    def begin(self, inputs: dict[str, Any], model: Any) -> None:
        """Before a micro-batch is computed with. Takes out of `inputs` what the model does not read."""
        if self.size == 1:
            return
        self.positions, whole = inputs.get("position_ids"), inputs.pop(WHOLE_POSITIONS, None)
        # Flash attention looks at the positions for itself.
        self.mask = None if whole is None or model.config._attn_implementation != "sdpa" else apart(whole)

    @contextlib.contextmanager
    def attending(self, model: Any) -> Iterator[None]:
        """Inside, the attention of models in training is shared. An evaluation reads whole texts on each rank."""
        if self.size == 1:
            yield
            return
        kind = str(model.config._attn_implementation)
        plain = ALL_ATTENTION_FUNCTIONS[kind]
        ALL_ATTENTION_FUNCTIONS[kind] = self._shared(plain, self._exchange(plain, model.config.get_text_config()))
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS[kind] = plain

    def _exchange(self, plain: Callable[..., Any], config: Any) -> Any:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(module, query, key, value, self.mask, *args, **kwargs)

        heads = config.num_attention_heads
        group, _ = distributed.new_subgroups(group_size=self.size)
        return UlyssesSPAttentionHF(
            attn=attend,
            batch_size=self.args.train_batch_size,
            attn_head_count=heads,
            attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            kv_head_count=getattr(config, "num_key_value_heads", None) or heads,
            num_hidden_layers=config.num_hidden_layers,
            process_group=group,
            seq_length_is_variable=True,
        )

    def _shared(self, plain: Callable[..., Any], exchange: Any) -> Callable[..., Any]:
        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            if not module.training:
                return plain(module, query, key, value, mask, *args, **kwargs)
            groups = getattr(module, "num_key_value_groups", None)
            try:
                kwargs["position_ids"] = self.positions
                mixed, weights = exchange(module, query, key, value, None, *args, **kwargs)  # (B, T / size, C)
                return mixed.unflatten(-1, (query.shape[1], -1)), weights  # by head, as GPT-2 wants it
            finally:
                if groups is not None:  # which the exchange changes where ranks are more than key-value heads
                    module.num_key_value_groups = groups

        return attend


def apart(positions: torch.Tensor) -> torch.Tensor:
    """A mask (B, 1, T, T), true where a token may see another: one before it in its own document, of which each begins
    at position 0; `positions` are (B, T)."""
    document = (positions == 0).cumsum(dim=1)
    length = positions.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()
    return ((document[:, :, None] == document[:, None, :]) & before)[:, None]


def settle_batch(config: dict[str, Any], size: int, world_size: int) -> None:
    """Have DeepSpeed's config say how many samples a step has, where `size` ranks share each. Call it when
    TrainingArguments have filled it in, for transformers takes every rank for one that reads other rows (5.23,
    integrations/deepspeed.py, trainer_config_process)."""
    micro, steps = (config.get(name) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    if size > 1 and isinstance(micro, int) and isinstance(steps, int):
        config["sequence_parallel_size"] = size  # by which it divides its ranks (deepspeed 0.19.8, runtime/config.py)
        config["train_batch_size"] = micro * steps * world_size // size
