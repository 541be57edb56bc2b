"""The flags of recipes/causal_lm.py and causal_lm_pipeline.py: model and text."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.run.flag import AT_LEAST_ONE, FILE, METRIC, NAME_OR_PATH, NOT_NEGATIVE, TEMPLATE, TIMEOUT, Range, flag
from finetune.run.flags.text import HeldOutArguments, NamedModelArguments
from finetune.run.on_resume import EVALUATED, GOES_ON, MODEL, NEVER, ROWS
from finetune.run.sizes import CAUSAL_SIZES

PACKINGS = ("wrapped", "bfd", "none")
OF_CHATS = ("chat_template", "reasoning", "train_on")  # completions use the first two, too
TURNS_LEARNT = ("assistant", "last", "all")
LEAST_BLOCK = 2  # tokens: one to read, and one to predict
LEAST_BPE_VOCABULARY = 257  # the bytes and the end-of-text token


@dataclass
class CausalModelArguments(NamedModelArguments):
    """Which model. Without a name, one of `model_size` is trained from scratch: a GPT-lite, or a mixture of experts."""

    model_name_or_path: str | None = flag(None, "hub id or folder of any causal LM", MODEL, path=NAME_OR_PATH)
    model_size: str = flag(
        "tiny", f"size of a model from scratch: {', '.join(CAUSAL_SIZES)}", MODEL, choices=CAUSAL_SIZES
    )
    config_overrides: str | None = flag(
        None,
        "changes to the config of a model from scratch, e.g. num_hidden_layers=4,hidden_size=128,dropout=0.1",
        MODEL,
    )
    attn_implementation: str | None = flag(None, "eager, sdpa, flash_attention_2, ...", GOES_ON)
    resize_embeddings: bool = flag(
        False, "enlarge the embeddings if the tokenizer has more tokens than the model", MODEL
    )
    loss_chunk_tokens: int | None = flag(
        None,
        "compute logits and loss for this many tokens at a time; 0: for all at once; default: by the vocabulary",
        GOES_ON,
        range=NOT_NEGATIVE,
    )


@dataclass
class CorpusArguments(HeldOutArguments):
    """What to train on. Without these, Python's reference manual is used."""

    train_file: list[str] | None = flag(
        None,
        "txt, csv, tsv, json(l) or parquet files; several may have weights: a.jsonl:0.7 b.jsonl:0.3",
        ROWS,
        path=FILE,
    )
    column_mapping: list[str] | None = flag(
        None, "names of columns in your files, e.g. context=input response=output", ROWS, pairs=True
    )
    text_column_name: str | None = flag(None, "column of the text; default: found by its name", ROWS)
    chat_template: str | None = flag(
        None,
        "chat template: a jinja file, or a name such as chatml or llama3; default: the tokenizer's",
        ROWS,
        path=TEMPLATE,
    )
    train_on: str = flag(
        "assistant",
        "tokens of a chat to learn: the assistant's turns, its last turn, or all",
        ROWS,
        choices=TURNS_LEARNT,
    )
    reasoning: str = flag(
        "keep", "reasoning (<think> blocks and the like) in a chat: keep or strip it", ROWS, choices=("keep", "strip")
    )
    validation_split_percentage: float = flag(
        10.0, "percentage of the training data to hold out", ROWS, range=Range(above=0, below=100)
    )
    drop_duplicates: bool = flag(
        False, "leave out duplicate documents, and those that share 13 words in a row with a held-out one", ROWS
    )
    streaming: bool = flag(False, "read the training text while training, without a cache", ROWS)
    max_train_samples: int | None = flag(
        None, "use only this many documents of each file, from its start", ROWS, range=AT_LEAST_ONE
    )
    max_eval_samples: int | None = flag(None, "the same for the held-out data", EVALUATED, range=AT_LEAST_ONE)
    preprocessing_num_workers: int | None = flag(None, "number of processes that tokenize", GOES_ON, range=AT_LEAST_ONE)
    data_timeout_seconds: float = flag(
        7200.0, "how long ranks wait for the one that prepares the data", GOES_ON, range=TIMEOUT
    )


@dataclass
class BlockArguments:
    """How text becomes tokens, and tokens become blocks."""

    tokenizer: str = flag(
        "char",
        "tokenizer of a model from scratch: char, byte, or bpe (trained on the text)",
        NEVER,
        choices=("char", "byte", "bpe"),
    )
    bpe_vocab_size: int = flag(
        8192, "vocabulary size of a bpe tokenizer from scratch", NEVER, range=Range(least=LEAST_BPE_VOCABULARY)
    )
    block_size: int | None = flag(
        None,
        "tokens in a block; default: as many as the model takes, at most 1024",
        ROWS,
        range=Range(least=LEAST_BLOCK),
    )
    packing: str = flag(
        "wrapped",
        "how documents fill blocks: wrapped (cut at block ends), bfd (kept whole) or none (one document per block)",
        ROWS,
        choices=PACKINGS,
    )
    document_mask: bool = flag(False, "do not let a document attend to others in its block", ROWS)


@dataclass
class SampleArguments:
    """What the model generates at each evaluation."""

    sample_prompt: str = flag("The ", "start of the text to sample, or the question to a chat model", GOES_ON)
    sample_tokens: int = flag(200, "tokens to sample at each evaluation; 0: none", GOES_ON, range=NOT_NEGATIVE)
    sample_temperature: float = flag(0.8, "sampling temperature; 0: greedy", GOES_ON, range=NOT_NEGATIVE)


@dataclass
class GeneratedAnswerArguments:
    """What the model answers to held-out prompts at each evaluation, and how it is scored."""

    predict_with_generate: bool = flag(
        False, "answer the held-out prompts at each evaluation, and score the answers", GOES_ON
    )
    generation_max_new_tokens: int | None = flag(
        None, "longest answer, in tokens; default: 256, or half of what the model takes", GOES_ON, range=AT_LEAST_ONE
    )
    metrics: list[str] | None = flag(
        None,
        "names in finetune/metrics/, or files with an evaluate.Metric of texts; default: exact_match and rouge",
        GOES_ON,
        path=METRIC,
    )
