"""Weights drawn from a seed: a model to measure and test with, without files."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from services.worker.loader.base import Checkpoint, StoredTensor
from triptych.config.architecture import ModelArchitecture
from triptych.errors import ModelError

_LLAMA_SHAPED = ("LlamaForCausalLM", "MistralForCausalLM")
_STANDARD_DEVIATION = 0.02  # what Llama is initialised with: activations neither vanish nor overflow


class RandomCheckpoint(Checkpoint):
    """A Llama-shaped model; each tensor depends on the seed and its own name alone."""

    def __init__(self, architecture: ModelArchitecture, seed: int) -> None:
        """Raises ModelError for an architecture whose tensors are not known here."""
        if architecture.name not in _LLAMA_SHAPED:
            raise ModelError(
                f"load.format: random: {architecture.name} is not supported, only {', '.join(_LLAMA_SHAPED)}"
            )
        self._seed = seed
        # The seed is part of the type, so that models of two seeds have two fingerprints.
        self.tensors = {
            name: StoredTensor(shape, f"random:{seed}", 4 * math.prod(shape))
            for name, shape in _llama_shapes(architecture).items()
        }
        self.file_name_to_size: dict[str, int] = {}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        shape = self.tensors[name].shape
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype)
        seed = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "little", signed=True))
        return torch.empty(shape).normal_(0.0, _STANDARD_DEVIATION, generator=generator).to(dtype)


def _llama_shapes(architecture: ModelArchitecture) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, in Hugging Face's layout."""
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    query_size = architecture.num_heads * architecture.head_dim
    kv_size = architecture.num_kv_heads * architecture.head_dim
    projections = {
        "self_attn.q_proj": (query_size, hidden, architecture.attention_bias),
        "self_attn.k_proj": (kv_size, hidden, architecture.attention_bias),
        "self_attn.v_proj": (kv_size, hidden, architecture.attention_bias),
        "self_attn.o_proj": (hidden, query_size, architecture.attention_bias),
        "mlp.gate_proj": (inner, hidden, architecture.mlp_bias),
        "mlp.up_proj": (inner, hidden, architecture.mlp_bias),
        "mlp.down_proj": (hidden, inner, architecture.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (architecture.vocab_size, hidden)}
    for layer in range(architecture.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not architecture.tie_word_embeddings:
        shapes["lm_head.weight"] = (architecture.vocab_size, hidden)
    return shapes
