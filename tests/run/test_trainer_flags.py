"""The snapshot of the Trainer's flags is the installed release's."""

from __future__ import annotations

import json

from finetune.run.make_trainer_flags import snapshot
from finetune.run.trainer_flags import SNAPSHOT


def test_the_snapshot_is_of_the_installed_transformers() -> None:
    """`python -m finetune.run.make_trainer_flags` makes it anew."""
    assert json.loads(SNAPSHOT.read_text()) == snapshot()
