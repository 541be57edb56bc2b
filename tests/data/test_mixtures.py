"""Several training files: exact shares after any number of samples, told by file, the same wherever they are taken."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data import digests
from finetune.data.causal_lm import prepare_corpus
from finetune.data.mixture import sentence_of_sources, taken_of_each
from finetune.data.sampling import MixtureSampler, interleaved, sampler_of
from finetune.data.tokenizer import train_text_tokenizer
from finetune.errors import RequestError
from finetune.run.choose import recipes
from finetune.run.flags.language import BlockArguments, CorpusArguments
from finetune.run.launch import Launch
from finetune.run.mixture import parts_of
from finetune.run.resolve import resolve
from finetune.training.metrics import language_metrics

WEIGHTS = st.lists(st.fractions(Fraction(1, 1000), 5, max_denominator=1000), min_size=2, max_size=7)


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_each_source_has_its_share_to_less_than_a_sample_after_any_number_of_them(weights: list[Fraction]) -> None:
    samples = 400
    found = interleaved(weights, [0] * len(weights), samples)
    for source, weight in enumerate(weights):
        share = float(weight / sum(weights)) * np.arange(1, samples + 1)
        assert np.abs(np.cumsum(found == source) - share).max() < 1


@settings(max_examples=30, deadline=None)
@given(WEIGHTS, st.integers(1, 200))
def test_the_shares_go_on_where_they_were(weights: list[Fraction], first: int) -> None:
    whole = interleaved(weights, [0] * len(weights), 300)
    counts = [int((whole[:first] == source).sum()) for source in range(len(weights))]
    assert (interleaved(weights, counts, 300 - first) == whole[first:]).all()


def epochs(sampler: MixtureSampler, count: int) -> list[list[int]]:
    found = []
    for epoch in range(count):
        sampler.set_epoch(epoch)
        found.append(list(sampler))
        assert len(found[-1]) == len(sampler)
    return found


def test_shares_hold_over_all_epochs_and_no_sample_is_taken_much_oftener_than_another() -> None:
    sizes, weights = [100, 23, 7], [Fraction("0.7"), Fraction("0.2"), Fraction("0.1")]
    every = epochs(MixtureSampler(sizes, weights, 8, seed=3), 5)
    assert len({tuple(epoch) for epoch in every}) == 5, "each has an order of its own"
    order = [sample for epoch in every for sample in epoch]
    bounds = np.cumsum([0, *sizes])
    for source in range(3):
        of_it = np.array([bounds[source] <= sample < bounds[source + 1] for sample in order])
        assert np.abs(np.cumsum(of_it) - float(weights[source]) * np.arange(1, len(order) + 1)).max() < 1
        times = Counter(sample for sample in order if bounds[source] <= sample < bounds[source + 1])
        assert len(times) == sizes[source]
        assert max(times.values()) - min(times.values()) <= 1
    assert order != [sample for epoch in epochs(MixtureSampler(sizes, weights, 8, seed=4), 5) for sample in epoch]


def test_a_run_that_begins_in_a_later_epoch_takes_the_same_samples() -> None:
    sizes, weights = [40, 11], [Fraction(1, 3), Fraction(2, 3)]
    every = epochs(MixtureSampler(sizes, weights, 4, seed=1), 4)
    resumed = MixtureSampler(sizes, weights, 4, seed=1)
    resumed.set_epoch(3)
    assert list(resumed) == every[3]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("a.jsonl:0.7 b.jsonl:0.3", [("a.jsonl", "a", 0.7), ("b.jsonl", "b", 0.3)]),
        ("x/a.jsonl y/a.jsonl", [("x/a.jsonl", "a", None), ("y/a.jsonl", "a_2", None)]),
        ("a:b.txt", [("a:b.txt", "a_b", None)]),
        ("a-b.jsonl:2 c.txt:1", [("a-b.jsonl", "a_b", 2), ("c.txt", "c", 1)]),
        ("", []),
    ],
)
def test_files_and_their_weights_are_read(words: str, found: list[Any]) -> None:
    parts = parts_of(words.split())
    assert [(p.path, p.name, p.weight and float(p.weight)) for p in parts] == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--train_file a.jsonl:0.7 b.jsonl", "some files have a weight, and others do not"),
        ("--train_file a.jsonl:0.7", "but there is only one"),
        ("--train_file a.jsonl:1 b.jsonl:0", "must be more than 0"),
        ("--train_file a.jsonl:1 a.jsonl:2", "a file is given twice"),
        (
            "--train_file a.jsonl b.jsonl --streaming True --max_steps 5 --tokenizer byte",
            "only one file can be streamed",
        ),
        ("--train_file a.jsonl:1 b.jsonl:2 --group_by_length True --packing none", "keep their order"),
        ("--train_file a.jsonl:1 c.jsonl:2", "c.jsonl"),
        ("--train_file a.jsonl:1 b.jsonl:2", ""),
    ],
)
def test_mixtures_that_cannot_be_are_refused_at_once(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.entry.main import resolve_here

    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Path(f"{name}.jsonl").write_text('{"text": "some words"}\n')
    if not message:
        assert resolve(recipes()["causal_lm"], words.split(), Launch()).value("train_file") == words.split()[1:]
        return
    with pytest.raises(RequestError, match=message):
        resolve_here(recipes()["causal_lm"], words.split(), Launch())


def chat(question: str, answer: str, name: str = "messages") -> dict[str, Any]:
    if name == "messages":
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    return {"instruction": question, "output": answer}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """100 conversations and 40 instructions, of which 90 and 36 are trained on."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(chat(f"{i}?", f"{i}.")) + "\n" for i in range(100)))
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps(chat(f"{i}!", f"{i} " * 5, "instruction")) + "\n" for i in range(40))
    )
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


