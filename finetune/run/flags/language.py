"""Which language model learns which text: the flags of recipes/causal_lm.py and causal_lm_pipeline.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.run.flag import FILE, NAME_OR_PATH, TEMPLATE
from finetune.run.flags.text import ENCODING
from finetune.run.range import AT_LEAST_ONE, NOT_NEGATIVE, TIMEOUT, Range
from finetune.run.sizes import GPTLITE_SIZES

PACKINGS = ("wrapped", "bfd", "none")
OF_CHATS = ("chat_template", "reasoning", "train_on")  # a completion has but one turn, and the other two
TURNS_LEARNT = ("assistant", "last", "all")
LEAST_BLOCK = 2  # tokens: one to read, and one to predict
LEAST_BPE_VOCABULARY = 257  # the bytes and the end of text


@dataclass
class CausalModelArguments:
    """Which model. Without a name, a GPT-lite of `model_size` is trained from scratch."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "hub id or folder of any causal LM", "path": NAME_OR_PATH}
    )
    model_revision: str = field(default="main", metadata={"help": "branch, tag or commit on the hub"})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "hub id or folder; default: the model's", "path": NAME_OR_PATH}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "run Python code that comes with the model"})
    model_size: str = field(
        default="tiny", metadata={"help": f"from scratch: {', '.join(GPTLITE_SIZES)}", "choices": tuple(GPTLITE_SIZES)}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "from scratch: e.g. num_hidden_layers=4,hidden_size=128,dropout=0.1"}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "eager, sdpa, flash_attention_2, ..."})
    resize_embeddings: bool = field(
        default=False, metadata={"help": "make room for a tokenizer that has more tokens than the model embeds"}
    )
    loss_chunk_tokens: int | None = field(
        default=None,
        metadata={
            "help": "logits of so many tokens at once; 0 for all; default: by the vocabulary",
            "range": NOT_NEGATIVE,
        },
    )


@dataclass
class CorpusArguments:
    """What to train on. With none of these, Python's reference manual is used."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "hub data set, or a local folder in its layout", "path": NAME_OR_PATH}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "configuration of the hub data set"})
    train_file: list[str] | None = field(
        default=None,
        metadata={
            "help": "txt, csv, tsv, json(l) or parquet; several, maybe with shares: a.jsonl:0.7 b.jsonl:0.3",
            "path": FILE,
        },
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "likewise; default: a part of train", "path": FILE}
    )
    encoding: str | None = field(default=None, metadata={"help": ENCODING})
    column_mapping: list[str] | None = field(
        default=None,
        metadata={"help": "columns by other names, as in context=input response=output", "pairs": True},
    )
    text_column_name: str | None = field(default=None, metadata={"help": "default: found by its name"})
    chat_template: str | None = field(
        default=None,
        metadata={"help": "a jinja file, or chatml, llama3, ...; default: the tokenizer's", "path": TEMPLATE},
    )
    train_on: str = field(
        default="assistant",
        metadata={"help": "of a chat the assistant's turns, its last, or all tokens", "choices": TURNS_LEARNT},
    )
    reasoning: str = field(
        default="keep",
        metadata={
            "help": "thoughts of a chat, as its template writes them: keep or strip",
            "choices": ("keep", "strip"),
        },
    )
    validation_split_percentage: float = field(
        default=10.0, metadata={"help": "of train, held out", "range": Range(above=0, below=100)}
    )
    drop_duplicates: bool = field(
        default=False,
        metadata={"help": "train on no document twice, nor on one that shares 13 words with held-out ones"},
    )
    streaming: bool = field(default=False, metadata={"help": "read training text on the way, and keep nothing of it"})
    max_train_samples: int | None = field(
        default=None, metadata={"help": "the first so many documents of each file", "range": AT_LEAST_ONE}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "likewise for validation", "range": AT_LEAST_ONE}
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "processes that tokenize", "range": AT_LEAST_ONE}
    )
    data_timeout_seconds: float = field(
        default=7200.0, metadata={"help": "how long to wait for the rank that prepares", "range": TIMEOUT}
    )


@dataclass
class BlockArguments:
    """How text becomes tokens, and tokens become blocks."""

    tokenizer: str = field(
        default="char",
        metadata={"help": "from scratch: char, byte, or bpe (trained on the text)", "choices": ("char", "byte", "bpe")},
    )
    bpe_vocab_size: int = field(
        default=8192,
        metadata={"help": "tokens of a bpe tokenizer from scratch", "range": Range(least=LEAST_BPE_VOCABULARY)},
    )
    block_size: int | None = field(
        default=None,
        metadata={"help": "tokens; default: the model's positions, <= 1024", "range": Range(least=LEAST_BLOCK)},
    )
    packing: str = field(
        default="wrapped", metadata={"help": "wrapped, bfd (whole documents) or none (one each)", "choices": PACKINGS}
    )
    document_mask: bool = field(default=False, metadata={"help": "documents in a block do not see one another"})


@dataclass
class SampleArguments:
    """What to have the model write at each evaluation."""

    sample_prompt: str = field(default="The ", metadata={"help": "how the sample begins, or what a chat is asked"})
    sample_tokens: int = field(default=200, metadata={"help": "its length; 0 for none", "range": NOT_NEGATIVE})
    sample_temperature: float = field(
        default=0.8, metadata={"help": "0 for the likeliest token each time", "range": NOT_NEGATIVE}
    )
