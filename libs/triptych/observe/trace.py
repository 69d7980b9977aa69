"""W3C trace context: the trace that the call which runs now belongs to.

A caller names it by two headers, or metadata of the same names. The log lines of the call carry the trace's id, and
calls that it makes in turn pass the two on. Triptych opens no spans of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

TRACE_PARENT = "traceparent"
TRACE_STATE = "tracestate"
_MAX_STATE_CHARS = 8192
_IDS = "-(?P<trace_id>(?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
# Version 00 ends behind the flags, and later ones may go on (W3C Trace Context, section 3.2). There is no ff.
_PARENT = re.compile(f"00{_IDS}")
_LATER_PARENT = re.compile(f"(?!00|ff)[0-9a-f]{{2}}{_IDS}(-.*)?")


class TraceContext(NamedTuple):
    """The place of a call in a trace."""

    trace_id: str = ""
    """32 hexadecimal digits. Empty: the call belongs to no trace."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers or metadata that pass the trace on to a server that is called next."""


_NONE = TraceContext()
_context: ContextVar[TraceContext] = ContextVar("trace", default=_NONE)


def set_trace(headers: Iterable[tuple[str, Any]] | None) -> None:
    """Take the context of the call that runs now from its headers. One that is not valid counts as none."""
    sent = {name: value for name, value in headers or () if name in (TRACE_PARENT, TRACE_STATE)}
    _context.set(read_trace(sent.get(TRACE_PARENT, ""), sent.get(TRACE_STATE, "")) if sent else _NONE)


def current_trace() -> TraceContext:
    """Return the context of the call that runs now."""
    return _context.get()


def read_trace(parent: str, state: str) -> TraceContext:
    """Return what the two headers say."""
    match = _PARENT.fullmatch(parent) or _LATER_PARENT.fullmatch(parent)
    if match is None:
        return _NONE
    has_state = 0 < len(state) <= _MAX_STATE_CHARS and state.isascii() and state.isprintable()
    return TraceContext(
        match["trace_id"], ((TRACE_PARENT, parent), *(((TRACE_STATE, state),) if has_state else ()))
    )
