"""Whatever a path flag names, a run ends in one line with status 2, or goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from path_flags import HAZARDS, before_torch, cases, path_flags, tried

from finetune.entry.main import resolve_here
from finetune.errors import RequestError
from finetune.run.choose import recipes
from finetune.run.launch import Launch
from finetune.run.parse import unusable

FLAGS = {
    "seq_cls": ("train_file", "output_dir", "config"),
    "causal_lm": ("chat_template",),
    "token_cls": ("deepspeed",),
}


@pytest.mark.parametrize("hazard", HAZARDS)
def test_a_strange_path_ends_in_a_line_before_torch(hazard: str) -> None:
    """benchmarks/path_flags.py has all flags of all recipes, and whole runs."""
    for recipe, flags in FLAGS.items():
        for case in [tried(*one, before_torch) for one in cases([recipe], list(flags), [hazard])]:
            assert case.is_harmless, case


def test_each_recipe_has_path_flags_to_try() -> None:
    assert all(len(path_flags(name)) > 8 for name in recipes())
    assert {flag for flags in FLAGS.values() for flag in flags} <= {f for name in recipes() for f in path_flags(name)}


@pytest.mark.parametrize("name", ["gone", "gone/run", "loop"])
def test_an_output_folder_is_refused_that_a_link_leads_to_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RequestError, match=f"{name.partition('/')[0]} is a broken link"):
        resolve_here(recipes()["seq_cls"], ["--output_dir", str(tmp_path / name)], Launch())


@pytest.mark.parametrize(
    "name",
    [
        "a.csv",
        "~",
        "~/runs",
        "./a b",
        "a ",
        "\u00fcber/\u65e5\u672c.csv",
        "n" * 255,
        "a/" * 300,
        "\u8cc7\u6599\u3000\u96c6.csv",
        "a\u00a0b",
        "Screenshot 9.41\u202fAM.png",
        "\u0645\u06cc\u200c\u0634\u0648\u062f",
    ],
)
def test_names_that_people_have_are_taken(name: str) -> None:
    assert unusable(name) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a\nb", r"has the character '\n'"),
        ("a\x1b[2J", r"has the character '\x1b'"),
        ("a\0", r"has the character '\x00'"),
        ("a\u202eb", r"has the character '\u202e'"),
        ("a\udcff", r"has the character '\udcff'"),
        ("x/" + "n" * 256, "is longer than"),
        ("\u65e5" * 86, "is longer than"),
        ("a/" * 2100, "is longer than"),
        ("~nobody_of_that_name/x", "there is no such user"),
        (" ", "is blank"),
    ],
)
def test_names_that_cannot_be_are_refused(name: str, said: str) -> None:
    assert said in str(unusable(name))
