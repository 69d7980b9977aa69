"""Measures how fast weights come from a checkpoint in the page cache into the form that products read.

    python -m benchmarks.worker.loading [--rounds 5] [--random FILE.gguf] [--model.model MODEL]

Rates are of bytes of the files. `reading` copies the bytes of the mapped files and keeps none of them; `loading`
fills a model, of which `creating` is the time before it has weights. `user` and `system` are the CPU time of a load per
GB: packing is the first, and clearing pages of new memory most of the second. `peak` is what the process needed at most
while it loaded, over the bytes of the weights: 1 if it held nothing else.

--random writes a model of random weights in Q4_K_M with Llama 3.2 1B's shapes to FILE.gguf and loads it.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import nn

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.worker.random_llama import write_random_llama
from triptych.config.loader import add_config_flags, config_from_arguments
from triptych.hub import resolve_model
from triptych_services.worker.context.device import resolve_config, use_threads
from triptych_services.worker.layers.weights import weight_bytes
from triptych_services.worker.loader.base import Checkpoint
from triptych_services.worker.loader.load import DuringLoad, load_model, open_checkpoint
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.models.choose import choose_architecture

_PIECE_BYTES = 1 << 20
_STATUS = Path("/proc/self/status")


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config = config_from_arguments(arguments)
    if arguments.random is not None:
        write_random_llama(arguments.random)
        # the quantization is that of this file, not of the model that is served by default
        config = replace(config, model=replace(config.model, model=str(arguments.random)))
    directory = resolve_model(config.model.model)
    resolved = resolve_config(config, choose_architecture(directory, config.model.backend))
    use_threads(config.worker.num_threads)
    for _ in range(arguments.rounds):
        checkpoint = open_checkpoint(directory, architecture=resolved.architecture)
        num_bytes = sum(stored.size for stored in checkpoint.tensors.values())
        started = time.perf_counter()
        _read(checkpoint)
        yield Figure("reading", "GB/s", (num_bytes / (time.perf_counter() - started) / 1e9,))
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
        before = _memory_bytes("VmRSS")
        created: list[float] = []
        cpu = resource.getrusage(resource.RUSAGE_SELF)
        started = time.perf_counter()
        model = load_model(resolved, checkpoint, during=_noting_time(created))
        seconds, end = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
        assert isinstance(model, nn.Module), "the contract of CausalLM"
        yield Figure("loading", "GB/s", (num_bytes / seconds / 1e9,))
        yield Figure("creating", "ms", ((created[0] - started) * 1e3,), less_is_better=True)
        for name, spent in (("user", end.ru_utime - cpu.ru_utime), ("system", end.ru_stime - cpu.ru_stime)):
            yield Figure(name, "s/GB", (spent / num_bytes * 1e9,), less_is_better=True)
        peak = _memory_bytes("VmHWM") - before
        yield Figure("peak", "of the weights", (peak / weight_bytes(model),), less_is_better=True)
        del model, checkpoint


def _noting_time(created: list[float]) -> DuringLoad:
    """Return what `load_model` enters when the model has been created, which adds the time."""

    @contextmanager
    def noting(model: CausalLM) -> Iterator[None]:
        created.append(time.perf_counter())
        yield

    return noting


def _read(checkpoint: Checkpoint) -> None:
    for name, stored in checkpoint.tensors.items():
        for start in range(0, stored.size, _PIECE_BYTES):
            checkpoint.read_bytes(name, start, min(_PIECE_BYTES, stored.size - start))
        checkpoint.release(name)


def _memory_bytes(field: str) -> int:
    """Return a size that Linux tells of this process."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=5)
    parser.add_argument(
        "--random", type=Path, metavar="FILE.gguf", help="write a random model there, and load it"
    )
    add_config_flags(parser)
    sys.exit(run(parser, measure))
