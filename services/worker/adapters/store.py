"""The loaded adapters of a worker: in the host's memory, and some of them in the device's slots."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from triptych.checkpoint.adapter import AdapterFiles, AdapterModule, read_adapter
from triptych.checkpoint.architecture import ModelArchitecture
from triptych.errors import MemoryShort, ModelError, WrongState
from triptych.types.adapters import AdapterFacts
from triptych_kernels.weights.adapters import PackedAdapter
from triptych_services.worker.adapters.sites import ModelSites
from triptych_services.worker.adapters.slots import AdapterUnavailable, SlotTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Bounds of the adapters that one worker holds."""

    max_adapters: int
    """Slots on the device: the most different adapters in a step."""
    max_rank: int
    """Largest rank of a module."""
    max_bytes: int
    """Memory of loaded adapters on the host, and size of the largest file that is read."""


@dataclass(slots=True, eq=False)
class _Loaded:
    """An adapter in the host's memory."""

    facts: AdapterFacts
    packed: Mapping[int, PackedAdapter]


class AdapterStore:
    """`load`, `unload` and `list` are called on any thread, the rest on the runner's. No step waits for a load.

    Where a native product reads the adapter, a slot is filled by writing addresses.
    """

    def __init__(self, architecture: ModelArchitecture, limits: AdapterLimits) -> None:
        self.limits = limits
        self._architecture = architecture
        self._lock = threading.Lock()
        """Held for changes of the tables below, never while files are read or packed."""
        self._loading = threading.Lock()
        """Held by the one load that is in progress, and its memory is then bounded, too."""
        self._loaded: dict[str, _Loaded] = {}
        """By digest."""
        self._sites: ModelSites | None = None
        self._slots = SlotTable(limits.max_adapters)
        self._in_slots: list[Mapping[int, PackedAdapter]] = [{}] * limits.max_adapters

    def attach(self, model: nn.Module) -> None:
        """Let a model's layers read the slots; called before steps are recorded.

        A model with the same weights may take the place of another, with the adapters that are loaded and those of
        rows that go on. The slots' memory on a GPU stays, also while there is no model.

        Raises:
            FeatureDisabled: The model computes no adapters.
        """
        limits = self.limits
        self._attach(
            ModelSites.of_model(
                model,
                self._architecture,
                num_slots=limits.max_adapters,
                max_rank=limits.max_rank,
                old=self._sites,
            )
        )

    def attach_stored(self, record: Mapping[str, Any], addresses: Sequence[NDArray[np.int64]]) -> None:
        """Let a stored program read the slots; arguments as of `ModelSites.of_record`."""
        self._attach(ModelSites.of_record(record, addresses, self._architecture))

    def _attach(self, sites: ModelSites) -> None:
        with self._lock:
            self._sites = sites
            for slot, packed in enumerate(self._in_slots):
                sites.put(slot, packed)

    @property
    def sites(self) -> ModelSites:
        """The layers that read the slots."""
        assert self._sites is not None, "attached before steps are recorded"
        return self._sites

    def load(self, name: str, source: str, directory: Path) -> AdapterFacts:
        """Read, check and pack an adapter, and keep it. One that is loaded is not packed again.

        Args:
            name, source: As of `AdapterFacts`.
            directory: Directory that it is read from.

        Raises:
            ModelError: A file is missing or damaged, asks for what is not served, does not fit the model, or needs more
                memory than all adapters may have; names it.
            MemoryShort: All adapters together would take more than they may.
            WrongState: No model is loaded yet.
        """
        sites = self._sites
        if sites is None:
            raise WrongState("adapters are loaded when the model is")
        with self._loading:
            files = read_adapter(
                directory,
                max_rank=self.limits.max_rank,
                max_bytes=self.limits.max_bytes,
                num_layers=self._architecture.num_layers,
                num_experts=self._architecture.num_experts,
            )
            with self._lock:
                known = self._loaded.get(files.digest)
            if known is None:
                sites.check(files)
                modules = sites.own_modules(files)
                self._check_memory(name, sites.least_bytes(modules))
                packed = sites.pack(modules, _read_tensors(files, modules))
                num_bytes = sum(part.num_bytes for part in packed.values())
                self._check_memory(name, num_bytes)
            else:
                packed, num_bytes = dict(known.packed), known.facts.num_bytes
            facts = AdapterFacts(name, files.digest, files.rank, source, num_bytes)
            with self._lock:
                self._loaded[files.digest] = _Loaded(facts, packed)
        log.info("adapter %s: %s, rank %d, %.1f MB", name, directory, facts.rank, num_bytes / 1e6)
        return facts

    def unload(self, digest: str) -> None:
        """Forget an adapter; rows that have it keep it until they leave. No effect if it is not loaded.

        One that a slot may have is unloaded on the runner's thread.
        """
        with self._lock:
            self._loaded.pop(digest, None)
            self._clear_unloaded()

    def list(self) -> tuple[AdapterFacts, ...]:
        """Return the loaded adapters."""
        with self._lock:
            return tuple(loaded.facts for loaded in self._loaded.values())

    def slot_of(self, digest: str) -> int:
        """See `AdapterSlots`."""
        with self._lock:
            loaded = self._loaded.get(digest)
            if loaded is None or self._sites is None:
                raise AdapterUnavailable(f"no adapter with digest {digest[:12]} is loaded")
            return self._slots.take(digest, lambda slot: self._put(slot, loaded.packed))

    def release(self, slot: int) -> None:
        """See `AdapterSlots`."""
        with self._lock:
            self._slots.release(slot)
            self._clear_unloaded()

    def _clear_unloaded(self) -> None:
        """Empty the slots of adapters that are neither loaded nor used by a row."""
        for slot, digest in self._slots.idle():
            if digest not in self._loaded:
                self._slots.clear(slot)
                self._put(slot, {})

    def _put(self, slot: int, packed: Mapping[int, PackedAdapter]) -> None:
        assert self._sites is not None, "a slot is filled for a row, which a model computes"
        self._in_slots[slot] = packed
        self._sites.put(slot, packed)

    def _check_memory(self, name: str, num_bytes: int) -> None:
        """Check that so many bytes more are within the bound.

        Raises:
            ModelError: They are more than all adapters may have.
            MemoryShort: There is no room for them beside the others.
        """
        max_bytes = self.limits.max_bytes
        if num_bytes > max_bytes:
            raise ModelError(
                f"adapter {name}: needs {num_bytes} bytes; all adapters together have at most {max_bytes}, "
                "worker.adapter_gib"
            )
        with self._lock:
            held = sum(loaded.facts.num_bytes for loaded in self._loaded.values())
        if held + num_bytes > max_bytes:
            raise MemoryShort(
                f"adapter {name}: needs {num_bytes} bytes; adapters have {held} of {max_bytes}, "
                "worker.adapter_gib; unload another one"
            )


def _read_tensors(files: AdapterFiles, modules: Sequence[AdapterModule]) -> dict[str, Tensor]:
    """Read the numbers of some modules of an adapter.

    Raises:
        ModelError: The file is damaged, or a number is not finite; names the tensor.
    """
    names = [part.name for module in modules for part in (module.a, module.b)]
    tensors: dict[str, Tensor] = {}
    try:
        if files.arrays is not None:
            tensors = {name: torch.from_numpy(files.arrays[name]) for name in names}
        else:
            with safe_open(files.weights, framework="pt", device="cpu") as file:
                tensors = {name: file.get_tensor(name).clone() for name in names}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{files.weights}: cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ModelError(f"{files.weights}: {name}: holds numbers that are not finite")
    return tensors
