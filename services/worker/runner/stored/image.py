"""A file with a recorded program, its packed weights, and what must be equal for both to be used.

    magic | length of the header | sha256 of the header | header, JSON | zeros up to a page | weights and tables

A file that is cut short, of another version or of another key is not used, and is written anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych_kernels.cpu.huge_pages import map_zeros
from triptych_kernels.cpu.stored_program import StoredProgram

log = logging.getLogger(__name__)

Json = Mapping[str, Any]

_MAGIC = b"triptych program"
_LENGTH_BYTES, _DIGEST_BYTES = 8, 32
_HEADER_START = len(_MAGIC) + _LENGTH_BYTES + _DIGEST_BYTES
_MAX_HEADER_BYTES = 64 << 20
_PAGE = 4096
_SUFFIX = ".program"
_ABANDONED_S = 3600.0  # a file that is still written changes more often


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The facts that a start would learn from the checkpoint."""

    fingerprint: str
    weights: str
    """Digest of samples of the weights."""
    weight_bytes: int
    kernels: str
    """Description of what computes, as in `WorkerFacts`."""
    quantization: str
    """Form of linear weights, as in `ModelFacts`."""
    adapted: Json | None = None
    """The layers that adapters add to, as `ModelSites.record` gives them; None: none do."""


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """The content of a file."""

    program: StoredProgram
    model: ModelRecord
    constants: mmap.mmap


def image_path(directory: Path, key: Json) -> Path:
    """Return the path of the file for a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return directory / f"{digest[:24]}{_SUFFIX}"


def read_image(path: Path, key: Json) -> Image | None:
    """Read a file into memory of huge pages; None if there is none that can be used.

    A mapping of the file would be shared by workers, but has pages of 4 kB, which cost a step more than the copy takes.
    """
    try:
        with path.open("rb") as file:
            header = _read_header(file.read(_HEADER_START), file.read, os.fstat(file.fileno()).st_size)
            if header["key"] != json.loads(json.dumps(key)):
                raise ValueError("it is of another key")
            program, model = StoredProgram.from_json(header["program"]), ModelRecord(**header["model"])
            num_bytes = int(header["constant_bytes"])
            constants = map_zeros(max(num_bytes, 1))
            file.seek(header["constants_start"])
            if file.readinto(memoryview(constants)[:num_bytes]) != num_bytes:
                raise ValueError("it is cut short")
        os.utime(path)  # used last: see `make_room`
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is not used, and is written anew: %s", path, error)
        return None
    return Image(program, model, constants)


def _read_header(start: bytes, read: Any, file_bytes: int) -> dict[str, Any]:
    """Return the header, whole.

    Raises:
        ValueError: It is damaged, or the file has not the size that it names.
    """
    if not start.startswith(_MAGIC) or len(start) < _HEADER_START:
        raise ValueError("it is no stored program")
    length = int.from_bytes(start[len(_MAGIC) :][:_LENGTH_BYTES], "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError("its header is damaged")
    content: bytes = read(length)
    if hashlib.sha256(content).digest() != start[-_DIGEST_BYTES:]:
        raise ValueError("its header is damaged")
    header: dict[str, Any] = json.loads(content)
    if header["constants_start"] + header["constant_bytes"] != file_bytes:
        raise ValueError("it is cut short")
    return header


def write_image(
    path: Path,
    key: Json,
    program: StoredProgram,
    model: ModelRecord,
    constants: Sequence[tuple[int, memoryview]],
    constant_bytes: int,
) -> None:
    """Write the file whole or not at all.

    Args:
        constants: Offset and bytes of each, ascending.

    Raises:
        OSError: It cannot be written; nothing of it is left.
    """
    record = {name: getattr(model, name) for name in ModelRecord.__slots__}
    header = {"key": key, "program": program.to_json(), "model": record, "constant_bytes": constant_bytes}
    # the header names the place of what follows it, so its length is found with a place as long as any
    longest = len(json.dumps({**header, "constants_start": 10**12}).encode())
    header["constants_start"] = constants_start = -(-(_HEADER_START + longest) // _PAGE) * _PAGE
    content = json.dumps(header).encode()
    start = _MAGIC + len(content).to_bytes(_LENGTH_BYTES, "little") + hashlib.sha256(content).digest()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(start + content)
            for offset, values in constants:
                file.seek(constants_start + offset)
                file.write(values)
            file.truncate(constants_start + constant_bytes)
            file.flush()
            os.fsync(file.fileno())  # the name shall not outlive the content
        os.chmod(scratch, 0o644)  # mkstemp made it private; the cache may be shared
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def make_room(directory: Path, num_bytes: int, limit_bytes: int, now_s: float) -> bool:
    """Delete the files that were not used for longest, so that one more fits. Return whether it does.

    Args:
        limit_bytes: Bytes that all files may take.
    """
    if num_bytes > limit_bytes or not directory.is_dir():
        return num_bytes <= limit_bytes
    for scratch in directory.glob(f".*{_SUFFIX}.*"):  # of a process that was killed
        if scratch.stat().st_mtime < now_s - _ABANDONED_S:
            scratch.unlink(missing_ok=True)
    files = sorted(directory.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime)
    taken = sum(file.stat().st_size for file in files)
    for file in files:
        if taken + num_bytes <= limit_bytes:
            break
        taken -= file.stat().st_size
        file.unlink(missing_ok=True)
    return True
