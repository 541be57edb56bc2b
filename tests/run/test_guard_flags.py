"""What is no policy, and what a run cannot keep to, is refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from asked import run_of
from conftest import flags

from finetune.errors import RequestError
from finetune.run.flags.compression import CompressionArguments
from finetune.run.flags.guards import GuardArguments


def ask(**values: Any) -> None:
    run_of(*flags(values), groups=(CompressionArguments, GuardArguments))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        pytest.param({"on_nan": "ignore"}, "must be one of stop, skip, rollback, off", id="no policy"),
        pytest.param({"on_nan": "skip", "ddp_comm_hook": "powersgd"}, "a NaN in it stays", id="a hook that remembers"),
        pytest.param({"on_nan": "rollback", "save_strategy": "no"}, "saves none", id="nothing to go back to"),
        pytest.param({"on_nan": "rollback", "save_only_model": True}, "saves none of these", id="no optimizer states"),
        pytest.param({"hang_timeout": 1}, "must be 5 or more, or 0", id="impatience"),
        pytest.param({"nan_limit": 0}, "must be 1 or more", id="no limit"),
        pytest.param({"stop_grace": -1}, "must be 0 or more", id="no grace"),
    ],
)
def test_it_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as refused:
        ask(**values)
    assert said in str(refused.value)


@pytest.mark.parametrize("values", [{}, {"on_nan": "skip", "ddp_comm_hook": "fp16"}, {"hang_timeout": 0}])
def test_it_is_taken(values: dict[str, Any]) -> None:
    ask(**values)
