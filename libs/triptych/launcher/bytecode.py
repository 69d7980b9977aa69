"""The place of the children's compiled modules, where it cannot be beside the sources."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path

from triptych.hub.cache import cache_home

_FORBIDDEN, _PREFIX = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
_CHECKED_BY_HASH = 1  # flag of a .pyc file, see PEP 552


def with_bytecode_cache(env: Mapping[str, str], source: Path = Path(__file__)) -> dict[str, str]:
    """Return an environment in which modules are compiled once, and not at each start.

    Where Python may not write beside the sources, and nothing was compiled there when they were installed, three
    processes compile the project's modules: 1.3 s of CPU time. They then share a directory in the project's cache. A
    directory that is set stays.

    Args:
        source: A module of the project, for which the others speak.
    """
    is_writable = not env.get(_FORBIDDEN) and os.access(source.parent, os.W_OK)
    if env.get(_PREFIX) or is_writable or _is_compiled(source):
        return dict(env)
    directory = cache_home() / "bytecode"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:  # nothing is lost but time
        return dict(env)
    kept = {name: text for name, text in env.items() if name != _FORBIDDEN}
    return {**kept, _PREFIX: str(directory)}


def _is_compiled(source: Path) -> bool:
    """Return whether a .pyc file of this version of Python lies beside a source and belongs to it."""
    try:
        with Path(cache_from_source(str(source))).open("rb") as file:
            header = file.read(16)
        stat = source.stat()
    except OSError:
        return False
    if header[:4] != MAGIC_NUMBER:
        return False
    numbers = [int.from_bytes(header[start : start + 4], "little") for start in (4, 8, 12)]
    of_source = [int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size & 0xFFFFFFFF]
    return bool(numbers[0] & _CHECKED_BY_HASH) or numbers[1:] == of_source
