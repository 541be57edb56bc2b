"""For tests of models for which no program is known: they are traced in this process, which has imported torch already.

from traced_here import traced_here  # noqa: F401 - an autouse fixture
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from finetune.errors import RequestError
from finetune.measure.tracing import traced
from finetune.plan import tracing

IN_A_PROCESS = tracing._traced  # as a user's plan traces


def in_this_process(config: dict[str, Any], head: str, attention: str, where: str) -> dict[str, Any]:
    try:
        return traced(config, head, attention)
    except Exception as error:
        raise RequestError(f"{where}: cannot be traced") from error


@pytest.fixture(scope="module", autouse=True)
def traced_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With a cache of their own."""
    folder = tmp_path_factory.mktemp("traces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "_cache", lambda: folder)
        patch.setattr(tracing, "_traced", in_this_process)
        yield
