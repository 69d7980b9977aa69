"""Installs a wheel as a user would, in an empty scratch folder without a compiler, and serves with it.

Timed are the installation and the first answer of `triptych serve` after it, the download of the embedded model
included. Packages come from pip's configured index, and torch from PyTorch's CPU index where that answers. Needs only
the standard library, so that it runs in an empty container as well: `python3 tools/test_install.py WHEEL`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_TIMEOUT_S = 5.0
INSTALL_TIMEOUT_S = 1800.0
ANSWER_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.1
QUESTION = "What is the capital of France?"
WORD = "Paris"
"""Part of the embedded model's answer at temperature 0."""
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc")
OUR_PACKAGES = {"triptych", "triptych_kernels", "triptych_services"}
FOREIGN_NAMES = {"services", "tests", "benchmarks", "tools", "kernels", "libs"}
"""Names that an installation must leave to others."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--keep", action="store_true", help="leave the scratch folder")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="triptych-install-"))
    try:
        check_installation(arguments.wheel.resolve(strict=True), scratch)
    finally:
        if arguments.keep:
            print(f"left: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    return 0


def check_installation(wheel: Path, scratch: Path) -> None:
    """Install, look at what came, serve and ask; print how long each took.

    Raises:
        SystemExit: Something is not as it must be; the message says what.
    """
    env = empty_environment(scratch)
    here = scratch / "elsewhere"
    for name in FOREIGN_NAMES:  # of the user: must not stand in for anything
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text("raise ImportError('this is the user\\'s')\n")
    venv = scratch / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    index = ["--extra-index-url", TORCH_CPU_INDEX] if answers(TORCH_CPU_INDEX) else []
    what = f"triptych[all] @ {wheel.as_uri()}"
    started = time.monotonic()
    pip = [str(venv / "bin/python"), "-m", "pip", "--no-cache-dir", "install", "--quiet"]
    run([*pip, *index, what], env, here, INSTALL_TIMEOUT_S)
    installed = time.monotonic()
    print(f"installed in {installed - started:.1f} s", flush=True)
    check_packages(venv)
    serve_and_ask(venv, env, here, scratch / "serve.log")
    print(f"from the beginning of the installation to the first answer: {time.monotonic() - started:.1f} s")


def empty_environment(scratch: Path) -> dict[str, str]:
    """Return an environment with an empty home, without compilers and without options of Python or Triptych."""
    programs = scratch / "bin"
    programs.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for program in Path(folder).iterdir():
            is_compiler = any(program.name.split("-")[-1] == name for name in COMPILERS)
            with suppress(FileExistsError):
                if not is_compiler and not any(
                    part in program.name for part in ("gcc", "g++", "clang", "cc1")
                ):
                    (programs / program.name).symlink_to(program)
    home = scratch / "home"
    home.mkdir()
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "SSL_")) or name.lower().endswith("_proxy")
    }
    env = kept | {"HOME": str(home), "PATH": str(programs), "TMPDIR": str(scratch)}
    if compilers := [name for name in COMPILERS if shutil.which(name, path=env["PATH"])]:
        raise SystemExit(f"test-install: still in the PATH: {', '.join(compilers)}")
    return env


def check_packages(venv: Path) -> None:
    """Look at what was installed."""
    [site] = venv.glob("lib/python3*/site-packages")
    [record] = site.glob("triptych-*.dist-info/RECORD")
    tops = {line.split("/")[0] for line in record.read_text().splitlines()}
    expected = OUR_PACKAGES | {record.parent.name, ".."}  # ../../../bin/triptych
    if tops != expected:
        raise SystemExit(f"test-install: the wheel installs {sorted(tops)}, expected {sorted(expected)}")
    libraries = list((site / "triptych_kernels/cpu/lib").glob("*.so"))
    if not libraries:
        raise SystemExit("test-install: the wheel has no native kernels")


def serve_and_ask(venv: Path, env: Mapping[str, str], here: Path, log: Path) -> None:
    """Start `triptych serve`, wait for an answer, and stop it.

    Raises:
        SystemExit: It ended, there was no answer in time, another answer, or a worker without native kernels.
    """
    ports = free_ports(5)
    names = ("frontend.port", "frontend.http-port", "frontend.admin-port", "engine.port", "worker.port")
    options = [word for name, port in zip(names, ports, strict=True) for word in (f"--{name}", str(port))]
    started = time.monotonic()
    with log.open("wb") as output:
        server = subprocess.Popen(
            [str(venv / "bin/triptych"), "serve", *options], env=env, cwd=here, stdout=output, stderr=output
        )
    try:
        answer = first_answer(f"http://127.0.0.1:{ports[1]}/v1/chat/completions", server)
        print(
            f"`triptych serve` to its first answer: {time.monotonic() - started:.1f} s: {answer!r}",
            flush=True,
        )
        server.send_signal(signal.SIGTERM)
        status = server.wait(STOP_TIMEOUT_S)
    except (SystemExit, subprocess.TimeoutExpired):
        print(log.read_text(errors="replace"), file=sys.stderr)
        raise
    finally:
        server.kill()
        server.wait()
    lines = log.read_text(errors="replace")
    kernels = re.search(r'worker +ready .*kernels="(\w+) recorded"', lines)
    if WORD not in answer or status != 0 or kernels is None:
        raise SystemExit(f"test-install: no {WORD!r}, status {status}, or no native kernels:\n{lines}")
    print(f"kernels: {kernels[1]}")


def first_answer(url: str, server: subprocess.Popen[bytes]) -> str:
    """Return the answer, asked for again until there is one.

    Raises:
        SystemExit: The server ended, or did not answer within ANSWER_TIMEOUT_S.
    """
    body = {"model": "embedded", "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    reason: object = "nothing yet"
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
                return str(json.load(response)["choices"][0]["message"]["content"])
        except OSError as error:  # refused, or 503 until it is ready
            reason = error
            time.sleep(POLL_S)
    raise SystemExit(f"test-install: no answer of `triptych serve` (status {server.poll()}): {reason}")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=PROBE_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def run(command: Sequence[str], env: Mapping[str, str], folder: Path, timeout_s: float) -> None:
    done = subprocess.run(command, env=env, cwd=folder, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise SystemExit(f"test-install: failed with status {done.returncode}: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
