"""Rows that carry their number, which locates values computed for them before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

NUMBER = "number"


class Numbered(Dataset[dict[str, Any]]):
    """Wraps a data set that reads whole batches, too; each row also has its NUMBER. Order and weights stay the same."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.weights, self.sizes = getattr(rows, "weights", None), getattr(rows, "sizes", None)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {**self.rows[number], NUMBER: number}

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        rows = self.rows.__getitems__(numbers)
        return [{**row, NUMBER: number} for row, number in zip(rows, numbers, strict=True)]


class NumberedCollator:
    """Wraps `collator` for rows with or without a NUMBER."""

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        plain = [{name: value for name, value in row.items() if name != NUMBER} for row in rows]
        numbers = [row[NUMBER] for row in rows if NUMBER in row]
        return {**self.collator(plain), **({NUMBER: torch.tensor(numbers)} if numbers else {})}
