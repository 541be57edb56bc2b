"""python tests/plan/preference_memory.py FLAG...: recipes/preference.py under the memory meter; one line of JSON, the
bytes between steps and at the peak of the third."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from finetune.entry.main import resolve_here
from finetune.measure.memory import Allocations
from finetune.measure.watch import Watch
from finetune.run.choose import recipes
from finetune.run.launch import Launch
from finetune.training import chapters

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "preference.py"


def main() -> None:
    spec = importlib.util.spec_from_file_location("preference", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    watch = Watch(Allocations())

    def finish(session: Any, trainer: Any, **_: Any) -> None:
        trainer.add_callback(watch)
        watch.follow(trainer.model)
        trainer.train()

    chapters.finish = finish
    watch.memory.__enter__()
    module.main(resolve_here(recipes()["preference"], sys.argv[1:], Launch()))
    print(json.dumps([watch.between_steps[-1], max(watch.step_peaks[-1].values())]))


if __name__ == "__main__":
    main()
