"""One request's KV blocks, and the hashes that name their content."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from triptych.prefix_hash import PLAIN_ROOT_HASH, Extras, hash_block, hash_blocks

NULL_BLOCK = 0  # padding in block tables: never allocated, never written, never read


@dataclass(slots=True, eq=False)
class GroupTable:
    """The blocks of one request in one group of layers, in the order of its tokens. Of twins: their bundles.

    tokens      0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 51
    block_ids      0         0          9         4       0: the null block, where none is needed any more
                <-- released -->
                <----- settled ------->                   cached, or cached before it was released
    """

    block_ids: list[int]
    num_released: int = 0
    """Leading entries without a block."""
    num_settled: int = 0
    """Leading pages of states that were given to the prefix cache, or came from there. It is 0 for keys and values, for
    which `BlockTable.num_cached` counts."""
    read_page: int = 0
    """Page of states that the step planned last goes on from on another one, which has its place here. 0: none."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request, in the order of its tokens. The request owns it; only `BlockManager` writes to it.

    tokens      0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 51        block size 16
    block_ids      7         2          9         4
    hashes         a         b          c                       of full blocks only
                <- hits ->
                <------ cached ------>                          others may find them
    """

    root_hash: bytes = PLAIN_ROOT_HASH
    """Begins the chain of hashes; two requests with different roots share no blocks."""
    extras: Extras = field(default_factory=dict)
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of leading full blocks, computed when they are needed. They depend only on tokens, root and extras, so
    they outlive the blocks: a preempted request finds its prefix again without hashing it again."""
    shares_hashes: bool = False
    """Whether `hashes` belongs to all choices of one prompt, and must be copied before it grows."""
    is_shared: bool = False
    """Whether all choices of one prompt share blocks though there is no prefix caching. Their root is their own."""
    num_hits: int = 0
    """Leading blocks that another request computed."""
    num_cached: int = 0
    """Leading blocks that are in the prefix cache, hits included."""
    groups: tuple[GroupTable, ...] = ()
    """The table of each kind of group, of which the first has `block_ids`. Each counts for itself how many of its
    blocks are cached. Empty where there is one full group."""

    def extend_hashes(self, token_ids: array[int], num_blocks: int, block_size: int) -> None:
        """Hash further leading blocks of `token_ids` until `num_blocks` have a hash."""
        first = len(self.hashes)
        if first >= num_blocks:
            return
        if self.shares_hashes:
            self.hashes, self.shares_hashes = self.hashes[:], False
        content = token_ids[first * block_size : num_blocks * block_size].tobytes()
        parent = self.hashes[-1] if first else self.root_hash
        if num_blocks == first + 1 and not self.extras:  # as while rows decode
            assert len(token_ids) >= num_blocks * block_size, "the block is not full"
            self.hashes.append(hash_block(parent, content))
            return
        self.hashes += hash_blocks(parent, content, block_size, self.extras, first)
