"""Sentences with tags: cleaned, split, and aligned with the tokens of whatever tokenizer a model has."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from finetune.data.classification import Account
from finetune.data.columns import IGNORED, TOKENS, Columns, Labels
from finetune.data.python_names import name_rows
from finetune.data.tables import CleanTables
from finetune.data.token_labels import clean_sentences, load_sentences
from finetune.data.tokenizer import train_wordpiece
from finetune.data.word_tokens import ENTITY, encode_words, not_scored, numbered_entities, remarks_on_words
from finetune.errors import RequestError
from finetune.run.flags.text import PreparationArguments, TokenDataArguments

WORDS = [["Ada", "Lovelace", "lives", "in", "Paris"], ["it", "rains"], ["Turing", "writes"]]
TAGS = [["B-PER", "I-PER", "O", "O", "B-LOC"], ["O", "O"], ["B-PER", "O"]]
NAMES = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def table(words: Any = WORDS, tags: Any = TAGS, names: tuple[str, str] = ("tokens", "tags")) -> Dataset:
    return Dataset.from_dict({names[0]: words} if tags is None else {names[0]: words, names[1]: tags})


def clean(tables: dict[str, Dataset], trained: Labels | None = None, skip: bool = False, **flags: Any) -> CleanTables:
    cut = PreparationArguments(skip_bad_rows=skip)
    return clean_sentences(tables, TokenDataArguments(**flags), cut, 0, None, trained)


def test_tags_become_ids_of_all_begins_and_insides_of_the_types() -> None:
    found = clean({"train": table(), "validation": table()})
    assert found.labels == Labels(TOKENS, NAMES)
    assert found.splits["train"]["label"][:] == [[3, 4, 0, 0, 1], [0, 0], [3, 0]]


def test_lists_that_a_csv_holds_as_text_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    pandas.DataFrame({"tokens": WORDS, "tags": TAGS}).to_csv(path, index=False)
    arguments = TokenDataArguments(train_file=str(path), validation_file=str(path))
    done = clean_sentences(load_sentences(arguments)[0], arguments, PreparationArguments(), 0)
    assert [note.partition(",")[0] for note in done.notes] == [
        f"{one} holds lists as text" for one in ("tokens", "tags")
    ]
    found = done.splits["train"]
    assert found["tokens"][:] == WORDS
    assert [[NAMES[i] for i in row] for row in found["label"]] == TAGS


def test_a_rare_entity_a_letter_away_from_a_frequent_one_is_said() -> None:
    tags = [*TAGS * 50, ["B-PRE", "O", "O", "O", "B-LOX"], ["B-GPE", "O"]]
    found = clean({"train": table([*WORDS * 50, WORDS[0], WORDS[2]], tags), "validation": table()})
    said = "entities that may be misspelt, each a separate class: 'PRE' (1) for 'PER' (150)"
    assert [note for note in found.notes if "misspelt" in note] == [said]


def test_tags_in_another_spelling_are_understood_and_said() -> None:
    tags = [[tag.replace("-", "_").lower() for tag in row] for row in TAGS]
    found = clean({"train": table(tags=tags), "validation": table(tags=tags)})
    assert found.labels.names == tuple(name[:2] + name[2:].lower() for name in NAMES)
    assert found.splits["train"]["label"][:] == [[3, 4, 0, 0, 1], [0, 0], [3, 0]]
    assert found.notes[0].startswith("tags are rewritten: b_loc is read as B-loc")


def test_ids_of_a_data_set_that_names_them_are_read_by_name() -> None:
    order = ["O", "B-PER", "I-PER", "B-LOC"]
    ids = [[order.index(tag) for tag in row] for row in TAGS]
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=order))})
    given = Dataset.from_dict({"tokens": WORDS, "ner_tags": ids}, features)
    found = clean({"train": given, "validation": given})
    assert [[NAMES[i] for i in row] for row in found.splits["train"]["label"][:]] == TAGS


ORDER = ["O", "B-PER", "I-PER", "B-LOC"]  # of the ids
IDS = [[ORDER.index(tag) for tag in row] for row in TAGS]


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(IDS, id="whole numbers"),
        pytest.param([[float(i) for i in row] for row in IDS], id="floats"),
        pytest.param([[str(i) for i in row] for row in IDS], id="texts, as of CoNLL files"),
        pytest.param([str(row) for row in IDS], id="lists as text, as of csv files"),
    ],
)
def test_whole_numbers_are_tags_where_tag_names_names_them(ids: Any) -> None:
    found = clean({"train": table(tags=ids), "validation": table(tags=ids)}, tag_names=ORDER)
    for split in ("train", "validation"):
        assert [[NAMES[i] for i in row] for row in found.splits[split]["label"][:]] == TAGS
    assert not [note for note in found.notes if "--tag_names" in note]
    found = clean({"train": table(tags=ids)}, tag_names=[*ORDER, "I-LOC"])
    assert [note for note in found.notes if "--tag_names" in note] == ["no word has I-LOC of --tag_names"]


@pytest.mark.parametrize(
    ("tags", "names", "said"),
    [
        pytest.param(IDS, ORDER[:3], r"row 1 of 'tags' has the tag 3, but --tag_names names .* 0 to 2", id="too few"),
        pytest.param([[-2] * 5, [0, 0], [0, 0]], ORDER, "has the tag -2, but", id="less than none"),
        pytest.param([[-100] * 5, [0, 0], [0, 0]], ORDER, "has the tag -100, but", id="ignored tokens"),
        pytest.param([[0.5] * 5, [0, 0], [0, 0]], ORDER, "has the tag '0.5', but --tag_names is for whole", id="half"),
        pytest.param(TAGS, ORDER, "has the tag 'B-PER', but --tag_names is for whole numbers. Drop it", id="names"),
        pytest.param(IDS, ["O", "B-PER", "O"], "has O twice", id="twice"),
        pytest.param(IDS, ["0", "1", "2", "3"], "'0' is no name", id="numbers"),
        pytest.param([[-1] * 5, [0, 1], [1, 0]], ORDER, "has 1 of 3 sentences", id="a hidden one"),
    ],
)
def test_wrong_tag_names_and_wrong_numbers_are_refused(tags: Any, names: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        clean({"train": table(tags=tags), "validation": table(tags=tags)}, tag_names=names)


def test_names_that_the_data_set_gives_its_ids_are_not_changed() -> None:
    features = Features({"tokens": List(Value("string")), "tags": List(ClassLabel(names=ORDER))})
    given = {"train": Dataset.from_dict({"tokens": WORDS, "tags": IDS}, features)}
    assert clean(given, tag_names=ORDER).labels.names == NAMES
    with pytest.raises(RequestError, match=r"'tags' names its ids itself .*and not as --tag_names does"):
        clean(given, tag_names=[*ORDER[1:], "O"])


def test_a_trained_models_tags_keep_their_ids() -> None:
    trained = Labels(TOKENS, ("B-PER", "I-PER", "O", "B-LOC", "I-LOC", "B-ORG"))
    assert clean({"train": table(), "validation": table()}, trained).labels == trained


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        pytest.param(
            {"train": table(tags=[["O"], ["O", "O"], ["O", "O"]])}, r"has 1 of 3 .* different number", id="count"
        ),
        pytest.param(
            {"train": table([["a"], [" "]], [["B-x"], ["O"]])}, r"has 1 of 2 sentences .* an empty word", id="empty"
        ),
        pytest.param(
            {"train": table(tags=[["O"] * 5, ["B-x", None], ["", "O"]])}, r"has 2 of 3 .* 1: 2, 3\)", id="empty tag"
        ),
        pytest.param({"train": table(tags=None)}, r"no column 'tags or ner_tags", id="no tags"),
        pytest.param(
            {"train": table(tags=[[1] * 5, [1, 1], [1, 1]])}, r"holds no names of tags, but \[1, 1, 1", id="ids"
        ),
        pytest.param({"train": table(tags=[["O"] * 5, ["O"] * 2, ["O"] * 2])}, "every word is tagged O", id="all O"),
        pytest.param(
            {"train": table(), "validation": table([["a"]], [["B-ORG"]])}, r"entities .*: 'ORG' \(1", id="new"
        ),
        pytest.param({"train": table(["a b"], ["O"])}, r"'tokens' holds no lists of words, but a b", id="texts"),
        pytest.param(
            {"train": table([[1, 2]], [["B-x", "O"]])}, r"holds no lists of words, but \[1, 2\]", id="numbers"
        ),
        pytest.param({"train": table(tags=["O", "O", "O"])}, r"'tags' holds no lists of tags, but O", id="a tag"),
    ],
)
def test_bad_sentences_are_refused(tables: dict[str, Dataset], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        clean(tables)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.conll", "x\tO\n\n-DOCSTART-\nAda\tB-x\n-\t\n\n\nb\t\n", r"has 2 of 3 .*\(line 4, 8\)"),
        ("a.jsonl", '{"tokens": ["a"], "tags": ["O"]}\n\n{"tokens": ["a"], "tags": []}\n', r"has 1 of 2 .*\(line 3\)"),
        ("a.json", '[{"tokens": ["a"], "tags": ["O"]},\n {"tokens": ["a"], "tags": []}, {"tokens": [], "tags": []}]',
         r"has 2 of 3 .*\(counted from 1: 2, 3\)"),
        ("a.csv", "tokens,tags\n\"['a', 'b']\",\"['O']\"\n", r"has 1 of 1 .* different number.* 1\)\. Fix them\.$"),
        ("a.csv", "tokens,tags\na b,O O\n", "holds no lists of words. .*recipes/seq_cls.py"),
        ("a.conll", "Ada\nlives\n", "each line is one word without a tag"),
        ("a.conll", "Ada,B-PER\nlives,O\n", "columns are separated by ','"),
        ("a.txt", "Ada;B-PER\nlives;O\n", "columns are separated by ';'"),
        ("a.jsonl", '{"words": ["a"], "pos": ["O"]}\n', r"has no column 'tags or ner_tags or .*it has words, pos"),
    ],
)  # fmt: skip
def test_bad_sentences_of_a_file_are_named_by_it_and_its_lines(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    arguments = TokenDataArguments(train_file=str(path))
    with pytest.raises(RequestError, match=f"--train_file {path}: .*{said}"):
        clean_sentences(load_sentences(arguments)[0], arguments, PreparationArguments(), 0)


def test_a_file_that_is_nearly_all_a_hole_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "train.conll"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(RequestError, match=r"--train_file .* is a sparse file without data"):
        load_sentences(TokenDataArguments(train_file=str(path)))


def test_bad_sentences_are_left_out_where_asked_and_a_test_row_keeps_its_number() -> None:
    bad = table([[], *WORDS], [[], *TAGS])
    found = clean({"train": bad, "validation": table(), "test": bad}, skip=True)
    assert found.skipped == {"train": 1, "validation": 0, "test": 1}
    assert found.splits["test"]["row"][:] == [1, 2, 3]


def of_ids(rows: Any) -> Dataset:
    features = Features({"tokens": List(Value("string")), "tags": List(ClassLabel(names=["O", "B-x"]))})
    return Dataset.from_dict({"tokens": [["a", "b"]] * len(rows), "tags": rows}, features)


def test_a_sentence_with_an_empty_tag_is_left_out_where_asked() -> None:
    found = clean({"train": table(tags=[TAGS[0], ["O", None], [" ", "O"]]), "validation": table()}, skip=True)
    assert found.labels.names == NAMES
    assert found.skipped["train"] == 2
    found = clean({"train": of_ids([[0, 1], [None, 1], [-1, 1]]), "validation": of_ids([[1, 0]])}, skip=True)
    assert found.skipped["train"] == 2
    with pytest.raises(RequestError, match="train data, row 1: has the id -2, but the 2 names"):
        clean({"train": of_ids([[0, -2]])}, skip=True)


def test_a_test_split_may_have_no_tags() -> None:
    found = clean({"train": table(), "validation": table(), "test": table(tags=None)})
    assert "label" not in found.splits["test"].column_names
    assert found.splits["test"]["words"][:] == WORDS


def test_a_file_without_blank_lines_is_told_that_it_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("Ada B-PER\nlives O\n" * 20)
    arguments = TokenDataArguments(train_file=str(path))
    tables, _ = load_sentences(arguments)
    with pytest.raises(RequestError, match=r"no blank line .* too few sentences to hold some out"):
        clean_sentences(tables, arguments, PreparationArguments(), 0)


def word_rows(path: Path, sentences: list[str]) -> str:
    """As Kaggle's NER data: a word per row, and a part of speech."""
    lines = [
        f"{number},{word},NN,{tag}"
        for number, words, row in zip(sentences, WORDS, TAGS, strict=True)
        for number, word, tag in zip([number, *[""] * 9], words, row, strict=False)
    ]
    path.write_text("\n".join(["Sentence #,Word,POS,Tag", *lines]) + "\n")
    return str(path)


