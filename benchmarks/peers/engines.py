"""The engines that are compared: each peer in the weight forms that matter, and Triptych in each of its modes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.peers import models
from benchmarks.peers.environments import (
    LLAMA_CPP,
    LLAMA_CPP_AVX2,
    ONNXRUNTIME,
    OPENVINO,
    VLLM,
    Environment,
    llama_cpp_bin,
    peers_home,
)

TRIPTYCH = "triptych"
AVX2 = "avx2"
"""Instruction set that engines can be held to, so that any x86-64 machine shows what they do where there is no more."""
_AVX2_VARIABLES = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # of oneDNN's kernels, and of those that OpenVINO makes with its generator
    "DNNL_MAX_CPU_ISA": "AVX2",  # as older ones call it
    "OV_CPU_MAX_ISA": "AVX2",  # of OpenVINO's own; in its release builds since 2026.4.1
}


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
    hold: Callable[[Engine], Engine] | None = None
    """Returns the engine as it runs with AVX2 and nothing wider; None: it has no way, and takes what the processor
    has."""

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


def _with_avx2_variables(engine: Engine) -> Engine:
    return replace(engine, env=lambda cpus: {**engine.env(cpus), **_AVX2_VARIABLES})


def _llama_cpp(
    weights: str, *, is_quantized: bool, environment: Environment = LLAMA_CPP, model: Path | None = None
) -> Engine:
    def prepare() -> Path:
        if model is not None:
            return model
        return models.gguf() if weights == "Q4_1" else models.requantized_gguf(weights, environment)

    return Engine(
        "llama.cpp", weights, "", "llama_server_adapter.py", prepare, environment, is_quantized=is_quantized,
        options=lambda: {"bin": str(llama_cpp_bin(environment))},
        hold=lambda engine: _llama_cpp(
            weights, is_quantized=is_quantized, environment=LLAMA_CPP_AVX2, model=model
        ),
    )  # fmt: skip


def _triptych(
    quantization: str,
    weights: str,
    cache_dtype: str = "auto",
    instruction_set: str = "auto",
    model: Path | None = None,
) -> Engine:
    """Return a mode, of the embedded model if none is given; one that the build refuses is in the table as failed."""
    mode = quantization if cache_dtype == "auto" else f"{quantization}-{cache_dtype}-cache"
    options = {"model.quantization": quantization, "cache.dtype": cache_dtype}
    return Engine(
        TRIPTYCH, weights, mode, "triptych_adapter.py", models.triptych_model if model is None else lambda: model,
        is_quantized=mode != "none", options=lambda: {**options, "worker.instruction_set": instruction_set},
        hold=lambda engine: _triptych(quantization, weights, cache_dtype, AVX2, model),
    )  # fmt: skip


ENGINES = (
    Engine("vllm", "bf16", "", "vllm_adapter.py", models.hugging_face_bf16, VLLM, env=_vllm_env),
    Engine(
        "openvino", "Q4_1", "", "openvino_adapter.py", models.openvino, OPENVINO, is_quantized=True,
        hold=_with_avx2_variables,
    ),
    Engine("onnxruntime", "int4", "", "onnxruntime_adapter.py", models.onnx, ONNXRUNTIME, is_quantized=True),
    _llama_cpp("Q4_1", is_quantized=True),
    _llama_cpp("Q4_0", is_quantized=True),
    _llama_cpp("BF16", is_quantized=False),
    _triptych("none", "bf16"),
    _triptych("q8", "8-bit"),
    _triptych("q4", "4-bit"),
    _triptych("auto", "mixed"),
    _triptych("none", "bf16", "int8"),  # openvino's own default cache is of 8 bits, too
    _triptych("q4", "4-bit", "int8"),
)  # fmt: skip
"""vLLM's compiled kernels and ONNX Runtime's look at the processor alone, so nothing holds these two to AVX2."""


def engines_of_file(path: Path) -> tuple[Engine, ...]:
    """Return those that read a .gguf file as it is, which may be quantized in whatever way."""
    modes = (_triptych("none", "file", model=path), _triptych("q4", "file", model=path))
    return tuple(
        replace(engine, is_quantized=True)
        for engine in (_llama_cpp("file", is_quantized=True, model=path), *modes)
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
