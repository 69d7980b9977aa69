"""The instruction sets that are not used, since `self_check` has found their kernels wrong. Needs no torch.

A library that computes wrongly there, or dies, is refused, and the next narrower instruction set is checked. The result
is kept in a file: only the first start on a kind of machine checks, and the first with other libraries.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from triptych_kernels.cpu.library import candidate_isas, refuse, refused_isas
from triptych_kernels.cpu.machine_files import Json, machine_key, read_or_make

log = logging.getLogger(__name__)

_VERSION = 2
"""Version of the checks; results of other versions are not used."""


def check_isas(directory: Path) -> None:
    """Refuse instruction sets with wrong kernels, from the widest that may be used on until one is right.

    Each of them is a warning. Call this before weights are packed.

    Args:
        directory: Directory of the files that keep the results.
    """
    for isa in candidate_isas():
        if isa in refused_isas():
            continue
        try:
            key: Json = {**machine_key(isa), "checks": _VERSION}
            problem = read_or_make(directory, "check", key, partial(_found, isa), _problem_in)
        except (OSError, MemoryError) as error:
            log.warning("native kernels: %s cannot be checked (%s), and is used unchecked", isa, error)
            return
        if not problem:
            return
        refuse(isa, problem)
        log.warning("native kernels: %s is not used: %s", isa, problem)


def _found(isa: str) -> Json:
    from triptych_kernels.cpu import self_check  # imports torch

    return {"problem": self_check.find_problem(isa)}


def _problem_in(found: Json) -> str:
    return str(found["problem"])