def read(**flags: Any) -> CleanTables:
    arguments = TokenDataArguments(**flags)
    return clean_sentences(load_sentences(arguments)[0], arguments, PreparationArguments(), 0)


def test_rows_of_one_word_each_are_joined_into_sentences(tmp_path: Path) -> None:
    path = word_rows(tmp_path / "train.csv", ["Sentence: 1", "Sentence: 2", "Sentence: 3"])
    found = read(train_file=path, validation_file=path)
    train = found.splits["train"]
    assert train["tokens"][:] == WORDS
    assert [[NAMES[i] for i in row] for row in train["label"]] == TAGS
    assert found.columns == Columns(("Word",), "Tag", ("POS",))
    joined = "{} rows of one word each are joined into 3 sentences by 'Sentence #'"
    assert found.notes == tuple(joined.format(f"{sum(map(len, WORDS))} {split}") for split in ("train", "validation"))
    every = [f"{i},{word},{tag}" for i in range(3) for word, tag in zip(WORDS[i], TAGS[i], strict=True)]
    (tmp_path / "each.csv").write_text("\n".join(["sent_id,token,label", *every]) + "\n")
    again = read(train_file=str(tmp_path / "each.csv"), validation_file=str(tmp_path / "each.csv"))
    assert again.splits["train"].to_dict() == train.to_dict()
    untagged = [line.rpartition(",")[0] for line in Path(path).read_text().splitlines()]
    (tmp_path / "test.csv").write_text("\n".join(untagged) + "\n")
    test = read(train_file=path, validation_file=path, test_file=str(tmp_path / "test.csv")).splits["test"]
    assert test["words"][:] == WORDS
    assert "label" not in test.column_names
    (tmp_path / "a.jsonl").write_text('{"tokens": ["a"], "tags": ["O"]}\n')
    with pytest.raises(RequestError, match=r"a.jsonl: has no column 'Word', as the other data has; it has tokens"):
        read(train_file=path, validation_file=str(tmp_path / "a.jsonl"))


