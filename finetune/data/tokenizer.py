"""A model's tokenizer, or one trained on the data when there is no model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import BertWordPieceTokenizer, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from finetune.data.cache import prepare_once
from finetune.data.splits import require_splits
from finetune.errors import RequestError
from finetune.run.launch import Launch

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


PREFIX = "##"  # marks a piece that continues a word
ALPHABET_CHARACTERS = 1_000  # the most common; a word with a rarer character becomes unknown


def identity(tokenizer: Any) -> list[Any]:
    """Everything about a tokenizer that affects its output. The class counts too: tokenizer.json does not settle it."""
    kind = [type(tokenizer).__name__, tokenizer.model_input_names, tokenizer.padding_side, tokenizer.truncation_side]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [*kind, tokenizer.special_tokens_map, sorted(tokenizer.get_vocab().items())]
    made_of = json.loads(backend.to_str())
    of_calls = ("truncation", "padding")  # state left by the last call
    return [*kind, tokenizer.special_tokens_map, {k: v for k, v in made_of.items() if k not in of_calls}]


def beginning_of(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before every text: BOS for Llama and Gemma, nothing for Qwen and GPT-2, even if
    they define a BOS. Tokens it adds after the text do not count."""
    plain, whole = (tokenizer("a", add_special_tokens=adds, verbose=False)["input_ids"] for adds in (False, True))
    if not plain:  # it has no token for this letter
        return [tokenizer.bos_token_id] if whole[:1] == [tokenizer.bos_token_id] else []
    places = range(len(whole) - len(plain) + 1)
    return next((list(whole[:i]) for i in places if whole[i : i + len(plain)] == plain), [])


def has_languages(tokenizer: Any) -> bool:
    """Whether the tokenizer is multilingual with language codes, as for mBART, M2M100 and NLLB."""
    return hasattr(tokenizer, "set_tgt_lang_special_tokens")


def begun(ids: list[int], beginning: list[int]) -> list[int]:
    """Puts `beginning` before a text's tokens, unless they already start with it."""
    return ids if ids[: len(beginning)] == beginning else [*beginning, *ids]


def identity_for_texts(tokenizer: Any) -> list[Any]:
    """Everything about a tokenizer that affects the tokens of documents, prompts and conversations."""
    beginning = beginning_of(tokenizer)
    return [*identity(tokenizer), tokenizer.chat_template, *([beginning] if beginning else [])]


class Tokenized:
    """What all tokenized data have in common."""

    splits: Any
    tokenizer: Any

    @property
    def processor(self) -> Any:
        """What is saved next to the weights."""
        return self.tokenizer

    @property
    def pad(self) -> int:
        """The id that pads the shorter rows of a batch."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id or 0)

    def require_all(self, training: Any) -> None:
        """Raises RequestError if the data lacks a split that a flag of `training` needs."""
        require_splits(self.splits, training, "file")


def prepare_tokens(job: Any, kept: Any | None, launch: Launch, timeout_seconds: float) -> Any:
    """`job`, once its `folder` has been made by its `make`. If it would train a tokenizer, and not get the one that is
    `kept` in a resumed run's checkpoint, it uses that."""
    if job.tokenizer is None and kept is not None and not _made_by(job.folder, kept):
        job = replace(job, tokenizer=kept)
    prepare_once(job.folder, job.make, what="to tokenize", launch=launch, timeout_seconds=timeout_seconds)
    return job


def _made_by(folder: Path, tokenizer: Any) -> bool:
    """Whether the data in `folder` was prepared with a tokenizer, trained there, that is identical to this one."""
    trained = folder / "tokenizer"
    return trained.is_dir() and identity(AutoTokenizer.from_pretrained(str(trained))) == identity(tokenizer)


