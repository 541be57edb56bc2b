"""For recipes/preference.py: a language model or a reward model, its reference, and the report of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from finetune.data import digests
from finetune.data.cache import cache_key
from finetune.data.preferences import PreferenceData
from finetune.data.tokenizer import pad_apart, refuse_no_padding
from finetune.errors import RequestError
from finetune.models.adapters import check_adapter, kept_as, with_adapter
from finetune.models.causal import CausalSource, build_causal_lm, find_causal_source, settled_config
from finetune.models.chunked_loss import choose_chunk_tokens, use_chunked_loss
from finetune.models.gptlite import GPTLiteForSequenceClassification
from finetune.models.gptlite_weights import draw_weights
from finetune.models.probes import check_shared_prompt
from finetune.models.source import load_weights, positions_of
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.language import CausalModelArguments
from finetune.run.recipes.preference import PreferenceArguments, PreferenceDataArguments
from finetune.run.reference import form_of_reference
from finetune.training.merging import has_adapted, merged, use_of_writer
from finetune.training.model_card import Card, write_card
from finetune.training.results import pictures_of, rows_table, sentences
from finetune.training.samples import Answers
from finetune.training.second_model import placed
from finetune.training.start import Session

FORMAT = 1  # of the cached values: raise it when they change
PROMPTS = 3  # held-out prompts that the model answers
PIECE_ROWS = 4096  # rows of the reference per cached file; a killed run continues after the last one
MISSING = "reference.npz"  # in the run folder, for a run that resumes on a machine without the cache
USE_REWARD = """from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("path/to/this/folder"{own})
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
{inputs}  # judged at its last token, as in training
print(model(**inputs).logits)  # the greater, the better"""
OF_TURNS = """turns = [{"role": "user", "content": "A prompt"}, {"role": "assistant", "content": "Its answer"}]
inputs = tokenizer.apply_chat_template(turns, return_dict=True, return_tensors="pt")"""
OF_TEXT = 'inputs = tokenizer("A prompt and its answer"{end}, return_tensors="pt")'
PADS = "{end} also pads: at the end of what is scored it is not read, and the score is at the token before"


@dataclass
class Reference:
    """`form` is "none", "adapter", "cached" or "online"; `key` identifies cached values; `model` is the second model;
    `values` (rows, 2) are the log-probabilities of both sides. `is_base`: it is the model without its adapter."""

    form: str
    is_base: bool = False
    key: str = ""
    model: Any = None
    values: Tensor | None = None


def reference_of(session: Session, source: CausalSource) -> Reference:
    """The reference's form: for a new adapter the base model, for an adapter that is trained further the adapter as it
    was. Raises RequestError if the model before its training is not known."""
    asked, trains = session[PreferenceArguments], session.training.do_train
    has_adapter = bool(session.run.value("use_peft") or source.adapter)
    goes_on = bool(source.adapter and trains)
    form = form_of_reference(asked.loss, asked.reference, has_adapter, goes_on)
    if form != "none" and has_adapter and not goes_on:
        return Reference(form, is_base=True)
    if form != "none" and not trains:
        raise RequestError(
            f"--do_train False: --loss {asked.loss} compares a model with what it was before training, and for a whole "
            "model that is not known. Evaluate an adapter, or use --loss simpo, which has no reference."
        )
    return Reference(form)


def reference_key(session: Session, source: CausalSource, data: PreferenceData, config: Any) -> str:
    """A key of everything that affects the reference's log-probabilities: the model, its precision, and the rows, which
    data, tokenizer and block size determine. The seed initializes the weights of a new model and of new tokens."""
    run, training = session.run, session.training
    return cache_key(
        FORMAT,
        [digests.of_rows(split) for split in data.splits.values()],
        config.to_json_string(use_diff=False),
        digests.of_weights(source.pretrained, run.value("model_revision")),
        digests.of_base(str(source.adapter) if source.adapter else None, None, whole=True),
        training.seed if source.pretrained is None or run.value("resize_embeddings") else None,
        [training.bf16, training.fp16, *map(run.value, ("dtype", "load_in_4bit", "bnb_4bit_use_double_quant"))],
    )


def read_pieces(folder: Path, kept: Path, key: str, begins: range) -> dict[int, npt.NDArray[Any]]:
    """The pieces that exist, by their first row."""
    found = {begin: np.load(path) for begin in begins if (path := folder / f"{begin}.npy").is_file()}
    if len(found) < len(begins) and kept.is_file():
        with np.load(kept) as stored:
            if str(stored["key"]) == key:
                found = {begin: stored["values"][begin : begin + PIECE_ROWS] for begin in begins}
    return found


def preference_source(session: Session) -> CausalSource:
    """Find the model, without loading its weights. Raises RequestError for flags that do not fit it."""
    run = session.run
    source = find_causal_source(session[CausalModelArguments], session[PreferenceDataArguments].block_size)
    session.say(*check_adapter(run, source.adapter))
    if session[PreferenceArguments].loss == "reward":
        if run.value("merge_adapter"):
            raise RequestError(f"{run.said('merge_adapter')}: a reward model cannot be merged yet. Drop it.")
        if source.tokenizer is not None:
            # A trained reward model is read as it was trained, also where the end of text is its padding.
            (refuse_no_padding if _scores(source) else pad_apart)(source.tokenizer)
    reference_of(session, source)  # raises before the data are prepared
    return source


