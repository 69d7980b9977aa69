"""Runs the tests of native kernels with a library that a sanitizer watches; `make sanitize-cpu` loads this plugin.

The library is the narrowest of this machine's architecture, so that every machine runs the same code. It is built
before, since the compiler must not run beside a preloaded sanitizer.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import pytest

from triptych_kernels.cpu import compile, library

ISA = os.environ["TRIPTYCH_SANITIZED_ISA"]
FOLDER = Path(os.environ["TRIPTYCH_SANITIZED_LIBRARY"])


@cache
def load(isa: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile.library_path(isa, FOLDER)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave only the tests of native kernels that are not for another instruction set."""
    others = [isa for isa in (*compile.ISA_FLAGS, compile.AMX_EMULATED) if not ISA.startswith(isa)]
    chosen = [item for item in items if not any(isa in item.name for isa in others)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


library.usable_isas = cache(lambda: (ISA,))
library.load = load