def test_ids_that_a_table_of_words_names_are_read_by_their_names() -> None:
    words, tags = (list(chain.from_iterable(rows)) for rows in (WORDS, TAGS))
    numbers = [i for i, row in enumerate(WORDS) for _ in row]
    given = Dataset.from_dict({"sentence_id": numbers, "token": words, "ner": tags})
    given = given.cast_column("ner", ClassLabel(names=sorted({*tags})))
    train = clean({"train": given, "validation": given}).splits["train"]
    assert [[NAMES[i] for i in row] for row in train["label"]] == TAGS


def test_whole_sentences_beside_their_number_are_no_words() -> None:
    given = Dataset.from_dict({"sentence_id": ["1", "2"], "tokens": ["a b c", "d e"], "tags": ["O O B-x", "O O"]})
    with pytest.raises(RequestError, match="'tokens' holds no lists of words, but a b c"):
        clean({"train": given})
    lists = given.remove_columns(["tokens", "tags"]).add_column("tokens", ["['a', 'b']", "['c']"])
    assert clean({"train": lists.add_column("tags", ["['O', 'B-x']", "['O']"])}).splits["train"].num_rows == 1


def test_a_sentence_that_occurs_twice_is_held_out_twice_or_not_at_all() -> None:
    rows = [[f"w{i % 20}", "x"] for i in range(60)]
    found = clean({"train": table(rows, [["B-a", "O"]] * 60)})
    train, held_out = ({tuple(row) for row in found.splits[split]["tokens"][:]} for split in ("train", "validation"))
    assert not train & held_out
    assert len(found.splits["validation"]) == 6


