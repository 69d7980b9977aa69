"""Exit codes of a service's process, for its supervisor."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Restarting helps with all of them but MISCONFIGURED."""

    OK = 0
    """Asked to stop, and did so in order."""
    FAILED = 1
    """A bug; the log has its traceback."""
    MISCONFIGURED = 2
    """The configuration cannot work. The last line of the log says why; a restart does not help."""
    FENCED = 3
    """An engine core after another, started later, has taken over its worker."""
    HUNG = 70
    """A worker with a step that made no progress, or a rank that has lost another one of its group."""
