"""Which part of a file the system keeps in memory, and making it all or none."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

_CHUNK_BYTES = 64 << 20


def evict(paths: Sequence[Path]) -> None:
    """Ask the system to forget the files' pages. It may decline: `resident_fraction` tells."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a page that is not written yet stays
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(paths: Sequence[Path]) -> None:
    """Read the files once."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(_CHUNK_BYTES):
                pass


def resident_fraction(paths: Sequence[Path]) -> float:
    """Of the files' pages, those in memory, 0..1.

    Raises:
        OSError: the system does not tell.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    resident = total = 0
    for path in paths:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view,
        ):
            num_pages = -(-len(view) // mmap.PAGESIZE)
            pages = (ctypes.c_ubyte * num_pages)()
            start = ctypes.c_char.from_buffer(view)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(view)), pages)
            error = ctypes.get_errno()
            del start  # the view cannot be closed before
            if failed:
                raise OSError(error, os.strerror(error), str(path))
            resident += sum(page & 1 for page in pages)
            total += num_pages
    return resident / max(total, 1)
