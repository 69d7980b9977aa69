"""All rows, in the order in which a time that runs out should find them."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.gpu_figures.attention import attention_rows
from benchmarks.gpu_figures.elementwise import elementwise_rows
from benchmarks.gpu_figures.limits import Bench, limit_rows
from benchmarks.gpu_figures.model_rows import Shelf, model_rows
from benchmarks.gpu_figures.products import product_rows
from benchmarks.gpu_figures.rows import Row, Sizes
from benchmarks.gpu_figures.sampling import sampling_rows
from benchmarks.gpu_figures.start import start_rows

SECTIONS = (
    "limits",
    "sampling",
    "attention",
    "models",
    "start",
    "other modes",
    "elementwise",
    "products",
    "8-bit attention",
)


def all_rows(device: torch.device, sizes: Sizes, checkpoint: Path | None) -> list[Row]:
    """Nothing is computed or allocated before a row is measured."""
    bench, shelf = Bench(device, sizes), Shelf()
    rows = [
        *limit_rows(bench),
        *sampling_rows(bench),
        *attention_rows(bench),
        *model_rows(bench, shelf),
        *start_rows(bench, shelf, checkpoint),
        *elementwise_rows(bench),
        *product_rows(bench),
    ]
    return sorted(rows, key=lambda row: SECTIONS.index(row.section))
