"""Measures the start: from the start of a process to its first token, weights read from the local disk.

This module is also that process: it loads a checkpoint, answers one prompt with one token, and says so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu.model_rows import LoadedModel
from benchmarks.gpu.models import runner_for
from benchmarks.gpu.serving import serve
from benchmarks.gpu.sizes import REAL, TINY
from benchmarks.gpu.timing import Bench, Row
from benchmarks.harness.command import module_command
from benchmarks.harness.figures import Figure
from benchmarks.harness.processes import Answers, Child
from triptych.checkpoint.config_json import CONFIG_FILE
from triptych.checkpoint.safetensors_header import SINGLE_FILE
from triptych_services.worker.loader.load import open_checkpoint

_PROMPT_TOKENS = 128
_TIMEOUT_S = 140.0
_CHUNK_BYTES = 64 << 20


def start_rows(bench: Bench, loaded: LoadedModel, checkpoint: Path | None) -> Iterator[Row]:
    """Yield the start with the files in the page cache, and with none of them."""
    for cache in ("warm", "cold"):
        measure = partial(measure_start, bench, loaded, checkpoint, is_cold=cache == "cold")
        yield Row(f"start: to first token, 8B, {cache} page cache", measure)


def measure_start(bench: Bench, loaded: LoadedModel, checkpoint: Path | None, *, is_cold: bool) -> Figure:
    """Return the seconds from the start of the interpreter to the token's arrival here."""
    loaded.clear()  # the new process needs the memory
    if checkpoint is None:
        return Figure("", note="--checkpoint: none given; `--write-checkpoint DIR` writes one")
    files = sorted(checkpoint.glob("*.safetensors"))
    for file in files:
        evict(file) if is_cold else read(file)
    size = "tiny" if bench.sizes.reduced_models else "real"
    command = module_command("benchmarks.gpu.start", checkpoint.resolve(), bench.device.type, size)
    with Child(command) as process:
        phases = process.receive(_TIMEOUT_S)
        seconds = time.monotonic() - process.started_s
    gigabytes = sum(file.stat().st_size for file in files) / 1e9
    stored_gigabytes = phases.pop("read_from_storage") / 1e9
    listed = ", ".join(f"{name} {value:.1f} s" for name, value in phases.items())
    note = f"{gigabytes:.1f} GB, {stored_gigabytes:.1f} of them from storage; {listed}"
    return Figure("", "s", (seconds,), less_is_better=True, note=note)


def write_checkpoint(directory: Path, config: dict[str, Any], device: torch.device) -> None:
    """Write random bfloat16 weights of a config.json. It needs memory for all of them."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")
    checkpoint = open_checkpoint(directory, format="random", device=device)
    tensors = {name: checkpoint.read(name, torch.bfloat16).cpu() for name in checkpoint.tensors}
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})


def evict(path: Path) -> None:
    """Ask the system to forget the file's pages. It may decline: the row says what came from storage."""
    with path.open("rb") as file:
        os.fsync(file)  # a page that is not written yet stays
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path) -> None:
    """Read the file once, so that the page cache holds it."""
    with path.open("rb", buffering=0) as file:
        while file.read(_CHUNK_BYTES):
            pass


def read_from_storage() -> int:
    """Return the bytes that this process has had read from storage, and not from the page cache."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def main(directory: str, device: str, size: str) -> None:
    """Answer one prompt, and say how long each phase took, imports not counted."""
    answers = Answers()
    started_s = time.perf_counter()
    sizes = TINY if size == "tiny" else REAL
    runner = runner_for(Path(directory), sizes, torch.device(device))
    ready_s = time.perf_counter()
    serve(runner, 1, min(_PROMPT_TOKENS, sizes.context), 1, seed=0)
    load_s = runner.facts.load_s
    rest_s, answer_s = ready_s - started_s - load_s, time.perf_counter() - ready_s
    phases = {"weights": load_s, "rest of set-up": rest_s, "answer": answer_s}
    answers.write({**phases, "read_from_storage": read_from_storage()})


if __name__ == "__main__":
    main(*sys.argv[1:])
