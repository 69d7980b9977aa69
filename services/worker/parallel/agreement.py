"""What all ranks of a group must share, compared before any of them loads a weight."""

from __future__ import annotations

import json

from services.worker.context.resolved import ResolvedConfig
from triptych.config.shared import shared_config
from triptych.errors import HandshakeMismatch


def check_agreement(config: ResolvedConfig, *, fingerprint: str, processor: str) -> None:
    """Stop before ranks compute parts of different things.

    Equal inputs give equal plans of the KV cache, and equal processors equal bits: every rank then draws the same
    tokens from the same logits, and none has to be told them.

    Args:
        fingerprint: of the checkpoint, as `loader.fingerprint` computes it.
        processor: what the kernels run on, in words.
    Raises:
        HandshakeMismatch: a rank differs from rank 0; names every such key with both values.
        RankUnavailable: a rank is gone.
    """
    cache, parallel = config.engine.cache, config.engine.parallel
    own = shared_config(config.engine) | {
        "parallel.tensor_parallel_size": str(parallel.tensor_parallel_size),
        "cache.num_blocks": str(cache.num_blocks),
        "cache.memory_fraction": str(cache.memory_fraction),
        "dtype": config.dtype,
        "KV dtype": config.kv_dtype,
        "quantization": config.quantization,
        "batch invariance": str(config.batch_invariant),
        "checkpoint": fingerprint,
        "processor": processor,
    }
    first, *others = [json.loads(text) for text in config.group.exchange(json.dumps(own))]
    differing = [
        f"{key}: rank 0 has {first[key]!r}, rank {rank} has {other[key]!r}"
        for rank, other in enumerate(others, start=1)
        for key in first
        if first[key] != other[key]
    ]
    if differing:
        raise HandshakeMismatch(
            "; ".join(differing) + "; give all ranks the same file, environment, flags and kind of machine"
        )
