"""Builders of small .gguf files, with the writer of the `gguf` package."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray

from triptych.hub import cache_home

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]

Weights = dict[str, NDArray[np.float32]]


def sentencepiece_vocabulary(pieces: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """A `llama` tokenizer: unk, bos, eos, 256 bytes, then `pieces` with their scores."""
    kinds = gguf.TokenType
    return {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *(piece for piece, _ in pieces)],
        "scores": [0.0] * 259 + [score for _, score in pieces],
        "types": [
            kinds.UNKNOWN,
            kinds.CONTROL,
            kinds.CONTROL,
            *[kinds.BYTE] * 256,
            *[kinds.NORMAL] * len(pieces),
        ],
        "bos": 1,
        "eos": 2,
    }


def byte_level_vocabulary(merges: Sequence[str], pre: str = "gpt-2") -> dict[str, Any]:
    """A `gpt2` tokenizer: two control tokens, a user-defined one, the byte alphabet and `merges`."""
    tokens = [
        "<|start|>",
        "<|end|>",
        "<tool>",
        *_byte_alphabet(),
        *(merge.replace(" ", "") for merge in merges),
    ]
    kinds = gguf.TokenType
    types = [kinds.CONTROL, kinds.CONTROL, kinds.USER_DEFINED, *[kinds.NORMAL] * (len(tokens) - 3)]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "types": types,
        "merges": list(merges),
        "bos": 0,
        "eos": 1,
    }


def tokenizer_metadata(vocabulary: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer metadata that a reader of a .gguf file with this vocabulary reports."""
    keys = {
        "model": "model",
        "pre": "pre",
        "tokens": "tokens",
        "types": "token_type",
        "scores": "scores",
        "merges": "merges",
        "bos": "bos_token_id",
        "eos": "eos_token_id",
    }
    return {f"tokenizer.ggml.{keys[key]}": value for key, value in vocabulary.items()}


def write_gguf(
    path: Path,
    *,
    vocabulary: dict[str, Any] | None = None,
    num_layers: int = 1,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    architecture: str = "llama",
    weights: Weights | None = None,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, Any] | None = None,
    pack: Callable[[str, NDArray[np.float32]], tuple[NDArray[Any], GGMLQuantizationType]] | None = None,
) -> Path:
    """Write a whole model; `weights` (under GGUF names) default to random ones without lm_head.

    `pack` returns the stored form of a matrix, in place of `quantization`.

    `extra`: more metadata, by key, of type str, bool, int or float.
    """
    vocabulary = vocabulary or byte_level_vocabulary(["a b", "ab c"])
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(num_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden_size)
    writer.add_feed_forward_length(intermediate_size)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(vocabulary["model"])
    if "pre" in vocabulary:
        writer.add_tokenizer_pre(vocabulary["pre"])
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
    if "merges" in vocabulary:
        writer.add_token_merges(vocabulary["merges"])
    writer.add_bos_token_id(vocabulary["bos"])
    writer.add_eos_token_id(vocabulary["eos"])
    adders = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
    }
    for key, value in (extra or {}).items():
        adders[type(value)](key, value)
    if weights is None:
        weights = random_weights(
            len(vocabulary["tokens"]), num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads
        )
    for name, array in weights.items():
        kind = quantization if array.ndim == 2 else GGMLQuantizationType.F32
        if pack is not None and array.ndim == 2:
            data, kind = pack(name, array)
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def use_own_cache(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Keep models that are made of files in this directory, but not what is found out about this machine once."""
    machine = os.environ.get("TRIPTYCH_MACHINE_DIR", cache_home() / "machine")
    monkeypatch.setenv("TRIPTYCH_MACHINE_DIR", str(machine))
    monkeypatch.setenv("TRIPTYCH_HOME", str(cache))


def random_weights(
    vocab_size: int,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
) -> Weights:
    kv_size = hidden_size // num_heads * num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, hidden_size)}
    for layer in range(num_layers):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (hidden_size,),
                "ffn_norm": (hidden_size,),
                "attn_q": (hidden_size, hidden_size),
                "attn_k": (kv_size, hidden_size),
                "attn_v": (kv_size, hidden_size),
                "attn_output": (hidden_size, hidden_size),
                "ffn_gate": (intermediate_size, hidden_size),
                "ffn_up": (intermediate_size, hidden_size),
                "ffn_down": (hidden_size, intermediate_size),
            }.items()
        }
    shapes["output_norm.weight"] = (hidden_size,)
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def llama3_rope_factors(
    head_dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> NDArray[np.float32]:
    """The `rope_freqs.weight` of a Llama 3 checkpoint, in the words of llama.cpp's converter."""
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi / (1.0 / theta ** (index / head_dim))
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def _byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


_PLACES_OF_SCALES = {
    "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Type -> bytes of a block at which a float16 begins."""


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> NDArray[np.uint8]:
    """Return rows of blocks with any codes and with scales as of usual weights."""
    random = np.random.default_rng(rows + columns)
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, columns // num_weights, num_bytes), dtype=np.uint8)
    for place in _PLACES_OF_SCALES.get(kind.name, ()):
        scales = (random.uniform(0.5, 1.5, blocks.shape[:2]) / 4096).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    if kind.name == "MXFP4":
        blocks[..., 0] = random.integers(118, 124, blocks.shape[:2])
    return blocks.reshape(rows, -1)
