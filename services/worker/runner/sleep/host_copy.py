"""A copy of a model's weights in the host's memory, while their memory on the device is freed.

Storages are emptied and filled in place, and no tensor is replaced. So tied parameters, views into stacks of experts
and weights that are not parameters need no special treatment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from services.worker.context import host
from triptych.errors import MemoryShort
from triptych_kernels.cpu.memory import zeros_in_huge_pages

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
        self._device = self._storages[0].device
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
        if self._device.type == "cuda":
            code = int(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
            assert code == 0, f"pinned memory cannot be released: CUDA error {code}"
        del self._parts, self._memory

    def _pin(self) -> None:
        """Pin the memory, so that copies run at the speed of the bus.

        Pinned memory from torch would be rounded up to powers of two, and cached after use.
        """
        if self._device.type != "cuda":
            return
        num_bytes = self._memory.nbytes
        if code := int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0)):
            raise MemoryShort(
                f"{num_bytes // _MIB} MiB of the host's memory cannot be pinned (CUDA error {code}); sleep at level 2, "
                "which reads the weights from the checkpoint again"
            )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


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
