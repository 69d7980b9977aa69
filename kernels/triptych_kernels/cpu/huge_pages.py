"""Memory of the system in huge pages, without torch."""

from __future__ import annotations

import mmap
import platform
import sys
from contextlib import suppress

# A KV cache is mapped whole and backed when it is first written, so Linux shall not count it as if it were in use;
# other systems do not count, or have no such flag. The number is Linux's on x86-64 and aarch64 (Python knows it from
# 3.13 on).
_HAS_NORESERVE = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if _HAS_NORESERVE else 0)


def map_zeros(num_bytes: int) -> mmap.mmap:
    """Return zeros that the system backs when they are first written, in pages of 2 MB if it grants them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
