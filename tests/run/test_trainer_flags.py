"""The snapshot of the Trainer's flags is the installed release's."""

from __future__ import annotations

import json

import pytest
from make_trainer_flags import snapshot

from finetune.errors import RequestError
from finetune.run.snapshot import SNAPSHOT
from finetune.run.trackers import TRACKERS, check_trackers


def test_the_snapshot_is_of_the_installed_transformers() -> None:
    """`python benchmarks/make_trainer_flags.py` makes it anew."""
    assert json.loads(SNAPSHOT.read_text()) == snapshot()


def test_the_trackers_are_those_of_transformers() -> None:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    assert sorted(TRACKERS) == sorted(INTEGRATION_TO_CALLBACK)


def test_a_tracker_that_nobody_knows_is_refused() -> None:
    check_trackers(["none"])
    with pytest.raises(RequestError, match=r"--report_to wandbb \(command line\): .* Did you mean wandb\?"):
        check_trackers(["wandbb"])
