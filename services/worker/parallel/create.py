"""From this process's rank to the group that it computes with, and the check that all ranks compute the same thing."""

from __future__ import annotations

import json

from triptych.config.loader import check_same_values, rank_config
from triptych.types.identity import ModelIdentity
from triptych_services.worker.context.group_place import GroupPlace
from triptych_services.worker.context.rank_group import OneRank, RankGroup
from triptych_services.worker.context.resolved_config import ResolvedConfig


def create_rank_group(config: ResolvedConfig, place: GroupPlace | None = None) -> RankGroup:
    """Connect the ranks of `config.rank`'s group, and wait until all of them are present.

    Args:
        place: What the ranks know of each other if they have met before. None: they meet at
            `parallel.rendezvous_address`.

    Called when the thread has chosen its device and before any memory is measured, since connections take memory.

    Raises:
        ConfigError: The ranks cannot meet at `parallel.rendezvous_address`.
        RankUnavailable: A rank did not come within `parallel.timeout_s`, or left at once; names it.
    """
    if config.rank.num_ranks == 1:
        return OneRank()
    # some builds of torch have no torch.distributed, and one rank does not need it
    from triptych_services.worker.parallel.process_group import ProcessGroup

    return ProcessGroup(config, place)


def check_agreement(
    config: ResolvedConfig, group: RankGroup, *, identity: ModelIdentity, processor: str
) -> None:
    """Compare this rank's model, config and processor with those of the other ranks, before weights are loaded.

    Equal inputs give equal plans of the KV cache, and equal processors equal bits: every rank then draws the same
    tokens from the same logits, so that tokens need not be sent between ranks.

    Args:
        identity: Of the checkpoint.
        processor: Name of what the kernels run on.

    Raises:
        ConfigError: `parallel.expert_counts` is of another checkpoint.
        HandshakeMismatch: A rank differs from rank 0; names every such key with both values.
        RankUnavailable: A rank is gone.
    """
    own = rank_config(config.engine) | {
        "dtype": config.dtype,
        "KV dtype": config.kv_dtype,
        "quantization": config.quantization,
        "attention backend": config.attention_backend,
        "batch invariance": str(config.batch_invariant),
        "checkpoint": identity.fingerprint,
        "weights": identity.weights,
        "processor": processor,
        "expert counts": "" if config.expert_placement is None else config.expert_placement.digest,
    }
    rank_to_values = [json.loads(text) for text in group.exchange(json.dumps(own))]
    check_same_values(
        {f"rank {rank}": values for rank, values in enumerate(rank_to_values)},
        advice="give all ranks the same file, environment, flags and kind of machine; only worker.rank and other "
        "options of a single process may differ",
    )
    if config.expert_placement is not None:
        config.expert_placement.check_weights(identity.weights)
