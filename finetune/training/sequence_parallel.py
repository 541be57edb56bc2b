"""Sequence parallelism under the Trainer: neighbouring ranks share each text, and exchange heads for tokens around
attention (DeepSpeed's Ulysses, arXiv 2309.14509).

In every other respect these ranks are data parallel. Each has a part of the tokens; the loss is a sum over them divided
by the learnt tokens of the global batch, which the Trainer counts over all ranks; ZeRO sums gradients and shards states
over all ranks, so a checkpoint is the same as in a data-parallel run.

transformers 5.23 and accelerate 1.15 have their own way to the same exchange (`ParallelismConfig`), which is not used:
it divides by the learnt tokens of one micro-batch (integrations/deepspeed.py, deepspeed_sp_compute_loss), so uneven
masks give a mean of means; with its loader (deepspeed, UlyssesSPDataLoaderAdapter) a step has other rows than in one
process, and a run cannot resume within an epoch; and evaluations lose their masks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from finetune.data.sampling import GlobalBatchSampler
from finetune.data.shares import WHOLE_POSITIONS, SharedRows, SharedTexts


class SequenceParallel(TrainerCallback):
    """Sequence parallelism of one trainer; `size` ranks share a text, and a size of 1 changes nothing."""

    def __init__(self, size: int, args: Any, accelerator: Any) -> None:
        self.size, self.args, self.accelerator = size, args, accelerator
        if size > 1:  # accelerate has filled in its config by now
            settle_batch(accelerator.state.deepspeed_plugin.deepspeed_config, size, args.world_size)
        self.draws_apart = size == 1
        self.positions: Any = None  # of the current micro-batch, on this rank: (B, T / size)
        self.mask: Any = None  # for all its tokens (B, 1, T, T), if it holds documents to keep apart

    @property
    def readers(self) -> int:
        """The number of groups of ranks; each group reads different rows."""
        return int(self.args.world_size) // self.size

    @property
    def reader(self) -> int:
        return int(self.args.process_index) // self.size

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first step: give ranks that share a text different random states, or its parts, and its heads,
        would have the same dropout masks. Those of a checkpoint, which are loaded by now, differ if the ranks that
        wrote it shared texts alike, and stay; those of a new run, or of another layout, do not all differ."""
        if self.draws_apart:
            return
        self.draws_apart = True
        with torch.random.fork_rng(devices=[]):
            drawn = torch.randint(2**62, (1,))
        every = self.accelerator.gather(drawn.to(args.device)).tolist()
        place = args.process_index % self.size
        group = every[args.process_index - place :][: self.size]
        if len(set(group)) < self.size:
            torch.manual_seed(group[place] + place)

    def sampler(self, sampler: GlobalBatchSampler) -> Any:
        return sampler if self.size == 1 else SharedRows(sampler, self.args.train_batch_size, self.size)

    def collator(self, collate: Any) -> Any:
        return collate if self.size == 1 else SharedTexts(collate, self.size, self.args.process_index % self.size)

    def begin(self, inputs: dict[str, Any], model: Any) -> None:
        """Call it before each micro-batch's forward pass. Removes from `inputs` what the model does not read."""
        if self.size == 1:
            return
        self.positions, whole = inputs.get("position_ids"), inputs.pop(WHOLE_POSITIONS, None)
        self.mask = None  # frees the one before
        # Flash attention reads the positions itself.
        self.mask = None if whole is None or model.config._attn_implementation != "sdpa" else document_mask(whole)

    @contextlib.contextmanager
    def attending(self, model: Any) -> Iterator[None]:
        """In this block, models in training mode share attention. An evaluation reads whole texts on each rank."""
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
                return mixed.unflatten(-1, (query.shape[1], -1)), weights  # by head, as GPT-2 expects it
            finally:
                if groups is not None:  # the exchange changes it if ranks outnumber key-value heads
                    module.num_key_value_groups = groups

        return attend


def document_mask(positions: torch.Tensor) -> torch.Tensor:
    """A mask (B, 1, T, T), true where a token may attend to another: itself or an earlier one of its document. Each
    document begins at position 0; `positions` are (B, T)."""
    document = (positions == 0).cumsum(dim=1)
    same = document[:, :, None] == document[:, None, :]  # a long text has memory for one tensor of this size
    return same.tril_()[:, None]


def settle_batch(config: dict[str, Any], size: int, world_size: int) -> None:
    """Set the batch size in DeepSpeed's config if `size` ranks share each sample. Call it after TrainingArguments have
    filled the config in: transformers assumes that every rank reads different rows (5.23, integrations/deepspeed.py,
    trainer_config_process)."""
    micro, steps = (config.get(name) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    if size > 1 and isinstance(micro, int) and isinstance(steps, int):
        config["sequence_parallel_size"] = size  # DeepSpeed divides its ranks by it (0.19.8, runtime/config.py)
        config["train_batch_size"] = micro * steps * world_size // size
