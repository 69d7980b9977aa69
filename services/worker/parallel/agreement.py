"""The check that all ranks of a group compute the same thing, made before any of them loads a weight."""

from __future__ import annotations

import json

from services.worker.context.resolved import ResolvedConfig
from triptych.config.loader import check_same_values, rank_config


def check_agreement(config: ResolvedConfig, *, fingerprint: str, processor: str) -> None:
    """Compare this rank's model, config and processor with those of the other ranks.

    Equal inputs give equal plans of the KV cache, and equal processors equal bits: every rank then draws the same
    tokens from the same logits, so that tokens need not be sent between ranks.

    Args:
        fingerprint: Digest of the checkpoint, as `loader.fingerprint` computes it.
        processor: Name of what the kernels run on.

    Raises:
        HandshakeMismatch: A rank differs from rank 0; names every such key with both values.
        RankUnavailable: A rank is gone.
    """
    own = rank_config(config.engine) | {
        "dtype": config.dtype,
        "KV dtype": config.kv_dtype,
        "quantization": config.quantization,
        "attention backend": config.attention_backend,
        "batch invariance": str(config.batch_invariant),
        "checkpoint": fingerprint,
        "processor": processor,
    }
    rank_to_values = [json.loads(text) for text in config.group.exchange(json.dumps(own))]
    check_same_values(
        {f"rank {rank}": values for rank, values in enumerate(rank_to_values)},
        advice="give all ranks the same file, environment, flags and kind of machine; only worker.rank and other "
        "options of a single process may differ",
    )
