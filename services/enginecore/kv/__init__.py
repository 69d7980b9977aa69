"""Paged KV blocks: allocation, sharing, and the prefix cache."""

from services.enginecore.kv.block_table import NULL_BLOCK, PLAIN_ROOT_HASH, BlockTable, root_hash
from services.enginecore.kv.manager import BlockManager

__all__ = ["NULL_BLOCK", "PLAIN_ROOT_HASH", "BlockManager", "BlockTable", "root_hash"]
