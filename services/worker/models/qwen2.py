"""Qwen2: Llama with biases on the projections into queries, keys and values, and on no other."""

from __future__ import annotations

from functools import partial

from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """The whole network; a `CausalLM`. Its config.json does not mention the biases."""

    def __init__(self, *, context: ModelContext, prefix: str = "") -> None:
        attention = partial(LlamaAttention, qkv_bias=True, out_bias=False)
        super().__init__(context=context, prefix=prefix, attention=attention)
