"""The runner of a real model, which can give its memory back for a while: docs/adr/0009.

            the model's weights    KV cache, graphs, buffers
awake       on the device          of a `ModelRunner`
level 1     in the host's memory   freed                       on a CPU the weights do not move
level 2     in their files         freed
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triptych import host
from triptych.errors import MemoryShort, TriptychError
from triptych.types.facts import SleepLevel, WorkerFacts
from triptych.types.step import StepPlan
from triptych_kernels.cpu.memory import zeros_in_huge_pages
from triptych_services.worker.adapters.store import AdapterStore
from triptych_services.worker.context.device import free_memory, held_memory
from triptych_services.worker.context.rank_group import OneRank, RankGroup
from triptych_services.worker.kv_transfer.base import BlockStore
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.runner.base import PendingStep, Runner, do_nothing
from triptych_services.worker.runner.encoder_runner import EncoderRunner
from triptych_services.worker.runner.model_runner import ModelRunner

log = logging.getLogger(__name__)

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The memory that a runner uses on its device, in bytes."""

    weights: int
    kv_cache: int
    activations: int
    """Memory of the largest step; 0 if that was not measured."""
    draft: int = 0
    """Weights and KV cache of a model that guesses, which are dropped at each level; 0: there is none."""


class SleepableRunner(Runner):
    """A `ModelRunner` or `EncoderRunner` that can be dropped and created again. Owned by the worker's runner thread."""

    def __init__(
        self,
        model: CausalLM,
        *,
        device: torch.device,
        needs: MemoryNeeds,
        load: Callable[[], CausalLM],
        create: Callable[[CausalLM], ModelRunner | EncoderRunner],
        warm_up: Callable[[ModelRunner | EncoderRunner], None],
        group: RankGroup | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        """Start the runner, ready for step 1.

        Args:
            load: Reads the same model from its checkpoint again.
            create: Creates the runner of a loaded model, with all its memory.
            warm_up: Prepares it for step 1, which all ranks do together.
            group: The connected ranks, of which all sleep or none; None: one rank.
            adapters: Adapters that rows may name, which stay loaded while it sleeps; None: none are served.
        """
        self._adapters = adapters
        self.device = device
        self._needs = needs
        self._load = load
        self._create = create
        self._warm_up = warm_up
        self._group = group or OneRank()
        self._model: CausalLM | None = model
        """The model, or None while the weights are dropped."""
        self._host_copy: HostCopy | None = None
        """Weights in the host's memory; None while they are on the device or dropped."""
        self._runner: ModelRunner | EncoderRunner | None = create(model)
        """The runner, or None while asleep."""
        warm_up(self._runner)
        self._facts = self._runner.facts

    @property
    def facts(self) -> WorkerFacts:
        return self._facts

    @property
    def adapters(self) -> AdapterStore:
        """The adapters that rows may name."""
        assert self._adapters is not None, "worker.max_adapters is 0"
        return self._adapters

    @property
    def model(self) -> CausalLM:
        assert self._model is not None, "asleep at level 2"
        return self._model

    @property
    def runner(self) -> ModelRunner:
        assert isinstance(self._runner, ModelRunner), "asleep, or an encoder's"
        return self._runner

    def block_store(self) -> BlockStore:
        assert self._runner is not None, "a sleeping worker grants no session"
        return self._runner.block_store()

    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> PendingStep:
        assert self._runner is not None, "a sleeping worker grants no session"
        return self._runner.launch(plan, on_prepared)

    def reset(self) -> None:
        assert self._runner is not None, "a sleeping worker grants no session"
        self._runner.reset()

    def sleep(self, level: SleepLevel) -> int:
        """Free memory; see `Runner.sleep`."""
        assert self._runner is not None, "already asleep"
        began, held = time.perf_counter(), held_memory(self.device)
        self._runner.reset()
        is_copied = level is SleepLevel.WEIGHTS_ON_HOST and self.device.type != "cpu"
        host_copy: HostCopy | None = None
        failure: TriptychError | None = None
        try:
            if is_copied:
                host_copy = HostCopy(_module(self.model))  # before anything changes, since it may fail
        except MemoryShort as error:
            failure = error.with_traceback(None)  # its frames would keep the copy alive
        if (failure := self._agree_on(failure)) is not None:
            if host_copy is not None:
                host_copy.discard()
            raise failure
        self._runner, self._host_copy = None, host_copy
        if level is SleepLevel.WEIGHTS_DROPPED:
            self._model = None
        self._release()
        released = max(held - held_memory(self.device), 0)
        log.info(
            "asleep at level %d: %d MiB released in %.2f s",
            level.value,
            released // _MIB,
            time.perf_counter() - began,
        )
        return released

    def wake(self) -> None:
        """Allocate memory again and prepare for step 1; see `Runner.wake`."""
        assert self._runner is None, "already awake"
        began, is_dropped = time.perf_counter(), self._model is None
        failure = self._agree_on(self._try_to_allocate()) or self._try_to_warm_up()
        if failure is not None:
            self._runner = None
            if is_dropped:
                self._model = None
            self._release()
            raise failure
        if self._runner is not None:
            self._facts = self._runner.facts  # of other weights, if the files hold new ones
        if self._host_copy is not None:
            self._host_copy.discard()
            self._host_copy = None
        log.info("awake after %.2f s", time.perf_counter() - began)

    def _agree_on(self, failure: TriptychError | None) -> TriptychError | None:
        """Return this rank's failure, or that of another rank: what one cannot do, none does. None if all can."""
        reasons = self._group.exchange("" if failure is None else failure.message)
        if failure is None:
            for rank, reason in enumerate(reasons):
                if reason:
                    failure = MemoryShort(f"rank {rank}: {reason}")
                    break
        return failure

    def _try_to_allocate(self) -> TriptychError | None:
        """Return the error, or None. Its traceback is removed, since the frames would keep allocated memory alive."""
        needed, free = self._needed_bytes(), free_memory(self.device)
        if needed > free:
            return self._memory_short(needed, free)
        try:
            if self._model is None:
                self._model = self._load()
            elif self._host_copy is not None:
                self._host_copy.restore()
            self._runner = self._create(self._model)
        except torch.OutOfMemoryError:  # another process was faster, or the free memory is fragmented
            pass
        except TriptychError as error:
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        return None if self._runner is not None else self._memory_short(needed, free)

    def _try_to_warm_up(self) -> TriptychError | None:
        """Return the error, or None, as `_try_to_allocate` does. That of one of several ranks ends the group."""
        assert self._runner is not None, "allocated"
        needed, free = self._needed_bytes(), free_memory(self.device)
        try:
            self._warm_up(self._runner)
        except torch.OutOfMemoryError:
            if self._group.size > 1:
                raise
            return self._memory_short(needed, free)
        except TriptychError as error:
            if self._group.size > 1:
                raise
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        return None

    def _needed_bytes(self) -> int:
        has_weights = self._model is not None and self._host_copy is None
        needs = self._needs
        return needs.kv_cache + needs.activations + needs.draft + (0 if has_weights else needs.weights)

    def _release(self) -> None:
        """Free the device's memory, including dropped objects in reference cycles and memory in torch's cache."""
        gc.collect()
        if self._host_copy is not None:
            self._host_copy.vacate()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):  # private, so another torch may not have it
                torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream that has multiplied, graphs' too
            torch.cuda.empty_cache()

    def _memory_short(self, needed: int, free: int) -> MemoryShort:
        needs = self._needs
        of_draft = f", the model that guesses {needs.draft // _MIB}" if needs.draft else ""
        return MemoryShort(
            f"waking takes {needed // _MIB} MiB on {self.device}, but {free // _MIB} MiB are free (weights "
            f"{needs.weights // _MIB}, KV cache {needs.kv_cache // _MIB}, the longest step {needs.activations // _MIB}"
            f"{of_draft} MiB); free some and wake the worker again"
        )


