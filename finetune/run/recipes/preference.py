"""recipes/preference.py: a language model trained on preferences between answers, or a reward model; and its flags."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.run.flag import FILE, NOT_NEGATIVE, POSITIVE, TEMPLATE, Range, Void, flag
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.language import LEAST_BLOCK, LEAST_BPE_VOCABULARY, CausalModelArguments
from finetune.run.flags.text import HeldOutArguments, PreparationArguments
from finetune.run.on_resume import GOES_ON, NEVER, ROWS, VALUES
from finetune.run.recipe import USUAL, Recipe
from finetune.run.recipes import TRAINER_GROUPS
from finetune.run.task import TEXT_CLASSIFICATION, TEXT_GENERATION

# Loss -> default --beta, as in the papers.
BETAS = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0, "reward": 1.0}
REFERENCES = ("auto", "cached", "online")


@dataclass
class PreferenceDataArguments(HeldOutArguments):
    """What to train on. Without these, Python's docstrings are preferred to the same words in another order."""

    train_file: str | None = flag(
        None, "csv, tsv, json(l) or parquet file: chosen and rejected, or completion and label", ROWS, path=FILE
    )
    column_mapping: list[str] | None = flag(
        None, "names of columns in your files, e.g. better=chosen worse=rejected", ROWS, pairs=True
    )
    chat_template: str | None = flag(
        None,
        "chat template: a jinja file, or a name such as chatml or llama3; default: the tokenizer's",
        ROWS,
        path=TEMPLATE,
    )
    tokenizer: str = flag(
        "bpe",
        "tokenizer of a model from scratch: char, byte, or bpe (trained on the text)",
        NEVER,
        choices=("char", "byte", "bpe"),
    )
    bpe_vocab_size: int = flag(
        2048, "vocabulary size of a bpe tokenizer from scratch", NEVER, range=Range(least=LEAST_BPE_VOCABULARY)
    )
    block_size: int | None = flag(
        None,
        "most tokens of a prompt and its answer; default: as many as the model takes, at most 1024",
        ROWS,
        range=Range(least=LEAST_BLOCK),
    )


@dataclass
class PreferenceArguments:
    """Which loss, and its settings (docs/preference.md)."""

    loss: str = flag("dpo", f"{', '.join(BETAS)} (trains a reward model)", NEVER, choices=tuple(BETAS))
    beta: float | None = flag(
        None, "scale of the rewards, or ORPO's lambda; default: 0.1, for simpo 2", VALUES, range=POSITIVE
    )
    label_smoothing: float = flag(
        0.0,
        "for dpo and simpo: fraction of the pairs assumed to be labeled wrongly",
        VALUES,
        range=Range(least=0, below=0.5),
    )
    length_normalization: bool = flag(False, "for dpo and ipo: average over the tokens of an answer", VALUES)
    target_margin: float = flag(1.0, "for simpo: gamma, the margin between the rewards", VALUES, range=NOT_NEGATIVE)
    desirable_weight: float = flag(1.0, "for kto: weight of a desirable answer", VALUES, range=NOT_NEGATIVE)
    undesirable_weight: float = flag(1.0, "for kto: weight of an undesirable answer", VALUES, range=NOT_NEGATIVE)
    reference: str = flag(
        "auto",
        "auto: the model without its adapter, or cached; cached: computed once; online: a second model",
        GOES_ON,
        choices=REFERENCES,
    )
    share_prompt: bool = flag(
        False, "compute a prompt once for both of its answers; a mask hides the answers from each other", GOES_ON
    )
    sample_tokens: int = flag(
        64,
        "longest answer to three held-out prompts, before training and at each evaluation; 0: none",
        GOES_ON,
        range=NOT_NEGATIVE,
    )


PREFERENCE = Recipe(
    name="preference",
    task=TEXT_GENERATION,
    tasks={("loss", "reward"): TEXT_CLASSIFICATION},
    groups=(
        CausalModelArguments,
        AdapterArguments,
        PreferenceDataArguments,
        PreparationArguments,
        PreferenceArguments,
        *TRAINER_GROUPS,
    ),
    figures=(
        *("loss", "preference_accuracy", "reward_margin", "reward_chosen", "reward_rejected"),
        *("logp_chosen", "logp_rejected", "kl"),
    ),
    defaults={
        **USUAL,
        "output_dir": "runs/preference",
        "per_device_train_batch_size": 8,  # pairs, so twice as many texts
        "per_device_eval_batch_size": 16,
        "num_train_epochs": 1,  # a second pass over the same pairs mostly learns them by heart
        "learning_rate": 1e-6,  # a trained model should stay close to its reference
        "warmup_steps": 0.1,
        "remove_unused_columns": False,  # the collator builds the model's inputs from a row
        "logging_nan_inf_filter": False,  # a NaN should be visible
    },
    # Random weights have nothing worth keeping, so the rate may be high.
    scratch_defaults={"learning_rate": 1e-3, "per_device_train_batch_size": 16, "ddp_find_unused_parameters": False},
    void=(
        Void(("label_smoothing",), "loss", ("ipo", "kto", "orpo", "reward"), "Only dpo and simpo use it. Drop it."),
        Void(
            ("length_normalization",), "loss", ("kto", "orpo", "reward", "simpo"), "Only dpo and ipo use it. Drop it."
        ),
        Void(("target_margin",), "loss", ("dpo", "ipo", "kto", "orpo", "reward"), "Give --loss simpo, or drop it."),
        Void(
            ("desirable_weight", "undesirable_weight"),
            "loss",
            ("dpo", "ipo", "orpo", "reward", "simpo"),
            "Give --loss kto, or drop it.",
        ),
        Void(("reference",), "loss", ("orpo", "reward", "simpo"), "It has no reference model. Drop it."),
        Void(("share_prompt",), "loss", ("kto", "reward"), "Only losses that compare two answers use it. Drop it."),
        Void(("beta", "loss_chunk_tokens", "sample_tokens"), "loss", ("reward",)),
    ),
)
