"""What `ops.sample` is told of the rows that sample, as columns in the order of the logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.sampling.params import SamplingColumns, TokenHistory
from triptych_kernels import ops

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """See `ops.sample`; each [num_sampling], on the rank's device."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    def choose(self, logits: Tensor) -> Tensor:
        """One token per row of the logits, [num_sampling] int64; -1 where there is nothing to choose from."""
        return ops.sample(
            logits,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seeds=self.seeds,
            positions=self.positions,
        )


class SamplingBuffers:
    """Where the columns of each step stand, allocated once; in the host's memory."""

    def __init__(self, max_num_seqs: int) -> None:
        self.columns = SamplingBatch(
            temperature=torch.zeros(max_num_seqs, dtype=torch.float32),
            top_k=torch.zeros(max_num_seqs, dtype=torch.int32),
            top_p=torch.ones(max_num_seqs, dtype=torch.float32),
            min_p=torch.zeros(max_num_seqs, dtype=torch.float32),
            seeds=torch.zeros(max_num_seqs, dtype=torch.int64),
            positions=torch.zeros(max_num_seqs, dtype=torch.int64),
        )
        """Each [max_num_seqs]; the first of them belong to the step."""
        self._temperature = self.columns.temperature.numpy()
        self._others = tuple(
            column.numpy()
            for column in (
                self.columns.top_k,
                self.columns.top_p,
                self.columns.min_p,
                self.columns.seeds,
                self.columns.positions,
            )
        )

    def gather(self, columns: SamplingColumns, history: TokenHistory, slots: I64) -> None:
        """Fill in what these slots, in the order of the logits, ask; of greedy ones nothing else matters."""
        count = slots.size
        temperature = columns.first_temperature[slots]
        self._temperature[:count] = temperature
        if not temperature.any():
            return
        sources: tuple[NDArray[np.number], ...] = (
            columns.top_k,
            columns.top_p,
            columns.min_p,
            columns.seed,
            history.num_known,
        )
        for buffer, column in zip(self._others, sources, strict=True):
            buffer[:count] = column[slots]

    def pad(self, count: int, padded: int) -> None:
        """Make the rows `count .. padded` greedy ones, of which nothing else matters."""
        self._temperature[count:padded] = 0.0

    def batch(self, count: int, device: torch.device) -> SamplingBatch:
        """The first `count` rows; on a CPU a view, which holds until the next `gather`."""
        columns = self.columns
        return SamplingBatch(
            temperature=columns.temperature[:count].to(device),
            top_k=columns.top_k[:count].to(device),
            top_p=columns.top_p[:count].to(device),
            min_p=columns.min_p[:count].to(device),
            seeds=columns.seeds[:count].to(device),
            positions=columns.positions[:count].to(device),
        )


def gather_sampling(
    columns: SamplingColumns, history: TokenHistory, slots: I64, device: torch.device
) -> SamplingBatch:
    """The columns of some slots, whatever changes their logits, in memory of their own."""

    def column(values: NDArray[np.number]) -> Tensor:
        return to_device(values[slots], device)

    return SamplingBatch(
        temperature=column(columns.temperature),
        top_k=column(columns.top_k),
        top_p=column(columns.top_p),
        min_p=column(columns.min_p),
        seeds=column(columns.seed),
        positions=column(history.num_known),
    )


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """A tensor of these values; on a CPU it shares their memory, and a device is not waited for."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
