"""What the language model recipes share: settling their flags, and the model for either engine."""

from __future__ import annotations

from typing import Any

from finetune.errors import RequestError
from finetune.models.adapters import check_adapter, check_expert_adapter, kept_as, with_adapter
from finetune.models.causal import CausalSource, build_causal_lm, find_causal_source, settled_config
from finetune.models.chunked_loss import choose_chunk_tokens, use_chunked_loss
from finetune.models.expert_parallel import check_expert_parallel
from finetune.models.experts import ASKED
from finetune.models.gptlite_pipeline import check_gptlite, gptlite_pipeline, pipeline_layers
from finetune.models.pipeline import PipelineModel
from finetune.models.probes import check_document_mask, check_sequence_parallel
from finetune.models.source import positions_of
from finetune.models.tiled_mlp import choose_tiled_mlp, use_tiled_mlp
from finetune.run.facts import loss_chunk_tokens
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.experts import ExpertArguments
from finetune.run.flags.language import BlockArguments, CausalModelArguments, SampleArguments
from finetune.run.flags.pipeline import PipelineArguments
from finetune.run.flags.sequence_parallel import TileArguments
from finetune.training.expert_parallel import section_for
from finetune.training.experts import coefficient_for, describe_mixture, watch_experts
from finetune.training.loss import settle_loss_scaling
from finetune.training.pipeline.stages import check_cut
from finetune.training.samples import check_sample
from finetune.training.start import Session


def language_source(session: Session) -> CausalSource:
    """Find the model, without loading its weights. Raises RequestError for flags that do not fit it."""
    arguments, run = session[CausalModelArguments], session.run
    source = find_causal_source(arguments, session[BlockArguments].block_size)
    session.say(*check_adapter(run, source.adapter))
    if run.stages is not None:
        check_gptlite(source, arguments)
        check_cut(pipeline_layers(source.config, seed=None), session[PipelineArguments].partition_method, run.stages)
    return source


def language_model(session: Session, source: CausalSource, data: Any) -> Any:
    """The model with its adapter and its loss. From scratch, each rank initializes all weights, so that they are the
    same under every ZeRO stage; ZeRO-3 shards pretrained weights while they are read."""
    arguments, adapter, blocks = session[CausalModelArguments], session[AdapterArguments], session[BlockArguments]
    training = session.training
    _check(session, source, data)
    kept = kept_as(session.run, source.adapter, training.bf16)
    base = build_causal_lm(arguments, source, data.tokenizer, training.seed, kept)
    stop_at(base, data.account.turn_ends)
    model = with_adapter(base, adapter, source.adapter, session.run.task.adapter)
    if session.shards_weights:
        check_expert_adapter(model)
    router = coefficient_for(session, base)
    changes = {ASKED: False} if router else {}  # `watch_experts` adds the routers' loss
    device = training.device.type
    chunk = choose_chunk_tokens(arguments.loss_chunk_tokens, base, device, changes)  # before peft wraps the head
    if chunk:
        base.accepts_loss_kwargs = True  # see use_chunked_loss
    else:
        settle_loss_scaling(base, label_per_token=True)
    if blocks.document_mask and session.launch.speaks:
        check_document_mask(base, max(training.train_batch_size, training.eval_batch_size))
    if (size := session.run.sequence_parallel_size) > 1 and session.launch.speaks:
        check_sequence_parallel(base, size, source.block_size, session.launch.world_size)
    choose_tiled_mlp(tiles := session[TileArguments].tiled_mlp_num_shards, base)
    if tiles:
        use_tiled_mlp(model, tiles)
    if (size := session.run.expert_parallel_size) > 1:
        check_expert_parallel(base, size, section_for(base.config, size), session.launch.world_size)
    if chunk:
        head = use_chunked_loss(model, chunk)
        if training.torch_compile:
            head.compile_scores(training.torch_compile_backend, training.torch_compile_mode)
    watch_experts(session, base, model, router)
    return model


def stop_at(model: Any, ends: list[int]) -> None:
    """Make generation also stop at the tokens that end a turn, in this run and in the saved model: a base model's
    config only knows the end of a text."""
    config = model.generation_config
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if set(ends) - set(known):
        config.eos_token_id = [one for one in dict.fromkeys([*known, *ends]) if one is not None]


def language_pipeline(session: Session, source: CausalSource, data: Any) -> PipelineModel:
    """GPT-lite as a list of layers; each rank builds those of its stage."""
    _check(session, source, data)
    arguments = session[CausalModelArguments]
    config = settled_config(arguments, source, data.tokenizer)
    chunk = loss_chunk_tokens(arguments.loss_chunk_tokens, config.vocab_size, session.training.device.type)
    asked, tiles = session[ExpertArguments].router_aux_loss_coef, session[TileArguments].tiled_mlp_num_shards
    model = gptlite_pipeline(config, None if source.pretrained else session.training.seed, chunk, asked, tiles)
    if model.mixture is not None:
        session.say(describe_mixture(session, config, model.mixture, model.router_weight))
    return model


def _check(session: Session, source: CausalSource, data: Any) -> None:
    if session.training.do_eval and not len(data.splits["validation"]):
        raise RequestError(
            "the validation data has no token to predict: it has a single one, or none that is trained on. Give more "
            "with --validation_file, or --do_eval False."
        )
    check_sample(data.tokenizer, session[SampleArguments], positions_of(source.config), data.is_chat)
    session.introduce(data.account.describe(), source.description)