def metaspace() -> PreTrainedTokenizerFast:
    """As Llama's and T5's: a blank belongs to the token after it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=60, special_tokens=["<s>"]))


def byte_level(trim: bool) -> PreTrainedTokenizerFast:
    """As GPT-2's and RoBERTa's; without `trim` the blank is part of a token's characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))


def trained(tokenizer: Tokenizer, trainer: Any) -> PreTrainedTokenizerFast:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.train_from_iterator([" ".join(row) for row in WORDS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {
    "WordPiece": lambda: train_wordpiece([" ".join(row) for row in WORDS], 60, 64),
    "metaspace": metaspace,
    "byte level": lambda: byte_level(True),
    "byte level with blanks": lambda: byte_level(False),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_first_token_of_each_word_has_its_label_whatever_the_tokenizer(name: str) -> None:
    """What the labelled tokens decode to, up to the next labelled one, is the word."""
    tokenizer = TOKENIZERS[name]()
    encode = partial(encode_words, tokenizer, Columns(("tokens",), "tags"), 64)
    labels = [list(range(1, len(row) + 1)) for row in WORDS]  # of each word its number
    found = encode({"tokens": WORDS, "label": labels, ENTITY: labels, "words": WORDS})
    for words, ids, marks, first in zip(WORDS, found["input_ids"], found["labels"], found["first"], strict=True):
        places = [place for place, mark in enumerate(marks) if mark != IGNORED]
        assert places == first
        assert [marks[place] for place in places] == list(range(1, len(words) + 1))
        for word, start, end in zip(words, places, [*places[1:], len(ids)], strict=True):
            assert tokenizer.decode(ids[start:end], skip_special_tokens=True).replace(" ", "").lower() == word.lower()


def encoded(words: list[list[str]], tags: list[list[str]], most: int) -> dict[str, list[Any]]:
    numbers = [numbered_entities(row) for row in tags]
    rows = {"tokens": words, "label": [[1] * len(row) for row in words], ENTITY: numbers, "words": words}
    return encode_words(TOKENIZERS["WordPiece"](), Columns(("tokens",), "tags"), most, rows)


def test_words_beyond_the_models_length_are_counted_and_not_judged() -> None:
    tags = [["B-x", "I-x", "O"], ["B-x", "O", "O", "B-y", "I-y", "B-y", "O", "B-x", "I-x"]]
    found = encoded([["a"] * 3, ["a"] * 9], tags, 6)
    assert found["truncated"] == [False, True]
    assert [len(ids) for ids in found["input_ids"]] == [5, 6]
    assert found["first"][1] == [1, 2, 3, 4] + [-1] * 5
    assert found["words_without_token"] == [0, 0]
    assert (found["words_not_scored"], found["entities"]) == ([0, 5], [1, 4])
    assert found["entities_not_scored"] == [0, 2], "the first word of I-y is scored"


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_word_that_the_tokenizer_drops_is_told_from_one_that_is_cut_off(side: str) -> None:
    words = ["Ada", "\u200b", "Paris", "\u2060", "lives", "\u200d"]
    tokenizer = train_wordpiece([" ".join(row) for row in WORDS], 60, 64, lowercase=False)
    tokenizer.truncation_side = side
    rows = {"tokens": [words] * 2, "label": [[1] * 6] * 2, ENTITY: [[0, 0, 1, 1, 0, 2]] * 2}
    whole, cut = (encode_words(tokenizer, Columns(("tokens",), "tags"), most, rows) for most in (64, 6))
    assert (whole["truncated"], cut["truncated"]) == ([False] * 2, [True] * 2)
    assert whole["words_without_token"] == cut["words_without_token"] == [3, 3]
    assert whole["entities_not_scored"] == [1, 1]
    assert whole["words_not_scored"] == [3, 3]
    assert cut["words_not_scored"][0] > 3


def test_what_no_figure_counts_is_said_by_its_split_and_cause() -> None:
    counts = {
        "train": {"words_without_token": 2, "entities": 9, "words_not_scored": 5, "entities_not_scored": 1},
        "validation": {"words_without_token": 1, "entities": 1200, "words_not_scored": 3, "entities_not_scored": 2},
        "test": {"words_without_token": 0, "entities": 5, "words_not_scored": 0, "entities_not_scored": 0},
    }
    truncated = {"train": 1, "validation": 1, "test": 0}
    account = Account("x", Columns(("tokens",), "tags"), {}, {}, truncated, {}, 32, counts=counts)
    assert remarks_on_words(account) == [
        "words that the tokenizer drops, and which are not learned or scored: 3",
        "2 of 1,200 validation entities have no token within 32 tokens (--max_seq_length), and no score",
    ]
    assert not_scored(account) == {
        "train": {"words_not_scored": 5, "entities_not_scored": 1},
        "validation": {"words_not_scored": 3, "entities_not_scored": 2},
        "test": {},
    }
    assert remarks_on_words(replace(account, counts={"test": {"words_without_token": 0}})) == []


def test_names_in_the_standard_library_are_labelled_alike_each_time_and_held_out_whole() -> None:
    rows = name_rows()
    assert rows == name_rows()
    train, held_out = ({tuple(row) for row in rows[split]["tokens"]} for split in ("train", "validation"))
    assert len(train) > 5_000
    assert len(held_out) > 500
    assert not train & held_out


def test_what_a_name_is_is_read_from_the_syntax(tmp_path: Any) -> None:
    from finetune.data.python_names import sentences

    path = tmp_path / "module.py"
    path.write_text(
        "import os.path as p\nfrom . import x\nclass Ä(B):\n    async def f(self, *, é: int = 1):\n"
        '        return self.g("ä", n.m)(lambda z: h(z))\n'
    )
    found = {}
    for words, tags in sentences(path):
        for word, tag in zip(words, tags, strict=True):
            found.setdefault(word, set()).add(tag)
    assert found.pop("self") == {"B-parameter", "O"}
    assert {word: tags.pop() for word, tags in found.items() if tags != {"O"} and len(tags) == 1} == {
        "os": "B-import", "path": "I-import", "p": "B-import", "x": "B-import", "Ä": "B-class", "f": "B-function",
        "é": "B-parameter", "g": "B-call", "m": "B-attribute", "h": "B-call",
    }  # fmt: skip
    assert found["z"] == {"B-parameter", "O"}
    assert found['""'] == {"O"}
