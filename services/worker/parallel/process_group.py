"""The ranks of one model over torch.distributed: NCCL between CUDA devices, gloo between CPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError
from torch.nn import functional

from triptych.config import ParallelConfig
from triptych.errors import ConfigError, RankUnavailable
from triptych_services.worker.context.group_place import GroupPlace, split_address
from triptych_services.worker.context.resolved_config import RankFacts, ResolvedConfig
from triptych_services.worker.parallel.shared_memory import share_memory
from triptych_services.worker.parallel.stage_link import ProcessStageLink, naming_errors

log = logging.getLogger(__name__)

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name since torch 2.13


class ProcessGroup:
    """A `RankGroup` of processes. torch.distributed allows each process one group at a time."""

    def __init__(self, config: ResolvedConfig, place: GroupPlace | None = None) -> None:
        """Meet the other ranks and set up every connection, so that no step and no capture has to.

        Args:
            place: As of `create_rank_group`.

        Raises:
            ConfigError, RankUnavailable: As of `create_rank_group`.
        """
        started = time.monotonic()
        self.rank, self.size = config.rank.rank, config.rank.num_ranks
        self.tensor_parallel_size = config.rank.tensor_parallel_size
        self._is_alone = config.rank.num_stages == config.rank.num_ranks > 1
        """Whether this rank is a stage of its own, which has no other to sum with."""
        self._device = torch.device(config.rank.device)
        self._timeout_s = config.engine.parallel.timeout_s
        self._failure = ""
        self._num_exchanges = 0
        self._store = meet(config.engine.parallel, self.rank, self.size, place)
        on_cuda = self._device.type == "cuda"
        with self._naming("meeting"):
            dist.init_process_group(
                "nccl" if on_cuda else "gloo",
                store=PrefixStore(place.generation if place else "group", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self._timeout_s),
                device_id=self._device if on_cuda else None,  # NCCL connects now, not at the first sum
            )
            self._sharing = _connect_stage(config.rank)
            self.stages = (
                ProcessStageLink(config.rank, timeout_s=self._timeout_s)
                if config.rank.num_stages > 1
                else None
            )
        self._shared = share_memory(config, self.exchange)
        self._warm_up()
        log.info(
            "rank %d of %d on %s, connected %sin %.1f s",
            self.rank,
            self.size,
            self._device,
            "by shared memory " if self._shared else "",
            time.monotonic() - started,
        )

    @property
    def is_recordable(self) -> bool:
        """See `RankGroup`."""
        return self._is_alone or self._shared is not None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `RankGroup`."""
        if self._is_alone:
            return tensor
        with self._naming("all_reduce"):
            if self._shared is not None:
                return self._shared.all_reduce(tensor)
            dist.all_reduce(tensor, group=self._sharing)
        return tensor

    def all_gather(self, tensor: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """See `RankGroup`."""
        if self._is_alone:
            return tensor
        if self._shared is not None:
            with self._naming("all_gather"):
                return self._shared.all_gather(tensor, lengths)
        longest, num_rows = max(lengths), len(tensor)
        if tensor.shape[1] < longest:
            tensor = functional.pad(tensor, (0, longest - tensor.shape[1]))
        gathered = tensor.new_empty(self.tensor_parallel_size, num_rows, longest)
        with self._naming("all_gather"):
            _all_gather(gathered.view(-1, longest), tensor.contiguous(), group=self._sharing)
        parts = zip(gathered, lengths, strict=True)
        return torch.cat([part[:, :length] for part, length in parts], dim=1)

    def minimum(self, number: int) -> int:
        tensor = torch.tensor(number, dtype=torch.int64, device=self._device)
        with self._naming("minimum"):
            dist.all_reduce(tensor, dist.ReduceOp.MIN)
            return int(tensor)

    def exchange(self, text: str) -> list[str]:
        prefix = f"exchange/{self._num_exchanges}"
        self._num_exchanges += 1
        with self._naming("exchange"):
            self._store.set(f"{prefix}/{self.rank}", text)
            return [self._store.get(f"{prefix}/{rank}").decode() for rank in range(self.size)]

    @contextmanager
    def step(self) -> Iterator[None]:
        """See `RankGroup`."""
        if self._failure:
            raise RankUnavailable(
                f"rank {self.rank} of {self.size}: a step failed ({self._failure}), which the other ranks may still "
                "compute; restart all ranks"
            )
        try:
            yield
        except TimeoutError as error:  # of a recorded program's sum
            self._failure = str(error)
            with self._naming("a step"):
                raise
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        if self.stages is not None:
            self.stages.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _warm_up(self) -> None:
        """Run each operation once, so that its buffers exist before memory is measured and graphs are captured."""
        ones, size = torch.ones(1, 1, device=self._device), self.tensor_parallel_size
        total = self.all_gather(self.all_reduce(ones), (1,) * size)
        assert total.tolist() == [[float(size)] * size], "a sum over the ranks that share layers"
        if self.stages is not None:
            with self._naming("meeting of the stages"):
                self.stages.warm_up(self._device)

    def _naming(self, what: str) -> AbstractContextManager[None]:
        return naming_errors(what, f"rank {self.rank} of {self.size}", self._timeout_s)


def _connect_stage(rank: RankFacts) -> dist.ProcessGroup | None:
    """Return the group of the ranks that share this rank's layers; None if it is the default one, of all ranks.

    Every rank creates the groups of all stages, as torch.distributed wants.
    """
    if rank.num_stages == 1:
        return None
    size = rank.tensor_parallel_size
    stages = [dist.new_group(list(range(start, start + size))) for start in range(0, rank.num_ranks, size)]
    return stages[rank.stage]


def meet(parallel: ParallelConfig, rank: int, size: int, place: GroupPlace | None = None) -> TCPStore:
    """Wait until all ranks have come to the store at rank 0, and return it.

    Args:
        place: Names the store's address; None: `parallel.rendezvous_address` does.

    Raises:
        ConfigError: The address is invalid, rank 0 cannot listen there, or two workers were given the same rank.
        RankUnavailable: A rank did not come within `parallel.timeout_s`; names it.
    """
    address = place.store_address if place else parallel.rendezvous_address
    host, port = split_address(address)
    timeout = timedelta(seconds=parallel.timeout_s)
    where = f"parallel.rendezvous_address: {address}"
    waited = f"rank {rank} of {size} waited {parallel.timeout_s:g} s (parallel.timeout_s)"
    try:
        store = TCPStore(
            host,
            port,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=place.store_fd if place else None,
        )
    except DistError as error:
        if rank == 0:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{where}: rank 0 cannot listen there: {reason}") from error
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
    except DistError as error:  # the store itself, which ended with rank 0
        raise RankUnavailable(f"{where}: rank 0 left before all ranks had come") from error
    return store
