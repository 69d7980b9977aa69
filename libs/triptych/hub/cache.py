"""The cache on disk: a directory is there whole or not at all, and is built once even if several processes ask."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from triptych.errors import ModelError
from triptych.hub.progress import ProgressLine

MARKER_FILE = "complete.json"
"""Written last into a built directory: the builder's version and each file's size."""


def cache_home() -> Path:
    """`$TRIPTYCH_HOME`, else ~/.cache/triptych; may not exist yet."""
    home = os.environ.get("TRIPTYCH_HOME")
    return Path(home).expanduser().absolute() if home else Path.home() / ".cache" / "triptych"


def build_directory_once(
    target: Path, version: int, build: Callable[[Path], None], *, progress: bool
) -> Path:
    """Return `target`, built by `build(empty directory)` unless it is there and complete.

    Processes that ask together build once. What a killed builder left, and what an older version of
    the builder made, is replaced.

    Raises:
        ModelError: the cache cannot be written; and whatever `build` raises.
    """
    if _is_complete(target, version):
        return target
    with locked(target, progress=progress):
        if not _is_complete(target, version):
            with scratch_directory(target) as scratch:
                build(scratch)
                _write_marker(scratch, version)
                _replace_directory(scratch, target)
    return target


@contextmanager
def locked(target: Path, *, progress: bool) -> Iterator[None]:
    """Hold the lock of `target` among processes; `.<name>.lock` beside it. The kernel frees it at death."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(target.parent / f".{target.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ModelError(f"cache: {target.parent}: cannot be written ({error}); set TRIPTYCH_HOME") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with ProgressLine(f"waiting for another process to prepare {target.name}", enabled=progress):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """An empty directory on the file system of `target`, gone at the end; the caller holds its lock."""
    prefix = f".{target.name}.partial-"
    for leftover in target.parent.glob(f"{prefix}*"):  # of a process that was killed: the lock is ours now
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or a directory to disk, so that a rename after it cannot outlive its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_complete(target: Path, version: int) -> bool:
    try:
        marker = json.loads((target / MARKER_FILE).read_text())
        return bool(marker["version"] == version) and all(
            (target / name).stat().st_size == size for name, size in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write_marker(directory: Path, version: int) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir()) if path.is_file()}
    (directory / MARKER_FILE).write_text(json.dumps({"version": version, "files": sizes}, indent=2) + "\n")


def _replace_directory(built: Path, target: Path) -> None:
    """Move `built` to `target`, after removing a broken or outdated directory there."""
    built.chmod(0o755)  # mkdtemp made it private; the cache may be shared by a read-only mount
    for path in built.iterdir():
        sync(path)
    sync(built)
    if target.exists():
        shutil.rmtree(target)
    built.rename(target)
    sync(target.parent)
