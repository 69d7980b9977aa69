"""Builds .venv: pinned dependencies and this project in editable form; started by `make`, stdlib only."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "constraints.txt"
LOG = ROOT / "build" / "setup.log"
INCOMPLETE = VENV / ".incomplete"
"""There while an install runs: pip takes a half-unpacked package for a whole one, so what an interrupted
set-up left is thrown away."""
INPUTS = (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__))

EXTRAS = {"runtime": "frontend,enginecore,worker,cli", "dev": "frontend,enginecore,worker,cli,bench,dev"}
STAMPS = {level: VENV / f".installed-{level}" for level in EXTRAS}

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu/"
PROBE_TIMEOUT_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("level", choices=EXTRAS, help="runtime: to serve; dev: to test and check as well")
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
    step("pip and setuptools", pip_install("pip", "setuptools"))
    install_torch()
    # setuptools stands in .venv as pinned; build isolation would fetch the newest one instead.
    step("triptych and its dependencies", pip_install("--no-build-isolation", "-e", f".[{EXTRAS[level]}]"))
    step("checking them against each other", [str(PYTHON), "-m", "pip", "check"])
    INCOMPLETE.unlink()
    for done in EXTRAS if level == "dev" else ("runtime",):
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
    an NVIDIA driver PyTorch's own index of CPU builds is asked first.
    """
    version = next(
        line.split("==")[1].split()[0]
        for line in CONSTRAINTS.read_text().splitlines()
        if line.startswith("torch==")
    )
    requirement = f"torch=={version}"
    if runs(PYTHON, "-c", f"import torch; raise SystemExit(torch.__version__.split('+')[0] != {version!r})"):
        return
    if has_nvidia_driver():
        step(f"{requirement} (NVIDIA driver found: {planned_torch(requirement)})", pip_install(requirement))
    elif answers(TORCH_CPU_INDEX):
        command = pip_install("--no-deps", "--index-url", TORCH_CPU_INDEX, requirement)
        step(f"{requirement} (no NVIDIA driver: CPU build of {TORCH_CPU_INDEX})", command)
    else:
        print(f"  {TORCH_CPU_INDEX} does not answer: torch comes from pip's configured index")
        step(f"{requirement} ({planned_torch(requirement)})", pip_install(requirement))


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def answers(url: str) -> bool:
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def planned_torch(requirement: str) -> str:
    """Describe the torch build that pip would fetch from its configured index."""
    command = pip_install("--dry-run", "--quiet", "--no-deps", "--report", "-", requirement)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return "pip could not tell which build"  # the install that follows fails with the reason
    entry = json.loads(result.stdout)["install"][0]
    wheel = urllib.parse.unquote(entry["download_info"]["url"].rsplit("/", 1)[-1])
    cuda = {
        match[0]
        for line in entry["metadata"].get("requires_dist", ())
        if (match := re.match(r"(nvidia|cuda)-[\w-]+", line))
    }
    return f"{wheel}, with {len(cuda)} CUDA packages: several GB" if cuda else wheel


def pip_install(*arguments: str) -> list[str]:
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]
    return [*pip, "install", "-c", str(CONSTRAINTS), *arguments]


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
