"""Names and places of LoRA adapters, as an operator gives them: which are taken, and which are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from triptych.errors import ConfigError, FeatureDisabled, InvalidRequest

MAX_NAME_CHARS = 128
_MAX_SOURCE_CHARS = 4096  # as Linux takes paths
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*\Z")


def check_adapter_name(name: str) -> None:
    """Refuse a name that cannot be one.

    Raises:
        InvalidRequest: It is empty, too long, a path, or has other characters than a name may have.
    """
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest("name", f"has {len(name)} characters, the limits are 1..{MAX_NAME_CHARS}")
    if "/" in name or "\\" in name:
        raise InvalidRequest(
            "name", f"{name!r} is a path; give a name without slashes, and the path as the source"
        )
    if not _NAME.match(name):
        raise InvalidRequest(
            "name",
            f"{name!r} has other characters than letters, digits and _.:@+-, or begins with one of .:@+-",
        )


def read_adapters(text: str) -> dict[str, str]:
    """Return name -> source of `model.adapters`.

    Raises:
        ConfigError: An entry is not of the form NAME=PATH, or a name cannot be one, or is there twice.
    """
    sources: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, source = entry.partition("=")
        if not source:
            raise ConfigError(f"model.adapters: {entry!r} is not of the form NAME=PATH")
        try:
            check_adapter_name(name)
        except InvalidRequest as error:
            raise ConfigError(f"model.adapters: {error.message}") from None
        if name in sources:
            raise ConfigError(f"model.adapters: {name!r} is there twice")
        sources[name] = source
    return sources


def find_adapter(
    name: str, source: str, *, root: str, at_start: dict[str, str], resolve: Callable[[str], Path]
) -> Path:
    """Return the directory of an adapter that is to be loaded.

    Args:
        source: As the operator gives it; a relative one is taken from the root.
        root: `model.adapter_root`.
        at_start: What the config lists, which may lie anywhere.
        resolve: Returns the directory of one that the config lists, which may be a hub id.

    Raises:
        InvalidRequest: The name cannot be one, or the source is no directory within the root, links resolved.
        ModelNotFound: The hub does not give one that the config lists.
        FeatureDisabled: There is no root, so only what the config lists may be loaded.
    """
    check_adapter_name(name)
    if not 1 <= len(source) <= _MAX_SOURCE_CHARS or "\0" in source:
        raise InvalidRequest("source", f"is no path of 1..{_MAX_SOURCE_CHARS} characters")
    if at_start.get(name) == source:
        return _check_directory(resolve(source), source)
    if not root:
        raise FeatureDisabled(
            "source", "model.adapter_root is empty: only adapters of model.adapters are loaded"
        )
    allowed = _resolve(Path(root), root)
    path = _resolve(allowed / source, source)
    if not path.is_relative_to(allowed):
        raise InvalidRequest("source", f"{source!r} is not within model.adapter_root = {root}")
    return _check_directory(path, source)


def _check_directory(path: Path, source: str) -> Path:
    if not path.is_dir():
        raise InvalidRequest("source", f"{source!r} is no directory on the worker's machine")
    return path


def _resolve(path: Path, source: str) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a circle of links
        raise InvalidRequest("source", f"{source!r} cannot be resolved: {error}") from None