def prepared(files: list[str], packing: str = "none", block_size: int = 64, **flags: Any) -> Any:
    tokenizer = train_text_tokenizer("byte", [], 0, 64, with_end=True)
    arguments = CorpusArguments(train_file=files, **flags)
    blocks = BlockArguments(packing=packing)
    return prepare_corpus(arguments, blocks, tokenizer, block_size=block_size, seed=1, launch=Launch())


def weighted(files: list[str], *weights: float) -> list[str]:
    return [f"{file}:{weight}" for file, weight in zip(files, weights, strict=True)]


def test_files_of_several_formats_are_mixed_and_what_is_taken_is_said(files: list[str]) -> None:
    data = prepared(weighted(files, 0.5, 0.5))
    train = data.splits["train"]
    assert train.sizes == [90, 36]
    said = data.account.describe()
    assert "a.jsonl: messages, 100 conversations; columns messages; b.jsonl: Alpaca, 40 conversations" in said
    assert "mixed by blocks, an epoch of 126: a 50.0%, 63 of 90, the others in later epochs, " in said
    assert "; b 50.0%, each of 36 repeated 1.75 times, " in said
    assert data.account.sources == {"a": {"validation": 10, "train": 90}, "b": {"validation": 4, "train": 36}}
    assert data.account.documents == {"train": 126, "validation": 14}
    assert data.lengths is None, "they are not grouped by length"
    order = list(sampler_of(train, 7, 1, None))
    assert sum(sample < 90 for sample in order[:40]) == 20
    texts = [data.tokenizer.decode(train[i]["input_ids"]) for i in (0, 89, 90, 125)]
    assert ["!" in text for text in texts] == [False, False, True, True]


@pytest.mark.parametrize("packing", ["none", "bfd", "wrapped"])
def test_a_block_has_documents_of_one_file_and_shares_are_of_blocks(packing: str, files: list[str]) -> None:
    data = prepared(weighted(files, 0.25, 0.75), packing, 128)
    train = data.splits["train"]
    mark = [{"?", "!"} & set(data.tokenizer.decode(train[i]["input_ids"])) for i in range(len(train))]
    assert mark == [{"?"}] * train.sizes[0] + [{"!"}] * train.sizes[1]
    order = list(sampler_of(train, 4, 1, None))
    assert abs(sum(sample < train.sizes[0] for sample in order) - len(order) / 4) < 1


