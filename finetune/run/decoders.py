"""Models of another kind than a recipe trains, told by their config.json: an encoder cannot learn to write, and only an
encoder with a decoder reads one text to write another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.safe_read import read_json_object

# transformers 5.23, models/auto/modeling_auto.py: those that fill in masks, and those that read one text and write
# another. Some of the first are decoders where their config says so.
ENCODERS = frozenset(
    """
    albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm esmc eurobert
    flaubert fnet funnel gte ibert jina_embeddings_v3 layoutlm longformer luke megatron-bert mobilebert modernbert
    modernvbert mpnet mra neomme nomic_bert nystromformer perceiver reformer rembert roberta roberta-prelayernorm
    roc_bert roformer squeezebert tapas ultrabert ultravbert xlm xlm-roberta xlm-roberta-xl xmod yoso
    """.split()
)

# Encoders with a decoder that have a class of classifiers (the same file, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING).
CLASSIFYING = frozenset("bart bigbird_pegasus led mbart mt5 mvp plbart t5 t5gemma t5gemma2 umt5".split())


def refuse_encoder(read: Callable[[str], Any], said: str) -> None:
    """Raises RequestError for a model that is none for this task; `read` gives the values of its config by name, None
    for what is not there, and `said` is how it was asked for."""
    kind = str(read("model_type"))
    if kind in ENCODERS and not read("is_decoder"):
        raise RequestError(
            f"{said}: its config.json is of an encoder ({kind}), whose tokens see those after them: it would learn to "
            "copy what it is to predict, and write nothing. Give a decoder (Llama, Qwen, GPT-2, ...); an encoder is "
            "for recipes/seq_cls.py and recipes/token_cls.py."
        )
    if read("is_encoder_decoder"):
        raise RequestError(
            f"{said}: its config.json is of an encoder with a decoder ({kind}), which reads one text and writes "
            "another: that is for recipes/seq2seq.py. Give a decoder (Llama, Qwen, GPT-2, ...)."
        )


def refuse_one_sided(read: Callable[[str], Any], said: str) -> None:
    """Likewise for a model that has not both sides, an encoder and a decoder."""
    kind = str(read("model_type"))
    if read("is_encoder_decoder"):
        return
    is_encoder = kind in ENCODERS and not read("is_decoder")
    what, recipe = ("an encoder", "recipes/seq_cls.py and recipes/token_cls.py") if is_encoder else (
        "a decoder, or of a model that reads no text", "recipes/causal_lm.py"
    )  # fmt: skip
    raise RequestError(
        f"{said}: its config.json is of {what} ({kind}), and one text is made of another by an encoder with a decoder "
        f"(T5, BART, Pegasus, Marian, ...). Give such a model; a {kind} is for {recipe}."
    )


def refuse_writer(read: Callable[[str], Any], said: str) -> None:
    """Likewise for an encoder with a decoder that transformers has no classifier of."""
    kind = str(read("model_type"))
    if read("is_encoder_decoder") and kind not in CLASSIFYING:
        raise RequestError(
            f"{said}: its config.json is of an encoder with a decoder ({kind}), of which transformers has no "
            "classifier: it is for recipes/seq2seq.py. Give an encoder (DistilBERT, RoBERTa, ...)."
        )


def look_at_model(run: Any) -> None:
    """Raises RequestError as loading the model would, by a folder's config.json, for one that the run's task is not
    for."""
    name = run.value("model_name_or_path")
    file = Path(str(name)).expanduser() / "config.json"
    if name and run.task.refuses is not None and file.is_file():
        run.task.refuses(read_json_object(file).get, run.said("model_name_or_path"))
