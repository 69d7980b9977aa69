"""Measures the start: from the start of a process to its first token, weights read from the local disk.

This module is also that process: it loads a checkpoint, answers one prompt with one token, and says so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.model_rows import RunnerCache
from benchmarks.gpu.models import Mode, runner_for
from benchmarks.gpu.serving import serve
from benchmarks.gpu.sizes import REAL, TINY
from benchmarks.gpu.timing import Bench, Row
from benchmarks.harness.command import module_command
from benchmarks.harness.figures import Figure
from benchmarks.harness.processes import Answers, Child

_PROMPT_TOKENS = 128
_TIMEOUT_S = 140.0
_CHUNK_BYTES = 64 << 20


def start_rows(bench: Bench, runners: RunnerCache, checkpoint: Path | None) -> Iterator[Row]:
    """Yield the start with the files in the page cache, and with none of them."""
    for cache in ("warm", "cold"):
        measure = partial(measure_start, bench, runners, checkpoint, is_cold=cache == "cold")
        yield Row(f"start: to first token, 8B, {cache} page cache", measure)


def measure_start(bench: Bench, runners: RunnerCache, checkpoint: Path | None, *, is_cold: bool) -> Figure:
    """Return the seconds from the start of the interpreter to the token's arrival here."""
    runners.clear()  # the new process needs the memory
    if checkpoint is None:
        raise ValueError("--checkpoint: none given; write one by `python -m benchmarks.gpu.checkpoint DIR`")
    files = sorted(checkpoint.glob("*.safetensors"))
    for file in files:
        evict(file) if is_cold else read(file)
    resident = resident_fraction(files)
    size = "tiny" if bench.sizes.reduced_models else "real"
    with Child(
        module_command("benchmarks.gpu.start", checkpoint.resolve(), bench.device.type, size)
    ) as process:
        phases = process.receive(_TIMEOUT_S)
        seconds = time.monotonic() - process.started_s
    gigabytes = sum(file.stat().st_size for file in files) / 1e9
    listed = ", ".join(f"{name} {value:.1f} s" for name, value in phases.items())
    note = f"{gigabytes:.1f} GB, {resident:.0%} in memory before; {listed}"
    return Figure("", "s", (seconds,), less_is_better=True, note=note)


def evict(path: Path) -> None:
    """Ask the system to forget the file's pages. It may decline: `resident_fraction` shows."""
    with path.open("rb") as file:
        os.fsync(file)  # a page that is not written yet stays
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path) -> None:
    """Read the file once, so that the page cache holds it."""
    with path.open("rb", buffering=0) as file:
        while file.read(_CHUNK_BYTES):
            pass


def resident_fraction(paths: Sequence[Path]) -> float:
    """Return the part of the files' pages that is in memory, 0 to 1.

    Raises:
        OSError: The system does not say.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    resident = total = 0
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as view:
            pages = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
            start = ctypes.c_char.from_buffer(view)
            failed = libc.mincore(ctypes.byref(start), ctypes.c_size_t(len(view)), pages)
            del start  # the view cannot be closed before
            if failed:
                raise OSError(ctypes.get_errno(), "mincore", str(path))
            resident += sum(page & 1 for page in pages)
            total += len(pages)
    return resident / max(total, 1)


def main(directory: str, device: str, size: str) -> None:
    """Answer one prompt, and say how long each phase took, imports not counted."""
    answers = Answers()
    started_s = time.perf_counter()
    sizes = TINY if size == "tiny" else REAL
    runner = runner_for(Path(directory), sizes, torch.device(device), Mode())
    ready_s = time.perf_counter()
    serve(runner, 1, min(_PROMPT_TOKENS, sizes.context), 1, seed=0)
    load_s = runner.facts.load_s
    rest_s, answer_s = ready_s - started_s - load_s, time.perf_counter() - ready_s
    answers.write({"weights": load_s, "rest of set-up": rest_s, "answer": answer_s})


if __name__ == "__main__":
    main(*sys.argv[1:])
