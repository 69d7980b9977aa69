"""The process that measures: one row after the other, each told to the supervisor as it begins and ends.

A figure that fails is told and the next one follows. If the failure has taken the device with it, as an illegal memory
access does, the process says so and ends; the supervisor starts another one for the rest.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu_figures.rows import Row
from benchmarks.gpu_figures.timing import release_memory

Tell = Callable[[dict[str, Any]], None]


def tell_through(descriptor: int) -> Tell:
    """Writes one JSON object a line."""

    def tell(event: dict[str, Any]) -> None:
        with open(descriptor, "w", closefd=False) as file:
            file.write(json.dumps(event) + "\n")

    return tell


def measure_rows(
    rows: Sequence[Row], tell: Tell, device: torch.device, *, first: int = 0, budget_s: float = float("inf")
) -> None:
    """Measure the rows from number `first` on; when `budget_s` seconds are spent, the rest is skipped by name."""
    started = time.monotonic()
    tell({"event": "machine", **_machine(device)})
    tell({"event": "rows", "titles": [row.title for row in rows]})
    for index in range(first, len(rows)):
        if time.monotonic() - started >= budget_s:
            tell({"event": "skipped", "index": index})
            continue
        tell({"event": "started", "index": index})
        began = time.monotonic()
        try:
            measured = rows[index].measure()
        except Exception as error:  # whatever it is, it is this row's result
            tell(
                {
                    "event": "failed",
                    "index": index,
                    "error": _describe(error),
                    "seconds": time.monotonic() - began,
                }
            )
        else:
            facts = asdict(measured) | {"fraction": measured.fraction}
            tell(
                {"event": "measured", "index": index, "measured": facts, "seconds": time.monotonic() - began}
            )
        _prove_usable(device, rows[index])


def _prove_usable(device: torch.device, row: Row) -> None:
    """Raise SystemExit if a row has left the device's context or its allocator unusable."""
    try:
        release_memory()
        torch.zeros(1, device=device).add_(1).item()
    except RuntimeError as error:
        raise SystemExit(
            f"the device is lost to this process after {row.title}: {_describe(error)}"
        ) from error


def _describe(error: Exception) -> str:
    """Type and message, on one line, shortened: tracebacks of compilers are pages long."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:600]


def _machine(device: torch.device) -> dict[str, Any]:
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type != "cuda":
        return versions | {"device": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    return versions | {
        "device": properties.name,
        "cuda": torch.version.cuda,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }
