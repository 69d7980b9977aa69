"""From the start of a process to its first token, weights read from the local disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu_figures.limits import Bench
from benchmarks.gpu_figures.model_rows import Shelf
from benchmarks.gpu_figures.page_cache import evict, resident_fraction, warm
from benchmarks.gpu_figures.rows import Measured, Row

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 140.0


def start_rows(bench: Bench, shelf: Shelf, checkpoint: Path | None) -> Iterator[Row]:
    """With the files in memory, and with none of them."""
    for cache in ("warm", "cold"):
        yield Row(
            "start",
            f"to first token, 8B, {cache} page cache",
            partial(measure_start, bench, shelf, checkpoint, is_cold=cache == "cold"),
        )


def measure_start(bench: Bench, shelf: Shelf, checkpoint: Path | None, *, is_cold: bool) -> Measured:
    """Seconds from the start of the interpreter to the token's arrival here."""
    shelf.clear()  # the new process needs the memory
    if checkpoint is None:
        raise ValueError(
            "no checkpoint: write one by `python3 benchmarks/gpu_checkpoint.py DIR` and give --checkpoint DIR"
        )
    files = sorted(checkpoint.glob("*.safetensors"))
    if is_cold:
        evict(files)
    else:
        warm(files)
    num_bytes, resident = sum(file.stat().st_size for file in files), resident_fraction(files)
    command = [sys.executable, "-m", "benchmarks.gpu_figures.first_token", str(checkpoint)]
    command += ["--device", bench.device.type, *(["--tiny"] if bench.sizes.reduced_models else [])]
    seconds, line = _until_first_line(command)
    phases = json.loads(line)
    listed = ", ".join(f"{name} {value:.1f} s" for name, value in phases.items())
    return Measured(
        seconds,
        "s",
        less_is_better=True,
        note=f"{num_bytes / 1e9:.1f} GB, {resident:.0%} in memory before; {listed}",
    )


def _until_first_line(command: list[str]) -> tuple[float, str]:
    """Seconds until the process has printed a line, and the line.

    Raises:
        ValueError: it ended, or took too long, before it printed any; with the end of what it complained of.
    """
    roots = [str(_ROOT), str(_ROOT / "libs"), str(_ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    with tempfile.TemporaryFile("w+") as complaints:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=complaints, text=True
        )
        alarm = threading.Timer(_TIMEOUT_S, process.kill)
        alarm.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - started
        finally:
            alarm.cancel()
            process.kill()
            process.communicate()
        complaints.seek(0)
        if not line:
            raise ValueError(
                f"no token after {seconds:.0f} s, the process ended with {process.returncode}: "
                f"{complaints.read().strip()[-400:]}"
            )
    return seconds, line
