"""The key of a stored program: everything that it depends on. Needs no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import triptych_kernels
from triptych import checkpoint
from triptych.checkpoint.gguf.index import GGUF_INDEX_FILE, GgufIndex
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.machine_files import machine_key
from triptych_services.worker.context.resolved_config import ResolvedConfig

_VERSION = 2
_WORKER = Path(__file__).resolve().parents[2]
_PLACES, _PLACE_BYTES = 64, 4096
_SMALL_BYTES = 1 << 20  # such files are read whole


def program_key(config: ResolvedConfig, directory: Path, num_threads: int) -> dict[str, Any]:
    """Return what must be equal for a stored program to be that of a start.

    Files of the checkpoint count by name, size, time of change and samples of their bytes; the modules that record a
    program by size and time of change. Adapters do not count, since they are loaded into a program that runs.

    Raises:
        OSError, ModelError: The checkpoint cannot be read.
    """
    engine = config.engine
    sections = {
        name: asdict(getattr(engine, name)) for name in ("model", "cache", "scheduler", "speculative", "load")
    }
    for name in ("adapters", "adapter_root"):
        del sections["model"][name]
    resolved = {
        name: getattr(config, name)
        for name in (
            "dtype", "weight_dtype", "kv_dtype", "quantization", "activation_bits", "attention_backend",
            "batch_invariant",
        )
    }  # fmt: skip
    return {
        "version": _VERSION,
        "sections": _digest(repr(sorted(sections.items()))),
        "resolved": resolved,
        "architecture": _digest(repr(config.architecture)),
        "machine": machine_key(isa()),
        "num_threads": num_threads,
        "max_adapters": engine.worker.max_adapters,
        "checkpoint": [list(_describe(path)) for path in _checkpoint_files(directory)],
        "modules": _digest("".join(_stamps())),
        "torch": _torch_version(),
    }


def _checkpoint_files(directory: Path) -> list[Path]:
    files = sorted(path for path in directory.iterdir() if path.is_file())
    if (directory / GGUF_INDEX_FILE).is_file():
        files += [directory / part.file for part in GgufIndex.read(directory).files]
    return files


def _describe(path: Path) -> tuple[str, int, int, str]:
    """Return a file's name, size, time of change, and a digest of samples of its bytes."""
    stat = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if stat.st_size <= _SMALL_BYTES:
            digest.update(file.read())
        else:
            for place in range(_PLACES):
                start = stat.st_size * place // _PLACES
                digest.update(os.pread(file.fileno(), _PLACE_BYTES, start))
    return path.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()


def _stamps() -> Iterator[str]:
    """Yield a line for each module that may decide what a program is."""
    roots = [_WORKER, Path(triptych_kernels.__file__).parent, Path(checkpoint.__file__).parent]
    for root in roots:
        for directory, _, files in sorted(os.walk(root)):
            for name in sorted(files):
                if name.endswith(".py"):
                    stat = os.stat(os.path.join(directory, name))
                    yield f"{directory}/{name} {stat.st_size} {stat.st_mtime_ns}\n"


def _torch_version() -> str:
    """Return the text of torch's own version file, which takes no import; empty if there is none."""
    spec = PathFinder.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ""
    path = Path(next(iter(spec.submodule_search_locations))) / "version.py"
    return path.read_text() if path.is_file() else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