def preference_model(session: Session, source: CausalSource, data: PreferenceData) -> tuple[Any, Reference]:
    """The model with its adapter, and its reference."""
    arguments, training, run = session[CausalModelArguments], session.training, session.run
    is_reward = session[PreferenceArguments].loss == "reward"
    kept = kept_as(run, source.adapter, training.bf16)
    if is_reward:
        base = _reward_model(session, source, data.tokenizer, kept)
    else:
        base = build_causal_lm(arguments, source, data.tokenizer, training.seed, kept)
    base.accepts_loss_kwargs = False  # the trainer's loss does its own division
    if session[PreferenceArguments].share_prompt and session.launch.speaks:
        check_shared_prompt(base, source.block_size)
    model = with_adapter(base, session[AdapterArguments], source.adapter, run.task.adapter)
    chunk = 0 if is_reward else choose_chunk_tokens(arguments.loss_chunk_tokens, base, training.device.type)
    if chunk:
        use_chunked_loss(model, chunk, by_token=True)
    reference = reference_of(session, source)
    if reference.form == "cached":
        reference.key = reference_key(session, source, data, base.config)
    if reference.form == "online":
        second = build_causal_lm(arguments, source, data.tokenizer, training.seed, kept).requires_grad_(False)
        if chunk:
            use_chunked_loss(second, chunk, by_token=True)
        reference.model = placed(session, second)
    return model, reference


def _scores(source: CausalSource) -> bool:
    """Whether the model that is given has a trained head, whose scores depend on which token pads."""
    made = getattr(source.config, "architectures", None) or ()
    return source.adapter is not None or any(name.endswith("ForSequenceClassification") for name in made)


def _reward_model(session: Session, source: CausalSource, tokenizer: Any, kept: Any) -> Any:
    """A classifier with one output, the score."""
    arguments = session[CausalModelArguments]
    config = settled_config(arguments, source, tokenizer)
    config.num_labels, config.problem_type = 1, "regression"
    pad = tokenizer.pad_token_id
    config.get_text_config().pad_token_id = tokenizer.eos_token_id if pad is None else pad
    if source.pretrained is None:
        model = GPTLiteForSequenceClassification(config)
        draw_weights(model, session.training.seed)
        return model
    kind = AutoModelForSequenceClassification
    makes_head = session.training.do_train or source.adapter is not None  # an adapter brings its own head
    return load_weights(kind, source.pretrained, config, arguments, kept, has_new_head=makes_head)


def answers_of(session: Session, config: Any, data: PreferenceData) -> Answers:
    """The model's answers to some held-out prompts that leave room for one; none from a reward model."""
    asked, room = session[PreferenceArguments], positions_of(config)
    name, rows = data.sides[0], data.splits.get("validation", [])
    places = [] if asked.loss == "reward" else [len(rows) * i // (PROMPTS + 1) for i in range(1, PROMPTS + 1)]
    found = (rows[i] for i in dict.fromkeys(places) if len(rows))
    prompts = [row[f"{name}_ids"][: row[f"{name}_learnt"].index(True)] for row in found if any(row[f"{name}_learnt"])]
    fitting = [ids for ids in prompts if 0 < len(ids) < room]
    return Answers(asked.sample_tokens if fitting else 0, session.folder, session.training.seed, fitting)


def _before_and_after(answers: Answers) -> str:
    if not answers.first:  # a resumed run, or one that did not train
        return answers.last
    return f"Before training\n\n{answers.first}\n\nAfter training\n\n{answers.last}"


def use_of_reward(session: Session, data: PreferenceData) -> str:
    """Python that opens a reward model and scores an answer. An adapter's base model does not say that it has one
    output, nor which token pads."""
    own = f", num_labels=1, pad_token_id={data.pad}" if has_adapted(session) else ""
    end = "" if data.tokenizer.eos_token is None or _pads_with_end(data) else " + tokenizer.eos_token"
    return USE_REWARD.format(own=own, inputs=OF_TURNS if data.is_chat else OF_TEXT.format(end=end))


def _pads_with_end(data: PreferenceData) -> bool:
    return bool(data.pad == data.tokenizer.eos_token_id)


def write_preference_report(
    session: Session, data: PreferenceData, source: CausalSource, answers: Answers
) -> list[str]:
    """Write `training_curve.png`, README.md and, with --merge_adapter, the merged model."""
    account, loss = data.account, session[PreferenceArguments].loss
    is_reward = loss == "reward"
    unread = PADS.format(end=data.tokenizer.eos_token) if is_reward and _pads_with_end(data) else ""
    card = Card(
        task="reward model" if is_reward else f"language model trained on preferences ({loss})",
        table=rows_table("rows", account),
        facts=sentences(account.columns, *account.notes, unread),
        pictures=pictures_of(session.folder, "eval_preference_accuracy"),
        use=use_of_reward(session, data) if is_reward else use_of_writer(session, data.is_chat),
        sample=_before_and_after(answers),
    )
    write_card(session, source, account, card)
    return [] if is_reward else merged(session, source, data)
