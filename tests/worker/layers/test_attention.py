"""The attention layer: what is rotated before it is written and attended to."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.worker.tiny import tiny_config
from triptych.checkpoint.architecture import RopeParameters
from triptych_kernels.attend_options import AttendOptions
from triptych_services.worker.attention.base import AttentionBatch, KvCache
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.attention import Attention
from triptych_services.worker.layers.rotary import RotaryEmbedding
from triptych_services.worker.layers.step_context import StepContext

HEADS, KV_HEADS, HEAD_DIM, NUM_TOKENS = 3, 1, 8, 6


def attend(rope: RopeParameters | None, positions: Tensor) -> Tensor:
    """Return the attention of one prompt, without a rotation if there is no rope."""
    rotary = None if rope is None else RotaryEmbedding(HEAD_DIM, rope, context=ModelContext(tiny_config()))
    layer = Attention(AttendOptions(HEAD_DIM**-0.5), layer_index=0, rotary=rotary)
    packed = torch.randn(
        NUM_TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0)
    )
    batch = AttentionBatch(
        slot_mapping=torch.arange(NUM_TOKENS) + 4,
        block_tables=torch.tensor([[1, 2]], dtype=torch.int32),
        query_starts=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        seq_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        backend=PagedAttention(),
        max_query_len=NUM_TOKENS,
        max_seq_len=NUM_TOKENS,
        query_lens_list=(NUM_TOKENS,),
        seq_lens_list=(NUM_TOKENS,),
    )
    context = StepContext(
        attention=(batch,), kv_caches=[KvCache(torch.zeros(3, 2, KV_HEADS, 4, HEAD_DIM), None)]
    )
    out: Tensor = layer(*packed.split((HEADS, KV_HEADS, KV_HEADS), dim=1), positions, context)
    return out


def test_without_a_rope_nothing_is_rotated() -> None:
    positions = torch.arange(NUM_TOKENS)
    unrotated = attend(None, positions)
    assert torch.equal(unrotated, attend(RopeParameters(), torch.zeros_like(positions)))
    assert not torch.allclose(unrotated, attend(RopeParameters(), positions))


def test_pairs_are_those_that_the_rope_asks_for() -> None:
    positions = torch.arange(NUM_TOKENS)
    halves, neighbours = (attend(RopeParameters(is_interleaved=i), positions) for i in (False, True))
    assert not torch.allclose(halves, neighbours)
