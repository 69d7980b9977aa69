"""The build of the protocol version before this one, as it was: from the repository's own history."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDER = "31f4ebc6"
"""The last commit whose build speaks protocol 3. Taken anew with each raise of a version."""


def extract_older_build(directory: Path) -> Path:
    """Return a folder from which the services of the older build can be run; skip where the history is cut off."""
    command = ("git", "-C", str(ROOT), "archive", OLDER, "libs", "kernels", "services")
    packed = subprocess.run(command, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"this checkout does not reach back to {OLDER}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(directory, filter="data")
    return directory
