"""A .gguf file -> a Hugging Face directory, once; the weights stay where they are, found by an index."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.config_json import CONFIG_FILE, GENERATION_CONFIG_FILE, MODULES_FILE
from triptych.checkpoint.gguf.families import POOLING_KEY, describe
from triptych.checkpoint.gguf.header import GgufHeader, read_header
from triptych.checkpoint.gguf.index import GgufFile, GgufIndex
from triptych.checkpoint.gguf.layout import index_numbers, index_tensors
from triptych.checkpoint.gguf.tokenizer import stop_token_ids, write_tokenizer
from triptych.errors import ModelError
from triptych.hub.cache import build_directory_once, cache_home
from triptych.hub.progress import ProgressLine

CONVERTER_VERSION = 6
"""Raise it when the converted files change: directories of another version are made anew."""

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 10_000
_POOLING_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}
"""Number of a way to make a vector, as llama.cpp has it -> its name in sentence-transformers."""


def prepare_gguf(gguf: Path, *, sha256: str | None = None, progress: bool) -> Path:
    """Return the directory of a .gguf file's conversion, converting at first use.

    Args:
        gguf: absolute path; of a model that was split, the path of any part.
        sha256: of the file, where it is known and the file lies in the cache: the conversion then
            survives a move of the cache. Else it is known by path, size and time of last change.
    Raises:
        ModelError: not a GGUF file, or a model or tokenizer that is not understood; names which.
    """
    parts = _find_parts(gguf)
    stats = [part.stat() for part in parts]
    known_by = "".join(
        f"{part}\0{stat.st_size}\0{stat.st_mtime_ns}" for part, stat in zip(parts, stats, strict=True)
    )
    identity = sha256 or hashlib.sha256(known_by.encode()).hexdigest()
    target = cache_home() / "models" / f"{parts[0].stem}-{identity[:16]}"

    def build(directory: Path) -> None:
        with ProgressLine(f"converting config and tokenizer of {gguf.name}", enabled=progress):
            headers = [read_header(part) for part in parts]
            index = _convert(headers, directory)
            files = [
                GgufFile(
                    file=os.path.relpath(part, target) if sha256 else str(part),
                    file_size=stat.st_size,
                    mtime_ns=None if sha256 else stat.st_mtime_ns,
                )
                for part, stat in zip(parts, stats, strict=True)
            ]
            replace(index, files=tuple(files)).write(directory)

    return build_directory_once(target, CONVERTER_VERSION, build, progress=progress)


def _find_parts(gguf: Path) -> list[Path]:
    """Return the files of a model that was split, in their order; else the file itself.

    Raises:
        ModelError: One is missing; names it.
    """
    match = _PART.fullmatch(gguf.name)
    if match is None:
        return [gguf]
    stem, count = match[1], int(match[3])
    if not 1 <= int(match[2]) <= count <= _MAX_PARTS:
        raise ModelError(f"{gguf}: its name says that it is part {match[2]} of {match[3]}")
    parts = [gguf.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelError(f"{part}: is missing, one of the {count} parts of {gguf.name}")
    return parts


def _convert(headers: Sequence[GgufHeader], directory: Path) -> GgufIndex:
    """Write the config and the tokenizer into a directory, and return where the tensors are."""
    header = _join(headers)
    try:
        config, rules = describe(header, lambda name: _read_floats(headers, name))
        stop_ids = stop_token_ids(header.metadata)
        kind = header.metadata["general.architecture"]
        _write_json(directory / CONFIG_FILE, config | {"model_type": kind, "eos_token_id": stop_ids})
        generation = {"bos_token_id": config.get("bos_token_id"), "eos_token_id": stop_ids}
        _write_json(directory / GENERATION_CONFIG_FILE, generation)
        write_tokenizer(header.metadata, directory)
        _write_pooling(header, directory)
        tensors = index_tensors([part.tensors for part in headers], config, rules)
        tensors += index_numbers(ConfigFile(header.path, header.metadata), config, rules)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Keys of another type or size than they always have, or text that is none.
        raise ModelError(f"{header.path}: its metadata cannot be used: {_in_one_line(error)}") from error
    return GgufIndex((), tuple(tensors))


def _write_pooling(header: GgufHeader, directory: Path) -> None:
    """Write the files of sentence-transformers for a model of vectors, which have length 1, as llama.cpp's have.

    Raises:
        ModelError: The vector is made in a way that is not built.
    """
    key = f"{header.metadata['general.architecture']}.{POOLING_KEY}"
    kind = header.metadata.get(key, 0)
    if kind in (0, 4):  # none; rank, of which the tensors tell
        return
    if kind not in _POOLING_MODES:
        raise ModelError(
            f"{header.path}: {key}: {kind} is none of {', '.join(map(str, (0, *_POOLING_MODES, 4)))}"
        )
    _write_json(directory / MODULES_FILE, [
        {"type": f"sentence_transformers.models.{name}", "path": path}
        for name, path in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    ])  # fmt: skip
    (directory / "1_Pooling").mkdir()
    _write_json(directory / "1_Pooling" / CONFIG_FILE, {"pooling_mode": _POOLING_MODES[kind]})


def _join(headers: Sequence[GgufHeader]) -> GgufHeader:
    """Return the parts of a model as one, with the metadata of the first.

    Raises:
        ModelError: They do not belong together, or one is read without the others; names what.
    """
    first = headers[0]
    for number, header in enumerate(headers):
        count, own = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
        if (count or 1, own) != (len(headers), number):
            raise ModelError(
                f"{header.path}: split.no, split.count: it is part {own} of {count} and not part {number} of "
                f"{len(headers)}; parts are found by names like model-00001-of-00002.gguf"
            )
    tensors = {name: info for header in headers for name, info in header.tensors.items()}
    if len(tensors) != sum(len(header.tensors) for header in headers):
        raise ModelError(f"{first.path}: parts of the model hold the same tensor")
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(f"{first.path}: split.tensors.count: {expected}, but the parts hold {len(tensors)}")
    return replace(first, tensors=tensors)


def _read_floats(headers: Sequence[GgufHeader], name: str) -> list[float]:
    """Read a small tensor of float32."""
    header = next(header for header in headers if name in header.tensors)
    info = header.tensors[name]
    if info.type.name != "F32" or len(info.shape) != 1:
        raise ModelError(
            f"{header.path}: {name}: is {info.type.name} {list(info.shape)}, must be a list of F32"
        )
    with header.path.open("rb") as file:
        file.seek(info.offset)
        return list(struct.unpack(f"<{info.shape[0]}f", file.read(info.size)))


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
