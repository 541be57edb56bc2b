"""Which language model learns which text: the flags of recipes/causal_lm.py and causal_lm_pipeline.py."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.run.flag import FILE, NAME_OR_PATH, TEMPLATE, flag
from finetune.run.flags.text import ENCODING
from finetune.run.on_resume import EVALUATED, GOES_ON, MODEL, NEVER, ROWS
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

    model_name_or_path: str | None = flag(None, "hub id or folder of any causal LM", MODEL, path=NAME_OR_PATH)
    model_revision: str = flag("main", "branch, tag or commit on the hub", MODEL)
    tokenizer_name: str | None = flag(None, "hub id or folder; default: the model's", MODEL, path=NAME_OR_PATH)
    trust_remote_code: bool = flag(False, "run Python code that comes with the model", GOES_ON)
    model_size: str = flag("tiny", f"from scratch: {', '.join(GPTLITE_SIZES)}", MODEL, choices=tuple(GPTLITE_SIZES))
    config_overrides: str | None = flag(
        None, "from scratch: e.g. num_hidden_layers=4,hidden_size=128,dropout=0.1", MODEL
    )
    attn_implementation: str | None = flag(None, "eager, sdpa, flash_attention_2, ...", GOES_ON)
    resize_embeddings: bool = flag(False, "make room for a tokenizer that has more tokens than the model embeds", MODEL)
    loss_chunk_tokens: int | None = flag(
        None, "logits of so many tokens at once; 0 for all; default: by the vocabulary", GOES_ON, range=NOT_NEGATIVE
    )


@dataclass
class CorpusArguments:
    """What to train on. With none of these, Python's reference manual is used."""

    dataset_name: str | None = flag(None, "hub data set, or a local folder in its layout", ROWS, path=NAME_OR_PATH)
    dataset_config_name: str | None = flag(None, "configuration of the hub data set", ROWS)
    train_file: list[str] | None = flag(
        None, "txt, csv, tsv, json(l) or parquet; several, maybe with shares: a.jsonl:0.7 b.jsonl:0.3", ROWS, path=FILE
    )
    validation_file: str | None = flag(None, "likewise; default: a part of train", EVALUATED, path=FILE)
    encoding: str | None = flag(None, ENCODING, ROWS)
    column_mapping: list[str] | None = flag(
        None, "columns by other names, as in context=input response=output", ROWS, pairs=True
    )
    text_column_name: str | None = flag(None, "default: found by its name", ROWS)
    chat_template: str | None = flag(
        None, "a jinja file, or chatml, llama3, ...; default: the tokenizer's", ROWS, path=TEMPLATE
    )
    train_on: str = flag(
        "assistant", "of a chat the assistant's turns, its last, or all tokens", ROWS, choices=TURNS_LEARNT
    )
    reasoning: str = flag(
        "keep", "thoughts of a chat, as its template writes them: keep or strip", ROWS, choices=("keep", "strip")
    )
    validation_split_percentage: float = flag(10.0, "of train, held out", ROWS, range=Range(above=0, below=100))
    drop_duplicates: bool = flag(
        False, "train on no document twice, nor on one that shares 13 words with held-out ones", ROWS
    )
    streaming: bool = flag(False, "read training text on the way, and keep nothing of it", ROWS)
    max_train_samples: int | None = flag(None, "the first so many documents of each file", ROWS, range=AT_LEAST_ONE)
    max_eval_samples: int | None = flag(None, "likewise for validation", EVALUATED, range=AT_LEAST_ONE)
    preprocessing_num_workers: int | None = flag(None, "processes that tokenize", GOES_ON, range=AT_LEAST_ONE)
    data_timeout_seconds: float = flag(7200.0, "how long to wait for the rank that prepares", GOES_ON, range=TIMEOUT)


@dataclass
class BlockArguments:
    """How text becomes tokens, and tokens become blocks."""

    tokenizer: str = flag(
        "char", "from scratch: char, byte, or bpe (trained on the text)", NEVER, choices=("char", "byte", "bpe")
    )
    bpe_vocab_size: int = flag(
        8192, "tokens of a bpe tokenizer from scratch", NEVER, range=Range(least=LEAST_BPE_VOCABULARY)
    )
    block_size: int | None = flag(
        None, "tokens; default: the model's positions, <= 1024", ROWS, range=Range(least=LEAST_BLOCK)
    )
    packing: str = flag("wrapped", "wrapped, bfd (whole documents) or none (one each)", ROWS, choices=PACKINGS)
    document_mask: bool = flag(False, "documents in a block do not see one another", ROWS)


@dataclass
class SampleArguments:
    """What to have the model write at each evaluation."""

    sample_prompt: str = flag("The ", "how the sample begins, or what a chat is asked", GOES_ON)
    sample_tokens: int = flag(200, "its length; 0 for none", GOES_ON, range=NOT_NEGATIVE)
    sample_temperature: float = flag(0.8, "0 for the likeliest token each time", GOES_ON, range=NOT_NEGATIVE)
