"""Facts of the code that deployment files must agree with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from triptych.config import EngineConfig
from triptych.config.loader import iter_options
from triptych.config.option import Option
from triptych.internal.v1 import engine_core_pb2, worker_pb2
from triptych.v1 import generation_pb2

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UID = 10001

SERVICES = ("frontend", "enginecore", "worker")
LEAF = {"frontend": "frontend", "enginecore": "engine", "worker": "worker"}
"""The section of the config that a service's own ports stand in."""
READY_NAME = {
    "frontend": generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    "enginecore": engine_core_pb2.DESCRIPTOR.services_by_name["EngineCoreService"].full_name,
    "worker": worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
}

OPTION_BY_ENV: dict[str, Option] = {option.env: option for option in iter_options()}
OTHER_ENV = {
    "TRIPTYCH_API_KEY",
    "TRIPTYCH_COMMIT",
    "TRIPTYCH_CONFIG",
    "TRIPTYCH_HOME",
    "TRIPTYCH_MACHINE_DIR",
    "HF_HOME",
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
    "PATH",
    "PYTHONUNBUFFERED",
    "TRITON_CACHE_DIR",
}
"""Variables that are no options: read by the loader, the hub, its client, Triton or Python itself."""


def default(key: str) -> object:
    leaf, name = key.split(".")
    return getattr(getattr(EngineConfig(), leaf), name)


def ports(service: str) -> dict[str, int]:
    """name -> default port of everything that the service listens on: grpc, metrics, and http if it has it."""
    names = {"port": "grpc", "http_port": "http", "metrics_port": "metrics"}
    leaf = getattr(EngineConfig(), LEAF[service])
    return {names[name]: getattr(leaf, name) for name in names if hasattr(leaf, name)}


def module_exists(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def assert_env_is_known(env: Iterable[str]) -> None:
    unknown = set(env) - set(OPTION_BY_ENV) - OTHER_ENV
    assert not unknown, f"no code reads {sorted(unknown)}"


def requirements_closure(extra: str | None, *, on_any_platform: bool = False) -> set[str]:
    """Canonical names of all distributions that `triptych[extra]` brings with it.

    Args:
        on_any_platform: count also what only other systems and Python versions need, as far as what is
            installed here tells.
    """
    wanted = [*PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] if extra else ())]
    extras_of: dict[str, set[str]] = {}
    todo = [Requirement(line) for line in wanted]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name == PROJECT["name"]:  # an extra that is a sum of others
            todo += [
                Requirement(line) for e in requirement.extras for line in PROJECT["optional-dependencies"][e]
            ]
            continue
        extras = {"", *requirement.extras}
        if extras <= extras_of.get(name, set()):
            continue
        extras_of.setdefault(name, set()).update(extras)
        for inner in map(Requirement, installed_requirements(name)):
            marker = inner.marker
            is_for_here = marker is None or any(marker.evaluate({"extra": e}) for e in extras_of[name])
            if is_for_here or (on_any_platform and "extra" not in str(marker)):
                todo.append(inner)
    return set(extras_of)


def installed_requirements(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:  # for another platform
        return []
