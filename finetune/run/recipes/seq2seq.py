"""recipes/seq2seq.py: one text to another with an encoder-decoder: summarization, translation, and the like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune.run.decoders import refuse_no_rewriter
from finetune.run.flag import AT_LEAST_ONE, METRIC, NAME_OR_PATH, RATE, Range, flag
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.text import FileArguments, NamedModelArguments, PreparationArguments
from finetune.run.on_resume import GOES_ON, MODEL, ROWS
from finetune.run.recipe import FIGURES_OF_TEXTS, METRICS_OF_TEXTS, USUAL, Recipe
from finetune.run.recipes import TRAINER_GROUPS
from finetune.run.task import Task

# Shapes of a T5 from scratch; its vocabulary has at most `vocab_size` tokens. `small` and `base` are from arXiv
# 1910.10683, `tiny` suits two CPU cores.
T5_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4, "vocab_size": 4_000},
    "small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 16_000},
    "base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32_000},
}
LENGTH = Range(least=2)  # a token, and the end of text


@dataclass
class Seq2SeqModelArguments(NamedModelArguments):
    """Which model. Without a name, a T5 of `model_size` is trained from scratch."""

    model_name_or_path: str | None = flag(
        None, "hub id or folder of a T5, BART, Pegasus, Marian or the like", MODEL, path=NAME_OR_PATH
    )
    model_size: str = flag(
        "tiny", f"size of a model from scratch: {', '.join(T5_SIZES)}", MODEL, choices=tuple(T5_SIZES)
    )
    dropout: float | None = flag(None, "dropout of a model from scratch; default: 0.1", MODEL, range=RATE)


@dataclass
class PairArguments(FileArguments):
    """What to train on. Without these, functions of Python's standard library and the first lines of their docstrings
    are used."""

    source_column_name: str | None = flag(None, "column of the source texts; default: found by its name", ROWS)
    target_column_name: str | None = flag(None, "column of the target texts; default: found by its name", ROWS)
    source_lang: str | None = flag(None, "source language, for `translation` columns and multilingual models", ROWS)
    target_lang: str | None = flag(None, "target language, for the same", ROWS)
    source_prefix: str | None = flag(None, "text to put before each source, such as 'summarize: '", ROWS)
    max_source_length: int | None = flag(
        None,
        "longer sources are cut to this many tokens; default: what the model takes, at most 512",
        ROWS,
        range=LENGTH,
    )
    max_target_length: int | None = flag(
        None,
        "longer targets are cut to this many tokens; default: what the model takes, at most 128",
        ROWS,
        range=LENGTH,
    )


@dataclass
class GeneratedTextArguments:
    """What the model generates from held-out sources at each evaluation, and how it is scored."""

    predict_with_generate: bool = flag(
        True, "generate texts at each evaluation and score them; otherwise only the loss", GOES_ON
    )
    num_beams: int | None = flag(None, "number of beams; default: the model's, or 1", GOES_ON, range=AT_LEAST_ONE)
    generation_max_length: int | None = flag(
        None, "longest text to generate, in tokens; default: --max_target_length", GOES_ON, range=AT_LEAST_ONE
    )
    metrics: list[str] | None = flag(
        None,
        "names in finetune/metrics/, or files with an evaluate.Metric of texts; default: exact_match and rouge",
        GOES_ON,
        path=METRIC,
    )


def t5_shape(read: Callable[[str], Any]) -> dict[str, Any]:
    """The config of the T5 from scratch that the flags ask for, with the largest vocabulary that it may have. `read`
    returns the values of the flags."""
    dropout = read("dropout")
    return {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "relative_attention_num_buckets": 32,
        **T5_SIZES[read("model_size")],
        "dropout_rate": 0.1 if dropout is None else dropout,
        "feed_forward_proj": "gated-gelu",
    }


SEQ2SEQ = Recipe(
    name="seq2seq",
    task=Task("text2text-generation", "AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM", refuse_no_rewriter),
    groups=(
        Seq2SeqModelArguments,
        AdapterArguments,
        PairArguments,
        PreparationArguments,
        GeneratedTextArguments,
        *TRAINER_GROUPS,
    ),
    defaults={
        **USUAL,
        "output_dir": "runs/seq2seq",
        "remove_unused_columns": False,  # the texts stay in the rows, and the collator leaves them out
    },
    figures=("loss", "perplexity", "token_accuracy", *FIGURES_OF_TEXTS),
    metrics=METRICS_OF_TEXTS,
    # A model from scratch needs a higher rate and more epochs than a pretrained one. The sources are short, because the
    # head of a function says most about it.
    scratch_defaults={
        "learning_rate": 2e-3,
        "num_train_epochs": 3,
        "warmup_steps": 0.1,
        "max_source_length": 96,
        "max_target_length": 24,
        "ddp_find_unused_parameters": False,
    },
    scratch=t5_shape,
)
