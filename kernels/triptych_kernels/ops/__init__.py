"""The public contract of every op: checks shapes, raises, and hands on to the implementation for the device."""

from triptych_kernels.ops.embedding import embedding
from triptych_kernels.ops.fused_moe import fused_moe
from triptych_kernels.ops.gated_linear import gated_linear
from triptych_kernels.ops.gather_rows import gather_rows
from triptych_kernels.ops.linear import linear
from triptych_kernels.ops.paged_attention import paged_attention
from triptych_kernels.ops.process_logits import process_logits
from triptych_kernels.ops.rms_norm import rms_norm
from triptych_kernels.ops.rotary_and_write_kv import rotary_and_write_kv
from triptych_kernels.ops.rotary_embedding import rotary_embedding
from triptych_kernels.ops.sample import sample
from triptych_kernels.ops.silu_and_mul import silu_and_mul
from triptych_kernels.ops.token_logprobs import token_logprobs
from triptych_kernels.ops.write_kv import write_kv

__all__ = [
    "embedding",
    "fused_moe",
    "gated_linear",
    "gather_rows",
    "linear",
    "paged_attention",
    "process_logits",
    "rms_norm",
    "rotary_and_write_kv",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
    "token_logprobs",
    "write_kv",
]
