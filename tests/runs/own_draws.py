"""A recipe whose ranks draw different samples: `own_draws.py RECIPE FLAGS`."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from finetune.training.samples import Samples

drawn = Samples.continued


def continued(self: Samples, *given: Any, **more: Any) -> list[int]:
    self.seed += int(os.environ["RANK"])
    return drawn(self, *given, **more)


if __name__ == "__main__":
    Samples.continued = continued  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
