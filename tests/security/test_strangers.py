"""Whatever lies in a folder from a stranger, each reader gives a value or an error of ours: within seconds, within a
gigabyte, and without showing what a link leads to. After a failure the name of the test says what to put where."""

from __future__ import annotations

import io
import os
import random
import shutil
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from strangers import LINKS, OWN_FILES, PLACED, READERS, altered, files_of, outcome, place, same_content

from finetune.errors import FinetuneError

SHARE = 4  # of the readers, a fourth is asked of each attack in the gate
QUICK = 2  # altered files of each reader in the gate
LONG = 80  # of each file, at night: thousands in all
SEED = 20261123


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the readers import, so that no child does; what they set is not left to other tests."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), patch.dict(os.environ):
        for reader, (_, _, read) in READERS.items():
            folder = tmp_path_factory.mktemp("warm")
            files, victims = files_of(reader)
            with suppress(FinetuneError):
                read(place(folder, reader, victims[0], same_content(files[victims[0]])))


def looked_at(reader: str) -> list[str]:
    """Attacks by name. A user may name a link to a file of theirs."""
    return [name for name in PLACED if reader not in OWN_FILES or name != LINKS[0]]


def wrong(reader: str, victim: str, attack: str, tmp_path: Path) -> str:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    try:
        return outcome(READERS[reader][2], place(scratch, reader, victim, PLACED[attack]), scratch)
    finally:
        shutil.rmtree(scratch)


@pytest.mark.parametrize("reader", READERS)
def test_a_folder_as_it_should_be_is_read(reader: str, tmp_path: Path) -> None:
    """Or only refusals would be tried."""
    files, victims = files_of(reader)
    folder = place(tmp_path, reader, victims[0], same_content(files[victims[0]]))
    assert outcome(READERS[reader][2], folder, tmp_path) == ""


@pytest.mark.parametrize("attack", PLACED)
def test_in_the_place_of_a_file_does_no_harm(attack: str, tmp_path: Path) -> None:
    """One file of some readers, others for each attack; at night all files of all."""
    number = list(PLACED).index(attack)
    found = {}
    for reader in list(READERS)[number % SHARE :: SHARE]:
        if attack in looked_at(reader):
            _, victims = files_of(reader)
            victim = victims[number % len(victims)]
            found[f"{reader}: {victim}"] = wrong(reader, victim, attack, tmp_path)
    assert {name: said for name, said in found.items() if said} == {}


@pytest.mark.nightly
@pytest.mark.parametrize("reader", READERS)
def test_in_the_place_of_any_file_nothing_does_harm(reader: str, tmp_path: Path) -> None:
    found = {
        f"{victim}: {attack}": wrong(reader, victim, attack, tmp_path)
        for victim in files_of(reader)[1]
        for attack in looked_at(reader)
    }
    assert {name: said for name, said in found.items() if said} == {}


def campaign(reader: str, count: int, seed: int, tmp_path: Path) -> dict[str, str]:
    """`count` altered files, one after another in one child; where that fails, which one it was."""
    files, victims = files_of(reader)
    choice = random.Random(seed)
    tries = [(victim, altered(files[victim], choice)) for victim in (choice.choice(victims) for _ in range(count))]
    found = {}
    for number, (victim, content) in enumerate(tries):
        scratch = tmp_path / f"{number}"
        scratch.mkdir()
        said = outcome(READERS[reader][2], place(scratch, reader, victim, same_content(content)), scratch)
        shutil.rmtree(scratch)
        if said:
            found[f"{victim}, {number} of seed {seed}: {content[:300]!r}"] = said
    return found


@pytest.mark.parametrize("reader", READERS)
def test_altered_files_do_no_harm(reader: str, tmp_path: Path) -> None:
    assert campaign(reader, QUICK, SEED, tmp_path) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("reader", READERS)
def test_thousands_of_altered_files_do_no_harm(reader: str, tmp_path: Path) -> None:
    assert campaign(reader, LONG * len(files_of(reader)[1]), SEED + 1, tmp_path) == {}
