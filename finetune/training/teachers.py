"""Load the model that --teacher names, and check that it can teach this student."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from finetune.data import digests
from finetune.data.cache import cache_home, cache_key
from finetune.data.tokenizer import rows_of
from finetune.errors import RequestError
from finetune.models.chunked_loss import loss_head, refusal
from finetune.models.classifier import trained_labels
from finetune.models.probes import check_document_mask, tried
from finetune.models.source import Kept, from_pretrained, load_weights, positions_of, refuse_without_weights
from finetune.run.facts import base_dtype
from finetune.run.flags.distillation import CachedTeacherArguments, DistillArguments
from finetune.run.flags.language import BlockArguments, CausalModelArguments
from finetune.run.flags.text import ModelArguments
from finetune.training.cached_teacher import PIECE_TOKENS, Asked, TopK, asked_before
from finetune.training.distilling import READ, HiddenHead, Teacher
from finetune.training.language import language_model
from finetune.training.loss import weighted_loss
from finetune.training.resuming import kept_random_states
from finetune.training.second_model import placed
from finetune.training.start import Session

FORMAT = 1  # of cached predictions: raise it when they change
ANSWERED_TOKENS = 1024  # tokens whose logits are made at a time, if the loss is not computed in chunks


def classifier_teacher(session: Session, source: Any, data: Any, loss: Any) -> tuple[Teacher | None, Any]:
    """The teacher, and `loss` mixed with the divergence from it. Raises RequestError for one that cannot teach these
    labels."""
    if not _is_asked(session):
        return None, loss
    labels, name = data.labels, session[DistillArguments].teacher
    if labels.task != "classification":
        raise RequestError(f"--teacher {name}: it teaches one class label a row, and these rows have others. Drop it.")
    arguments = session[ModelArguments]
    config = _config(session, arguments, data.tokenizer, source.max_seq_length)
    known = trained_labels(config)
    if known is None or known.task != labels.task or set(known.names) != set(labels.names):
        has = f"knows {', '.join(known.names[:10]) or 'numbers'}" if known else "names no labels in its config.json"
        raise RequestError(
            f"--teacher {name}: it {has}, but the data has {', '.join(labels.names[:10])}. Give a model that "
            "was trained on these labels (recipes/seq_cls.py trains one), or rename the data's to match."
        )
    model = _opened(session, AutoModelForSequenceClassification, config, arguments)
    teacher = _teacher(session, model)
    teacher.classes = [known.names.index(label) for label in labels.names]
    smoothing = session.training.label_smoothing_factor
    return teacher, teacher.mixed(loss or weighted_loss([1.0] * len(labels.names), smoothing))


def taught_language_model(session: Session, source: Any, data: Any) -> tuple[Any, Teacher | None]:
    """The model from `language_model`, and its teacher, if --teacher names one."""
    model = language_model(session, source, data)
    return model, language_teacher(session, source, data, model)


def language_teacher(session: Session, source: Any, data: Any, student: Any) -> Teacher | None:
    """The teacher of `student`, which is ready to train. Raises RequestError if their tokens differ."""
    if not _is_asked(session):
        return None
    arguments, training, name = session[CausalModelArguments], session.training, session[DistillArguments].teacher
    if training.use_liger_kernel:
        raise RequestError("--use_liger_kernel: its loss makes no logits to compare with the teacher's. Drop it.")
    config = _config(session, arguments, data.tokenizer, source.block_size)
    attention = arguments.attn_implementation
    chosen = {"attn_implementation": attention} if attention else {}
    head = loss_head(student)

    def opened() -> Teacher:
        model = _opened(session, AutoModelForCausalLM, config, arguments, **chosen)
        if session[BlockArguments].document_mask and session.launch.speaks:
            check_document_mask(model, max(training.train_batch_size, training.eval_batch_size))
        if head is not None and (reason := tried(model, refusal)):
            raise RequestError(f"--teacher {name}: {reason}. Add --loss_chunk_tokens 0, which compares whole logits.")
        hidden = _with_hidden_head(model) if head is not None else None
        teacher = _teacher(session, model)
        teacher.head, teacher.hidden = head, hidden
        return teacher

    if session[CachedTeacherArguments].teacher_top_k is None:
        return opened()
    shared = min(one.get_text_config().vocab_size for one in (student.config, config))
    kept, asked = _kept(session, data, config, shared, opened), session[DistillArguments]
    return Teacher(None, asked.distill_alpha, asked.distill_temperature, (), nullcontext, head=head, kept=kept)


def _kept(session: Session, data: Any, config: Any, classes: int, opened: Any) -> TopK:
    """The teacher's predictions for the training data, over the `classes` tokens that it shares with the student."""
    asked, training, run = session[DistillArguments], session.training, session.run
    k = int(session[CachedTeacherArguments].teacher_top_k or 0)
    if k > classes:
        raise RequestError(
            f"{run.said('teacher_top_k')}, but teacher and student have {classes:,} tokens in common. Give at most "
            f"{classes}."
        )
    request = Asked(
        data.splits["train"],
        data.collator,
        k,
        classes,
        asked.distill_temperature,
        cache_home() / "teacher" / answers_key(session, data, config, classes),
        max(1, PIECE_TOKENS // data.account.block_size),
        training.eval_batch_size,
        session.launch.leads_its_node,
    )
    chunk = session[CausalModelArguments].loss_chunk_tokens or ANSWERED_TOKENS
    found = asked_before(request, opened, training.device, chunk)
    session.say(f"teacher: its {k:,} likeliest tokens per position are cached, {found.bytes / 2**20:,.1f} MiB")
    return found


def answers_key(session: Session, data: Any, config: Any, classes: int) -> str:
    """A key of everything that affects the predictions of the teacher with this `config` over `classes` tokens. File
    names say which rows they hold."""
    asked, training, run = session[DistillArguments], session.training, session.run
    return cache_key(
        FORMAT,
        digests.of_rows(data.splits["train"]),
        config.to_json_string(use_diff=False),
        digests.of_weights(asked.teacher, "main"),
        [run.value("teacher_top_k"), classes, asked.distill_temperature],
        [training.bf16, training.fp16, run.value("dtype")],
    )


def _is_asked(session: Session) -> bool:
    """Whether a teacher is used; with a weight of 0 the run is the same as without one."""
    asked = session[DistillArguments]
    if asked.teacher and not asked.distill_alpha:
        session.say("note: --distill_alpha is 0: the teacher has no effect, and is not loaded")
    if not (asked.teacher and asked.distill_alpha and session.training.do_train):
        return False
    session.say(f"teacher: {asked.teacher}, alpha {asked.distill_alpha:g}, temperature {asked.distill_temperature:g}")
    return True


def _config(session: Session, arguments: Any, tokenizer: Any, tokens: int) -> Any:
    """The teacher's config. Raises RequestError if it cannot read what the student reads."""
    name = str(session[DistillArguments].teacher)
    arguments = replace(arguments, model_revision="main")
    config = from_pretrained(AutoConfig, "teacher", name, arguments)
    if refuses := session.run.task.refuses_teacher or session.run.task.refuses:
        refuses(config.to_dict().get, f"--teacher {name}")
    refuse_without_weights(name, "teacher")
    own = from_pretrained(AutoTokenizer, "teacher", name, arguments)
    embeds = config.get_text_config().vocab_size
    if own.get_vocab() != tokenizer.get_vocab() or embeds < rows_of(tokenizer):
        raise RequestError(
            f"--teacher {name}: its vocabulary of {rows_of(own):,} tokens is not the student's of "
            f"{rows_of(tokenizer):,}, so their predictions cannot be compared. Give a teacher of the student's family, "
            f"or train a student from scratch on the teacher's tokens, by --tokenizer_name {name}."
        )
    if tokens > positions_of(config):
        flag = "block_size" if BlockArguments in session.run.recipe.groups else "max_seq_length"
        raise RequestError(
            f"--teacher {name}: it reads {positions_of(config)} tokens, but samples have {tokens}. Give at most as "
            f"many by --{flag}."
        )
    config.use_cache = False
    return config


def _opened(session: Session, auto: Any, config: Any, arguments: Any, **chosen: Any) -> Any:
    """Load the teacher, in the dtype of the student's frozen weights. Random states do not change."""
    name, training = str(session[DistillArguments].teacher), session.training
    kept = Kept(base_dtype(session.run, training.bf16, has_adapter=True))
    arguments = replace(arguments, model_revision="main")
    with kept_random_states():
        model = load_weights(auto, name, config, arguments, kept, flag="teacher", **chosen)
    return model.requires_grad_(False).eval()


def _with_hidden_head(model: Any) -> HiddenHead:
    """Replace the model's head by a `HiddenHead` with the same weight."""
    old = model.get_output_embeddings()
    head = HiddenHead(old.in_features, old.out_features, bias=old.bias is not None, device="meta")
    head.weight, head.bias = old.weight, old.bias
    model.set_output_embeddings(head)
    return head


def _teacher(session: Session, model: Any) -> Teacher:
    asked, training = session[DistillArguments], session.training
    reads = [name for name in READ if name in inspect.signature(model.forward).parameters]
    half = torch.bfloat16 if training.bf16 else torch.float16
    is_cast = (training.bf16 or training.fp16) and not session.ds_config  # DeepSpeed casts the weights
    autocast = partial(torch.autocast, training.device.type, half, enabled=is_cast)
    return Teacher(placed(session, model), asked.distill_alpha, asked.distill_temperature, reads, autocast)
