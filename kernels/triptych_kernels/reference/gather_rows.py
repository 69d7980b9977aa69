"""Gathering rows, one by one."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    gathered = [x[row] for row in rows.tolist()]
    return torch.stack(gathered) if gathered else x[:0]
