"""The arguments of `ops.sample` for the rows of a step, as columns in the order of the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych_kernels import ops
from triptych_kernels.logit_index import TokenMasks
from triptych_services.worker.sampling.params import SamplingArrays, SamplingColumns, TokenHistory

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """See `ops.sample`."""

    columns: Mapping[str, Tensor]
    """Name of each column -> its values, [num_sampling], on the rank's device. In the order of `COLUMN_TO_DTYPE`."""

    def choose(
        self, logits: Tensor, *, rows: Tensor | None = None, masks: TokenMasks | None = None
    ) -> Tensor:
        """Return one token for each row, [num_sampling] int64; -1 where there is nothing to choose from.

        Args:
            rows: Rows of the logits; None: all of them, in order.
            masks: Tokens that may be chosen; None restricts no row.
        """
        columns: Mapping[str, Any] = self.columns
        return ops.sample(logits, **columns, rows=rows, masks=masks)

    def map(self, change: Callable[[Tensor], Tensor]) -> SamplingBatch:
        """Return a batch with each column changed."""
        return SamplingBatch({name: change(column) for name, column in self.columns.items()})


class SamplingBuffers:
    """The columns of each step as tensors on the host, in the memory of their arrays."""

    def __init__(self, arrays: SamplingArrays) -> None:
        self.columns = SamplingBatch(
            {name: torch.from_numpy(column) for name, column in arrays.columns.items()}
        )
        """Each [max_num_seqs]; the first rows belong to the step."""

    def batch(self, count: int, device: torch.device) -> SamplingBatch:
        """Return the first `count` rows. On a CPU they are views, which hold until the next `gather`."""
        return self.columns.map(lambda column: column[:count].to(device))


def gather_sampling(
    columns: SamplingColumns, history: TokenHistory, slots: I64, device: torch.device
) -> SamplingBatch:
    """Return the parameters of some slots, whether their logits are changed or not, in memory of their own."""
    values = {name: column[slots] for name, column in columns.columns.items()}
    values["positions"] = history.num_known[slots]
    return SamplingBatch({name: to_device(column, device) for name, column in values.items()})


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return a tensor of these values. On a CPU it shares their memory; a device is not waited for."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
