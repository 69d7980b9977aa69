"""Which request holds which KV blocks, and what of a new one's prompt stands in blocks already."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from services.enginecore.kv.block_table import BlockTable
from services.enginecore.kv.hashing import extend_hashes
from services.enginecore.kv.pool import BlockPool


class BlockManager:
    """Owned by the scheduler; decides nothing about who runs.

    Steps run strictly in order on the worker, so a block may be given to another request as soon as its
    holder is done being planned, whatever is still in flight for it.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        """`num_blocks` counts the null block."""
        self._pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._newly_cached: list[int] = []

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def room(self) -> int:
        """A number that grows by at least as much as what any one request lacks falls; see `num_lacking`."""
        return self._pool.num_free + self._pool.num_shareable_gained

    @property
    def num_used(self) -> int:
        return self._pool.num_held

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be hit."""
        return self._pool.num_cached_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def hash_prompt(
        self, tables: Sequence[BlockTable], token_ids: array[int], num_prompt_tokens: int
    ) -> None:
        """Name the full blocks of a prompt once, before anyone waits for it.

        Args:
            tables: Of new requests with this prompt and the same extras.
        """
        if self.enable_prefix_caching:
            first = tables[0]
            extend_hashes(
                first.hashes, token_ids, num_prompt_tokens // self.block_size, self.block_size, first.extras
            )
            for table in tables:
                table.hashes, table.shares_hashes = first.hashes, len(tables) > 1

    def get_computed_blocks(self, table: BlockTable, token_ids: array[int]) -> list[int]:
        """The longest run of cached blocks that holds a prefix of `token_ids`. Holds nothing yet."""
        if not self.enable_prefix_caching:
            return []
        num_full = len(token_ids) // self.block_size
        hits: list[int] = []
        while len(hits) < num_full:
            if len(hits) == len(table.hashes):
                self._extend_hashes(table, token_ids, min(num_full, 2 * len(hits) + 1))
            hits += self._pool.find_run(table.hashes[len(hits) : num_full])
            if len(hits) < len(table.hashes):
                break
        return hits

    def num_lacking(self, num_tokens: int, hits: Sequence[int] = (), num_promised: int = 0) -> int:
        """How many more blocks would have to be free, so that a request without blocks could be given all that
        `num_tokens` need; 0 or less: there is room.

        A hit that nobody holds stands in the free queue, so it counts as capacity consumed.

        Args:
            num_promised: Free blocks that others are to get.
        """
        num_shared = len(hits) - self._pool.num_free_among(hits)
        return self.blocks_for(num_tokens) - num_shared + num_promised - self._pool.num_free

    def allocate(self, table: BlockTable, num_tokens: int, hits: Sequence[int] = ()) -> list[int] | None:
        """Grow `table` until it holds `num_tokens` tokens; returns the blocks added, hits first.

        `hits` come first in an empty table. None if there are too few blocks: then nothing has changed.
        """
        assert not (hits and table.block_ids), "hits can only begin a table"
        num_new = self.blocks_for(num_tokens) - len(table.block_ids) - len(hits)
        if num_new + self._pool.num_free_among(hits) > self._pool.num_free:
            return None
        if hits:
            self._pool.share(hits)
            table.num_hits = table.num_cached = len(hits)
        added = [*hits, *self._pool.take(num_new)] if num_new > 0 else [*hits]
        table.block_ids += added
        return added

    def cache_full_blocks(self, table: BlockTable, token_ids: array[int], num_tokens: int) -> None:
        """Let others find the blocks that the first `num_tokens` tokens fill.

        The caller vouches that these tokens are known and that a planned step computes each of them:
        whoever hits such a block is planned later, so it reads what was written.
        """
        num_full = num_tokens // self.block_size
        if num_full <= table.num_cached or not self.enable_prefix_caching:
            return
        self._extend_hashes(table, token_ids, num_full)
        new = slice(table.num_cached, num_full)
        self._newly_cached += self._pool.offer(table.block_ids[new], table.hashes[new])
        table.num_cached = num_full

    def take_newly_cached(self) -> list[int]:
        """The blocks offered since the last call; the step now planned is the last that writes to them."""
        offered, self._newly_cached = self._newly_cached, []
        return offered

    def uncache(self, blocks: Iterable[int]) -> None:
        """Take offers back, for a step that failed."""
        for block in blocks:
            self._pool.uncache(block)

    def named_blocks(self, table: BlockTable) -> list[int]:
        """Whatever blocks the cache holds of a table's content; its own may be given back."""
        return self._pool.find_all(table.hashes)

    def free(self, table: BlockTable) -> None:
        """Give all of a request's blocks back, last first, so that its tail is evicted before its head."""
        self._pool.release(reversed(table.block_ids))
        table.block_ids.clear()
        table.num_hits = table.num_cached = 0

    def blocks_freed_by(self, tables: Iterable[BlockTable]) -> Iterator[int]:
        """Yield, for each table in turn, how many more blocks would be free if it were given back, too."""
        block_to_references: dict[int, int] = {}
        for table in tables:
            num_freed = 0
            for block in table.block_ids:
                references = block_to_references.get(block) or self._pool.num_references(block)
                block_to_references[block] = references - 1
                num_freed += references == 1
            yield num_freed

    def reset(self) -> bool:
        """Forget all cached content; refused (False) while any block is in use."""
        if self._pool.num_held:
            return False
        self._pool.forget_all()
        self._newly_cached.clear()
        return True

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """`tables`: those of all running requests. Raises AssertionError naming what is off."""
        references: Counter[int] = Counter()
        for table in tables:
            assert len(set(table.block_ids)) == len(table.block_ids), "a table holds a block twice"
            assert table.num_hits <= table.num_cached <= len(table.block_ids), "more offered than held"
            references.update(table.block_ids)
        self._pool.check_integrity(references)

    def _extend_hashes(self, table: BlockTable, token_ids: array[int], num_blocks: int) -> None:
        if num_blocks <= len(table.hashes):
            return
        if table.shares_hashes:
            table.hashes, table.shares_hashes = table.hashes[:], False
        extend_hashes(table.hashes, token_ids, num_blocks, self.block_size, table.extras)
