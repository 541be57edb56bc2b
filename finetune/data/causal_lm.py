"""Language modeling: a corpus as tokens on disk and as training blocks, prepared once and cached."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from finetune.data.account import CorpusAccount, note_of_cuts
from finetune.data.cache import file_states, folder_for
from finetune.data.changes import UnchangedFiles
from finetune.data.chat.conversation import Learning
from finetune.data.chat.remarks import ENDLESS, ENDLESS_TOKENIZER, note_of_ends, notes_of, turn_ends
from finetune.data.chat.templates import DEFAULT_TEMPLATE, INVENTED, UNTEMPLATED, read_template
from finetune.data.columns import CHAT, COMPLETION, TEXT, of_chats_alone
from finetune.data.documents import ENDS, Corpus, open_corpora
from finetune.data.encoding import Encoder, UnknownCharacterError, write_tokens
from finetune.data.mixture import Joined, joined, note_of_shares
from finetune.data.packing import Blocks, Collator, PackedDataset, Tokens, best_fit_decreasing, one_each, wrapped
from finetune.data.token_stream import TokenStream
from finetune.data.tokenizer import Tokenized, beginning_of, identity_for_texts, prepare_tokens, train_text_tokenizer
from finetune.errors import RequestError
from finetune.run.flags.language import BlockArguments, CorpusArguments
from finetune.run.launch import Launch
from finetune.run.mixture import parts_of

FORMAT = 10  # raise it when what is cached changes
TOKENIZER_DOCUMENTS = 100_000  # of a stream: enough text to train a vocabulary on


@dataclass(frozen=True)
class CorpusData(Tokenized):
    """Splits `train` and `validation` as blocks, with account and tokenizer. `train` may be a stream."""

    splits: dict[str, PackedDataset | Joined | TokenStream]
    account: CorpusAccount
    tokenizer: Any

    @property
    def is_chat(self) -> bool:
        """Whether the data consists of conversations."""
        return self.account.kind == CHAT

    @property
    def beginning(self) -> str:
        """What the tokenizer puts before each document or prompt; empty for conversations."""
        return "" if self.is_chat else str(self.tokenizer.decode(beginning_of(self.tokenizer)))

    @property
    def collator(self) -> Collator:
        """Stacks blocks and pads the shorter ones."""
        return Collator(self.pad)

    def same_length_collator(self) -> Collator:
        """As `collator`, but pads all blocks to --block_size, so that all batches have one shape."""
        return Collator(self.pad, self.account.block_size)

    @property
    def lengths(self) -> Any:
        """Tokens in each training block, for length grouping; None if all blocks have one length, if a mixture sets
        their order, or for a stream."""
        train = self.splits["train"]
        if self.account.packing != "none" or isinstance(train, TokenStream) or getattr(train, "weights", None):
            return None
        return train.lengths


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
    """The blocks of one run, from the cache or made by the rank that leads its node. `block_size` is in tokens.

    Without `tokenizer`, one of kind `blocks.tokenizer` is trained on the training text; a resumed run passes its
    checkpoint's tokenizer as `kept`. Raises RequestError for bad data, and RunError if the preparing rank takes longer
    than --data_timeout_seconds.
    """
    if arguments.chat_template and tokenizer is not None:
        tokenizer.chat_template = read_template(arguments.chat_template)  # so it is saved with the tokenizer
    job = _Job(arguments, blocks, tokenizer, block_size, seed)
    try:
        made: _Job = prepare_tokens(job, kept, launch, arguments.data_timeout_seconds)
    except UnknownCharacterError as error:
        if tokenizer is None and kept is not None:
            raise RequestError(f"--resume: with the checkpoint's tokenizer, {error}") from error
        raise
    return made.load()


@dataclass(frozen=True)
class _Job:
    """Everything that determines the tokens and blocks, and how to make them."""

    arguments: CorpusArguments
    blocks: BlockArguments
    tokenizer: Any | None
    block_size: int
    seed: int

    @cached_property
    def folder(self) -> Path:
        arguments, paths = self.arguments, [part.path for part in parts_of(self.arguments.train_file)]
        files = file_states(arguments.dataset_name, *paths, arguments.validation_file)
        by_content = replace(arguments, chat_template=None, train_file=None)
        # Blocks are cut at load time, but a tokenizer trained from scratch depends on their size.
        trained = [self.blocks.tokenizer, self.blocks.bpe_vocab_size, self.block_size]
        known = trained if self.tokenizer is None else identity_for_texts(self.tokenizer)
        return folder_for("causal_lm", FORMAT, files, by_content, known, self.seed)

    def make(self, folder: Path) -> None:
        """Reads and tokenizes each file, and writes tokens and counts. Skips the training text of a stream."""
        corpora = open_corpora(self.arguments, self.seed)
        first, several = corpora[0], len(corpora) > 1
        self._check_turns(first.kind)
        tokenizer = self.tokenizer or self._train_tokenizer(corpora)
        account: dict[str, Any] = {"turn_ends": [], "of_each": []}
        account |= {name: getattr(first, name) for name in ("source", "kind", "columns", "notes")}
        if several:
            account["source"] = " + ".join(corpus.source for corpus in corpora)
            account["columns"] = "; ".join(f"{one.source}: {one.columns}" for one in corpora if one.columns)
        remarks: Any = 0
        for number, corpus in enumerate(corpora):
            found: dict[str, dict[str, int]] = {}
            for split, table in self._tables(number, corpus).items():
                (folder / f"{split}-{number}").mkdir()
                encoder = Encoder(tokenizer, corpus.formats[split], self._learning, corpus.places[split])
                counts, said = write_tokens(folder / f"{split}-{number}", table, encoder, self._workers)
                remarks = np.add(remarks, said)
                if not counts["learnt"]:
                    raise RequestError(f"{corpus.source}: " * several + corpus.nothing_learnt(split))
                for name, count in counts.items():
                    found.setdefault(name, {})[split] = count
                    sums = account.setdefault(name, {})
                    sums[split] = sums.get(split, 0) + count
            account["of_each"].append(found)
        if first.kind == COMPLETION:
            account["notes"] = [*account["notes"], *self._notes_of_completions(corpora)]
        if first.kind == CHAT:
            account |= self._account_of_turns(Tokens.open(folder / "validation-0"), tokenizer, account, remarks)
        tokenizer.save_pretrained(str(folder / "tokenizer"))
        (folder / "account.json").write_text(json.dumps(account, indent=1))

    @property
    def _workers(self) -> int:
        return self.arguments.preprocessing_num_workers or os.cpu_count() or 1

    def _tables(self, number: int, corpus: Corpus) -> dict[str, Any]:
        """The tables to tokenize. A --validation_file is shared by all training files, so it is tokenized only once."""
        tables = {} if self.arguments.streaming else {"train": corpus.train}
        return tables | ({"validation": corpus.validation} if corpus.was_held_out or number == 0 else {})

    @property
    def _learning(self) -> Learning:
        return Learning(self.arguments.train_on, self.arguments.reasoning)

    def _check_turns(self, kind: str) -> None:
        """Raises RequestError for a flag that has no effect on documents of this kind."""
        for name in of_chats_alone(kind, self.arguments):
            value = getattr(self.arguments, name)
            raise RequestError(f"--{name} {value} is for conversations, but the data has {kind}. Drop it.")

    def _notes_of_completions(self, corpora: list[Corpus]) -> Iterator[str]:
        tables = [table for number, corpus in enumerate(corpora) for table in self._tables(number, corpus).values()]
        blank = sum(not str(said).strip() for table in tables for said in table["completion"])
        if blank and self.arguments.train_on != "all":
            total = sum(map(len, tables))
            yield f"{blank:,} of {total:,} completions are blank, and not trained on: fill them, or remove the rows"
        if self.tokenizer is not None and self.tokenizer.chat_template:
            yield UNTEMPLATED.format(rows="prompts and completions", mend="--column_mapping completion=response")

    def _account_of_turns(self, tokens: Tokens, tokenizer: Any, account: Any, remarks: Any) -> dict[str, Any]:
        notes = notes_of(remarks, sum(account["documents"].values()))
        if not tokenizer.chat_template:
            notes.insert(0, INVENTED.format(end=tokenizer.eos_token or "nothing"))
        if remarks[0] >= sum(account["documents"].values()):
            raise RequestError(ENDLESS if tokenizer.chat_template else ENDLESS_TOKENIZER)
        ends = turn_ends(tokens, tokenizer) if self.arguments.train_on != "all" else []
        if not ends and not remarks[0] and self.arguments.train_on != "all":
            notes.append(note_of_ends(tokens, tokenizer))
        return {"notes": [*account["notes"], *notes], "turn_ends": ends}

    def _train_tokenizer(self, corpora: list[Corpus]) -> Any:
        first = corpora[0]
        if first.kind != TEXT:
            raise RequestError(
                f"the data has {first.kind}, which a tokenizer trained from scratch does not support. Give a model's "
                "tokenizer with --model_name_or_path or --tokenizer_name."
            )
        texts: Any
        if self.arguments.streaming:
            texts, single = (row["text"] for row in first.train.take(TOKENIZER_DOCUMENTS)), False
        else:
            # A character tokenizer covers the whole text, including the part held out.
            whole = self.blocks.tokenizer == "char" and first.was_held_out
            tables = [table for one in corpora for table in (one.train, *([one.validation] if whole else []))]
            texts = chain.from_iterable(table["text"] for table in tables)
            single = len(corpora) == 1 and ENDS in first.train.column_names and sum(first.train[ENDS]) <= 1
        kind, size = self.blocks.tokenizer, self.blocks.bpe_vocab_size
        return train_text_tokenizer(kind, texts, size, self.block_size, with_end=not single)

    def load(self) -> CorpusData:
        """Cuts blocks anew each time: it is quick, and the tokens stay on disk."""
        folder = self.folder
        found = json.loads((folder / "account.json").read_text())
        tokenizer = self.tokenizer or AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
        if found["kind"] == CHAT and not tokenizer.chat_template:
            tokenizer.chat_template = DEFAULT_TEMPLATE  # saved with the model, which was trained with it
        each = found.pop("of_each")
        parts, split_of = parts_of(self.arguments.train_file), dict[str, Any]()
        for split in ("validation",) if self.arguments.streaming else ("validation", "train"):
            numbers = [number for number, counts in enumerate(each) if split in counts["tokens"]]
            split_of[split] = [self._blocks(Tokens.open(folder / f"{split}-{n}"), split != "train") for n in numbers]
        names = [part.name for part in parts] if len(parts) > 1 else [""]
        splits: dict[str, Any] = {"validation": joined(split_of["validation"])}
        figures: dict[str, Any] = {"left_over": 0, "padding_share": None}
        if self.arguments.streaming:
            splits["train"] = self._stream(tokenizer)
        else:
            weights = [part.weight for part in parts if part.weight is not None]
            splits["train"] = train = joined(split_of["train"], weights or None, names)
            learnt = {name: counts["learnt"]["train"] for name, counts in zip(names, each, strict=True)}
            figures |= self._figures(split_of["train"], train.lengths)
            found["notes"] += self._notes_of_training(names, train, split_of["train"], found["kind"], learnt)
        are_apart = self.blocks.packing != "wrapped" or self.blocks.document_mask
        if found["kind"] == TEXT and are_apart and beginning_of(tokenizer):
            # The first token of each document was added by the tokenizer, and nothing predicts it.
            found["learnt"] = {split: n - found["documents"][split] for split, n in found["learnt"].items()}
        blocks = {split: [len(one) for one in some] for split, some in split_of.items()}
        account = CorpusAccount(
            **found,
            **figures,
            blocks={split: sum(some) for split, some in blocks.items()},
            sources={
                name: {split: some[i] for split, some in blocks.items() if len(some) == len(names)}
                for i, name in enumerate(names if len(parts) > 1 else [])
            },
            block_size=self.block_size,
            packing=self.blocks.packing,
        )
        return CorpusData(splits, account, tokenizer)

    def _figures(self, train: list[PackedDataset], lengths: Any) -> dict[str, Any]:
        """What depends on how the training blocks are packed."""
        if self.blocks.packing == "wrapped":
            rest = sum((len(part.tokens.ids) - 1) % self.block_size for part in train)
            return {"left_over": rest, "padding_share": 0.0}
        is_packed = self.blocks.packing == "bfd"
        return {"padding_share": 1 - float(lengths.mean()) / int(lengths.max()) if is_packed else None}

    def _notes_of_training(
        self, names: list[str], train: Any, parts: list[PackedDataset], kind: str, learnt: dict[str, int]
    ) -> list[str]:
        """Notes on cuts and mixture shares. Raises RequestError for a file too short for a block."""
        notes = []
        for name, part in zip(names, parts, strict=True):
            if not len(part):
                raise RequestError(
                    f"the training text{f' of {name}' if name else ''} has {len(part.tokens.ids):,} tokens, less than "
                    f"one block of {self.block_size} and the token after it. Give more text, or a smaller --block_size."
                )
            cuts = note_of_cuts(part.tokens, kind, learnt[name], self.block_size, self.blocks.packing)
            notes += [f"{name}: {note}" if name else note for note in cuts]
        return [*notes, note_of_shares(names, train, learnt)] if len(parts) > 1 else notes

    def _blocks(self, tokens: Tokens, keep_tail: bool) -> PackedDataset:
        return PackedDataset(tokens, self._cut(tokens.starts, keep_tail), self.blocks.document_mask).with_labels()

    def _cut(self, starts: Any, keep_tail: bool = False) -> Blocks:
        if self.blocks.packing == "wrapped":
            return wrapped(starts, self.block_size, keep_tail)[0]
        return (best_fit_decreasing if self.blocks.packing == "bfd" else one_each)(starts, self.block_size)

    def _stream(self, tokenizer: Any) -> TokenStream:
        (corpus,) = open_corpora(self.arguments, self.seed)
        carries, mask = self.blocks.packing == "wrapped", self.blocks.document_mask
        files = UnchangedFiles(part.path for part in parts_of(self.arguments.train_file))
        encoder = Encoder(tokenizer, corpus.formats["train"], self._learning, corpus.places["train"])
        return TokenStream(corpus.train, encoder, self._cut, carries, mask, self.seed, files)
