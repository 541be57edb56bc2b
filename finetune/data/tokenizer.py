"""The tokenizer of a model, or one trained on the text at hand when there is no model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def train_wordpiece(texts: Iterable[str], vocab_size: int, max_length: int) -> Any:
    """A lower-casing WordPiece tokenizer as BERT's, with a vocabulary of at most `vocab_size`.

    The same texts give the same vocabulary. `max_length` is in tokens, [CLS] and [SEP] included.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL.values()), show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator(texts, trainer)
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
