"""What a model and its layers are built from: the operator's word, the checkpoint's, the machine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.worker.context.rank_group import OneRank, RankGroup
from triptych.checkpoint.architecture import ModelArchitecture
from triptych.config import EngineConfig
from triptych.types.facts import RankFacts


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Built once per worker process; every model and layer takes `config: ResolvedConfig, prefix: str`."""

    engine: EngineConfig
    architecture: ModelArchitecture
    rank: RankFacts = field(default_factory=RankFacts)
    group: RankGroup = field(default_factory=OneRank)
    """The ranks that compute each layer together, connected: of `rank.tensor_parallel_size`."""
    dtype: str = "float32"
    """`engine.model.dtype` with `auto` resolved for this machine: float32, bfloat16, float16."""
    kv_dtype: str = "float32"
    """`engine.cache.dtype` with `auto` resolved: int8, float8_e4m3fn, or one of `dtype`'s."""
    quantization: str = "none"
    """`engine.model.quantization` with `auto` resolved: none, q4, q8, int8, fp8."""
    attention_backend: str = "torch"
    """`engine.worker.attention_backend` with `auto` resolved: native, triton, torch, flash-attn (of version 2),
    flash-attn-3, flashinfer; none on a simulated device."""
    batch_invariant: bool = True
    """`engine.model.batch_invariant` with `auto` resolved."""
    tensor_types: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor in the checkpoint -> form of its stored elements: quantized weights keep what they can.
    Empty: nothing is kept."""
