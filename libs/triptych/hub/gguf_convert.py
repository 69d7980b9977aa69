"""A .gguf file -> a Hugging Face directory, once; the weights stay where they are, found by an index."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.checkpoint.config_json import CONFIG_FILE, GENERATION_CONFIG_FILE
from triptych.checkpoint.gguf.index import GgufIndex, GgufTensor
from triptych.checkpoint.gguf.tokenizer import stop_token_ids, write_tokenizer
from triptych.errors import ModelError
from triptych.hub.cache import build_directory_once, cache_home
from triptych.hub.progress import ProgressLine

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

CONVERTER_VERSION = 1
"""Raise it when the converted files change: directories of another version are made anew."""

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

Metadata = dict[str, Any]
"""GGUF key -> value: int, float, bool, str or a list of them."""


def prepare_gguf(gguf: Path, *, sha256: str | None = None, progress: bool) -> Path:
    """Return the directory of a .gguf file's conversion, converting at first use.

    Args:
        gguf: absolute path.
        sha256: of the file, where it is known and the file lies in the cache: the conversion then
            survives a move of the cache. Else it is known by path, size and time of last change.
    Raises:
        ModelError: not a GGUF file, or a model or tokenizer that is not understood; names which.
    """
    stat = gguf.stat()
    identity = sha256 or hashlib.sha256(f"{gguf}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
    target = cache_home() / "models" / f"{gguf.stem}-{identity[:16]}"

    def build(directory: Path) -> None:
        with ProgressLine(f"converting config and tokenizer of {gguf.name}", enabled=progress):
            try:
                tensors = _convert(_open(gguf), directory)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                # Keys of another type or size than they always have, or text that is none.
                raise ModelError(f"{gguf}: its metadata cannot be used: {_in_one_line(error)}") from error
            GgufIndex(
                file=os.path.relpath(gguf, target) if sha256 else str(gguf),
                file_size=stat.st_size,
                mtime_ns=None if sha256 else stat.st_mtime_ns,
                tensors=tuple(tensors),
            ).write(directory)

    return build_directory_once(target, CONVERTER_VERSION, build, progress=progress)


def _open(gguf: Path) -> GGUFReader:
    from gguf import GGUFReader  # seconds to import and to run: needed only for the conversion

    try:
        reader = GGUFReader(gguf)
    except (ValueError, IndexError, OSError, KeyError, AssertionError) as error:
        # IndexError and friends are how the reader meets the end of a truncated header.
        raise ModelError(f"{gguf}: not a GGUF file, or cut short: {error}") from error
    if reader.byte_order != "I":
        raise ModelError(f"{gguf}: byte order: big-endian GGUF is not supported")
    return reader


def _convert(reader: GGUFReader, directory: Path) -> list[GgufTensor]:
    """Write the config and the tokenizer into a directory, and return the tensors."""
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _check_architecture(metadata)
    config = _config(metadata, tensors)
    _write_json(directory / CONFIG_FILE, config)
    _write_json(
        directory / GENERATION_CONFIG_FILE,
        {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]},
    )
    write_tokenizer(metadata, directory)
    return _index(tensors, config)


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _check_architecture(metadata: Metadata) -> None:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"gguf: general.architecture: {architecture!r} is not supported, only 'llama'; "
            "use the model's safetensors directory"
        )
    if metadata.get("llama.expert_count", 0):
        raise ModelError(
            f"gguf: llama.expert_count: {metadata['llama.expert_count']} experts are not supported"
        )
    if metadata.get("split.count", 1) > 1:
        raise ModelError(f"gguf: split.count: {metadata['split.count']} files; merge them with gguf-split")


def _config(metadata: Metadata, tensors: dict[str, ReaderTensor]) -> dict[str, Any]:
    """The config.json of the original, from the metadata that llama.cpp's converter wrote."""

    def fact(key: str, default: Any = None) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if value is None:
            raise ModelError(f"gguf: llama.{key}: is missing")
        return value

    num_heads = fact("attention.head_count")
    head_dim = fact("attention.key_length", fact("embedding_length") // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fact(key, head_dim) != head_dim:
            raise ModelError(
                f"gguf: llama.{key}: {fact(key)} differs from the head dimension {head_dim}, "
                "which is not supported"
            )
    if "token_embd.weight" not in tensors:
        raise ModelError("gguf: token_embd.weight: is missing")
    rope_theta = float(fact("rope.freq_base", 10000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": fact("embedding_length"),
        "intermediate_size": fact("feed_forward_length"),
        "num_hidden_layers": fact("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fact("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fact("context_length"),
        "rms_norm_eps": _shortest_float32(fact("attention.layer_norm_rms_epsilon")),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(metadata, tensors, rope_theta, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": _has_biases(tensors, ("attn_q", "attn_k", "attn_v", "attn_output")),
        "mlp_bias": _has_biases(tensors, ("ffn_gate", "ffn_up", "ffn_down")),
        "torch_dtype": "bfloat16",  # quantized weights have none; this is what most were made from
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": stop_token_ids(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _shortest_float32(value: float) -> float:
    """1e-05 instead of 9.999999747378752e-06: the number that was meant, when stored as float32."""
    for digits in range(1, 10):
        rounded = float(f"{value:.{digits}g}")
        if math.isclose(rounded, value, rel_tol=2**-24):
            return rounded
    return value


def _has_biases(tensors: dict[str, ReaderTensor], names: Sequence[str]) -> bool:
    """Whether the projections of layer 0 have biases; all or none, as config.json can say no more."""
    present = [name for name in names if f"blk.0.{name}.bias" in tensors]
    if present and len(present) < len(names):
        raise ModelError(
            f"gguf: blk.0: biases on {present} but not on all of {list(names)} are not supported"
        )
    return bool(present)


def _rope_scaling(
    metadata: Metadata, tensors: dict[str, ReaderTensor], theta: float, head_dim: int
) -> dict[str, Any] | None:
    """The rotary scaling: `linear` is in the metadata, `llama3` is a tensor of divisors by frequency."""
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(metadata.get("llama.rope.scaling.factor", 1.0))}
    if kind != "none":
        raise ModelError(f"gguf: llama.rope.scaling.type: {kind!r} is not supported")
    if _ROPE_FACTORS not in tensors:
        return None
    # llama.cpp's converter turns Llama 3's four numbers into divisors and drops the numbers. The lowest
    # frequency is divided by the full factor; the other three are the same in every Llama 3 checkpoint.
    divisors = [float(divisor) for divisor in tensors[_ROPE_FACTORS].data]
    scaling = {
        "rope_type": "llama3",
        "factor": max(divisors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_divisors(scaling, theta, head_dim)
    if len(divisors) != len(expected) or any(
        not math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, expected, strict=True)
    ):
        raise ModelError(
            f"gguf: {_ROPE_FACTORS}: the divisors are not those of Llama 3's rotary scaling, "
            "the only kind that is supported in this form"
        )
    return scaling


def _llama3_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> list[float]:
    """[head_dim / 2] what each rotary frequency is divided by. Source: llama.cpp, convert_hf_to_gguf.py."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        turns = scaling["original_max_position_embeddings"] / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return divisors


def _index(tensors: dict[str, ReaderTensor], config: dict[str, Any]) -> list[GgufTensor]:
    """Rename every tensor; one that has no place in the architecture stops the conversion."""
    entries = []
    for tensor in tensors.values():
        if tensor.name == _ROPE_FACTORS:  # taken up into config.json
            continue
        name = _hugging_face_name(tensor.name)
        permuted_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        entries.append(
            GgufTensor(
                name=name,
                gguf_name=tensor.name,
                type=tensor.tensor_type.name,
                shape=tuple(int(size) for size in reversed(tensor.shape)),
                offset=int(tensor.data_offset),
                size=int(tensor.n_bytes),
                permuted_heads=permuted_heads.get(name.split(".")[-2], 0),
            )
        )
    return entries


def _hugging_face_name(gguf_name: str) -> str:
    stem, _, kind = gguf_name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _LAYER_TENSOR_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_TENSOR_NAMES[layer[2]]}.{kind}"
    if stem in _TENSOR_NAMES:
        return f"{_TENSOR_NAMES[stem]}.{kind}"
    raise ModelError(f"gguf: tensor {gguf_name!r} has no place in LlamaForCausalLM")


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
