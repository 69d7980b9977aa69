"""Lists the options that an engine and its worker must agree on. The hello carries them, the worker compares."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.config.fields import EngineConfig
from triptych.errors import HandshakeMismatch


def shared_config(config: EngineConfig) -> dict[str, str]:
    """Key to value, as the operator set them on this side."""
    return {
        "model.model": config.model.model,
        "model.dtype": config.model.dtype,
        "model.quantization": config.model.quantization,
        "model.max_model_len": str(config.model.max_model_len),
        "cache.dtype": config.cache.dtype,
        "cache.block_size": str(config.cache.block_size),
        "scheduler.max_num_seqs": str(config.scheduler.max_num_seqs),
        "scheduler.max_num_batched_tokens": str(config.scheduler.max_num_batched_tokens),
    }


def check_shared(*, engine: Mapping[str, str], worker: Mapping[str, str]) -> None:
    """Raise HandshakeMismatch naming every key that differs, with both values."""
    differing = [
        f"{key}: engine has {engine.get(key, 'nothing')!r}, worker has {worker.get(key, 'nothing')!r}"
        for key in sorted({*engine, *worker})
        if engine.get(key) != worker.get(key)
    ]
    if differing:
        raise HandshakeMismatch(
            "; ".join(differing) + "; give both processes the same file, environment and flags"
        )
