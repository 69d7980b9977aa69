"""The engines that are compared: each peer in the weight forms that matter, and Triptych in each of its modes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import models
from benchmarks.peers.environments import (
    LLAMA_CPP,
    ONNXRUNTIME,
    OPENVINO,
    VLLM,
    Environment,
    llama_cpp_bin,
    peers_home,
)

TRIPTYCH = "triptych"


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """One line of the table."""

    product: str
    weights: str
    """As a reader of the table knows them."""
    mode: str
    adapter: str
    """File in adapters/."""
    model: Callable[[], Path | str]
    """Prepares the form that it reads, at first use, and returns where it is."""
    environment: Environment | None = None
    """Environment of a peer; None for Triptych, which runs in this one."""
    is_quantized: bool = False
    """Weights, or a cache, of less than 16 bits."""
    options: Callable[[], Mapping[str, str]] = dict
    """Options of its adapter."""
    env: Callable[[tuple[int, ...]], Mapping[str, str]] = field(default=lambda cpus: {})
    """Environment variables, given the CPUs to run on."""

    @property
    def name(self) -> str:
        """Name that `--engines` takes."""
        parts = (self.product, self.weights, self.mode) if self.is_peer else (self.product, self.mode)
        return "-".join(part.lower() for part in parts if part)

    @property
    def is_peer(self) -> bool:
        return self.product != TRIPTYCH

    @property
    def command(self) -> list[str]:
        """Command that runs its adapter in its own Python."""
        python = self.environment.python if self.environment else Path(sys.executable)
        return [str(python), str(models.ADAPTERS / self.adapter)]

    def prepare(self) -> Path | str:
        """Install what is missing and return the model in its form."""
        if self.environment is not None:
            self.environment.install()
        return self.model()


def _vllm_env(cpus: tuple[int, ...]) -> dict[str, str]:
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; its default is half of the machine's memory
        "VLLM_CACHE_ROOT": str(peers_home() / VLLM.name / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # torch's compiler looks for programs beside the Python that runs it.
        "PATH": f"{VLLM.python.parent}{os.pathsep}{os.environ['PATH']}",
    }


def _llama_cpp(weights: str, model: Callable[[], Path], *, is_quantized: bool) -> Engine:
    return Engine(
        "llama.cpp", weights, "", "llama_server_adapter.py", model, LLAMA_CPP, is_quantized=is_quantized,
        options=lambda: {"bin": str(llama_cpp_bin())},
    )  # fmt: skip


def _triptych(quantization: str, weights: str, cache_dtype: str = "auto") -> Engine:
    """Return a mode; one that the build refuses is in the table as failed."""
    mode = quantization if cache_dtype == "auto" else f"{quantization}-{cache_dtype}-cache"
    return Engine(
        TRIPTYCH, weights, mode, "triptych_adapter.py", models.triptych_model, is_quantized=mode != "none",
        options=lambda: {"model.quantization": quantization, "cache.dtype": cache_dtype},
    )  # fmt: skip


ENGINES = (
    Engine("vllm", "bf16", "", "vllm_adapter.py", models.hugging_face_bf16, VLLM, env=_vllm_env),
    Engine("openvino", "Q4_1", "", "openvino_adapter.py", models.openvino, OPENVINO, is_quantized=True),
    Engine("onnxruntime", "int4", "", "onnxruntime_adapter.py", models.onnx, ONNXRUNTIME, is_quantized=True),
    _llama_cpp("Q4_1", models.gguf, is_quantized=True),
    _llama_cpp("Q4_0", lambda: models.requantized_gguf("Q4_0"), is_quantized=True),
    _llama_cpp("BF16", lambda: models.requantized_gguf("BF16"), is_quantized=False),
    _triptych("none", "bf16"),
    _triptych("q8", "8-bit"),
    _triptych("q4", "4-bit"),
    _triptych("auto", "mixed"),
    _triptych("none", "bf16", "int8"),  # openvino's own default cache is of 8 bits, too
    _triptych("q4", "4-bit", "int8"),
)


def matching_engines(name: str) -> list[Engine]:
    """Return the engine of this name, or all that begin with it; the type of a command's option.

    Raises:
        ArgumentTypeError: There is none.
    """
    matching = [engine for engine in ENGINES if engine.name == name]
    matching = matching or [engine for engine in ENGINES if engine.name.startswith(f"{name}-")]
    if not matching:
        raise argparse.ArgumentTypeError(
            f"{name!r} is none of {', '.join(engine.name for engine in ENGINES)}"
        )
    return matching
