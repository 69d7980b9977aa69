"""Builds .venv: locked dependencies and this project in editable form; started by `make`, stdlib only."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = ROOT / "requirements"
"""Exact versions with the SHA-256 of their files, by `make lock`."""
LOG = ROOT / "build" / "setup.log"
INCOMPLETE = VENV / ".incomplete"
"""There while an install runs: pip takes a half-unpacked package for a whole one, so what an interrupted
set-up left is thrown away."""
LEVELS = ("runtime", "dev")
"""Each with its file in requirements/."""
INPUTS = (
    ROOT / "pyproject.toml",
    ROOT / "setup.py",
    *(REQUIREMENTS / f"{name}.txt" for name in ("installers", "torch-cpu", "torch-cuda", *LEVELS)),
    Path(__file__),
)
STAMPS = {level: VENV / f".installed-{level}" for level in LEVELS}

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu/"
PROBE_TIMEOUT_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("level", choices=LEVELS, help="runtime: to serve; dev: to test and check as well")
    level = parser.parse_args().level
    LOG.parent.mkdir(exist_ok=True)
    with (ROOT / "build" / ".setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("set-up: waiting for another one to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_installed(level):
            STAMPS[level].touch()  # the inputs are newer by date alone, or another make was faster
            return
        install(level)


def is_installed(level: str) -> bool:
    return not INCOMPLETE.exists() and STAMPS[level].is_file() and STAMPS[level].read_text() == digest()


def digest() -> str:
    """Return a digest of the files that an installation is made from."""
    content = b"\0".join(path.read_bytes() for path in INPUTS)
    return hashlib.sha256(content).hexdigest()


def install(level: str) -> None:
    LOG.write_text("")
    print(f"set-up ({level}): .venv with Python {sys.version.split()[0]}; log: {LOG.relative_to(ROOT)}")
    make_venv()
    INCOMPLETE.touch()
    for stamp in STAMPS.values():
        stamp.unlink(missing_ok=True)
    step("pip and setuptools", pip_install(*locked("installers")))
    install_torch()
    # torch again, so that pip sees what it needs: a dependency without a hash is refused.
    torch = "torch-cuda" if torch_needs_cuda() else "torch-cpu"
    step("what triptych needs", pip_install(*locked(level, torch)))
    # setuptools is in .venv as locked; build isolation would fetch the newest one instead.
    step("triptych", pip_install("--no-index", "--no-deps", "--no-build-isolation", "-e", "."))
    step("checking them against each other", [str(PYTHON), "-m", "pip", "check"])
    INCOMPLETE.unlink()
    for done in LEVELS if level == "dev" else ("runtime",):
        STAMPS[done].write_text(digest())


def make_venv() -> None:
    if INCOMPLETE.exists():
        print("  an earlier set-up was interrupted: starting anew")
    elif VENV.exists() and not runs(PYTHON, "-m", "pip", "--version"):
        print("  .venv has no working Python: starting anew")
    elif VENV.exists():
        return
    shutil.rmtree(VENV, ignore_errors=True)
    step("virtual environment", [sys.executable, "-m", "venv", str(VENV)])


def install_torch() -> None:
    """Bring PyTorch in by itself, because its package index depends on the machine.

    On the public package index, torch for Linux is the CUDA build, several GB with what it needs; without
    an NVIDIA driver the CPU build is looked for first, in PyTorch's own index and in pip's configured one.
    """
    [version] = re.findall(r"^torch==(\S+)", (REQUIREMENTS / "torch-cuda.txt").read_text(), re.MULTILINE)
    if runs(PYTHON, "-c", f"import torch; raise SystemExit(torch.__version__.split('+')[0] != {version!r})"):
        return
    cpu_build = pip_install(*locked("torch-cpu"), "--no-deps")
    any_build = pip_install(*locked("torch-cuda"), "--no-deps")
    if has_nvidia_driver():
        step(f"torch {version} with CUDA, several GB (NVIDIA driver found)", any_build)
    elif answers(TORCH_CPU_INDEX):
        title = f"torch {version} (no NVIDIA driver: CPU build of {TORCH_CPU_INDEX})"
        step(title, [*cpu_build, "--index-url", TORCH_CPU_INDEX])
    else:
        print(f"  {TORCH_CPU_INDEX} does not answer: torch comes from pip's configured index")
        if runs(*cpu_build, "--dry-run", "--quiet"):
            step(f"torch {version} (CPU build)", cpu_build)
        else:
            step(f"torch {version} with CUDA, several GB", any_build)


def torch_needs_cuda() -> bool:
    """Return whether the torch in .venv is a build that needs CUDA's packages."""
    code = "import importlib.metadata as m; print(*m.requires('torch') or (), sep='\\n')"
    lines = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout
    return re.search("^(nvidia|cuda)-", lines, re.MULTILINE) is not None


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def answers(url: str) -> bool:
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def locked(*names: str) -> list[str]:
    """Return pip's options for files of requirements/; wheels only, as a build would fetch tools without hashes."""
    files = [word for name in names for word in ("-r", str(REQUIREMENTS / f"{name}.txt"))]
    return ["--require-hashes", "--only-binary", ":all:", *files]


def pip_install(*arguments: str) -> list[str]:
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", *arguments]


def runs(*command: str | Path) -> bool:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def step(title: str, command: list[str]) -> None:
    """Run one command: a line for people, with what it does now on a terminal; the rest goes to the log.

    Raises:
        SystemExit: it failed; the end of its output has been printed.
    """
    started = time.monotonic()
    is_terminal = sys.stdout.isatty()
    print(f"  {title} … ", end="", flush=True)
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            log.write(line)
            lines.append(line)
            if is_terminal:
                width = max(20, shutil.get_terminal_size().columns - 1)
                text = f"  {title} … {line.split(' -> ')[0].strip()}"
                print(f"\r\033[K{text[:width]}", end="", flush=True)
    status = process.wait()
    if is_terminal:
        print(f"\r\033[K  {title} … ", end="")
    if status != 0:
        tail = "".join(f"    {line}" for line in lines[-20:])
        print(f"failed\n{tail}  the whole log: {LOG}", flush=True)
        raise SystemExit(1)
    print(f"{time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("\nset-up: interrupted; the next make starts it anew") from None
