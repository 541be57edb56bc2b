"""GPT-lite as a flat list of layers for DeepSpeed's PipelineModule, made of the same modules as `GPTLiteForCausalLM`.

    layers = pipeline_layers(config, seed=42)     # specs: each stage builds only its own layers

The list is token embedding, position embedding, one entry per block, final norm, head. Layers pass on `x` (B, T, C) or,
if documents do not attend to each other, `(x, position_ids (B, T))`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers.dynamic_module_utils import custom_object_save
from transformers.masking_utils import create_causal_mask

from finetune.data.packing import IGNORED
from finetune.errors import RequestError
from finetune.models.causal import CausalSource
from finetune.models.chunked_loss import LossHead, row_figures
from finetune.models.experts import mixture_of, router_coefficient
from finetune.models.gptlite import GPTLiteBlock, GPTLiteConfig, GPTLiteForCausalLM, GPTLitePreTrainedModel
from finetune.models.multiplied import multiplied_parameters
from finetune.models.pipeline import PipelineLayer, PipelineModel, draw_layer
from finetune.models.tiled_mlp import choose_tiled_mlp, use_tiled_mlp
from finetune.run.flags.experts import dropout_fault
from finetune.run.flags.language import CausalModelArguments
from finetune.run.flags.pipeline import check_kind

Packet: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # passed between layers: x, or x and position_ids
TIED = "tokens"  # DeepSpeed's key for the embedding that is also the head's weight
# Not the head: its logits are kept for the loss anyway.
CHECKPOINTED = ("GPTLiteTokens", "GPTLitePositions", "GPTLiteBlockLayer")


def _open(packet: Packet) -> tuple[torch.Tensor, torch.Tensor | None]:
    return packet if isinstance(packet, tuple) else (packet, None)


def _packed(x: torch.Tensor, positions: torch.Tensor | None) -> Packet:
    return x if positions is None else (x, positions)


class GPTLiteTokens(nn.Module):
    """Token ids (B, T) to vectors."""

    def __init__(self, config: GPTLiteConfig, seed: int | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if seed is not None:
            draw_layer(self, GPTLitePreTrainedModel(config)._init_weights, seed, place=0)

    def forward(self, packet: Packet) -> Packet:
        ids, positions = _open(packet)
        return _packed(self.tokens(ids), positions)


class GPTLitePositions(nn.Module):
    """Adds position embeddings, then applies dropout."""

    def __init__(self, config: GPTLiteConfig, seed: int | None = None) -> None:
        super().__init__()
        rows = config.max_position_embeddings
        self.positions = nn.Embedding(rows, config.hidden_size)
        self.drop = nn.Dropout(config.dropout)
        if seed is not None:
            draw_layer(self, GPTLitePreTrainedModel(config)._init_weights, seed, place=1)

    def forward(self, packet: Packet) -> Packet:
        x, given = _open(packet)
        places = torch.arange(x.shape[1], device=x.device)[None] if given is None else given
        return _packed(self.drop(x + self.positions(places)), given)


class GPTLiteBlockLayer(nn.Module):
    """A block. It builds its own mask: passing one on would transfer more than the positions."""

    def __init__(self, config: GPTLiteConfig, index: int, seed: int | None = None, tiles: int = 0) -> None:
        super().__init__()
        self.config, self.name = config, str(index)
        self.add_module(self.name, GPTLiteBlock(config, index))
        if tiles:
            use_tiled_mlp(self, tiles)
        if seed is not None:
            draw_layer(self, GPTLitePreTrainedModel(config)._init_weights, seed, place=2 + index)

    def forward(self, packet: Packet) -> Packet:
        x, given = _open(packet)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=given
        )
        places = torch.arange(x.shape[1], device=x.device)[None] if given is None else given
        return _packed(self.get_submodule(self.name)(x, mask, position_ids=places), given)


class GPTLiteNorm(nn.Module):
    """The final norm. It drops the positions."""

    def __init__(self, config: GPTLiteConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_epsilon
        self.norm = nn.LayerNorm(size, eps=eps, bias=config.bias)

    def forward(self, packet: Packet) -> torch.Tensor:
        normed: torch.Tensor = self.norm(_open(packet)[0])
        return normed


class GPTLiteHead(nn.Module):
    """x (B, T, C) to logits (B, T, vocabulary), unless they are made `late`."""

    def __init__(self, config: GPTLiteConfig, seed: int | None = None, late: LateHead | None = None) -> None:
        super().__init__()
        self.late = late
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if seed is not None:
            draw_layer(self, GPTLitePreTrainedModel(config)._init_weights, seed, place=3 + config.num_hidden_layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(x) if self.late is None else self.late.keep(self.lm_head.weight, x)
        return logits


@dataclass
class LateHead:
    """A head that runs within the loss, on `chunk_tokens` positions at a time: the last layer passes hidden states on
    unchanged, and leaves its weight here. So no stage holds the logits of a micro-batch."""

    chunk_tokens: int
    weight: Any = None  # (vocabulary, C) of the last stage; weak, since other ranks only measure it

    def keep(self, weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        self.weight = weakref.ref(weight)
        return x

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """`summed_loss` of hidden states (B, T, C); without gradients each row's `row_figures` (B, 3)."""
        weight = self.weight()
        head = LossHead(*reversed(weight.shape), bias=False, device="meta")
        head.weight, head.chunk_tokens, head.targets, head.items = weight, self.chunk_tokens, targets, 1
        found: torch.Tensor = head(x)
        return found

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def figures(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(x, targets)


def tied_head(module: GPTLiteTokens, x: torch.Tensor, late: LateHead | None = None) -> torch.Tensor:
    """The head of a model with tied embeddings, on whichever stage it runs."""
    weight = module.tokens.weight
    return nn.functional.linear(x, weight) if late is None else late.keep(weight, x)


def pipeline_layers(
    config: GPTLiteConfig, seed: int | None, late: LateHead | None = None, tiles: int = 0
) -> list[PipelineLayer]:
    """The layers with their weights' names in the whole model. With `seed` None, weights are not initialized: they will
    be loaded. `late`: the loss makes the logits. `tiles`: parts in which each MLP is computed; 0: whole."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    tied = config.tie_word_embeddings
    weight = "tokens.weight"
    first = (
        TiedLayerSpec(TIED, GPTLiteTokens, config, seed, tied_weight_attr=weight)
        if tied
        else LayerSpec(GPTLiteTokens, config, seed)
    )
    head_of_tokens = partial(tied_head, late=late)
    last = (
        TiedLayerSpec(TIED, GPTLiteTokens, config, seed, tied_weight_attr=weight, forward_fn=head_of_tokens)
        if tied
        else LayerSpec(GPTLiteHead, config, seed, late)
    )
    embeddings = "transformer.embeddings"
    blocks = [LayerSpec(GPTLiteBlockLayer, config, index, seed, tiles) for index in range(config.num_hidden_layers)]
    return [
        PipelineLayer(first, embeddings),
        PipelineLayer(LayerSpec(GPTLitePositions, config, seed), embeddings),
        *(PipelineLayer(block, "transformer.blocks") for block in blocks),
        PipelineLayer(LayerSpec(GPTLiteNorm, config), "transformer"),
        PipelineLayer(last, embeddings if tied else ""),
    ]


def gptlite_pipeline(
    config: GPTLiteConfig,
    seed: int | None,
    chunk_tokens: int = 0,
    router_aux_loss_coef: float | None = None,
    tiles: int = 0,
) -> PipelineModel:
    """A GPT-lite for `finetune.training.pipeline`; see `pipeline_layers` for `seed` and `tiles`. The loss is computed
    on `chunk_tokens` positions at a time, 0: on all. Raises RequestError as `router_coefficient` and
    `choose_tiled_mlp` do."""
    late = LateHead(chunk_tokens) if chunk_tokens else None
    with torch.device("meta"):
        whole = GPTLiteForCausalLM(config)
    choose_tiled_mlp(tiles, whole)
    router_weight = router_coefficient(whole, router_aux_loss_coef)
    if router_weight and (fault := dropout_fault(config.dropout)):
        raise RequestError(fault)
    return PipelineModel(
        layers=pipeline_layers(config, seed, late, tiles),
        split=split_batch,
        loss=late.loss if late else summed_loss,
        items=count_targets,
        figures=late.figures if late else row_figures,
        checkpointed=CHECKPOINTED,
        multiplied_parameters=multiplied_parameters(whole),
        config=config,
        save=partial(save_config, config),
        mixture=mixture_of(whole),
        router_weight=router_weight,
    )


def check_gptlite(source: CausalSource, arguments: CausalModelArguments) -> None:
    """Raises RequestError for a pretrained model other than a GPT-lite in a folder, and for flags that its pipeline
    does not support."""
    if arguments.resize_embeddings:
        raise RequestError("--resize_embeddings: a pipeline cannot resize them. Resize with recipes/causal_lm.py.")
    check_kind(getattr(source.config, "model_type", None), f"--model_name_or_path {source.pretrained}")
    if source.hub_id:
        raise RequestError(f"--model_name_or_path {source.hub_id}: a pipeline reads a folder. Download it first.")


def save_config(config: GPTLiteConfig, folder: Path) -> None:
    """Write what a GPT-lite's `save_pretrained` writes beside its weights."""
    with torch.device("meta"):
        model = GPTLiteForCausalLM(config)
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def split_batch(batch: dict[str, torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """A collated batch as the first stage's input and the last stage's targets.

    The padding mask is left out: padding is on the right, and causal attention never reaches it."""
    ids, positions = batch["input_ids"], batch.get("position_ids")
    return ids if positions is None else (ids, positions), batch["shift_labels"]


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats, summed over the targets that count: logits (B, T, V), targets (B, T)."""
    flat = logits.float().flatten(0, 1)  # (B * T, V)
    return nn.functional.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def count_targets(targets: torch.Tensor) -> torch.Tensor:
    """The number of targets that count, as a 0-d tensor."""
    return (targets != IGNORED).sum()