def _module(model: CausalLM) -> nn.Module:
    assert isinstance(model, nn.Module), "the contract of CausalLM"
    return model


_MIB = 1 << 20


class HostCopy:
    """The copy, and the storages that it was made from. Owned by the runner's thread.

    After construction `vacate` and `restore` are called in turn, and `discard` last.
    """

    def __init__(self, model: nn.Module) -> None:
        """Copy the weights; the model does not change.

        Raises:
            MemoryShort: The host has not enough free memory.
        """
        self._storages = weight_storages(model)
        self.device = self._storages[0].device
        sizes = [storage.nbytes() for storage in self._storages]
        if sum(sizes) > (free_bytes := host.free_memory()):
            raise MemoryShort(
                f"the weights take {sum(sizes) // _MIB} MiB, but {free_bytes // _MIB} MiB of the host's memory are "
                "free; free some, or sleep at level 2, which reads them from the checkpoint again"
            )
        self._memory = zeros_in_huge_pages((sum(sizes),), torch.uint8)
        self._parts = self._memory.split(sizes)
        self._pin()
        for storage, part in zip(self._storages, self._parts, strict=True):
            part.copy_(_bytes_of(storage), non_blocking=True)
        self._synchronize()

    def vacate(self) -> None:
        """Free the device's memory; the model must not be run until `restore`."""
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Fill the device's memory again.

        Raises:
            torch.OutOfMemoryError: There is not enough memory; call `vacate` to free what was allocated.
        """
        for storage, part in zip(self._storages, self._parts, strict=True):
            storage.resize_(part.nbytes)
            _bytes_of(storage).copy_(part, non_blocking=True)
        self._synchronize()

    def discard(self) -> None:
        """Free the host's memory."""
        if self.device.type == "cuda":
            code = int(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
            assert code == 0, f"pinned memory cannot be released: CUDA error {code}"
        del self._parts, self._memory

    def _pin(self) -> None:
        """Pin the memory, so that copies run at the speed of the bus.

        Pinned memory from torch would be rounded up to powers of two, and cached after use.
        """
        if self.device.type != "cuda":
            return
        num_bytes = self._memory.nbytes
        if code := int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0)):
            raise MemoryShort(
                f"{num_bytes // _MIB} MiB of the host's memory cannot be pinned (CUDA error {code}); sleep at level 2, "
                "which reads the weights from the checkpoint again"
            )

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def weight_storages(model: nn.Module) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors of a model, buffers included, each once."""
    found = {storage._cdata: storage for storage in map(Tensor.untyped_storage, _tensors(model, set()))}
    return [storage for storage in found.values() if storage.nbytes()]


def _tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors that can be reached through modules, objects of our kernels, and collections."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif isinstance(value, nn.Module) or type(value).__module__.startswith("triptych_kernels."):
        parts = list(getattr(value, "__dict__", {}).values())
    else:
        return
    for part in parts:
        yield from _tensors(part, seen)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a view of the storage, [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
