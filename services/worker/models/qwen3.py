"""Qwen3: Llama with an RMSNorm on each head's query and key."""

from __future__ import annotations

from functools import partial

from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The whole network; a `CausalLM`."""

    def __init__(self, *, context: ModelContext, prefix: str = "") -> None:
        super().__init__(context=context, prefix=prefix, attention=partial(LlamaAttention, qk_norm=True))
