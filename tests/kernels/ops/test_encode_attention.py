"""encode_attention against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.ops.implementations import Case, Implementation, cases_of, implementations_of
from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.cpu.library import use_threads
from triptych_kernels.ops import encode_attention

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LENGTHS = (1, 2, 40, 7, 17, 96)

case = cases_of("encode_attention")
implementation = implementations_of("encode_attention")


def operands(
    lengths: tuple[int, ...], num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Queries, keys and values as views of one tensor, and the layout of the texts."""
    generator = torch.Generator().manual_seed(head_dim)
    shape = sum(lengths), num_heads + 2 * num_kv_heads, head_dim
    packed = torch.randn(shape, generator=generator).to(dtype)
    query, key, value = packed.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.cat((torch.zeros(1), seq_lens.cumsum(0))).int()
    return query, key, value, starts, seq_lens


def options(**changes: Any) -> AttendOptions:
    return AttendOptions(**{"scale": 0.3, "is_causal": False, **changes})


@pytest.mark.parametrize("window", [0, 1, 6, 50])
@pytest.mark.parametrize("heads", [(2, 2, 32), (4, 2, 24), (1, 1, 64), (2, 2, 10)], ids=str)
def test_attends_like_the_reference(heads: tuple[int, int, int], window: int, case: Case) -> None:
    given = operands(LENGTHS, *heads, case.dtype)
    out = case(encode_attention, *given, options(window=window))
    expected = encode_attention(*given, options(window=window), impl="reference")
    assert out.dtype == case.dtype
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("window", [0, 65, 300])
def test_long_texts_are_merged_from_spans(window: int, case: Case) -> None:
    given = operands((700, 255, 256, 257), 1, 1, 16, case.dtype)
    out = case(encode_attention, *given, options(window=window))
    wide = [x.double() if x.is_floating_point() else x for x in given]
    expected = encode_attention(*wide, options(window=window), impl="torch").to(case.dtype)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("window", [0, 6])
def test_adds_a_bias_by_distance(window: int, case: Case) -> None:
    *given, starts, seq_lens = operands((300, 1, 45), 3, 3, 16, case.dtype)
    bias = torch.randn(3, 2 * 310 - 1, generator=torch.Generator().manual_seed(2))
    changed = options(window=window, distance_bias=bias)
    out = case(encode_attention, *given, starts, seq_lens, changed)
    expected = encode_attention(*given, starts, seq_lens, changed, impl="reference")
    tolerance = 3 * TOLERANCE[case.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    plain = encode_attention(*given, starts, seq_lens, options(window=window), impl="reference")
    assert not torch.allclose(plain.float(), expected.float(), atol=0.1)


def test_a_text_has_the_same_bits_alone_and_with_any_threads(implementation: Implementation) -> None:
    for dtype in implementation.dtypes[:2]:
        lengths = (300, 5, 64)
        query, key, value, starts, seq_lens = operands(lengths, 3, 3, 32, dtype)
        together = implementation(encode_attention, query, key, value, starts, seq_lens, options())
        for row, length in enumerate(lengths):
            own = slice(int(starts[row]), int(starts[row + 1]))
            layout = torch.tensor([0, length], dtype=torch.int32), seq_lens[row : row + 1]
            for num_threads in (1, 3):
                use_threads(num_threads)
                alone = implementation(encode_attention, query[own], key[own], value[own], *layout, options())
                assert torch.equal(together[own], alone)


def test_no_other_text_has_influence(implementation: Implementation) -> None:
    query, key, value, starts, seq_lens = operands((20, 30, 9), 2, 2, 32, torch.float32)
    before = implementation(encode_attention, query, key, value, starts, seq_lens, options())
    for tensor in (query, key, value):
        tensor[20:50] = torch.nan
    after = implementation(encode_attention, query, key, value, starts, seq_lens, options())
    assert after[20:50].isnan().all()
    assert torch.equal(before[:20], after[:20])
    assert torch.equal(before[50:], after[50:])


def test_what_it_does_not_compute_is_refused() -> None:
    query, key, value, starts, seq_lens = operands((3, 2), 2, 2, 8, torch.float32)
    with pytest.raises(ValueError, match="is_causal must be False"):
        encode_attention(query, key, value, starts, seq_lens, AttendOptions(scale=1.0))
    with pytest.raises(ValueError, match=r"not \['soft_cap'\]"):
        encode_attention(query, key, value, starts, seq_lens, options(soft_cap=3.0))
    with pytest.raises(ValueError, match="multiple of the key's heads"):
        encode_attention(query[:, :1], key, value, starts, seq_lens, options())
    with pytest.raises(ValueError, match="one longer than seq_lens"):
        encode_attention(query, key, value, starts, seq_lens[:1], options())
    with pytest.raises(ValueError, match="with a text of 3 tokens"):
        encode_attention(query, key, value, starts, seq_lens, options(distance_bias=torch.zeros(2, 3)))
    with pytest.raises(ValueError, match="sum to the 5 tokens"):
        encode_attention(query, key, value, starts, seq_lens + 1, options())
    with pytest.raises(ValueError, match=r"must be torch\.int32"):
        encode_attention(query, key, value, starts.long(), seq_lens, options())
