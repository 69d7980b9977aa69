"""A checkpoint's architecture as plain numbers, read from config.json or GGUF metadata without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary position embedding; the names are those of Hugging Face's `rope_parameters`."""

    theta: float = 10000.0
    kind: str = "default"
    """default, linear, dynamic, llama3, yarn, longrope, proportional"""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    rotary_dim: int = 0
    """Elements of a head, its first ones, that are rotated; 0: all."""
    is_interleaved: bool = False
    """Whether neighbours are rotated against each other, rather than the halves of what is rotated."""
    attention_factor: float = 0.0
    """Factor of cosines and sines; 0: as the kind computes it."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: whether the limits of its ramp are rounded to whole frequencies."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """longrope: a divisor for each frequency, for sequences up to the original length and for longer ones."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Normalisation of a vector."""

    kind: str = "rms"
    """rms: by the root of its mean square. layer: its mean is subtracted first."""
    eps: float = 1e-6
    offset: float = 0.0
    """Added to the stored weight."""
    bias: bool = False
    weight: bool = True
    """False: the vector is normalised and no more."""


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """The shape and numerics of a model, as its checkpoint states them."""

    name: str
    """Registry key, as in config.json: `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeParameters
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    dtype: str
    """float32, bfloat16 or float16, as stored; GGUF counts as bfloat16."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_experts: int = 0
    """In each layer's mixture; 0: every layer has one MLP."""
    num_experts_per_tok: int = 0
    """How many of them a token goes through."""
    sliding_window: int = 0
    """Keys that a token sees at most, its own included, in every layer; 0: all."""
    is_gguf: bool = False
