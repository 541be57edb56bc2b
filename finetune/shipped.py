"""Files shipped with the toolkit besides its code: the recipes, their configs and launch files, and DeepSpeed configs.
In a checkout they are at its top level; a wheel contains them in the package (setup.py)."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
PLACE = PACKAGE / "shipped" if (PACKAGE / "shipped").is_dir() else PACKAGE.parent
KINDS = ("*.py", "configs/*.yaml", "launch/*")
RECIPES, DS_CONFIGS = PLACE / "recipes", PLACE / "ds_configs"


def as_typed(path: Path) -> str:
    """The path relative to the current folder; absolute if it is elsewhere."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def launch_file(name: str) -> str:
    """The path of a file in recipes/launch/, as a user would type it."""
    return as_typed(RECIPES / "launch" / name)


def config(name: str) -> Path:
    """The YAML at this path; if there is none, the shipped one of this name."""
    path = Path(name).expanduser()
    shipped = RECIPES / "configs" / f"{name.removeprefix('recipes/configs/').removesuffix('.yaml')}.yaml"
    return shipped if not path.exists() and shipped.is_file() else path


def is_recipes_yaml(name: str) -> bool:
    """Judged by the name: `run.yaml`, or a shipped one such as `lora_24gb`."""
    shipped = RECIPES / "configs" / f"{name}.yaml"
    return name.endswith((".yaml", ".yml")) or (not os.path.exists(name) and os.path.isfile(shipped))


def files(pattern: str = "") -> dict[str, Path]:
    """Recipes, their configs and launch files by name: `seq_cls`, `lora_24gb`, `slurm.sbatch`, ...; with a pattern,
    only those that match."""
    found = [path for one in ((pattern,) if pattern else KINDS) for path in sorted(RECIPES.glob(one))]
    return {path.name if path.parent.name == "launch" else path.stem: path for path in found}
