"""What a model and its layers are built from: the operator's word, the checkpoint's, the machine's."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.config.architecture import ModelArchitecture
from triptych.config.fields import EngineConfig
from triptych.types.facts import RankFacts


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Built once per worker process; every model and layer takes `config: ResolvedConfig, prefix: str`."""

    engine: EngineConfig
    architecture: ModelArchitecture
    rank: RankFacts = field(default_factory=RankFacts)
    dtype: str = "float32"
    """`engine.model.dtype` with `auto` resolved for this machine: float32, bfloat16, float16."""
    kv_dtype: str = "float32"
    """`engine.cache.dtype` likewise."""
