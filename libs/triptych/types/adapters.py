"""LoRA adapters as the tiers know them: by name for people, by digest for everything else."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """An adapter that has been loaded."""

    name: str
    """Name that clients use, beside the model's."""
    digest: str
    """sha256 of what decides its tokens: tensors, ranks, scales; hexadecimal."""
    rank: int
    """The largest rank of its modules."""
    source: str = ""
    """Directory or hub id that it was read from, as the operator wrote it."""
    num_bytes: int = field(default=0, compare=False)
    """Bytes that it takes of the host's memory, on the first rank of its worker."""
