"""The seams of KV transfer: where the bytes of blocks are, and what carries them. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from triptych.types.kv_transfer import KvPull


class BlockStore(Protocol):
    """The bytes of a runner's KV blocks and pages of states. Any thread may call it; callers see to it that no step
    uses the block.

    A block is named by its number, and a page by its negative one.
    """

    def num_bytes(self, block: int) -> int:
        """Return the bytes of a block, or of a page."""
        ...

    def read(self, block: int, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with a block's bytes from `offset` on."""
        ...

    def write(self, block: int, offset: int, content: memoryview) -> None:
        """Write a part of a block, which begins at `offset`. It is there for every later step."""
        ...


class PullSink(Protocol):
    """The receiver of one pull's bytes, called on the thread of the transport. Owned by the worker's session."""

    pull: KvPull

    def num_bytes(self, place: int) -> int:
        """Return the bytes of the pull's `place`-th block."""
        ...

    def write(self, place: int, offset: int, content: memoryview) -> None:
        """Write a verified part of the pull's `place`-th block.

        Raises:
            PullStopped: The pull was stopped: its blocks may belong to others.
        """
        ...

    def note_blocks(self, num_blocks: int) -> None:
        """Note that so many leading blocks have arrived whole."""
        ...

    def fail(self, why: str, *, is_spoiled: bool = False) -> None:
        """Note that no more will come. Not called after the last block."""
        ...


class PullStopped(Exception):
    """The pull was stopped by the engine, or its session has ended."""


class PullTransport(Protocol):
    """Brings blocks from other workers: plain sockets, or what the machine has."""

    def begin(self, sink: PullSink) -> Callable[[], None]:
        """Begin a pull, which reports to `sink` from another thread, and return a function that interrupts it."""
        ...
