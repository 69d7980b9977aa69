"""LoRA adapters of a simulated worker: names, digests and slots, without tensors."""

from __future__ import annotations

import hashlib
from pathlib import Path

from triptych.errors import MemoryShort, ModelError
from triptych.types.adapters import AdapterFacts
from triptych_services.worker.adapters.slots import AdapterUnavailable, SlotTable

CONFIG_FILE = "adapter_config.json"
_RANK = 1


class SimulatedAdapters:
    """An `AdapterHolder`, and the slots of its rows.

    An adapter is a directory with a config, and its digest is that of the config's bytes.
    """

    def __init__(self, num_slots: int, max_bytes: int) -> None:
        """
        Args:
            num_slots: Different adapters that rows may have at once.
            max_bytes: Bytes of the files of all adapters together.
        """
        self._max_bytes = max_bytes
        self._slots = SlotTable(num_slots)
        self._by_digest: dict[str, tuple[AdapterFacts, int]] = {}
        """Digest -> the adapter, and the bytes of its files."""

    def load(self, name: str, source: str, directory: Path) -> AdapterFacts:
        path = directory / CONFIG_FILE
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            num_bytes = sum(file.stat().st_size for file in directory.iterdir())
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or error}") from None
        others = sum(size for facts, size in self._by_digest.values() if facts.digest != digest)
        if others + num_bytes > self._max_bytes:
            raise MemoryShort(
                f"worker.adapter_gib: {source!r} has {num_bytes} bytes, the others have {others}, "
                f"and {self._max_bytes} is the limit of all together"
            )
        facts = AdapterFacts(name, digest, _RANK, source)
        self._by_digest[digest] = facts, num_bytes
        return facts

    def unload(self, digest: str) -> None:
        self._by_digest.pop(digest, None)

    def list(self) -> tuple[AdapterFacts, ...]:
        return tuple(facts for facts, _ in self._by_digest.values())

    def slot_of(self, digest: str) -> int:
        if digest not in self._by_digest:
            raise AdapterUnavailable(f"{digest} is not loaded")
        return self._slots.take(digest, lambda slot: None)

    def release(self, slot: int) -> None:
        self._slots.release(slot)
