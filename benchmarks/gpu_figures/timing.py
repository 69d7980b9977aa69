"""Seconds of device work: replays of a CUDA graph between events, cold caches, medians over rounds."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_MIN_ROUNDS, _MAX_ROUNDS = 5, 100
_WARM_UP_S = 0.05  # an idle device runs at a fraction of its clock
_FLUSH_BYTES = 256 << 20  # more than any L2

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call."""

    median: float
    low: float
    high: float
    note: str = ""
    """How it was timed, where not as intended."""


def time_calls(
    calls: Sequence[Call], device: torch.device, *, round_s: float, warm_up_s: float = _WARM_UP_S
) -> Timing:
    """How long one of these calls takes, launched one after the other and averaged in each round.

    On a CUDA device they are recorded as one graph, so that neither Python nor launches are measured, and the L2 is
    overwritten before each round. What cannot be recorded is launched from Python, and the note says so.

    Args:
        calls: alike, but on operands of their own where the caches must stay cold.
        round_s: what all rounds shall take together, seconds.
        warm_up_s: of the device before the first round; 0: it comes from work like this.
    """
    for call in calls:  # compiles what must be compiled
        call()
    if device.type == "cpu":
        return _over_rounds(lambda: _host_seconds(calls), len(calls), round_s)
    torch.cuda.synchronize()
    graph, note = _record(calls)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def run() -> float:
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if graph is None:
            for call in calls:
                call()
        else:
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    begun = time.perf_counter()
    while time.perf_counter() - begun < warm_up_s:
        run()
    return _over_rounds(run, len(calls), round_s, note)


def device_seconds(work: Call, device: torch.device) -> float:
    """Seconds of one piece of work, launches and what the host does meanwhile included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def release_memory() -> None:
    """Give back what no tensor holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _record(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph | None, str]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception as error:  # a recording stops at whatever waits for the device: said, and timed without
        torch.cuda.set_stream(stream)  # which torch leaves to us where recording fails
        torch.cuda.synchronize()
        first_line = str(error).partition("\n")[0]
        return None, f"no graph, launches included: {type(error).__name__}: {first_line}"
    return graph, ""


def _host_seconds(calls: Sequence[Call]) -> float:
    started = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - started


def _over_rounds(run: Callable[[], float], num_calls: int, round_s: float, note: str = "") -> Timing:
    first = run()
    rounds = min(max(int(round_s / max(first, 1e-9)), _MIN_ROUNDS), _MAX_ROUNDS)
    seconds = [run() / num_calls for _ in range(rounds)]
    return Timing(statistics.median(seconds), min(seconds), max(seconds), note)
