"""Leave to use AMX, whose tiles Linux gives only to processes that ask."""

from __future__ import annotations

import ctypes
import os

_SYS_ARCH_PRCTL = 158  # on x86-64; the C library has no function for it
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def request_permission() -> str:
    """Ask for the tiles, for all threads of this process, those there are and those to come.

    Returns:
        Why the system refuses; empty: it does not.
    Source: Linux, Documentation/arch/x86/xstate.rst.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    if libc.syscall(*(ctypes.c_long(argument) for argument in arguments)) == 0:
        return ""
    return os.strerror(ctypes.get_errno())
