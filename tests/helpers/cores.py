"""How many of the machine's cores a test may use."""

from __future__ import annotations

import os

from triptych.host import usable_cores


def share_of_cores() -> int:
    """Return the part of the cores that is this process's, where pytest-xdist runs several beside each other."""
    return max(1, usable_cores() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
