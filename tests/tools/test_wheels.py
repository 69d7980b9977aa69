"""Wheels and source distributions, built with a compiler that makes empty libraries."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.wheels import ROOT, load_build, unexpected
from triptych_kernels.cpu.compile import FLAGS_OF_MACHINE

SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "NOTICE")
FOLDERS = ("libs", "kernels", "services", "protos")
COMPILER = """#!/bin/sh
case " $* " in *" UNKNOWN "*) exit 1 ;; esac
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then : > "$2"; fi
  shift
done
"""
ISAS = list(FLAGS_OF_MACHINE.get(platform.machine(), {}))
LIBRARIES = {f"triptych_kernels/cpu/lib/libtriptych_cpu_{isa}.so" for isa in ISAS}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources, without libraries."""
    copy = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        shutil.copy(ROOT / name, copy / name)
    unwanted = shutil.ignore_patterns("__pycache__", "lib", "lib-*")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=unwanted)
    return copy


def compiler(folder: Path, unknown: str = "") -> dict[str, str]:
    """Return an environment with a g++ that writes empty files, and refuses one option."""
    folder.mkdir()
    program = folder / "g++"
    program.write_text(COMPILER.replace("UNKNOWN", unknown or "none"))
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def build(hook: str, tree: Path, target: Path, **env: str) -> subprocess.CompletedProcess[str]:
    code = f"from setuptools import build_meta; build_meta.build_{hook}({str(target)!r})"
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=tree, env=os.environ | env, capture_output=True, text=True, timeout=300, check=False
    )


def wheel_of(tree: Path, target: Path, **env: str) -> zipfile.ZipFile:
    done = build("wheel", tree, target, **env)
    assert done.returncode == 0, done.stderr
    [path] = target.glob("*.whl")
    shutil.rmtree(tree / "build")  # which the next build would take over
    return zipfile.ZipFile(path)


@pytest.mark.thorough
def test_wheel_with_kernels(tree: Path, tmp_path: Path) -> None:
    env = compiler(tmp_path / "bin")
    wheel = wheel_of(tree, tmp_path / "wheel", TRIPTYCH_NATIVE="all", **env)
    names = wheel.namelist()
    assert list(unexpected(names, platform.machine())) == []
    assert {name for name in names if name.endswith(".so")} == LIBRARIES
    assert "triptych_kernels/cpu/lib/DIGEST" in names, "without it no library is used"
    machine = platform.machine()
    assert wheel.filename is not None
    assert wheel.filename.endswith(f"triptych-{version(wheel)}-py3-none-linux_{machine}.whl"), "any Python 3"
    assert {f"{info(wheel)}/licenses/{name}" for name in ("LICENSE", "NOTICE")} <= set(names)
    metadata = wheel.read(f"{info(wheel)}/METADATA").decode()
    assert "Description-Content-Type: text/markdown" in metadata
    assert "# Triptych" in metadata

    assert build("sdist", tree, tmp_path / "sdist").returncode == 0
    [archive] = (tmp_path / "sdist").glob("*.tar.gz")
    with tarfile.open(archive) as content:
        content.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    assert (unpacked / "protos/triptych/v1/generation.proto").is_file()
    again = wheel_of(unpacked, tmp_path / "again", TRIPTYCH_NATIVE="all", **env)
    assert sorted(again.namelist()) == sorted(names), "the source distribution is whole"


def version(wheel: zipfile.ZipFile) -> str:
    return info(wheel).removeprefix("triptych-").removesuffix(".dist-info")


def info(wheel: zipfile.ZipFile) -> str:
    [name] = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    return name


def test_wheel_without_kernels(tree: Path, tmp_path: Path) -> None:
    wheel = wheel_of(tree, tmp_path / "wheel", PATH=compiler(tmp_path / "bin")["PATH"])
    assert wheel.filename is not None
    assert wheel.filename.endswith("-py3-none-any.whl")
    assert not [name for name in wheel.namelist() if name.endswith(".so")]
    assert "triptych_kernels/cpu/src/kernel.h" in wheel.namelist(), "to be compiled where it is installed"


@pytest.mark.thorough
def test_unknown_instruction_set(tree: Path, tmp_path: Path) -> None:
    widest = ISAS[0]
    (flag,) = FLAGS_OF_MACHINE[platform.machine()][widest][-1:]
    shutil.rmtree(tree / "kernels/triptych_kernels/cpu/lib", ignore_errors=True)
    done = build(
        "wheel", tree, tmp_path / "wheel", TRIPTYCH_NATIVE="all", **compiler(tmp_path / "bin", unknown=flag)
    )
    assert done.returncode != 0
    assert f"the native kernels are not complete: libtriptych_cpu_{widest}.so" in done.stderr


def test_unknown_request(tree: Path, tmp_path: Path) -> None:
    done = build("wheel", tree, tmp_path, TRIPTYCH_NATIVE="some")
    assert "TRIPTYCH_NATIVE: 'some' must be 'all' or empty" in done.stderr


def test_what_a_wheel_must_not_hold() -> None:
    good = ["triptych/a.py", "triptych_services/a.py", "triptych_kernels/a.py", "triptych-1.dist-info/RECORD"]
    libraries = sorted(LIBRARIES)
    assert list(unexpected([*good, *libraries], platform.machine())) == []
    (problem,) = unexpected([*good, *libraries, "services/a.py"], platform.machine())
    assert problem.startswith("the wheel installs services")
    (problem,) = unexpected([*good[1:], *libraries], platform.machine())
    assert problem == "the wheel lacks triptych"
    (problem,) = unexpected([*good, *libraries[1:]], platform.machine())
    assert problem.startswith("the wheel lacks the native kernels for")


def test_the_compiler_module_is_the_package_s_own() -> None:
    assert load_build().FLAGS_OF_MACHINE == FLAGS_OF_MACHINE
