"""Which recipe a YAML or a command line is for: the one it names, else the one that its flags fit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from finetune.errors import RequestError
from finetune.run.flat_yaml import read_flat_yaml_lines
from finetune.run.parse import RECIPE_KEY, spelt
from finetune.run.recipe import Recipe

LIKELIEST = ("causal_lm", "causal_lm_pipeline", "seq_cls", "image_cls")  # preferred when the flags fit several


@cache
def recipes() -> dict[str, Recipe]:
    """The recipes in finetune/run/recipes/, likeliest first: `NAME.py` there defines `NAME`, in capitals."""
    names = {path.stem for path in (Path(__file__).parent / "recipes").glob("[a-z]*.py")}
    ordered = (*(name for name in LIKELIEST if name in names), *sorted(names.difference(LIKELIEST)))
    return {name: getattr(import_module(f"finetune.run.recipes.{name}"), name.upper()) for name in ordered}


def candidates(argv: Sequence[str], named: str | None = None) -> list[Recipe]:
    """The recipes that a command line may be for: the one `named` by the user or by the YAML of --config, and those
    that read its YAMLs; else all. Of these, the ones that know the most of its flags, likeliest first. Raises
    RequestError."""
    given, by_yaml = _said(argv)
    named = named or by_yaml
    every = recipes()
    if named is not None and named not in every:
        raise RequestError(f"recipe is {named!r}, but there is no such recipe. The recipes are {', '.join(every)}.")
    found = [one for one in every.values() if named is None or named in (one.name, *one.reads)]
    found.sort(key=lambda recipe: recipe.name != named)
    unknown = [sum(not {name, name.removeprefix("no_")} & recipe.flags.keys() for name in given) for recipe in found]
    return [recipe for recipe, many in zip(found, unknown, strict=True) if many == min(unknown)]


def is_told(argv: Sequence[str], named: str | None = None) -> bool:
    """Whether the recipe is known for sure: it is named, or only one fits the flags."""
    return bool(named or _said(argv)[1]) or len(candidates(argv)) == 1


def why_chosen(argv: Sequence[str], is_odd: bool) -> str:
    """Why a recipe was chosen, for a note. `is_odd`: it trains another head than is usual for the run's model."""
    usual = recipes()[LIKELIEST[0]]
    lacked = sorted(name for name in _said(argv)[0] if not {name, name.removeprefix("no_")} & usual.flags.keys())
    if is_odd and lacked:
        return f"because recipes/{usual.name}.py has no --{' and no --'.join(lacked)}"
    return "the likeliest that has these flags"


def _said(argv: Sequence[str]) -> tuple[Collection[str], str | None]:
    """The names of all given flags, including the YAML's, and the recipe that the YAML names."""
    given, config = set(), None
    for word, follows in zip(argv, [*argv, ""][1:], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given.add(spelt(name))
            config = (value if equals else follows) if name == "config" else config
    if config is None:
        return given, None
    lines = [(spelt(key), value) for key, value, _ in read_flat_yaml_lines(config) if value is not None]
    given |= {name for name, _ in lines if name != RECIPE_KEY}
    return given, next((str(value) for name, value in lines if name == RECIPE_KEY), None)
