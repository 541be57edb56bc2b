"""Language modelling: a corpus as tokens on disk and as blocks to train on, prepared once and cached."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from finetune.data.cache import OF_NO_EFFECT, cache_home, cache_key, file_states, prepare_once
from finetune.data.chat import completion, conversation
from finetune.data.documents import CHAT, TEXT, Corpus, open_corpus
from finetune.data.packing import Collator, PackedDataset, Tokens, TokenWriter, best_fit_decreasing, one_each, wrapped
from finetune.data.tokenizer import TEXT_TOKENIZERS, identity, train_text_tokenizer
from finetune.errors import RequestError

FORMAT = 1  # raise it when what is cached changes
PACKINGS = ("wrapped", "bfd", "none")


@dataclass
class CorpusArguments:
    """What to train on. With none of these, Python's reference manual is used."""

    dataset_name: str | None = field(default=None, metadata={"help": "hub data set, or a local folder in its layout"})
    dataset_config_name: str | None = field(default=None, metadata={"help": "configuration of the hub data set"})
    train_file: str | None = field(default=None, metadata={"help": "txt, csv, tsv, json(l) or parquet file"})
    validation_file: str | None = field(default=None, metadata={"help": "likewise; default: a part of train"})
    text_column_name: str | None = field(default=None, metadata={"help": "default: found by its name"})
    validation_split_percentage: float = field(default=10.0, metadata={"help": "of train, held out"})
    max_train_samples: int | None = field(default=None, metadata={"help": "the first so many documents"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "likewise for validation"})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "processes that tokenize"})
    data_timeout_seconds: float = field(
        default=7200.0, metadata={"help": "how long to wait for the rank that prepares"}
    )


@dataclass
class BlockArguments:
    """How text becomes tokens, and tokens become blocks."""

    tokenizer: str = field(default="char", metadata={"help": "from scratch: char, byte, or bpe (trained on the text)"})
    bpe_vocab_size: int = field(default=8192, metadata={"help": "tokens of a bpe tokenizer from scratch"})
    block_size: int | None = field(default=None, metadata={"help": "tokens; default: the model's positions, <= 1024"})
    packing: str = field(default="wrapped", metadata={"help": "wrapped, bfd (whole documents) or none (one each)"})
    document_mask: bool = field(default=False, metadata={"help": "documents in a block do not see one another"})


@dataclass(frozen=True)
class CorpusAccount:
    """What was found, for the log and the model card. Counts are of documents, tokens, characters and UTF-8 bytes."""

    source: str
    kind: str
    documents: dict[str, int]
    tokens: dict[str, int]
    characters: dict[str, int]
    bytes: dict[str, int]
    learnt: dict[str, int]  # tokens: all, or of conversations those of the assistant
    blocks: dict[str, int]
    left_over: int  # tokens at the end of the training text that fill no block
    padding_share: float  # of the training blocks
    block_size: int
    packing: str

    @property
    def tokens_per_byte(self) -> float:
        """Of the held-out text: learnt tokens by the bytes that they stand for."""
        return self.learnt["validation"] / max(self.bytes["validation"], 1)

    @property
    def tokens_per_character(self) -> float:
        """Of the held-out text, likewise."""
        return self.learnt["validation"] / max(self.characters["validation"], 1)

    def headline(self) -> str:
        """One line for the log: what is used, and which flags change it."""
        more = "; --train_file takes your own" if self.source.startswith("built-in") else ""
        counts = ", ".join(f"{count:,} {split}" for split, count in self.tokens.items())
        rest = f", {self.left_over} left over" if self.left_over else ""
        return f"data: {self.source} ({counts} tokens{rest}; blocks of {self.block_size}, {self.packing}{more})"


@dataclass(frozen=True)
class CorpusData:
    """Splits `train` and `validation` as blocks, with all that belongs to them."""

    splits: dict[str, PackedDataset]
    account: CorpusAccount
    tokenizer: Any

    @property
    def collator(self) -> Collator:
        """Stacks blocks; the shorter ones are padded."""
        pad = self.tokenizer.pad_token_id
        return Collator(pad if pad is not None else self.tokenizer.eos_token_id or 0)


