"""Where the ranks of a group meet: a store at rank 0, reached by the address that all of them are told."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from triptych.config import ParallelConfig
from triptych.errors import ConfigError, RankUnavailable


def meet(parallel: ParallelConfig, rank: int, size: int) -> TCPStore:
    """Wait until all ranks are here.

    Raises:
        ConfigError: the address is none, or rank 0 cannot listen there; or a rank was given to two workers.
        RankUnavailable: a rank did not come within `parallel.timeout_s`; names it.
    """
    host, port = _split(parallel.rendezvous_address)
    timeout = timedelta(seconds=parallel.timeout_s)
    where = f"parallel.rendezvous_address: {parallel.rendezvous_address}"
    waited = f"rank {rank} of {size} waited {parallel.timeout_s:g} s (parallel.timeout_s)"
    try:
        store = TCPStore(host, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    except DistError as error:
        if rank == 0:
            raise ConfigError(f"{where}: rank 0 cannot listen there: {_first_line(error)}") from error
        raise RankUnavailable(f"{where}: {waited} for rank 0 to listen there; is it running?") from error
    arrived = [f"arrived/{number}" for number in range(size)]
    try:
        if store.add(arrived[rank], 1) > 1:
            raise ConfigError(f"worker.rank: {rank} was given to two workers of the group at {where}")
        try:
            store.wait(arrived, timeout)
        except DistError as error:
            missing = [number for number, key in enumerate(arrived) if not store.check([key])]
            raise RankUnavailable(f"{where}: {waited} for ranks {missing}; are they running?") from error
    except DistError as error:  # the store itself, with rank 0
        raise RankUnavailable(f"{where}: rank 0 left before all were there") from error
    return store


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"parallel.rendezvous_address: {address!r} is not host:port with a port of 1 to 65535; "
            "name a host and a free port of rank 0's machine"
        )
    return host.strip("[]"), int(port)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