def rows_of(tokenizer: Any) -> int:
    """The number of embedding rows it needs. Ids may have gaps, so the highest id can exceed the number of tokens."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)


def pad_with_end(tokenizer: Any) -> None:
    """Pad with the end of text if the tokenizer has no padding token, as GPT-2's and Llama's: a mask hides it. Raises
    RequestError if it has neither."""
    refuse_no_padding(tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def pad_apart(tokenizer: Any) -> None:
    """Pad with another special token than the end of text, if the vocabulary has one that ends no text. transformers
    takes the last tokens of a text for padding if they are the padding token, whatever the mask says (5.23,
    modeling_layers.py, GenericForSequenceClassification). Raises RequestError as `refuse_no_padding`."""
    refuse_no_padding(tokenizer)
    if tokenizer.pad_token not in (None, tokenizer.eos_token):
        return
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    for_padding = [token for token in special if "pad" in token.lower()]  # Llama 3.1, Qwen, GPT-NeoX
    unused = [token for token in special if "reserved" in token or "unused" in token]  # Llama 3
    for token in (*for_padding, tokenizer.unk_token, *unused):
        if token not in (None, tokenizer.eos_token):
            tokenizer.pad_token = token
            return


def refuse_no_padding(tokenizer: Any) -> None:
    """Raises RequestError for a tokenizer without a token that can pad the shorter texts of a batch."""
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise RequestError(
            f"the tokenizer in {tokenizer.name_or_path} names neither a padding token nor an end of text, and a batch "
            'needs one. Add "pad_token" to its tokenizer_config.json.'
        )


def refuse_more_tokens(tokenizer: Any, embedded: int, mend: str = "") -> None:
    """Raises RequestError if `tokenizer` needs more rows than are `embedded`; `mend` is another way out."""
    if (rows := rows_of(tokenizer)) > embedded:
        raise RequestError(
            f"the tokenizer has {rows:,} tokens, but the model embeds {embedded:,}. Use the model's own tokenizer"
            f"{mend}."
        )


def letters_of(tokenizer: Any) -> frozenset[str] | None:
    """The characters that a character tokenizer knows. None for any other tokenizer: it covers all characters or has an
    unknown token."""
    special = set(tokenizer.all_special_tokens)
    letters = frozenset(token for token in tokenizer.get_vocab() if token not in special)
    one_each = bool(letters) and all(len(letter) == 1 for letter in letters)
    by_bytes = one_each and set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters if one_each and not by_bytes and tokenizer.unk_token_id is None else None


def train_wordpiece(texts: Iterable[str], vocab_size: int, max_length: int, lowercase: bool = True) -> Any:
    """A BERT-style WordPiece tokenizer, lower-casing by default, with a vocabulary of at most `vocab_size`.

    The same texts give the same vocabulary. `max_length` is in tokens, [CLS] and [SEP] included. The trainer numbers
    the pieces "##a", "##b", ... in hash map order and breaks ties between merges by these numbers, so two runs would
    differ (tokenizers 0.23, models/bpe/trainer.rs, tokenize_words). Passing the pieces as special tokens numbers them
    in a fixed order. Only the vocabulary of that tokenizer is kept.
    """
    texts, first = list(texts), BertWordPieceTokenizer(lowercase=lowercase)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(first.normalize(text))
    common = sorted(sorted(counts), key=lambda c: -counts[c])[:ALPHABET_CHARACTERS]
    alphabet = [c for c in common if not c.isspace()]
    first.train_from_iterator(
        texts,
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL.values(), *(PREFIX + c for c in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    made = BertWordPieceTokenizer(first.get_vocab(), lowercase=lowercase)
    return ready(Tokenizer.from_str(made.to_str()), max_length, **SPECIAL)


END_OF_TEXT = "<|endoftext|>"


def train_text_tokenizer(kind: str, texts: Iterable[str], vocab_size: int, max_length: int, with_end: bool) -> Any:
    """A lossless tokenizer for language modeling.

    "char": one token per character of `texts`, in sorted order. "byte": the 256 bytes. "bpe": a byte-level BPE like
    GPT-2's, trained to `vocab_size`. `with_end` adds an end-of-document token.
    """
    if kind == "bpe":
        tokenizer = train_bpe(texts, vocab_size, [END_OF_TEXT] if with_end else [])
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet() if kind == "byte" else _characters_of(texts))
        tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
        if kind == "byte":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.Fuse() if kind == "char" else decoders.ByteLevel()
    end = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT} if with_end else {}
    return ready(tokenizer, max_length, clean_up_tokenization_spaces=False, **end)


def train_bpe(texts: Iterable[str], vocab_size: int, special: list[str]) -> Tokenizer:
    """A lossless byte-level BPE like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def ready(tokenizer: Tokenizer, max_length: int, **more: Any) -> Any:
    """The tokenizer as transformers uses it; `more` are its special tokens and settings."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        **more,
    )


def _characters_of(texts: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for text in texts:
        found.update(text)
    return found


def cut_to(tokenizer: Any, most: int, **texts: list[str]) -> tuple[dict[str, list[Any]], list[bool]]:
    """What the tokenizer makes of `text` and `text_pair`, or `text_target`: `input_ids` and maybe `token_type_ids`,
    truncated to `most` tokens including special tokens; and which rows were cut."""
    # One extra token distinguishes a row that was cut from one that just fits.
    encoded = dict(tokenizer(**texts, truncation=True, max_length=most + 1, return_attention_mask=False))
    cut = [len(ids) > most for ids in encoded["input_ids"]]
    if any(cut):
        some = {name: [text for text, was in zip(column, cut, strict=True) if was] for name, column in texts.items()}
        shorter = tokenizer(**some, truncation=True, max_length=most, return_attention_mask=False)
        for name, values in shorter.items():
            mended = iter(values)
            encoded[name] = [next(mended) if was else old for old, was in zip(encoded[name], cut, strict=True)]
    return encoded, cut
