"""A random model of Llama 3.2 1B's shapes in a .gguf file of types as llama.cpp's Q4_K_M chooses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from numpy.typing import NDArray

from benchmarks.peers.models import copy_tokenizer, gguf

_HIDDEN, _INTERMEDIATE, _KV, _LAYERS = 2048, 8192, 512, 16
_SHAPES = {
    "attn_q": (_HIDDEN, _HIDDEN),
    "attn_k": (_KV, _HIDDEN),
    "attn_v": (_KV, _HIDDEN),
    "attn_output": (_HIDDEN, _HIDDEN),
    "ffn_gate": (_INTERMEDIATE, _HIDDEN),
    "ffn_up": (_INTERMEDIATE, _HIDDEN),
    "ffn_down": (_HIDDEN, _INTERMEDIATE),
}
_MORE_BITS = ("attn_v", "ffn_down")
_Q4_K, _Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
_PLACES_OF_SCALES = {_Q4_K: (0, 2), _Q6_K: (208,)}
"""Type -> bytes of a block at which a float16 begins."""


def write_random_llama(path: Path) -> None:
    """Write the model, 0.67 GB; the tokenizer, and with it the embedding of 49,152 tokens, is SmolLM2's."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INTERMEDIATE)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    num_tokens = copy_tokenizer(GGUFReader(gguf()), writer)
    random = np.random.default_rng(1)

    def add(name: str, shape: tuple[int, int], kind: GGMLQuantizationType) -> None:
        writer.add_tensor(name, _random_blocks(random, shape, kind), raw_dtype=kind)

    add("token_embd.weight", (num_tokens, _HIDDEN), _Q6_K)
    for layer in range(_LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(_HIDDEN, np.float32))
        for name, shape in _SHAPES.items():
            kind = _Q6_K if name in _MORE_BITS and _has_more_bits(layer) else _Q4_K
            add(f"blk.{layer}.{name}.weight", shape, kind)
    writer.add_tensor("output_norm.weight", np.ones(_HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _has_more_bits(layer: int) -> bool:
    """Source: `use_more_bits` of llama-quant.cpp in llama.cpp."""
    eighth = _LAYERS // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


def _random_blocks(
    random: np.random.Generator, shape: tuple[int, int], kind: GGMLQuantizationType
) -> NDArray[np.uint8]:
    """Return [rows, bytes] with any codes and with scales as of usual weights."""
    num_weights, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // num_weights, num_bytes), np.uint8)
    for place in _PLACES_OF_SCALES[kind]:
        blocks[..., place : place + 2] = np.frombuffer(np.float16(1 / 4096).tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1)
