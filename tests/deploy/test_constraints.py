"""constraints.txt pins exactly what gets installed, to the version that the tests run with."""

from __future__ import annotations

import importlib.metadata
import itertools
import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.facts import PROJECT, ROOT, requirements_closure

LINES = [
    line.split("#")[0].strip()
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.split("#")[0].strip()
]
PINS = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}
INSTALLERS = {"pip", "setuptools"}


def closure(*, on_any_platform: bool = False) -> set[str]:
    extras = PROJECT["optional-dependencies"]
    return set().union(*(requirements_closure(extra, on_any_platform=on_any_platform) for extra in extras))


def test_every_line_is_one_exact_version_for_any_platform():
    assert len(PINS) == len(LINES)
    for line in LINES:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line), line


def test_everything_that_gets_installed_is_pinned():
    assert sorted(closure() - PINS.keys()) == []


def test_nothing_else_is_pinned():
    assert sorted(PINS.keys() - closure(on_any_platform=True) - INSTALLERS) == []


@pytest.mark.parametrize("name", sorted(PINS.keys() & (closure() | INSTALLERS)))
def test_the_pin_is_what_the_tests_run_with(name):
    assert importlib.metadata.version(name).split("+")[0] == PINS[name]


def test_pins_are_within_the_supported_ranges():
    lines = itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    own_extras = f"{PROJECT['name']}["
    for requirement in (Requirement(line) for line in lines if not line.startswith(own_extras)):
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)]), requirement
