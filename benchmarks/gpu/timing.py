"""Times device work as replays of a CUDA graph, and sets it beside the limits of the device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.figures import Figure, rate
from benchmarks.harness.timing import rounds_within, wall_s

_WARM_UP_S = 0.05  # an idle device runs at a fraction of its clock
_FLUSH_BYTES = 256 << 20  # more than any L2
_MAX_COPIES = 64

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure that can be measured. Nothing is computed or allocated before."""

    title: str
    measure: Callable[[], Figure]
    """Returns the figure; the row names it."""


def time_calls(
    calls: Sequence[Call], device: torch.device, *, round_s: float, warm_up_s: float = _WARM_UP_S
) -> Figure:
    """Return the seconds that one of these calls takes, launched one after the other and averaged in each round.

    On a CUDA device they are recorded as one graph, so that neither Python nor launches are measured, and the L2 is
    overwritten before each round. What cannot be recorded is launched from Python, and the note says so.

    Args:
        calls: Alike, but on operands of their own if the caches must stay cold.
        round_s: Seconds that all rounds take together, about.
        warm_up_s: Seconds of work before the first round; 0 if work like this came before.
    """
    for call in calls:  # compiles what must be compiled
        call()

    def launch_all() -> None:
        for call in calls:
            call()

    if device.type == "cpu":
        rounds_s = rounds_within(round_s, lambda: wall_s(launch_all))
        return Figure("", "s", tuple(one_s / len(calls) for one_s in rounds_s))
    torch.cuda.synchronize()
    graph, note = _record(launch_all)
    replay = launch_all if graph is None else graph.replay
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def round_of_all() -> float:
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    started_s = time.perf_counter()
    while time.perf_counter() - started_s < warm_up_s:
        round_of_all()
    rounds_s = rounds_within(round_s, round_of_all)
    return Figure("", "s", tuple(one_s / len(calls) for one_s in rounds_s), note=note)


def release_memory() -> None:
    """Give back memory that no tensor holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Bench:
    """The device, the sizes, and the device's limits, measured at first use."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device = device
        self.sizes = sizes
        self.dtype = torch.bfloat16
        """Element type of activations and weights."""

    @cached_property
    def copied(self) -> Figure:
        """Bytes per second that a copy reads and writes."""
        source = self.normal(self.sizes.copy_bytes // 2)
        target = torch.empty_like(source)
        timing = self.time([lambda: target.copy_(source)])
        return rate("", "GB/s", 2 * self.sizes.copy_bytes / 1e9, timing.samples, note=timing.note)

    @cached_property
    def multiplied(self) -> Figure:
        """Operations per second of a large bfloat16 product of random numbers: zeros would take less power."""
        size = self.sizes.matrix
        left, right = self.normal(size, size), self.normal(size, size)
        timing = self.time([lambda: left @ right])
        return rate("", "TFLOP/s", 2 * size**3 / 1e12, timing.samples, note=timing.note)

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return 1e9 * self.copied.median

    @property
    def matrix_rate(self) -> float:
        """Operations per second."""
        return 1e12 * self.multiplied.median

    def normal(self, *shape: int) -> Tensor:
        """Return fresh random numbers, in `dtype`."""
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_()

    def num_copies(self, operand_bytes: int) -> int:
        """Return how many operands of this size no cache holds together."""
        return min(max(-(-self.sizes.uncached_bytes // max(operand_bytes, 1)), 1), _MAX_COPIES)

    def time(self, calls: Sequence[Call]) -> Figure:
        return time_calls(calls, self.device, round_s=self.sizes.round_s)

    def as_bandwidth(self, timing: Figure, num_bytes: int) -> Figure:
        """Return the bytes per second beside those of a copy."""
        return rate("", "GB/s", num_bytes / 1e9, timing.samples, self.copied.median, timing.note)

    def as_matrix_rate(self, timing: Figure, num_operations: float) -> Figure:
        """Return the operations per second beside those of a large product."""
        return rate("", "TFLOP/s", num_operations / 1e12, timing.samples, self.multiplied.median, timing.note)


def _record(work: Call) -> tuple[torch.cuda.CUDAGraph | None, str]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            work()
    except Exception as error:  # a recording stops at whatever waits for the device: noted, and timed without
        torch.cuda.set_stream(stream)  # which torch leaves to us if recording fails
        torch.cuda.synchronize()
        first_line = str(error).partition("\n")[0]
        return None, f"no graph, launches included: {type(error).__name__}: {first_line}"
    return graph, ""
