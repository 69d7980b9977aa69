"""Paged KV blocks: who holds which, what stands in them, and which may be taken next."""

from services.enginecore.kv.block_table import NULL_BLOCK, BlockTable
from services.enginecore.kv.manager import BlockManager

__all__ = ["NULL_BLOCK", "BlockManager", "BlockTable"]
