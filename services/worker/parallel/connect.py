"""From this process's place among the ranks to the group that it computes with."""

from __future__ import annotations

from services.worker.context.rank_group import RankGroup
from services.worker.context.resolved import ResolvedConfig


def connect(config: ResolvedConfig) -> RankGroup:
    """The group that `config.rank` is of, every rank of it present; of one rank, `config.group` as it is.

    Called when the device is the thread's own and nothing has been measured yet: connections take memory.

    Raises:
        ConfigError: the ranks cannot meet at `parallel.rendezvous_address`.
        RankUnavailable: a rank did not come within `parallel.timeout_s`, or left at once; names it.
    """
    if config.rank.tensor_parallel_size == 1:
        return config.group
    # one rank needs nothing of torch.distributed
    from services.worker.parallel.process_group import ProcessGroup

    return ProcessGroup(config)
