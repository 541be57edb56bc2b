"""The tokenizer of a model, or one trained on the text at hand when there is no model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


PREFIX = "##"  # before a piece that goes on with a word
ALPHABET_CHARACTERS = 1_000  # the commonest; a rarer character makes its word unknown


def identity(tokenizer: Any) -> list[Any]:
    """All of a tokenizer that shows in what it makes: one tokenizer.json serves classes of different inputs."""
    kind = [type(tokenizer).__name__, tokenizer.model_input_names, tokenizer.padding_side, tokenizer.truncation_side]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [*kind, tokenizer.special_tokens_map, sorted(tokenizer.get_vocab().items())]
    made_of = json.loads(backend.to_str())
    of_calls = ("truncation", "padding")  # as the last call has left them
    return [*kind, tokenizer.special_tokens_map, {k: v for k, v in made_of.items() if k not in of_calls}]


def beginning_of(tokenizer: Any) -> list[int]:
    """What a tokenizer puts in front of every text: BOS for Llama's and Gemma's, nothing for Qwen's and GPT-2's, though
    they may have a BOS. What it puts behind a text is left out."""
    plain, whole = (tokenizer("a", add_special_tokens=adds, verbose=False)["input_ids"] for adds in (False, True))
    if not plain:  # it has no such letter
        return [tokenizer.bos_token_id] if whole[:1] == [tokenizer.bos_token_id] else []
    places = range(len(whole) - len(plain) + 1)
    return next((list(whole[:i]) for i in places if whole[i : i + len(plain)] == plain), [])


def has_languages(tokenizer: Any) -> bool:
    """Whether it is of many languages, as mBART's, M2M100's and NLLB's are."""
    return hasattr(tokenizer, "set_tgt_lang_special_tokens")


def begun(ids: list[int], beginning: list[int]) -> list[int]:
    """The tokens of a text behind its `beginning`, unless the text itself begins so."""
    return ids if ids[: len(beginning)] == beginning else [*beginning, *ids]


def identity_for_texts(tokenizer: Any) -> list[Any]:
    """All of it that shows in the tokens of documents, prompts and conversations."""
    beginning = beginning_of(tokenizer)
    return [*identity(tokenizer), tokenizer.chat_template, *([beginning] if beginning else [])]


def made_by(folder: Path, tokenizer: Any) -> bool:
    """Whether the data prepared in `folder`, with a tokenizer trained on them, are as this one makes them."""
    trained = folder / "tokenizer"
    return trained.is_dir() and identity(AutoTokenizer.from_pretrained(str(trained))) == identity(tokenizer)


def rows_of(tokenizer: Any) -> int:
    """Of the embeddings that it needs: ids may have gaps, and then there are fewer tokens than the highest id says."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)


def letters_of(tokenizer: Any) -> frozenset[str] | None:
    """The characters that a character tokenizer knows; None for a tokenizer of another kind, which knows them all or
    has a token for the unknown."""
    special = set(tokenizer.all_special_tokens)
    letters = frozenset(token for token in tokenizer.get_vocab() if token not in special)
    one_each = bool(letters) and all(len(letter) == 1 for letter in letters)
    by_bytes = one_each and set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters if one_each and not by_bytes and tokenizer.unk_token_id is None else None


def train_wordpiece(texts: Iterable[str], vocab_size: int, max_length: int, lowercase: bool = True) -> Any:
    """A WordPiece tokenizer as BERT's, lower-casing unless told, with a vocabulary of at most `vocab_size`.

    The same texts give the same vocabulary. `max_length` is in tokens, [CLS] and [SEP] included.
    """
    vocabulary = _train_vocabulary(list(texts), vocab_size, lowercase)
    tokenizer = _tokenizer(vocabulary, lowercase)
    cls, sep = SPECIAL["cls_token"], SPECIAL["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (cls, sep)],
    )
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        **SPECIAL,
    )


def _tokenizer(vocabulary: dict[str, int] | None, lowercase: bool) -> Tokenizer:
    model = models.WordPiece(vocabulary, unk_token=SPECIAL["unk_token"]) if vocabulary else models.WordPiece()
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _train_vocabulary(texts: list[str], vocab_size: int, lowercase: bool) -> dict[str, int]:
    """The trainer numbers the pieces "##a", "##b", ... as a hash map yields words, and settles ties between merges by
    these numbers, so that two runs differ (tokenizers 0.23, models/bpe/trainer.rs, tokenize_words). Naming
    them beforehand, as if they were special, numbers them in order. The vocabulary alone is kept.
    """
    tokenizer = _tokenizer(None, lowercase)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text))
    common = sorted(sorted(counts), key=lambda c: -counts[c])[:ALPHABET_CHARACTERS]
    alphabet = [c for c in common if not c.isspace()]
    first = [*SPECIAL.values(), *(PREFIX + c for c in alphabet)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return dict(tokenizer.get_vocab())


END_OF_TEXT = "<|endoftext|>"


def train_text_tokenizer(kind: str, texts: Iterable[str], vocab_size: int, max_length: int, with_end: bool) -> Any:
    """A tokenizer for language modelling that gives every text back as it was.

    "char": the characters of `texts`, in order, a token each. "byte": the 256 bytes. "bpe": a byte-level BPE as
    GPT-2's, trained to `vocab_size`. With `with_end` there is a token for the end of a document.
    """
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT] if with_end else [],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet() if kind == "byte" else _characters_of(texts))
        tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
        if kind == "byte":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.Fuse() if kind == "char" else decoders.ByteLevel()
    end = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT} if with_end else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **end,
    )


def _characters_of(texts: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for text in texts:
        found.update(text)
    return found


def cut_to(tokenizer: Any, most: int, **texts: list[str]) -> tuple[list[list[int]], list[bool]]:
    """Ids of `text`, or of `text_target`, at most so many with what the tokenizer puts around them; and which were
    cut."""
    # One token more than is kept tells a text that was cut from one that just fits.
    ids = tokenizer(**texts, truncation=True, max_length=most + 1, return_attention_mask=False)["input_ids"]
    was_cut = [len(one) > most for one in ids]
    if any(was_cut):
        ids = tokenizer(**texts, truncation=True, max_length=most, return_attention_mask=False)["input_ids"]
    return ids, was_cut