def prepare_corpus(
    arguments: CorpusArguments,
    blocks: BlockArguments,
    tokenizer: Any | None,
    *,
    block_size: int,
    seed: int,
    leads: bool,
    reports: bool,
) -> CorpusData:
    """The blocks of one run, from the cache or made on the rank that `leads`. `block_size` is in tokens.

    Without `tokenizer`, one of the kind `blocks.tokenizer` is made from the training text. Raises RequestError for bad
    data and RunError when the rank that prepares takes longer than --data_timeout_seconds.
    """
    for name, given, known in (("packing", blocks.packing, PACKINGS), ("tokenizer", blocks.tokenizer, TEXT_TOKENIZERS)):
        if given not in known:
            raise RequestError(f"--{name} {given}: give one of {', '.join(known)}.")
    job = _Job(arguments, blocks, tokenizer, block_size, seed)
    folder = cache_home() / "causal_lm" / job.key()
    timeout = arguments.data_timeout_seconds
    prepare_once(folder, job.make, what="to tokenize", leads=leads, reports=reports, timeout_seconds=timeout)
    return job.load(folder)


@dataclass(frozen=True)
class _Job:
    """All that decides what the tokens and blocks are, and how they are made."""

    arguments: CorpusArguments
    blocks: BlockArguments
    tokenizer: Any | None
    block_size: int
    seed: int

    def key(self) -> str:
        arguments = self.arguments
        return cache_key(
            FORMAT,
            platform.python_version(),  # the built-in text is Python's own
            {name: value for name, value in asdict(arguments).items() if name not in OF_NO_EFFECT},
            asdict(self.blocks),
            file_states(arguments.dataset_name, arguments.train_file, arguments.validation_file),
            None if self.tokenizer is None else [*identity(self.tokenizer), self.tokenizer.chat_template],
            self.block_size,
            self.seed,
        )

    def make(self, folder: Path) -> None:
        """Read, tokenize, and write tokens and what was counted."""
        corpus = open_corpus(self.arguments, self.arguments.validation_split_percentage, self.seed)
        tables = {
            split: table if most is None else table.select(range(min(most, len(table))))
            for split, table, most in (
                ("train", corpus.train, self.arguments.max_train_samples),
                ("validation", corpus.validation, self.arguments.max_eval_samples),
            )
        }
        tokenizer = self.tokenizer or self._train_tokenizer(corpus, tables["train"])
        if self.tokenizer is None and self.blocks.tokenizer == "char":
            _refuse_unknown_characters(tokenizer, tables["validation"])
        account: dict[str, Any] = {"source": corpus.source, "kind": corpus.kind}
        workers = self.arguments.preprocessing_num_workers or os.cpu_count() or 1
        for split, table in tables.items():
            (folder / split).mkdir()
            counts = write_tokens(folder / split, table, corpus.kind, tokenizer, workers)
            for name, count in counts.items():
                account.setdefault(name, {})[split] = count
        tokenizer.save_pretrained(str(folder / "tokenizer"))
        (folder / "account.json").write_text(json.dumps(account, indent=1))

    def _train_tokenizer(self, corpus: Corpus, train: Any) -> Any:
        if corpus.kind != TEXT:
            raise RequestError(f"the data has {corpus.kind}, which wants a model's own tokenizer. Give one.")
        single = "ends" in train.column_names and sum(train["ends"]) <= 1
        kind, size = self.blocks.tokenizer, self.blocks.bpe_vocab_size
        return train_text_tokenizer(kind, train["text"], size, self.block_size, with_end=not single)

    def load(self, folder: Path) -> CorpusData:
        """Blocks are cut anew each time: it is quick, and the tokens stay on the disk."""
        found = json.loads((folder / "account.json").read_text())
        tokenizer = self.tokenizer or AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
        splits, left_over = {}, 0
        for split in ("train", "validation"):
            tokens = Tokens.open(folder / split)
            if self.blocks.packing == "wrapped":
                cut, rest = wrapped(tokens.starts, self.block_size, keep_tail=split == "validation")
                left_over += rest
            elif self.blocks.packing == "bfd":
                cut = best_fit_decreasing(tokens.starts, self.block_size)
            else:
                cut = one_each(tokens.starts, self.block_size)
            splits[split] = PackedDataset(tokens, cut, self.blocks.document_mask)
        if not len(splits["train"]):
            raise RequestError(
                f"the training text has {found['tokens']['train']:,} tokens, less than one block of {self.block_size} "
                "and the token after it. Give more text, or a smaller --block_size."
            )
        lengths = splits["train"].lengths
        account = CorpusAccount(
            **found,
            blocks={split: len(blocks) for split, blocks in splits.items()},
            left_over=left_over,
            padding_share=0.0 if self.blocks.packing == "none" else 1 - float(lengths.mean()) / int(lengths.max()),
            block_size=self.block_size,
            packing=self.blocks.packing,
        )
        return CorpusData(splits, account, tokenizer)


