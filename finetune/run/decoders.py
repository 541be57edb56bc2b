"""Refuses models of the wrong kind for a recipe, by their config.json: an encoder cannot learn to generate text, and
only an encoder-decoder maps one text to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from finetune.errors import RequestError, plain
from finetune.safe_read import read_json_object

# Models for masked language modelling (transformers 5.23, models/auto/modeling_auto.py). Some are decoders if their
# config sets is_decoder.
ENCODERS = frozenset(
    """
    albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm esmc eurobert
    flaubert fnet funnel gte ibert jina_embeddings_v3 layoutlm longformer luke megatron-bert mobilebert modernbert
    modernvbert mpnet mra neomme nomic_bert nystromformer perceiver reformer rembert roberta roberta-prelayernorm
    roc_bert roformer squeezebert tapas ultrabert ultravbert xlm xlm-roberta xlm-roberta-xl xmod yoso
    """.split()
)

# Encoder-decoders that have a classifier class (the same file, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING).
CLASSIFYING = frozenset("bart bigbird_pegasus led mbart mt5 mvp plbart t5 t5gemma t5gemma2 umt5".split())

# The end of an architecture's name -> the recipe that trains it.
RECIPES = {
    "ForSequenceClassification": "recipes/seq_cls.py, and recipes/preference.py --loss reward",
    "ForTokenClassification": "recipes/token_cls.py",
    "ForQuestionAnswering": "recipes/question_answering.py",
    "ForImageClassification": "recipes/image_cls.py",
    "ForCausalLM": "recipes/causal_lm.py",
    "LMHeadModel": "recipes/causal_lm.py",
    "ForConditionalGeneration": "recipes/seq2seq.py",
    "Model": "recipes/embedding.py",
}
JUDGES = tuple(RECIPES)[:4]


def recipe_for(architectures: Sequence[str]) -> str:
    """The recipe for a checkpoint whose config.json names these architectures; "" if none is known."""
    return next((recipe for end, recipe in RECIPES.items() if architectures and architectures[0].endswith(end)), "")


def refuse_no_language_model(read: Callable[[str], Any], said: str) -> None:
    """Raises RequestError for a model that is not a causal language model; `read` and `said` as in `refuse_encoder`."""
    refuse_encoder(read, said)
    _refuse_judge(read, said)


def refuse_no_rewriter(read: Callable[[str], Any], said: str) -> None:
    """Raises RequestError for a model that is not a sequence-to-sequence model."""
    refuse_one_sided(read, said)
    _refuse_judge(read, said)


def _refuse_judge(read: Callable[[str], Any], said: str) -> None:
    """Raises RequestError for a classifier: its language-model head is not saved, or was not trained."""
    names = _architectures(read)
    if names and all(name.endswith(JUDGES) for name in names):
        raise RequestError(
            f"{said}: its config.json is that of a {names[0]}, which has no language-model head: the head would be "
            f"random. Give the language model that it was made from; a {names[0]} is for {recipe_for(names)}."
        )


def refuse_no_classifier(read: Callable[[str], Any], said: str) -> None:
    """Raises RequestError for a teacher of a classifier that has no classification head."""
    refuse_writer(read, said)
    names = _architectures(read)
    if names and not any(name.endswith("ForSequenceClassification") for name in names):
        raise RequestError(
            f"{said}: its config.json is that of a {names[0]}, which has no classification head: the head would be "
            "random. Give a model that was trained on these labels (recipes/seq_cls.py trains one)."
        )


def _architectures(read: Callable[[str], Any]) -> list[str]:
    found = read("architectures")
    return [plain(name) for name in found if isinstance(name, str)] if isinstance(found, list) else []


def refuse_encoder(read: Callable[[str], Any], said: str) -> None:
    """Raises RequestError for an encoder or an encoder-decoder; `read` returns the values of its config by name, None
    for missing ones, and `said` is how the model was asked for."""
    kind = str(read("model_type"))
    if kind in ENCODERS and not read("is_decoder"):
        raise RequestError(
            f"{said}: its config.json is that of an encoder ({kind}), whose tokens see those after them: it would "
            "learn to copy what it should predict, and generate nothing. Give a decoder (Llama, Qwen, GPT-2, ...); an "
            "encoder is for recipes/seq_cls.py and recipes/token_cls.py."
        )
    if read("is_encoder_decoder"):
        raise RequestError(
            f"{said}: its config.json is that of an encoder with a decoder ({kind}), which maps one text to "
            "another: that is for recipes/seq2seq.py. Give a decoder (Llama, Qwen, GPT-2, ...)."
        )


def refuse_one_sided(read: Callable[[str], Any], said: str) -> None:
    """Raises RequestError for a model that does not have both an encoder and a decoder."""
    kind = str(read("model_type"))
    if read("is_encoder_decoder"):
        return
    is_encoder = kind in ENCODERS and not read("is_decoder")
    what, recipe = ("an encoder", "recipes/seq_cls.py and recipes/token_cls.py") if is_encoder else (
        "a decoder, or of a model that does not read text", "recipes/causal_lm.py"
    )  # fmt: skip
    raise RequestError(
        f"{said}: its config.json is that of {what} ({kind}), but mapping one text to another takes an encoder with a "
        f"decoder (T5, BART, Pegasus, Marian, ...). Give such a model; a {kind} is for {recipe}."
    )


def refuse_writer(read: Callable[[str], Any], said: str) -> None:
    """Raises RequestError for an encoder-decoder that has no classifier in transformers."""
    kind = str(read("model_type"))
    if read("is_encoder_decoder") and kind not in CLASSIFYING:
        raise RequestError(
            f"{said}: its config.json is that of an encoder with a decoder ({kind}), for which transformers has no "
            "classifier: it is for recipes/seq2seq.py. Give an encoder (DistilBERT, RoBERTa, ...)."
        )


def look_at_model(run: Any) -> None:
    """Raises RequestError, as loading the model would, if a folder's config.json does not fit the run's task; also for
    the teacher, which must have the task's head."""
    _look(run, "model_name_or_path", run.task.refuses)
    _look(run, "teacher", run.task.refuses_teacher or run.task.refuses)


def _look(run: Any, flag: str, refuses: Callable[[Callable[[str], Any], str], None] | None) -> None:
    name = run.value(flag)
    file = Path(str(name)).expanduser() / "config.json"
    if name and refuses is not None and file.is_file():
        refuses(read_json_object(file).get, run.said(flag))
