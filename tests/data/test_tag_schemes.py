"""Tags in the schemes that are about, each made BIO."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities

from finetune.data.tag_schemes import find_scheme, read_conll, spelt_alike, to_bio
from finetune.errors import RequestError

SAID = "--train_file a.conll"
BIO = "B-a I-a O B-a B-a I-a B-b I-b I-b O".split()
IN_SCHEMES = {
    "BIO": BIO,
    "IOB1": "I-a I-a O I-a B-a I-a I-b I-b I-b O".split(),
    "BILOU": "B-a L-a O U-a B-a L-a B-b I-b L-b O".split(),
    "BIOES": "B-a E-a O S-a B-a E-a B-b I-b E-b O".split(),
}


@pytest.mark.parametrize("name", IN_SCHEMES)
def test_every_scheme_is_told_and_says_the_same(name: str) -> None:
    scheme, _ = find_scheme([IN_SCHEMES[name]], SAID)
    assert scheme.name == name
    assert to_bio(IN_SCHEMES[name], scheme) == BIO


@given(st.lists(st.sampled_from(["O", *(f"{p}-{t}" for p in "BILU" for t in "xy")]), max_size=12))
def test_bio_says_what_seqeval_reads_in_any_tags(tags: list[str]) -> None:
    """Broken tags among them: seqeval's own reading is the judge. It knows U by the name S, and no L but E."""
    made = to_bio(tags, find_scheme([["B-x", "L-x"]], SAID)[0])
    spelled = [tag.replace("U-", "S-").replace("L-", "E-") for tag in tags]
    assert get_entities(made) == get_entities(spelled)
    assert all(tag[0] != "I" or before[2:] == tag[2:] for before, tag in zip(["O", *made], made, strict=False))


def test_an_entity_that_goes_on_from_nothing_is_begun_and_counted() -> None:
    scheme, note = find_scheme([["O", "I-a", "I-b"], ["B-a", "I-a"]], SAID)
    assert scheme.name == "BIO"
    assert note.startswith("2 tags I- continue an entity that did not begin")
    assert to_bio(["O", "I-a", "I-b"], scheme) == ["O", "B-a", "B-b"]


def test_plain_types_are_entities_of_neighbours_where_some_words_have_none_and_else_of_a_word_each() -> None:
    names = ["PER", "PER", "O", "LOC"]
    assert to_bio(names, find_scheme([names], SAID)[0]) == ["B-PER", "I-PER", "O", "B-LOC"]
    speech = ["NOUN", "NOUN", "VERB"]
    assert to_bio(speech, find_scheme([speech], SAID)[0]) == ["B-NOUN", "B-NOUN", "B-VERB"]


@pytest.mark.parametrize(
    ("tags", "read_as"),
    [
        ("B_PER I_PER O", "B-PER I-PER O"),
        ("B-PER I_PER", "B-PER I-PER"),
        ("B:PER O", "B-PER O"),
        ("B\u2010PER O", "B-PER O"),
        ("PER-B PER-I O", "B-PER I-PER O"),
        ("PER_B PER_E O", "B-PER E-PER O"),
        ("b-per i-per o", "B-per I-per O"),
        ("B-PER o", "B-PER O"),
        ("B I O", "B-entity I-entity O"),
        ("B M E S", "B-entity M-entity E-entity S-entity"),
    ],
)
def test_a_prefix_in_another_spelling_is_read_and_said(tags: str, read_as: str) -> None:
    rows, note = spelt_alike([tags.split(), None], SAID)
    assert rows == [read_as.split(), []]
    changed = sorted((old, new) for old, new in zip(tags.split(), read_as.split(), strict=True) if old != new)
    assert note == "tags are rewritten: {} is read as {}".format(*changed[0])


@pytest.mark.parametrize(
    "tags", ["B-PER I-PER O", "PER LOC O", "NOUN V.fin N-pl", "s_1 t_2", "a o u", "B-B_x I-B_x", "O"]
)
def test_tags_that_are_spelt_as_ever_stay_as_they_are(tags: str) -> None:
    assert spelt_alike([tags.split()], SAID) == ([tags.split()], "")


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        ("B-PER LOC", "others do not: LOC"),
        ("B_PER I_PER LOC", "others do not: LOC"),
        ("PER PER-I O", "others do not: PER"),
        ("B-PER LOC-B LOC-I", "others do not: B-PER"),
        ("3 0", r"numbers \(0, 3\), which do not say which words are outside"),
        ("-1 1", r"numbers \(-1, 1\)"),
        ("1.0 0.0", r"numbers \(0.0, 1.0\)"),
        ("B-PER -100", r"others do not: -100|numbers \(-100\)"),
    ],
)
def test_mixtures_and_numbers_are_refused(tags: str, said: str) -> None:
    with pytest.raises(RequestError, match=f"{SAID}: .*({said})"):
        find_scheme(spelt_alike([tags.split()], SAID)[0], SAID)


CONLL = "-DOCSTART- -X- O O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n\nPeter NNP B-NP I-PER\n"


@pytest.mark.parametrize("text", [CONLL, CONLL.replace(" ", "\t"), CONLL.replace("\n", "\r\n"), "\ufeff" + CONLL])
def test_conll_is_read_by_its_first_column_and_its_last(text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.conll"
    path.write_bytes(text.encode())
    assert list(read_conll(path)) == [(["EU", "rejects"], ["B-ORG", "O"], 3), (["Peter"], ["I-PER"], 7)]


def test_a_line_that_lacks_its_tag_is_named_and_a_file_of_words_has_none(tmp_path: Path) -> None:
    path = tmp_path / "train.conll"
    path.write_text("EU B-ORG\nrejects\n")
    with pytest.raises(RequestError, match="line 2 has 1 columns, but the lines before it have 2"):
        list(read_conll(path))
    path.write_text("EU\nrejects\n\nPeter\n")
    assert list(read_conll(path)) == [(["EU", "rejects"], None, 1), (["Peter"], None, 4)]


@pytest.mark.parametrize(
    ("comment", "line"),
    [("# sent_id = 1", "EU B-ORG"), ("#begin document (nw/1); part 000", "EU B-ORG"), ("# newpar", "EU B-ORG"),
     ("# a b = 2", "EU NNP B-NP B-ORG"), ("# text = 0", "EU NNP B-NP B-ORG"), ("# a corpus of ours", "EU\tB-ORG")],
)  # fmt: skip
def test_comments_before_a_sentence_are_passed_over(comment: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "train.conll"
    path.write_text(f"{comment}\n{line}\n\n{comment}\n{line}\n")
    assert list(read_conll(path)) == [(["EU"], ["B-ORG"], 2), (["EU"], ["B-ORG"], 5)]


@pytest.mark.parametrize("rest", ["O", "B-NUM", "SYM", "NN I-NP O"])
def test_the_word_number_sign_is_a_word(rest: str, tmp_path: Path) -> None:
    path = tmp_path / "train.conll"
    path.write_text(f"# {rest}\n1 {rest}\n\n")
    assert list(read_conll(path)) == [(["#", "1"], [rest.split()[-1]] * 2, 1)]
