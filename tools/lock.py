"""Compiles the requirements files: exact versions and the SHA-256 of their files; `make lock`, stdlib only.

    constraints.txt, pyproject.toml -> requirements/NAME.txt    what an image, .venv or a tool gets installed
    torch's pin                     -> requirements/torch-cpu.txt     the build of PyTorch's own CPU index
                                       requirements/torch-cuda.txt    the build of PyPI, and what it needs of CUDA
    NAME.in                         -> NAME.txt    environments of their own: stubs, the site, clients of others

Everything is for Linux on x86-64 and aarch64 and for the Python versions that pyproject.toml supports.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST_PYTHON = "3.11"

UV = "uv==0.13.9"
UV_REQUIREMENTS = REQUIREMENTS / "uv.txt"

EXTRAS = {
    "frontend": ["frontend"],
    "enginecore": ["enginecore"],
    "worker": ["worker"],
    "runtime": ["frontend", "enginecore", "worker", "cli"],
    "dev": ["frontend", "enginecore", "worker", "transformers", "cli", "bench", "dev"],
}
"""Name of a file in requirements/ -> the extras that it installs."""
OWN_PINS = {
    ROOT / "protos" / "requirements": [],
    ROOT / "protos" / "protobuf-6": [],
    ROOT / "tools" / "docs" / "requirements": [],
    ROOT / "tools" / "wheels": [],
    # The clients' own ranges do not agree with each other.
    ROOT / "tests" / "clients" / "requirements": ["--no-deps"],
}
"""Stem of a file of pins (.in) -> options for compiling it."""

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
TORCH_CPU = REQUIREMENTS / "torch-cpu.txt"
WHEEL = re.compile(r"torch-(?P<version>[^-+]+)\+cpu-cp31[123]-cp31[123]-manylinux\w+_(x86_64|aarch64)\.whl")
INDEX_TIMEOUT_S = 20.0
CUDA_PART = re.compile(r"nvidia-.*|cuda-.*|triton")
"""Names that torch requires in its CUDA builds only."""


def main() -> None:
    uv = compiler()
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    pins: list[str | Path] = ["--constraints", CONSTRAINTS]

    compile_file(uv, REQUIREMENTS / "installers.txt", *pins, text="pip\nsetuptools\n")
    compile_file(uv, UV_REQUIREMENTS, text=UV)
    write_torch_cpu(torch)
    around_torch = names(compiled(uv, "-", *pins, text=torch)) - {"torch"}
    cuda = {name for name in around_torch if CUDA_PART.fullmatch(name)}
    compile_file(uv, REQUIREMENTS / "torch-cuda.txt", *pins, *without(around_torch - cuda), text=torch)
    for name, extras in EXTRAS.items():
        chosen = [word for extra in extras for word in ("--extra", extra)]
        elsewhere = {"torch"} | cuda - direct_requirements(extras)
        target = REQUIREMENTS / f"{name}.txt"
        compile_file(uv, target, *pins, *chosen, *without(elsewhere), source="pyproject.toml")
    for stem, options in OWN_PINS.items():
        source = str(stem.with_suffix(".in").relative_to(ROOT))
        compile_file(uv, stem.with_suffix(".txt"), *options, source=source)


def compiler() -> Path:
    """Return the pinned uv, installed anew when its pin has changed or an install was interrupted."""
    venv = ROOT / "build" / "lock-venv"
    stamp = venv / ".installed"
    if not stamp.is_file() or stamp.read_text() != UV:
        shutil.rmtree(venv, ignore_errors=True)
        run(sys.executable, "-m", "venv", venv)
        # The file may be of the version before: then the new one is taken on trust, and its hashes are written.
        is_locked = UV_REQUIREMENTS.is_file() and UV in UV_REQUIREMENTS.read_text()
        what = ["--require-hashes", "-r", UV_REQUIREMENTS] if is_locked else [UV]
        run(venv / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *what)
        stamp.write_text(UV)
    return venv / "bin" / "uv"


def compile_file(uv: Path, target: Path, *options: str | Path, source: str = "-", text: str = "") -> None:
    """Write `target`; versions that no input pins stay as they are in the file of before."""
    compiled(uv, source, *options, "--generate-hashes", "--output-file", target, text=text)
    print(f"{target.relative_to(ROOT)}: {len(names(target.read_text()))} packages", flush=True)


def compiled(uv: Path, source: str, *options: str | Path, text: str = "") -> str:
    """Return the requirements that uv makes of a file, or of `text` where `source` is "-"."""
    return run(
        uv, "pip", "compile", source, "--quiet", "--no-config", "--universal", "--python-version", OLDEST_PYTHON,
        "--annotation-style", "line", "--custom-compile-command", "make lock", *options, text=text,
    )  # fmt: skip


def write_torch_cpu(requirement: str) -> None:
    version = requirement.partition("==")[2].split()[0]
    builds = sorted(cpu_builds(version).items())
    listing = "".join(f"# {digest}  {name}\n" for name, digest in builds)
    hashes = "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(digest for _, digest in builds))
    header = f"# Written by `make lock`. The wheels of {TORCH_CPU_INDEX}:\n"
    TORCH_CPU.write_text(f"{header}{listing}torch=={version}+cpu{hashes}\n")
    print(f"{TORCH_CPU.relative_to(ROOT)}: torch {version}, {len(builds)} wheels", flush=True)


def cpu_builds(version: str) -> dict[str, str]:
    """Return file name -> SHA-256 of the wheels of PyTorch's CPU index.

    Raises:
        SystemExit: the index does not answer and its wheels of this version have not been seen before.
    """
    try:
        with urllib.request.urlopen(TORCH_CPU_INDEX, timeout=INDEX_TIMEOUT_S) as response:
            links = re.findall(
                r'href="([^"]+)#sha256=([0-9a-f]{64})"', html.unescape(response.read().decode())
            )
        listed = [(urllib.parse.unquote(url).rsplit("/", 1)[-1], digest) for url, digest in links]
    except OSError as error:
        print(f"{TORCH_CPU_INDEX} does not answer ({error}): its hashes stay as they are", flush=True)
        lines = re.findall(r"^# ([0-9a-f]{64})  (\S+)$", TORCH_CPU.read_text(), re.MULTILINE)
        listed = [(name, digest) for digest, name in lines]
    found = {
        name: digest
        for name, digest in listed
        if (wheel := WHEEL.fullmatch(name)) and wheel["version"] == version
    }
    if not found:
        raise SystemExit(
            f"lock: no hash of a CPU build of torch {version}; {TORCH_CPU_INDEX} has to answer once"
        )
    return found


def names(requirements: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9][a-z0-9._-]*)==", requirements, re.MULTILINE))


def direct_requirements(extras: Iterable[str]) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {re.split(r"[^A-Za-z0-9._-]", line)[0].lower() for line in lines}


def without(packages: Iterable[str]) -> list[str]:
    return [word for name in sorted(packages) for word in ("--no-emit-package", name)]


def run(*command: str | Path, text: str = "") -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, input=text, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"lock: failed: {' '.join(words)}")  # uv and pip have said why
    return done.stdout


if __name__ == "__main__":
    main()
