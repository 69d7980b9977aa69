"""An asynchronous device made of CPU tensors: it computes at once, and says what only when it is waited for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from triptych_services.worker.runner.cuda.streams import DeviceTimes


class DeferredStream:
    """A `DeviceStream`; two blocks take turns, as on a device."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.times = DeviceTimes(busy_ns=5_000, gap_ns=70)
        self.reads: list[DeferredRead] = []
        """Every step's, in order."""
        self.uploaded_bytes: list[int] = []
        self._blocks: list[tuple[np.ndarray, Tensor]] = []

    def reserve(self, num_bytes: int) -> None:
        assert not self._blocks
        self._blocks = [
            (np.zeros(num_bytes, np.uint8), torch.zeros(num_bytes, dtype=torch.uint8)) for _ in range(2)
        ]

    def host_block(self) -> np.ndarray:
        self._blocks.reverse()
        self._blocks[0][0].fill(0xA5)  # whoever reads what was not packed shall notice
        return self._blocks[0][0]

    def upload(self, num_bytes: int) -> Tensor:
        host, device = self._blocks[0]
        device.fill_(0x5A)
        device[:num_bytes] = torch.from_numpy(host[:num_bytes])
        self.uploaded_bytes.append(num_bytes)
        return device[:num_bytes]

    def read_back(self, tensors: tuple[Tensor, ...]) -> DeferredRead:
        read = DeferredRead(tuple(tensor.numpy().copy() for tensor in tensors), self.times)
        self.reads.append(read)
        return read


class DeferredRead:
    """A `ReadBack` that is done once somebody has waited for it, or a test says so."""

    def __init__(self, values: tuple[np.ndarray, ...], times: DeviceTimes) -> None:
        self._values = values
        self._times = times
        self.done = False
        self.fail: Callable[[], None] = lambda: None

    def is_done(self) -> bool:
        return self.done

    def wait(self) -> tuple[tuple[np.ndarray, ...], DeviceTimes]:
        self.fail()
        self.done = True
        return self._values, self._times
