"""Gathering rows in plain torch."""

from __future__ import annotations

from torch import Tensor


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows]
