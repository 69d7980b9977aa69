"""Qwen2: Llama with biases on the projections into queries, keys and values, and on no other."""

from __future__ import annotations

from functools import partial

from services.worker.context.resolved import ResolvedConfig
from services.worker.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """The whole network; a `CausalLM`. Its config.json does not mention the biases."""

    def __init__(self, *, config: ResolvedConfig, prefix: str = "") -> None:
        attention = partial(LlamaAttention, qkv_bias=True, out_bias=False)
        super().__init__(config=config, prefix=prefix, attention=attention)
