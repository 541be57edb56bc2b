"""Models that cannot learn to write, told by their config.json: each of an encoder's tokens sees those after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.run.run import Run
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
            "another, and for that there is no recipe yet. Give a decoder (Llama, Qwen, GPT-2, ...)."
        )


def look_at_model(run: Run) -> None:
    """Raises RequestError as loading the model would, by a folder's config.json, if the run is to write text."""
    name = run.value("model_name_or_path")
    file = Path(str(name)).expanduser() / "config.json"
    if name and "block_size" in run.recipe.flags and file.is_file():
        refuse_encoder(read_json_object(file).get, run.said("model_name_or_path"))
