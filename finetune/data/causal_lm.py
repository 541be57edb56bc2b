"""Language modelling: a corpus as tokens on disk and as blocks to train on, prepared once and cached."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from finetune.data.cache import OF_NO_EFFECT, cache_home, cache_key, file_states, prepare_once
from finetune.data.changes import UnchangedFiles
from finetune.data.chat.conversation import Learning
from finetune.data.chat.ends import note_of_ends, turn_ends
from finetune.data.chat.remarks import notes_of
from finetune.data.chat.templates import DEFAULT_TEMPLATE, INVENTED, read_template
from finetune.data.columns import CHAT, TEXT, of_chats_alone
from finetune.data.documents import ENDS, Corpus, open_corpus
from finetune.data.encoding import Encoder, UnknownCharacterError, write_tokens
from finetune.data.packing import Blocks, Collator, PackedDataset, Tokens, best_fit_decreasing, one_each, wrapped
from finetune.data.token_stream import TokenStream
from finetune.data.tokenizer import identity, made_by, train_text_tokenizer
from finetune.errors import RequestError
from finetune.run.flags.language import BlockArguments, CorpusArguments
from finetune.run.launch import Launch

FORMAT = 4  # raise it when what is cached changes
TOKENIZER_DOCUMENTS = 100_000  # of a stream: enough text to train a vocabulary on


@dataclass(frozen=True)
class CorpusAccount:
    """What was found, for the log and the model card. Counts are of documents, tokens, characters and UTF-8 bytes."""

    source: str
    kind: str
    columns: str  # which are read, and which are not; nothing where there are none
    notes: tuple[str, ...]  # what else there is to say
    documents: dict[str, int]
    tokens: dict[str, int]
    characters: dict[str, int]
    bytes: dict[str, int]
    learnt: dict[str, int]  # tokens: all, or of conversations those of the assistant
    turn_ends: list[int]  # tokens that end the assistant's turns; none where it has none
    blocks: dict[str, int]
    left_over: int  # tokens at the end of the training text that fill no block
    padding_share: float | None  # of the training blocks; None where it depends on which rows meet in a batch
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

    def describe(self) -> str:
        """One line for the log: what is used, and which flags change it."""
        more = "; --train_file takes your own" if self.source.startswith("built-in") else ""
        counts = ", ".join(f"{count:,} {split}" for split, count in self.tokens.items())
        counts = counts if "train" in self.tokens else f"streamed; {counts}"
        rest = f", {self.left_over} left over" if self.left_over else ""
        rest += "" if self.source.startswith("built-in") or not self.columns else f"; {self.columns}"
        rest += "".join(f"; {note}" for note in self.notes)
        return f"data: {self.source} ({counts} tokens{rest}; blocks of {self.block_size}, {self.packing}{more})"


@dataclass(frozen=True)
class CorpusData:
    """Splits `train` and `validation` as blocks, with all that belongs to them. `train` may be a stream."""

    splits: dict[str, PackedDataset | TokenStream]
    account: CorpusAccount
    tokenizer: Any

    @property
    def is_chat(self) -> bool:
        """Whether it has turns of conversations."""
        return self.account.kind == CHAT

    @property
    def processor(self) -> Any:
        """What is saved beside the weights."""
        return self.tokenizer

    @property
    def collator(self) -> Collator:
        """Stacks blocks; the shorter ones are padded."""
        pad = self.tokenizer.pad_token_id
        return Collator(pad if pad is not None else self.tokenizer.eos_token_id or 0)

    def same_length_collator(self) -> Collator:
        """Likewise, but all batches have one shape: blocks shorter than --block_size are padded to it."""
        return Collator(self.collator.pad_token_id, self.account.block_size)

    @property
    def lengths(self) -> Any:
        """Tokens in each training block, to group by; None where all blocks have one length, or nobody knows."""
        train = self.splits["train"]
        return train.lengths if isinstance(train, PackedDataset) and self.account.packing == "none" else None


def prepare_corpus(
    arguments: CorpusArguments,
    blocks: BlockArguments,
    tokenizer: Any | None,
    *,
    block_size: int,
    seed: int,
    launch: Launch,
    kept: Any | None = None,
) -> CorpusData:
    """The blocks of one run, from the cache or made on the rank that leads its node. `block_size` is in tokens.

    Without `tokenizer`, one of the kind `blocks.tokenizer` is made from the training text; a resumed run gives the one
    that its checkpoint has `kept`. Raises RequestError for bad data and RunError when the rank that prepares takes
    longer than --data_timeout_seconds.
    """
    if arguments.chat_template and tokenizer is not None:
        tokenizer.chat_template = read_template(arguments.chat_template)  # and so it is saved
    job = _Job(arguments, blocks, tokenizer, block_size, seed)
    folder = cache_home() / "causal_lm" / job.key()
    if tokenizer is None and kept is not None and not made_by(folder, kept):
        job = replace(job, tokenizer=kept)
        folder = cache_home() / "causal_lm" / job.key()
    timeout = arguments.data_timeout_seconds
    try:
        prepare_once(folder, job.make, what="to tokenize", launch=launch, timeout_seconds=timeout)
    except UnknownCharacterError as error:
        if tokenizer is None and kept is not None:
            raise RequestError(f"--resume: by the checkpoint's tokenizer, {error}") from error
        raise
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
            {name: value for name, value in asdict(arguments).items() if name not in (*OF_NO_EFFECT, "chat_template")},
            # Blocks are cut when they are loaded; a tokenizer from scratch is made for their size.
            None if self.tokenizer else [self.blocks.tokenizer, self.blocks.bpe_vocab_size, self.block_size],
            file_states(arguments.dataset_name, arguments.train_file, arguments.validation_file),
            None if self.tokenizer is None else [*identity(self.tokenizer), self.tokenizer.chat_template],
            self.seed,
        )

    def make(self, folder: Path) -> None:
        """Read, tokenize, and write tokens and what was counted. A stream's training text is left where it is."""
        corpus = open_corpus(self.arguments, self.seed)
        self._check_turns(corpus.kind)
        tokenizer = self.tokenizer or self._train_tokenizer(corpus)
        account: dict[str, Any] = {"turn_ends": []} | {
            name: getattr(corpus, name) for name in ("source", "kind", "columns", "notes")
        }
        workers = self.arguments.preprocessing_num_workers or os.cpu_count() or 1
        tables = {"validation": corpus.validation}
        if not self.arguments.streaming:
            tables = {"train": corpus.train, **tables}
        remarks: Any = 0
        for split, table in tables.items():
            (folder / split).mkdir()
            counts, found = write_tokens(folder / split, table, corpus.kind, tokenizer, workers, self._learning)
            remarks = np.add(remarks, found)
            if not counts["learnt"]:
                raise RequestError(_nothing_learnt(corpus, split))
            for name, count in counts.items():
                account.setdefault(name, {})[split] = count
        if corpus.kind == CHAT:
            account |= self._account_of_turns(Tokens.open(folder / "validation"), tokenizer, account, remarks)
        tokenizer.save_pretrained(str(folder / "tokenizer"))
        (folder / "account.json").write_text(json.dumps(account, indent=1))

    @property
    def _learning(self) -> Learning:
        return Learning(self.arguments.train_on, self.arguments.reasoning)

    def _check_turns(self, kind: str) -> None:
        """Raises RequestError for a flag that does nothing for documents of this kind."""
        for name in of_chats_alone(kind, self.arguments):
            value = getattr(self.arguments, name)
            raise RequestError(f"--{name} {value} is for conversations, but the data has {kind}. Drop it.")

    def _account_of_turns(self, tokens: Tokens, tokenizer: Any, account: Any, remarks: Any) -> dict[str, Any]:
        notes = notes_of(remarks, sum(account["documents"].values()))
        if not tokenizer.chat_template:
            notes.insert(0, INVENTED.format(end=tokenizer.eos_token or "nothing"))
        ends = turn_ends(tokens, tokenizer) if self.arguments.train_on != "all" else []
        if not ends and not remarks[0] and self.arguments.train_on != "all":
            notes.append(note_of_ends(tokens, tokenizer))
        return {"notes": [*account["notes"], *notes], "turn_ends": ends}

    def _train_tokenizer(self, corpus: Corpus) -> Any:
        if corpus.kind != TEXT:
            raise RequestError(
                f"the data has {corpus.kind}, which a tokenizer from scratch does not suit. Give a model's own by "
                "--model_name_or_path or --tokenizer_name."
            )
        train = corpus.train
        texts: Any
        if self.arguments.streaming:
            texts, single = (row["text"] for row in train.take(TOKENIZER_DOCUMENTS)), False
        else:
            # A text's characters are known whole, whichever part of it is held out.
            whole = self.blocks.tokenizer == "char" and corpus.was_held_out
            texts = chain(train["text"], corpus.validation["text"]) if whole else train["text"]
            single = ENDS in train.column_names and sum(train[ENDS]) <= 1
        kind, size = self.blocks.tokenizer, self.blocks.bpe_vocab_size
        return train_text_tokenizer(kind, texts, size, self.block_size, with_end=not single)

    def load(self, folder: Path) -> CorpusData:
        """Blocks are cut anew each time: it is quick, and the tokens stay on the disk."""
        found = json.loads((folder / "account.json").read_text())
        tokenizer = self.tokenizer or AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
        if found["kind"] == CHAT and not tokenizer.chat_template:
            tokenizer.chat_template = DEFAULT_TEMPLATE  # saved with the model, which has learnt by it
        held_out = Tokens.open(folder / "validation")
        splits: dict[str, Any] = {"validation": self._blocks(held_out, keep_tail=True)}
        left_over = 0
        padding: float | None = 0.0
        if self.arguments.streaming:
            padding = None
            splits["train"] = self._stream(tokenizer, found["kind"])
        else:
            train = self._blocks(Tokens.open(folder / "train"), keep_tail=False)
            if not len(train):
                raise RequestError(
                    f"the training text has {found['tokens']['train']:,} tokens, less than one block of "
                    f"{self.block_size} and the token after it. Give more text, or a smaller --block_size."
                )
            splits["train"] = train
            if self.blocks.packing == "wrapped":
                left_over = (found["tokens"]["train"] - 1) % self.block_size
            elif self.blocks.packing == "bfd":
                padding = 1 - float(train.lengths.mean()) / int(train.lengths.max())
            else:
                padding = None
        account = CorpusAccount(
            **found,
            blocks={name: len(split) for name, split in splits.items() if isinstance(split, PackedDataset)},
            left_over=left_over,
            padding_share=padding,
            block_size=self.block_size,
            packing=self.blocks.packing,
        )
        return CorpusData(splits, account, tokenizer)

    def _blocks(self, tokens: Tokens, keep_tail: bool) -> PackedDataset:
        return PackedDataset(tokens, self._cut(tokens.starts, keep_tail), self.blocks.document_mask).with_labels()

    def _cut(self, starts: Any, keep_tail: bool = False) -> Blocks:
        if self.blocks.packing == "wrapped":
            return wrapped(starts, self.block_size, keep_tail)[0]
        return (best_fit_decreasing if self.blocks.packing == "bfd" else one_each)(starts, self.block_size)

    def _stream(self, tokenizer: Any, kind: str) -> TokenStream:
        documents = open_corpus(self.arguments, self.seed).train
        carries, mask = self.blocks.packing == "wrapped", self.blocks.document_mask
        files = UnchangedFiles([self.arguments.train_file])
        return TokenStream(
            documents, Encoder(tokenizer, kind, self._learning), self._cut, carries, mask, self.seed, files
        )


def _nothing_learnt(corpus: Corpus, split: str) -> str:
    if corpus.kind != CHAT:
        return f"the {split} data has nothing to learn: no text is left of it. Check the file."
    table = corpus.train if split == "train" else corpus.validation
    roles = sorted({str(turn.get("role")) for row in islice(table, 1000) for turn in row["messages"]})
    return (
        f"the {split} data has nothing to learn: the turns of role `assistant` are, and the roles here are "
        f"{', '.join(roles)}. Rename the model's role to `assistant`."
    )