def write_tokens(folder: Path, table: Any, kind: str, tokenizer: Any, workers: int) -> dict[str, int]:
    """Tokenize a table into `folder`, on all cores and never whole in memory; what it counted, by name."""
    ends = tokenizer.eos_token_id is not None
    encoder = _TextEncoder(tokenizer) if kind == TEXT else _TurnEncoder(tokenizer, kind)
    encoded = table.map(
        encoder,
        batched=True,
        batch_size=8,
        with_indices=True,
        num_proc=workers if workers > 1 and len(table) > 8 * workers else None,
        remove_columns=[name for name in table.column_names if name != "ends"],
        desc="tokenizing",
    )
    writer = TokenWriter(folder, len(tokenizer))
    counts = {"characters": 0, "bytes": 0, "learnt": 0}
    for row in encoded.with_format("numpy"):
        writer.add(row["ids"], row.get("learnt"))
        counts["learnt"] += int(row["learnt"].sum()) if "learnt" in row else len(row["ids"])
        if row.get("ends", True):
            if ends and kind == TEXT:
                writer.add([tokenizer.eos_token_id])
            writer.end_document()
        for name in ("characters", "bytes"):
            counts[name] += int(row[name])
    writer.close()
    return {**counts, "documents": len(writer.starts) - 1, "tokens": writer.written}


class _TextEncoder:
    """Plain text to ids, without special tokens; a class, for processes that tokenize must be handed it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, rows: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        texts = rows["text"]
        return {
            "ids": self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"],
            "characters": [len(text) for text in texts],
            "bytes": [len(text.encode()) for text in texts],
        }


class _TurnEncoder:
    """Conversations, or prompts with completions, to ids and which of them are learnt."""

    def __init__(self, tokenizer: Any, kind: str) -> None:
        self.tokenizer, self.kind = tokenizer, kind

    def __call__(self, rows: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        if self.kind == CHAT:
            made = [conversation(self.tokenizer, m, n + 1) for m, n in zip(rows["messages"], numbers, strict=True)]
        else:
            made = [completion(self.tokenizer, p, c) for p, c in zip(rows["prompt"], rows["completion"], strict=True)]
        learnt_texts = [
            self.tokenizer.decode([i for i, used in zip(ids, learnt, strict=True) if used]) for ids, learnt in made
        ]
        return {
            "ids": [ids for ids, _ in made],
            "learnt": [learnt for _, learnt in made],
            "characters": [len(text) for text in learnt_texts],
            "bytes": [len(text.encode()) for text in learnt_texts],
        }


def _refuse_unknown_characters(tokenizer: Any, table: Any) -> None:
    """A character tokenizer has no token for a character that the training text lacks."""
    known = set(tokenizer.get_vocab())
    for number, text in enumerate(table["text"], 1):
        for place, character in enumerate(text):
            if character not in known:
                near = text[max(0, place - 20) : place + 20]
                raise RequestError(
                    f"the validation text has {character!r} (U+{ord(character):04X}), which the training text lacks, "
                    f"at character {place + 1:,} of document {number} ({near!r}). A character tokenizer has no token "
                    "for it: use --tokenizer byte or bpe, or mend the text."
                )
