"""The project's own attention, which reads the paged cache: by the device's kernels, or in plain torch."""

from __future__ import annotations

from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.ops import latent_attention, paged_attention
from triptych_services.worker.attention.base import AttentionBatch, KvCache

_NAMES = {None: "auto", "cpu": "native", "triton": "triton", "torch": "torch"}


class PagedAttention:
    """An `AttentionBackend`."""

    supported = frozenset({"window", "chunk", "soft_cap", "sinks", "alibi", "latent_dim"})

    def __init__(self, impl: str | None = None) -> None:
        """
        Args:
            impl: cpu, triton or torch; None: the device's own kernels.
        """
        self.name = _NAMES[impl]
        self.in_graphs = impl != "torch"  # plain torch loops over rows on the host
        self.writer = impl

    def attend(
        self, query: Tensor, kv_cache: KvCache, batch: AttentionBatch, options: AttendOptions
    ) -> Tensor:
        if options.latent_dim:
            return latent_attention(
                query,
                kv_cache.blocks[:, 0, 0],
                batch.block_tables,
                batch.query_starts,
                batch.seq_lens,
                scale=options.scale,
                value_dim=options.latent_dim,
                query_lens_list=batch.query_lens_list,
                seq_lens_list=batch.seq_lens_list,
                impl=self.writer,
            )
        return paged_attention(
            query,
            kv_cache.blocks,
            batch.block_tables,
            batch.query_starts,
            batch.seq_lens,
            options,
            kv_scales=kv_cache.scales,
            query_lens_list=batch.query_lens_list,
            seq_lens_list=batch.seq_lens_list,
            impl=self.writer,
        )
