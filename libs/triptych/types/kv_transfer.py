"""KV blocks on their way from one worker to another (docs/adr/0035).

engine that prefills                       engine that decodes
  step {export lease, blocks} ──► worker    worker ◄── step {pull lease, blocks}
                                    └── blocks ─►│
  ◄── progress {lease, sent}                     └── progress {pull, arrived} ──►
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated

from triptych.types.row_key import RowKey

HASH_BYTES = 16
"""Bytes of the hash that names a block (`triptych.prefix_hash`)."""
LEASE_BYTES = 16
"""Bytes of a lease's name, which is drawn at random: a peer that knows it may pull the blocks."""


@dataclass(frozen=True, slots=True)
class Width:
    """In an annotation: the length of bytes, which other tiers refuse in another length."""

    num_bytes: int
    may_be_empty: bool = False
    """Empty bytes mean that there are none."""


Lease = Annotated[bytes, Width(LEASE_BYTES)]
BlockHash = Annotated[bytes, Width(HASH_BYTES)]


class EngineRole(Enum):
    """The part of requests that an engine computes."""

    BOTH = auto()
    PREFILL = auto()
    """Prompts, for engines that decode."""
    DECODE = auto()
    """Outputs, and those prompts that it has sooner than they could be pulled."""


@dataclass(frozen=True, slots=True)
class KvTail:
    """Keys or states that layers which do not keep every key need behind a prompt, whatever is cached of it."""

    num_tokens: int
    """Tokens of a prompt from which on it is this much. Shorter ones have as much less."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """A worker that serves KV blocks."""

    address: str
    """host:port, as other workers reach it."""
    layout: str
    """sha256 of all that the bytes of a block depend on beside its tokens. Blocks go between equal ones only."""
    block_bytes: int
    """Bytes of as many tokens as a block hash names, in all layers that keep every key."""
    tails: tuple[KvTail, ...] = ()
    """Parts of all other layers, which come behind that."""

    def pulled_bytes(self, num_blocks: float, num_tokens: int) -> float:
        """Return the bytes that come over for a prompt, about.

        Args:
            num_blocks: Blocks of the prompt that are not cached by the worker that pulls.
            num_tokens: Tokens of the whole prompt.
        """
        return num_blocks * self.block_bytes + sum(
            tail.num_bytes * min(num_tokens / max(tail.num_tokens, 1), 1.0) for tail in self.tails
        )


@dataclass(frozen=True, slots=True)
class KvSource:
    """The place at which the blocks of one prompt can be pulled."""

    endpoint: KvEndpoint
    lease: Lease
    """The name under which they are held there."""
    ready_in_s: float
    """Seconds in which the last of them is expected to have been computed and to have arrived."""


@dataclass(frozen=True, slots=True)
class KvExport:
    """Further blocks that other workers may pull, once the step that says so is computed."""

    lease: Lease
    row: RowKey
    """The row that has them. If it fails so that its KV is not valid, the lease fails."""
    first_index: int
    """Index of the first of them in its prompt. The blocks of a lease are exported in order, pages of states last."""
    block_ids: tuple[int, ...]
    hashes: tuple[BlockHash, ...]
    """Hashes of the blocks, and then of the pages."""
    state_pages: tuple[int, ...] = ()
    """Pages of states, which come behind the blocks."""

    @property
    def places(self) -> tuple[int, ...]:
        """The blocks and then the pages, of which the numbers are negative."""
        return (*self.block_ids, *(-page for page in self.state_pages))


@dataclass(frozen=True, slots=True)
class KvPull:
    """Blocks that a worker is to pull from another."""

    pull_id: int
    """Its name, never used twice in a session."""
    address: str
    lease: Lease
    first_index: int
    """Index of the first of them in its prompt."""
    block_ids: tuple[int, ...]
    """The blocks to be written, in order. Nothing else writes to them or reads them until the pull is stopped."""
    hashes: tuple[BlockHash, ...]
    """Hashes of the blocks, and then of the pages."""
    state_pages: tuple[int, ...] = ()
    """Pages of states to be written, which come behind the blocks."""

    @property
    def places(self) -> tuple[int, ...]:
        """As of `KvExport`."""
        return (*self.block_ids, *(-page for page in self.state_pages))


@dataclass(frozen=True, slots=True)
class KvOrders:
    """The changes of transfers that a step orders.

    Order of effects: `released` and `stopped`, before the step writes to any block; `pulls`, once the steps before it
    are computed; and `exports`, once the step itself is. So the step that ends a pull or a lease may give its blocks to
    other requests, and a pull may get blocks that steps in flight still use.
    """

    exports: tuple[KvExport, ...] = ()
    released: tuple[Lease, ...] = ()
    """Leases of blocks that are not served any more."""
    pulls: tuple[KvPull, ...] = ()
    stopped: tuple[int, ...] = ()
    """Pulls that have ended, or end now."""


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How far one pull has come."""

    pull_id: int
    num_blocks: int
    """Leading blocks, and pages behind them, that have arrived whole and have been verified."""
    failure: str = ""
    """Why no more will come. Empty: the pull goes on, or is complete."""
    is_spoiled: bool = False
    """The blocks that have arrived are wrong as well: their KV was found to be invalid where it was computed."""


@dataclass(frozen=True, slots=True)
class LeaseProgress:
    """How far the blocks of one lease have been pulled."""

    lease: bytes
    num_blocks: int
    """Leading blocks that have been sent."""


@dataclass(frozen=True, slots=True)
class KvProgress:
    """How far a worker's transfers have come: pulls that are not stopped, and leases that are not released."""

    pulls: tuple[PullProgress, ...] = field(default=())
    leases: tuple[LeaseProgress, ...] = field(default=())


@dataclass(slots=True)
class TransferCounts:
    """An engine's transfers of KV blocks since its start, by how they ended. The counts never fall."""

    num_in_complete: int = 0
    """Prompts that were pulled whole from other workers."""
    num_in_failed: int = 0
    """Prompts of which a part was computed here in the end, because blocks were late or did not come."""
    num_in_blocks: int = 0
    """Blocks that have come, and pages of states."""
    num_in_pages: int = 0
    """Pages of states among them."""
    num_out_complete: int = 0
    """Prompts that other workers have pulled whole."""
    num_out_expired: int = 0
    """Prompts that no worker pulled whole before the lease ended."""
    num_out_blocks: int = 0
    """Blocks that were pulled, and pages of states."""
    num_out_pages: int = 0
    """Pages of states among them."""

    def add(self, other: TransferCounts) -> None:
        """Add the counts of an earlier scheduler."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
