"""The mutants of benchmarks/mutants.py: that they are made, that rooms have tests, and what the last ones came to."""

from __future__ import annotations

import ast
from collections import Counter

import mutants
import pytest
from conftest import REPO
from mutants import CAUGHT, LIVED, PAGE, ROOMS, Mutant, key_of, page, read_rows


def test_every_room_has_files_and_quick_tests() -> None:
    for name, room in ROOMS.items():
        assert mutants.files_of(room), name
        for test in (*room.tests, *room.then):
            assert (REPO / test).exists(), test


def test_of_every_room_mutants_were_tried_and_nearly_all_were_caught() -> None:
    rows = read_rows()
    assert Counter(row.room for row in rows).keys() == ROOMS.keys()
    assert mutants.share_caught(rows) >= mutants.WANTED
    assert [row.id for row in rows if row.outcome == LIVED and not row.because] == []
    assert len({key_of(row) for row in rows}) == len(rows)
    assert page(rows) == PAGE.read_text()


def test_a_share_is_of_all_that_were_tried_and_mean_something_else() -> None:
    rows = [
        Mutant("loss", "a.py", "AddNot", n, 1, 9, outcome=outcome) for n, outcome in enumerate([CAUGHT] * 3 + [LIVED])
    ]
    assert mutants.share_caught(rows) == 0.75
    assert "| loss | 9 | 4 | 0 | 3 | 1 | 75.0% |" in page(rows)
    rows.append(Mutant("loss", "a.py", "AddNot", 5, 1, 9, outcome=LIVED, because="same: it is"))
    assert mutants.share_caught(rows) == 0.75, "one that computes the same is none"
    assert "| loss | 9 | 5 | 1 | 3 | 1 | 75.0% |" in page(rows)


def test_places_are_broken_one_at_a_time(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("cosmic_ray", reason="cosmic-ray (extra dev) is not installed")
    source = "def f(x: int | None) -> int | None:\n    print(x)\n    return x + 2 if x < 3 else None\n"
    (tmp_path / "a.py").write_text(source)
    monkeypatch.setattr(mutants, "REPO", tmp_path)
    monkeypatch.setattr(mutants, "ROOMS", {"loss": mutants.Room(("a.py",), ())})
    places = mutants.every_mutant("loss")
    made = [found for place in places for one in place if (found := mutants.mutated(one))]
    assert all(ast.dump(ast.parse(text)) != ast.dump(ast.parse(source)) for _, text in made)
    became = {row.became for row, _ in made}
    assert {"pass", "return x - 2 if x < 3 else None", "return x + 2 if x <= 3 else None"} <= became
    assert {"return x + 3 if x < 3 else None", "return x + 2 if x < 2 else None"} <= {
        b.replace("  ", " ") for b in became
    }
    assert not any(row.line == 1 for row, _ in made), "annotations mean nothing"
    some = list(mutants.sampled("loss", 3, "0", set()))
    assert some == list(mutants.sampled("loss", 3, "0", set())), "by the seed"
    known = {key_of(row) for row, _ in some}
    assert not known & {key_of(row) for row, _ in mutants.sampled("loss", 9, "1", known)}
