"""Files of what was found out about this kind of machine, so that only its first process finds it out.

Needs no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from triptych_kernels.cpu import library
from triptych_kernels.cpu.compile import library_path

log = logging.getLogger(__name__)

Found = TypeVar("Found")
Json = dict[str, object]

_VERSION = 1
"""Version of the files and of how their content is found out; files of other versions are replaced."""
_CHECKS_VERSION = 3
"""Version of the checks of `self_check`; results of other versions are not used."""
_IDENTITY = (
    "model name", "cpu family", "model", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features",
)  # fmt: skip


def machine_key(isa: str) -> Json:
    """Return what distinguishes this kind of machine from others: the processor, and the content of the native library.

    Raises:
        OSError: There is no library for the instruction set.
    """
    return {"processor": processor(), "isa": isa, "library": _digest(library_path(isa))}


def read_or_make(
    directory: Path, name: str, key: Json, make: Callable[[], Json], parse: Callable[[Json], Found]
) -> Found:
    """Return what the file for `key` holds, or else what `make` finds, which is then written.

    Processes that ask together find it out in turn. A file that is damaged, of another version or of another key is
    replaced. A directory that cannot be written is a warning.

    Args:
        directory: Made at need.
        name: First part of the file's name.
        parse: Makes the result; raises KeyError, TypeError or ValueError for what it does not understand.
    """
    if (kept := read_found(directory, name, key, parse)) is not None:
        return kept
    with _locked(directory):
        if (kept := read_found(directory, name, key, parse)) is not None:  # another process has just made it
            return kept
        content = make()
        write_found(directory, name, key, content)
        return parse(content)


def read_found(directory: Path, name: str, key: Json, parse: Callable[[Json], Found]) -> Found | None:
    """Return what the file for `key` holds; None if there is none that is whole, of this version and of this key.

    Args:
        name, parse: As of `read_or_make`.
    """
    try:
        content = json.loads(_path(directory, name, key).read_text())
        if content["version"] != _VERSION or content["key"] != key:
            return None
        return parse(content["found"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_found(directory: Path, name: str, key: Json, content: Json) -> None:
    """Write the file for `key`. A directory that cannot be written is a warning.

    Args:
        name: As of `read_or_make`.
    """
    path = _path(directory, name, key)
    try:
        _write(path, {"version": _VERSION, "key": key, "found": content})
    except OSError as error:
        log.warning(
            "%s cannot be written (%s), so it is found out anew each time; set TRIPTYCH_MACHINE_DIR",
            path,
            error,
        )


def _path(directory: Path, name: str, key: Json) -> Path:
    return (
        directory / f"{name}-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"
    )


def _write(path: Path, content: Json) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.chmod(scratch, 0o644)  # mkstemp made it private; the cache may be shared
        os.replace(scratch, path)
    except OSError:
        Path(scratch).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a lock among processes for this directory, if it can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def processor() -> dict[str, str]:
    """Return the identity of the first processor, if the system has it."""
    if not library.CPUINFO.is_file():
        return {"machine": platform.machine(), "flags": " ".join(sorted(library.processor_flags()))}
    first = library.CPUINFO.read_text().partition("\n\n")[0]
    pairs = (line.partition(":")[::2] for line in first.splitlines())
    return {name.strip(): value.strip() for name, value in pairs if name.strip() in _IDENTITY}


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_isas(directory: Path) -> None:
    """Refuse instruction sets with wrong kernels, from the widest that may be used on until one is right.

    Each of them is a warning. Call this before weights are packed.

    Args:
        directory: Directory of the files that keep the results.
    """
    for isa in library.candidate_isas():
        if isa in library.refused_isas():
            continue
        try:
            key: Json = {**machine_key(isa), "checks": _CHECKS_VERSION}
            problem = read_or_make(directory, "check", key, partial(_found, isa), _problem_in)
        except (OSError, MemoryError) as error:
            log.warning("native kernels: %s cannot be checked (%s), and is used unchecked", isa, error)
            return
        if not problem:
            return
        library.refuse(isa, problem)
        log.warning("native kernels: %s is not used: %s", isa, problem)


def _found(isa: str) -> Json:
    from triptych_kernels.cpu import self_check  # imports torch

    return {"problem": self_check.find_problem(isa)}


def _problem_in(found: Json) -> str:
    return str(found["problem"])
