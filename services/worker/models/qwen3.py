"""Qwen3: Llama with an RMSNorm on each head's query and key."""

from __future__ import annotations

from functools import partial

from services.worker.context.resolved import ResolvedConfig
from services.worker.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The whole network; a `CausalLM`."""

    def __init__(self, *, config: ResolvedConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix, attention=partial(LlamaAttention, qk_norm=True))
