"""Finds the files of a model: a path, a hub id, or the embedded model."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from triptych.checkpoint.config_file import check_inside
from triptych.checkpoint.config_json import CONFIG_FILE
from triptych.checkpoint.gguf.index import GGUF_INDEX_FILE, GgufIndex
from triptych.checkpoint.tokenizer_files import (
    FILES,
    TOKENIZER_FILE,
    convert_tokenizer,
    find_tokenizer_file,
    read_tokenizer_config,
)
from triptych.errors import ModelError, ModelNotFound
from triptych.hub.cache import build_directory_once, cache_home
from triptych.hub.progress import ProgressLine

EMBEDDED = "embedded"
"""Names the model that needs no hub: SmolLM2-135M-Instruct, from the Python package index."""

EMBEDDED_EMBEDDING = "embedded-embedding"
"""Names the model for embeddings that needs no hub: all-MiniLM-L6-v2, from there as well."""

_TOKENIZER_VERSION = 1
"""Raise it when a converted tokenizer changes: directories of another version are made anew."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(
    model: str, *, revision: str = "", progress: bool = True, may_be_head: bool = False
) -> Path:
    """Return a directory that holds config.json, tokenizer.json, tokenizer_config.json and weights.

    Weights are *.safetensors, or stay in a .gguf file that the directory's gguf_index.json refers to.
    Fetching and converting happen once; later calls touch a few files. Safe to call from many
    processes at once.

    Args:
        model: path of a Hugging Face model directory or of a .gguf file, a hub id, `embedded` or
            `embedded-embedding`.
            A path that exists wins over a hub id of the same name.
        revision: branch, tag or commit of a hub id; empty: the newest of its main branch.
        progress: show work that takes longer than a moment on stderr.
        may_be_head: whether it may be a head that guesses for a model, which has no tokenizer of its own.
    Raises:
        ModelNotFound: no such path, hub id or network; says what else can be served.
        ModelError: the files are there but incomplete or not understood, or have no revisions.
    """
    path = Path(model).expanduser()
    is_hub_id = (
        _HUB_ID.fullmatch(model)
        and path.suffix != ".gguf"
        and model not in (EMBEDDED, EMBEDDED_EMBEDDING)
        and not path.exists()
    )
    if revision and not is_hub_id:
        raise ModelError(f"model.revision: {revision!r} has no meaning for {model!r}, which is no hub id")
    # Imported where they are needed: a start with a model directory must not pay for downloads and conversion.
    if model == EMBEDDED:
        from triptych.hub.embedded import prepare_embedded

        return prepare_embedded(progress=progress)
    if model == EMBEDDED_EMBEDDING:
        from triptych.hub.embedded import prepare_embedded_embedding

        return prepare_embedded_embedding(progress=progress)
    if model and path.is_dir():  # an empty name would be the current directory
        return _check_directory(path.absolute(), progress=progress, may_be_head=may_be_head)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model: {path} is a file, but not a .gguf; pass the model's directory")
        from triptych.hub.gguf_convert import prepare_gguf

        return prepare_gguf(path.resolve(), progress=progress)
    if is_hub_id:
        directory = fetch_snapshot(model, revision=revision, progress=progress)
        return _check_directory(directory, progress=progress, may_be_head=may_be_head)
    raise ModelNotFound(
        f"model: {model!r}: no such directory or .gguf file, and not a hub id; `{EMBEDDED}` is always there"
    )


def resolve_adapter(source: str, *, progress: bool = True) -> Path:
    """Return the directory of a LoRA adapter.

    Args:
        source: A directory, or a hub id, perhaps with a branch, tag or commit: `org/name@revision`. A path that exists
            wins over a hub id of the same name.
        progress: As of `resolve_model`.

    Raises:
        ModelNotFound: No such hub id, or no network.
    """
    path = Path(source).expanduser()
    hub_id, _, revision = source.partition("@")
    if path.exists() or not _HUB_ID.fullmatch(hub_id):
        return path
    return fetch_snapshot(hub_id, revision=revision, progress=progress, option="model.adapters")


def _check_directory(directory: Path, *, progress: bool, may_be_head: bool) -> Path:
    """Return the directory, or one with what it lacks; raise for what is missing before a service starts with it."""
    if not (directory / CONFIG_FILE).is_file():
        gguf_files = sorted(directory.glob("*.gguf"))
        hint = f"; pass the file itself: {gguf_files[0]}" if gguf_files else ""
        raise ModelError(f"model: {directory} has no {CONFIG_FILE}{hint}")
    if may_be_head and _is_head(directory):
        return directory
    if not (directory / TOKENIZER_FILE).is_file():
        directory = _with_tokenizer(directory, progress=progress)
    index = directory / GGUF_INDEX_FILE
    if index.is_file() and not directory.resolve().is_relative_to((cache_home() / "models").resolve()):
        for part in GgufIndex.read(directory).files:  # a conversion of ours names where the user's file is
            check_inside(index, part.file)
    return directory


def _is_head(directory: Path) -> bool:
    from triptych.checkpoint.eagle import is_eagle3

    return is_eagle3(directory)


def _with_tokenizer(directory: Path, *, progress: bool) -> Path:
    """Return a directory of the cache with links to these files and a tokenizer.json, made from what there is."""
    file = find_tokenizer_file(directory)
    if file is None:
        raise ModelError(
            f"model: {directory} has no {TOKENIZER_FILE}, nor one of {', '.join(FILES)}; write one with "
            "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY) of transformers"
        )
    names = sorted(path.name for path in directory.iterdir())
    stat = file.stat()
    known_by = json.dumps([str(directory), names, stat.st_size, stat.st_mtime_ns])
    identity = hashlib.sha256(known_by.encode()).hexdigest()[:16]

    def build(target: Path) -> None:
        with ProgressLine(f"converting {file.name} of {directory.name}", enabled=progress):
            tokenizer = convert_tokenizer(file, read_tokenizer_config(directory))
            for name in names:
                (target / name).symlink_to(directory / name)
            tokenizer.save(str(target / TOKENIZER_FILE), pretty=False)

    target = cache_home() / "models" / f"{directory.name}-{identity}"
    return build_directory_once(target, _TOKENIZER_VERSION, build, progress=progress)


ALLOW_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "vocab.txt")
# Second copies of the weights, in the formats of other tools.
IGNORE_PATTERNS = ("original/*", "onnx/*", "consolidated*")


def fetch_snapshot(hub_id: str, *, revision: str, progress: bool, option: str = "model") -> Path:
    """Return the directory of a revision; what is cached already is not fetched again. Empty: the newest.

    Args:
        option: Names what has the id, for the error.

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
            hub_id,
            revision=revision or None,
            allow_patterns=list(ALLOW_PATTERNS),
            ignore_patterns=list(IGNORE_PATTERNS),
        )
    except Exception as error:  # the client raises its own, its transport's and OSError, by version
        reason = f"{type(error).__name__}: {str(error).strip().partition(os.linesep)[0]}"
        of_revision = f" (revision {revision})" if revision else ""
        raise ModelNotFound(
            f"{option}: {hub_id!r}{of_revision} is no directory here, and the Hugging Face hub did not give it: "
            f"{reason} (a wrong name, a gated model without HF_TOKEN, or no network). A directory or .gguf file "
            "works without a network, and so does `embedded` once it is in the cache"
        ) from error
    return Path(directory)