@pytest.mark.parametrize("packing", ["none", "bfd", "wrapped"])
@pytest.mark.parametrize("weights", [None, (0.25, 0.75)])
def test_what_each_file_gave_is_what_a_run_would_count(packing: str, weights: Any, files: list[str]) -> None:
    data = prepared(weighted(files, *weights) if weights else files, packing, 128)
    train, sampler = data.splits["train"], sampler_of(data.splits["train"], 4, 1, None)
    samples = len(sampler) + len(sampler) // 2
    wanted = {name: [0, 0] for name in ("a", "b")}
    for sample in [one for epoch in epochs(sampler, 2) for one in epoch][:samples]:
        own = wanted["a" if sample < train.sizes[0] else "b"]
        own[0] += 1
        own[1] += len(train[sample]["input_ids"])
    found = taken_of_each(train, sampler, samples)
    assert {name: [one["blocks"], one["tokens"]] for name, one in found.items()} == wanted
    assert sum(one["blocks"] for one in found.values()) == samples
    assert "a " in (said := sentence_of_sources(found))
    assert f"{wanted['b'][1]:,} tokens" in said
    assert taken_of_each(train.parts[0], sampler, samples) == {}
    assert sentence_of_sources({}) == ""


@pytest.mark.parametrize("packing", ["none", "bfd", "wrapped"])
def test_an_epoch_without_weights_has_each_document_once(packing: str, files: list[str]) -> None:
    train = prepared(files, packing, 128).splits["train"]
    found = taken_of_each(train, sampler_of(train, 1, 1, None), len(train))
    documents = {name: one["documents"] for name, one in found.items()}
    # Of wrapped text the last tokens fill no block, and their documents are left over.
    assert (documents == {"a": 90, "b": 36}) or (packing == "wrapped" and 80 < documents["a"] <= 90)


def test_without_weights_each_block_of_each_file_is_taken_once(files: list[str]) -> None:
    data = prepared(files)
    train = data.splits["train"]
    assert sorted(sampler_of(train, 9, 1, data.lengths)) == list(range(126))
    assert "a 71.4%, each of 90 once" in data.account.describe()


def test_other_weights_use_the_same_tokens_and_are_other_rows(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    found = [prepared(some).splits["train"] for some in (weighted(files, 1, 2), weighted(files, 2, 1), files)]
    assert len([place for place in (tmp_path / "cache" / "causal_lm").iterdir() if place.is_dir()]) == 1
    assert len({digests.of_rows(train) for train in found}) == 3
    same = prepared(weighted(files, 0.5, 1)).splits["train"]
    assert digests.of_rows(same) == digests.of_rows(found[0])


def test_one_validation_file_is_held_out_once_for_all(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "v.jsonl").write_text((json.dumps(chat("a", "b")) + "\n") * 5)
    data = prepared(files, validation_file=str(tmp_path / "v.jsonl"))
    assert len(data.splits["validation"]) == 5
    assert data.account.documents == {"train": 140, "validation": 5}
    assert data.account.rates[2] == {}, "nothing is told by file"


def test_files_of_two_kinds_are_refused(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "some words"}\n' * 9)
    with pytest.raises(RequestError, match=r"a.jsonl has messages, but c.jsonl has text\. Mix only files of one kind"):
        prepared([files[0], str(tmp_path / "c.jsonl")])


def test_texts_from_scratch_are_mixed_and_share_a_tokenizer(tmp_path: Path) -> None:
    for name, word in (("a", "abc "), ("b", "xyz ")):
        (tmp_path / f"{name}.txt").write_text(word * 200)
    data = prepare_corpus(
        CorpusArguments(train_file=[f"{tmp_path}/a.txt:1", f"{tmp_path}/b.txt:1"]),
        BlockArguments(),
        None,
        block_size=16,
        seed=1,
        launch=Launch(),
    )
    assert set("abcxyz ") <= set(data.tokenizer.get_vocab())
    assert data.tokenizer.eos_token is not None, "there are two texts"


def test_an_evaluation_has_a_loss_of_each_source() -> None:
    rows = np.array([[2.0, 1, 2], [4.0, 0, 2], [9.0, 1, 3]])
    metrics = language_metrics(1.0, 1.0, {"a": 2, "b": 1})
    found = metrics(SimpleNamespace(predictions=rows))
    assert (found["a_loss"], found["b_loss"], found["loss"]) == (1.5, 3.0, 15 / 7)
    sums = metrics(SimpleNamespace(predictions=rows.sum(axis=0)[None]))
    assert sums["loss"] == 15 / 7
    assert "a_loss" not in sums, "a pipeline has sums alone"
