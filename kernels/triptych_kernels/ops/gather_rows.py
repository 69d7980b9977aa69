"""Some rows of a tensor, in the order asked."""

from __future__ import annotations

from torch import Tensor

from triptych_kernels.registry import find_impl


def gather_rows(x: Tensor, rows: Tensor, *, impl: str | None = None) -> Tensor:
    """`x[rows]`.

    Args:
        x: [num_rows, size], contiguous.
        rows: [num_gathered] int64, each below num_rows; not checked, the device is not waited for.
    Returns:
        [num_gathered, size], a new tensor like x.
    Raises:
        ValueError: shapes disagree; names both.
    """
    if x.ndim != 2 or rows.ndim != 1:
        raise ValueError(
            f"gather_rows: x {list(x.shape)} must be [num_rows, size] and rows {list(rows.shape)} one list"
        )
    out: Tensor = find_impl("gather_rows", x, impl)(x, rows)
    return out
