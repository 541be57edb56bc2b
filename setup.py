"""All but one thing stands in pyproject.toml: a wheel carries recipes/ and ds_configs/ as finetune/shipped/."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("recipes", "ds_configs"):
                place = Path(self.build_lib, "finetune/shipped", name)
                shutil.copytree(name, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithRecipes})
