"""What recipes/preference.py trains: a language model, or one of rewards, with its reference; and what it reports."""

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
from finetune.errors import RequestError
from finetune.models.adapters import check_adapter, kept_as, with_adapter
from finetune.models.causal import CausalSource, build_causal_lm, find_causal_source, settled_config
from finetune.models.chunked_loss import choose_chunk_tokens, use_chunked_loss
from finetune.models.gptlite import GPTLiteForSequenceClassification
from finetune.models.gptlite_weights import draw_weights
from finetune.models.shared_prompt import check_shared_prompt
from finetune.models.source import load_weights, positions_of
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.language import CausalModelArguments
from finetune.run.recipes.preference import PreferenceArguments, PreferenceDataArguments
from finetune.run.reference import form_of_reference
from finetune.training.figures import more_is_better
from finetune.training.merging import merged
from finetune.training.model_card import Card, write_card
from finetune.training.results import USE_LANGUAGE_MODEL, named, pictures_of, rows_table, sentences
from finetune.training.samples import Answers
from finetune.training.second_model import placed
from finetune.training.start import Session

FORMAT = 1  # raise it when what is cached changes
PROMPTS = 3  # are answered, of the held-out ones
PIECE_ROWS = 4096  # of the reference are kept at a time, so that a run that is killed goes on there
MISSING = "reference.npz"  # in the run folder, for a run that goes on elsewhere
USE_REWARD = """import finetune.models.gptlite  # makes GPT-lite known to transformers; other models do without
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
text = "A prompt and its answer" + (tokenizer.eos_token or "")  # it is judged at its end, as in training
print(model(**tokenizer(text, return_tensors="pt")).logits)  # the greater, the better"""


@dataclass
class Reference:
    """`form` is "none", "adapter", "cached" or "online"; `key` names what cached values are of, `model` is a second one
    and `values` (rows, 2) are the log-probabilities of both sides. `is_base`: it is the model without its adapter."""

    form: str
    is_base: bool = False
    key: str = ""
    model: Any = None
    values: Tensor | None = None


def reference_of(session: Session, source: CausalSource) -> Reference:
    """Its form: of a new adapter the base model, of one that is trained further the adapter as it was. Raises
    RequestError where nobody knows what the model was before its training."""
    asked, trains = session[PreferenceArguments], session.training.do_train
    has_adapter = bool(session.run.value("use_peft") or source.adapter)
    goes_on = bool(source.adapter and trains)
    form = form_of_reference(asked.loss, asked.reference, has_adapter, goes_on)
    if form != "none" and has_adapter and not goes_on:
        return Reference(form, is_base=True)
    if form != "none" and not trains:
        raise RequestError(
            f"--do_train False: --loss {asked.loss} measures a model by what it was before it was trained, and of a "
            "whole model nobody knows that. Evaluate an adapter, or by --loss simpo, which has no reference."
        )
    return Reference(form)


def reference_key(session: Session, source: CausalSource, data: PreferenceData, config: Any) -> str:
    """All that decides the reference's log-probabilities: the model, its precision, and the rows, which the data, the
    tokenizer and the block size have made. The seed draws the weights of a new model and of new tokens."""
    run, training = session.run, session.training
    return cache_key(
        FORMAT,
        [digests.of_rows(split) for split in data.splits.values()],
        config.to_json_string(use_diff=False),
        digests.of_weights(source.pretrained, run.value("model_revision")),
        digests.of_base(str(source.adapter) if source.adapter else None, None, whole=True),
        training.seed if source.pretrained is None or run.value("resize_embeddings") else None,
        [training.bf16, training.fp16, run.value("dtype"), run.value("load_in_4bit")],
    )


def read_pieces(folder: Path, kept: Path, key: str, begins: range) -> dict[int, npt.NDArray[Any]]:
    """What there is, by its first row."""
    found = {begin: np.load(path) for begin in begins if (path := folder / f"{begin}.npy").is_file()}
    if len(found) < len(begins) and kept.is_file():
        with np.load(kept) as stored:
            if str(stored["key"]) == key:
                found = {begin: stored["values"][begin : begin + PIECE_ROWS] for begin in begins}
    return found


def preference_source(session: Session) -> CausalSource:
    """Which model, before its weights. Raises RequestError for flags that do not go with it."""
    training, run = session.training, session.run
    source = find_causal_source(session[CausalModelArguments], session[PreferenceDataArguments].block_size)
    check_adapter(run, source.adapter, session.shards_weights)
    if session[PreferenceArguments].loss == "reward" and run.value("merge_adapter"):
        raise RequestError(f"{run.said('merge_adapter')}: a model of rewards is not merged yet. Drop it.")
    reference_of(session, source)  # refused before the data are prepared
    if training.metric_for_best_model and "greater_is_better" not in run.given:
        training.greater_is_better = more_is_better(training.metric_for_best_model) is not False
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
    base.accepts_loss_kwargs = False  # the trainer divides by itself
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


def _reward_model(session: Session, source: CausalSource, tokenizer: Any, kept: Any) -> Any:
    """A classifier of one output, its score."""
    arguments = session[CausalModelArguments]
    config = settled_config(arguments, source, tokenizer)
    config.num_labels, config.problem_type = 1, "regression"
    pad = tokenizer.pad_token_id
    config.get_text_config().pad_token_id = tokenizer.eos_token_id if pad is None else pad
    if source.pretrained is None:
        model = GPTLiteForSequenceClassification(config)
        draw_weights(model, session.training.seed)
        return model
    kind, is_local = AutoModelForSequenceClassification, source.hub_id is None
    makes_head = session.training.do_train or source.adapter is not None  # which has its own
    return load_weights(kind, source.pretrained, config, is_local, arguments, kept, has_new_head=makes_head)


def answers_of(session: Session, config: Any, data: PreferenceData) -> Answers:
    """What the model answers to some of the held-out prompts that leave it room; to none where it is one of rewards."""
    asked, room = session[PreferenceArguments], positions_of(config)
    name, rows = data.sides[0], data.splits.get("validation", [])
    places = [] if asked.loss == "reward" else [len(rows) * i // (PROMPTS + 1) for i in range(1, PROMPTS + 1)]
    found = (rows[i] for i in dict.fromkeys(places) if len(rows))
    prompts = [row[f"{name}_ids"][: row[f"{name}_learnt"].index(True)] for row in found if any(row[f"{name}_learnt"])]
    fitting = [ids for ids in prompts if 0 < len(ids) < room]
    return Answers(asked.sample_tokens if fitting else 0, session.folder, session.training.seed, fitting)


def _before_and_after(answers: Answers) -> str:
    if not answers.first:  # of a run that went on, or that did not train
        return answers.last
    return f"Before training\n\n{answers.first}\n\nAfter training\n\n{answers.last}"


def write_preference_report(
    session: Session, data: PreferenceData, source: CausalSource, answers: Answers
) -> list[str]:
    """`training_curve.png` and README.md; and the merged model where --merge_adapter asks for it."""
    account, loss = data.account, session[PreferenceArguments].loss
    is_reward = loss == "reward"
    card = Card(
        task="model of rewards" if is_reward else f"language model trained on preferences ({loss})",
        pipeline_tag=session.run.task.name,
        **named(session, source, account),
        table=rows_table("rows", account),
        facts=sentences(account.columns, *account.notes),
        pictures=pictures_of(session.folder, "eval_preference_accuracy"),
        use=USE_REWARD if is_reward else USE_LANGUAGE_MODEL,
        sample=_before_and_after(answers),
    )
    write_card(session.folder, card)
    return [] if is_reward else merged(session, source, data)
