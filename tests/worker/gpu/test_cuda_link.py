"""Streams and events: nothing is overwritten while it is read, and the host waits for nothing it did not ask for."""

from __future__ import annotations

import time

import numpy as np
import torch

from triptych_services.worker.runner.cuda.streams import CudaStream

NUM_BYTES = 1 << 16
LONG_CYCLES = 1_000_000_000  # about half a second of a device that does nothing else
SHORT_CYCLES = 2_000_000  # a millisecond


def launch(stream: CudaStream, value: int, cycles: int):
    """A step whose kernels read its inputs only after a while."""
    stream.host_block()[:] = value
    inputs = stream.upload(NUM_BYTES)
    torch.cuda._sleep(cycles)
    return stream.read_back((inputs.clone(), inputs[:8].sum()[None]))


def test_steps_launched_ahead_read_their_own_inputs(device: torch.device) -> None:
    stream = CudaStream(device)
    stream.reserve(NUM_BYTES)
    reads = [launch(stream, value, SHORT_CYCLES) for value in range(1, 40)]
    for value, read in enumerate(reads, 1):
        (copied, total), _ = read.wait()
        assert copied.dtype == np.uint8
        assert (copied == value).all()
        assert total.tolist() == [8 * value]


def test_launching_does_not_wait_for_the_device(device: torch.device) -> None:
    stream = CudaStream(device)
    stream.reserve(NUM_BYTES)
    launch(stream, 1, SHORT_CYCLES).wait()
    began = time.perf_counter()
    first = launch(stream, 2, LONG_CYCLES)
    second = launch(stream, 3, SHORT_CYCLES)
    launch_s = time.perf_counter() - began
    assert not first.is_done()
    assert not second.is_done()
    _, times = first.wait()
    assert first.is_done()
    assert launch_s * 1e9 < times.busy_ns / 2
    (copied, _), times = second.wait()
    assert (copied == 3).all()
    assert 0 < times.gap_ns < 1_000_000, "it was there when the first ended"


def test_the_first_step_has_no_gap(device: torch.device) -> None:
    stream = CudaStream(device)
    stream.reserve(NUM_BYTES)
    _, times = launch(stream, 1, SHORT_CYCLES).wait()
    assert times.gap_ns == 0
    assert times.busy_ns > 0
