"""Sums between CPU ranks of one machine through memory that they share, which recorded programs contain."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.ranks import MAX_RANKS, SharedRanks, create_file
from triptych_services.worker.context.attention_choice import NATIVE_DTYPES
from triptych_services.worker.context.group_place import host_name
from triptych_services.worker.context.resolved_config import ResolvedConfig

log = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")


def share_memory(config: ResolvedConfig, exchange: Callable[[str], list[str]]) -> SharedRanks | None:
    """Return the memory that the ranks of this stage share, or None if they must send each other messages.

    All ranks of the group call this together, and those of a stage get the same answer.

    Args:
        exchange: See `RankGroup`.
    """
    rank, obstacle = config.rank, ""
    first = rank.stage * rank.tensor_parallel_size
    stage = slice(first, first + rank.tensor_parallel_size)
    hosts = exchange(host_name())[stage]
    if rank.device != "cpu" or not isa() or config.dtype not in NATIVE_DTYPES:
        obstacle = "only native kernels on CPUs do that"
    elif len(set(hosts)) > 1:
        obstacle = "the ranks are on several machines"
    elif rank.tensor_parallel_size > MAX_RANKS:
        obstacle = f"there are more than {MAX_RANKS} ranks"
    file: Path | None = None
    if not obstacle and rank.tensor_parallel_rank == 0:
        try:
            folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
            file = create_file(folder, rank.tensor_parallel_size)
        except OSError as error:
            obstacle = f"no memory is to be had: {error}"
    name = exchange("" if file is None else str(file))[first]
    shared: SharedRanks | None = None
    if not obstacle and name:
        try:
            shared = SharedRanks(
                Path(name),
                rank=rank.tensor_parallel_rank,
                num_ranks=rank.tensor_parallel_size,
                timeout_s=config.engine.parallel.timeout_s,
            )
        except OSError as error:
            obstacle = f"rank {rank.rank} does not see what rank {first} has made: {error}"
    obstacles = exchange(obstacle)[stage]
    if file is not None:
        with suppress(FileNotFoundError):
            file.unlink()  # it lives on in those who have mapped it
    why = next((obstacle for obstacle in obstacles if obstacle), "")
    if why:
        if rank.device == "cpu":
            log.warning("ranks send each other messages instead of sharing memory, which is slower: %s", why)
        return None
    return shared
