"""requirements/ holds the versions of constraints.txt, the hashes of their files, and all that each install needs."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.facts import PROJECT, ROOT, requirements_closure
from tests.deploy.test_constraints import INSTALLERS, PINS
from tools.lock import CUDA_PART, EXTRAS, OWN_PINS, UV, WHEEL

PLATFORMS = [
    {
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "python_version": f"3.{minor}",
        "python_full_version": f"3.{minor}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    for machine, minor in itertools.product(("x86_64", "aarch64"), (11, 12, 13))
]


class Locked(NamedTuple):
    requirement: Requirement
    hashes: list[str]

    @property
    def version(self) -> str:
        [specifier] = self.requirement.specifier
        assert specifier.operator == "=="
        return specifier.version

    @property
    def is_supported(self) -> bool:
        """Whether a platform that the project supports installs it."""
        marker = self.requirement.marker
        return marker is None or any(marker.evaluate(platform) for platform in PLATFORMS)


def read(path: Path) -> dict[str, Locked]:
    """Return name -> entry of a requirements file that pip takes by hash."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    entries: dict[str, Locked] = {}
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        words, *hashes = re.split(r"\s+--hash=", line.rstrip())
        requirement = Requirement(words)
        name = canonicalize_name(requirement.name)
        assert name not in entries, f"{name} twice"
        entries[name] = Locked(requirement, hashes)
    return entries


def locked(name: str) -> dict[str, Locked]:
    return {
        key: entry for key, entry in read(ROOT / f"requirements/{name}.txt").items() if entry.is_supported
    }


FILES = sorted((ROOT / "requirements").glob("*.txt")) + [stem.with_suffix(".txt") for stem in OWN_PINS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_entry_is_one_version_with_hashes(path):
    entries = read(path)
    assert entries
    for name, entry in entries.items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*(\+cpu)?", entry.version), name
        assert entry.hashes, name
        for digest in entry.hashes:
            assert re.fullmatch("sha256:[0-9a-f]{64}", digest), name
    assert "://" not in "".join(line for line in path.read_text().splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("name", [*EXTRAS, "installers"])
def test_versions_are_those_of_the_constraints(name):
    versions = {key: entry.version for key, entry in locked(name).items()}
    assert versions == {key: PINS.get(key, "not pinned") for key in versions}, "run make lock"


@pytest.mark.parametrize("name", EXTRAS)
def test_a_file_holds_what_its_extras_need_and_nothing_else(name):
    here, anywhere = (
        set().union(*(requirements_closure(extra, on_any_platform=anywhere) for extra in EXTRAS[name]))
        for anywhere in (False, True)
    )
    assert sorted(here - locked(name).keys() - {"torch"}) == [], "run make lock"
    assert sorted(locked(name).keys() - anywhere) == [], "run make lock"


def test_every_pin_is_locked():
    assert sorted(PINS.keys() - locked("dev").keys() - locked("installers").keys() - {"torch"}) == []
    assert locked("installers").keys() == INSTALLERS
    assert EXTRAS.keys() >= {"frontend", "enginecore", "worker"}
    assert set(EXTRAS["dev"]) == PROJECT["optional-dependencies"].keys() - {"tokenizer", "serve", "all"}, (
        "which are parts or sums of others"
    )


def test_sums_of_extras_are_what_a_stack_runs_with():
    serve = set().union(*(requirements_closure(service) for service in ("frontend", "enginecore", "worker")))
    assert requirements_closure("serve") == serve
    assert requirements_closure("all") == set().union(*map(requirements_closure, EXTRAS["runtime"]))


def test_torch_is_one_version_in_two_builds():
    cpu, cuda = locked("torch-cpu"), locked("torch-cuda")
    assert cpu["torch"].version == f"{PINS['torch']}+cpu"
    assert cuda["torch"].version == PINS["torch"]
    assert cpu.keys() == {"torch"}
    assert all(CUDA_PART.fullmatch(name) for name in cuda.keys() - {"torch"})
    assert cuda["triton"].version == PINS["triton"], "the one that .venv has beside the CPU build"
    assert not (cpu.keys() | cuda.keys()) & locked("worker").keys()


def test_a_cpu_build_is_locked_for_every_platform():
    listed = re.findall(
        r"^# ([0-9a-f]{64})  (\S+)$", (ROOT / "requirements/torch-cpu.txt").read_text(), re.MULTILINE
    )
    [entry] = locked("torch-cpu").values()
    assert sorted(entry.hashes) == sorted(f"sha256:{digest}" for digest, _ in listed)
    assert all(WHEEL.fullmatch(name)["version"] == PINS["torch"] for _, name in listed)
    for platform in PLATFORMS:
        tag = f"cp{platform['python_version'].replace('.', '')}"
        matching = [
            name for _, name in listed if f"-{tag}-{tag}-" in name and platform["platform_machine"] in name
        ]
        assert len(matching) == 1, (platform, matching)


def test_pins_of_other_environments_are_locked():
    for stem in OWN_PINS:
        lines = [
            line for line in stem.with_suffix(".in").read_text().splitlines() if not line.startswith("#")
        ]
        pins = {
            canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)
        }
        versions = {key: entry.version for key, entry in read(stem.with_suffix(".txt")).items()}
        assert versions == pins, f"{stem.name}: run make lock"


def test_the_compiler_is_locked():
    [entry] = locked("uv").values()
    assert f"{entry.requirement.name}=={entry.version}" == UV


@pytest.mark.parametrize("name", ["frontend", "enginecore", "worker"])
def test_what_is_installed_here_was_locked_for_here(name):
    for key, entry in locked(name).items():
        marker = entry.requirement.marker
        if marker is None or marker.evaluate():
            assert importlib.metadata.version(key) == entry.version
