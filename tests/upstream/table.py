"""All rows."""

from __future__ import annotations

from upstream import of_engines, of_models, of_trainer
from upstream.row import Row

ROWS: tuple[Row, ...] = (*of_trainer.ROWS, *of_engines.ROWS, *of_models.ROWS)
