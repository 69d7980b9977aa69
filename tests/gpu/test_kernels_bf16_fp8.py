"""The kernels in bfloat16, and over caches of 8 bits, against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.gpu import oracles
from tests.kernels.poison import poisoned_allocations
from triptych_kernels import ops
from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.logit_index import PenaltyColumns
from triptych_kernels.triton.linear import few_rows
from triptych_kernels.triton.linear.few_rows import multiply_few_rows
from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight
from triptych_kernels.triton.moe.expert_stack import ExpertStack
from triptych_kernels.triton.moe.quantized_experts import GroupQuantizedExperts
from triptych_kernels.triton.moe.w8a8_experts import ChannelQuantizedExperts
from triptych_kernels.weights.formats import BLOCK_FORMATS

BF16 = torch.bfloat16
KV_DTYPES = [BF16, torch.int8, torch.float8_e4m3fn]
BLOCK_SIZE = 16

ROUNDED_ONCE = (
    3e-3  # of a norm: bfloat16 keeps 8 bits, so an element is off by up to 2^-8, the norm by 1.7e-3
)
# probabilities, or the values of an 8-bit cache, are rounded to bfloat16 before they are multiplied
ATTENTION = 6e-3
EIGHT_BITS = {torch.int8: 1.2e-2, torch.float8_e4m3fn: 4e-2}
"""Error of a quantized vector: half a step of 1/127 of its largest, and half of an eighth of each element."""


def normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(BF16)


class TestPagedAttention:
    @pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
    @pytest.mark.parametrize(
        ("query_lens", "seq_lens"),
        [
            ([1] * 5, [1, 15, 16, 17, 3001]),
            ([1] * 33, list(range(1, 34))),
            ([257], [257]),
            ([16, 130, 64], [16, 1000, 65]),
            ([1, 1, 77, 1, 129], [700, 1, 77, 33, 400]),
        ],
        ids=["decode", "many decodes", "prompt", "chunks", "mixed"],
    )
    def test_is_within_rounding_of_float64(
        self, kv_dtype: torch.dtype, query_lens: list[int], seq_lens: list[int], device: torch.device
    ) -> None:
        self.compare(kv_dtype, query_lens, seq_lens, device)

    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_dim"),
        [(9, 3, 64), (4, 4, 80), (8, 2, 96), (16, 1, 128), (8, 4, 256)],
    )
    def test_takes_every_shape_of_head(
        self, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        heads = num_heads, num_kv_heads, head_dim
        self.compare(BF16, [1, 1, 50, 1], [300, 17, 90, 1], device, heads=heads)

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
    def test_windows(self, kv_dtype: torch.dtype, device: torch.device) -> None:
        self.compare(kv_dtype, [1, 100, 1], [1000, 500, 20], device, window=64)

    @staticmethod
    def compare(
        kv_dtype: torch.dtype,
        query_lens: list[int],
        seq_lens: list[int],
        device: torch.device,
        *,
        heads: tuple[int, int, int] = (32, 8, 128),
        window: int = 0,
    ) -> None:
        """Over a cache that is NaN wherever no row may look."""
        num_heads, num_kv_heads, head_dim = heads
        blocks_each = [-(-length // BLOCK_SIZE) for length in seq_lens]
        num_blocks = sum(blocks_each) + 3
        shape = num_blocks, 2, num_kv_heads, BLOCK_SIZE, head_dim
        plain = normal(device, *shape)
        shuffled = torch.randperm(num_blocks - 1, device=device) + 1
        block_tables = torch.zeros(len(seq_lens), max(blocks_each), dtype=torch.int32, device=device)
        visible = torch.zeros(num_blocks, BLOCK_SIZE, dtype=torch.bool, device=device)
        taken = 0
        for row, (count, length) in enumerate(zip(blocks_each, seq_lens, strict=True)):
            blocks = shuffled[taken : taken + count]
            block_tables[row, :count] = blocks
            visible[blocks] = (torch.arange(count * BLOCK_SIZE, device=device) < length).view(
                count, BLOCK_SIZE
            )
            taken += count
        hidden = ~visible[:, None, None, :]
        if kv_dtype in LARGEST_ELEMENT:
            scales = plain.float().abs().amax(-1) / LARGEST_ELEMENT[kv_dtype]
            elements = plain.float() / scales[..., None]
            cache = (elements.round() if kv_dtype == torch.int8 else elements).to(kv_dtype)
            kv_scales = scales.masked_fill(hidden, torch.nan)
        else:
            cache, kv_scales = plain.masked_fill(hidden[..., None], torch.nan), None
        query = normal(device, sum(query_lens), num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads]
        starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
        lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        with poisoned_allocations():
            out = ops.paged_attention(
                query, cache, block_tables, starts, lengths, AttendOptions(head_dim**-0.5, window=window),
                kv_scales=kv_scales, query_lens_list=tuple(query_lens), seq_lens_list=tuple(seq_lens), impl="triton",
            )  # fmt: skip
        expected = oracles.paged_attention(
            query, cache, kv_scales, block_tables, query_lens, seq_lens, window=window
        )
        assert oracles.relative_error(out, expected) < ATTENTION
        # no row is hidden behind the others
        worst = max(
            oracles.relative_error(part, whole)
            for part, whole in zip(out.split(query_lens), expected.split(query_lens), strict=True)
        )
        assert worst < 2 * ATTENTION


@pytest.mark.parametrize("shape", [(1, 64), (3, 576), (257, 4096), (5, 8192)])
def test_norms_add_the_residual_and_round_once(shape: tuple[int, int], device: torch.device) -> None:
    x, weight, residual = normal(device, *shape), normal(device, shape[1]), torch.randn(shape, device=device)
    with poisoned_allocations():
        out, total = ops.rms_norm(x, weight, 1e-5, residual, impl="triton")
    expected, expected_total = oracles.rms_norm(x, weight, 1e-5, residual)
    assert oracles.relative_error(out, expected) < ROUNDED_ONCE
    assert oracles.relative_error(total, expected_total) < 1e-6


@pytest.mark.parametrize("shape", [(1, 2), (7, 2 * 1025), (300, 2 * 14336)])
def test_gates_are_silu_times_up(shape: tuple[int, int], device: torch.device) -> None:
    x = normal(device, *shape)
    with poisoned_allocations():
        out = ops.silu_and_mul(x, impl="triton")
    assert oracles.relative_error(out, oracles.silu_and_mul(x)) < 2 * ROUNDED_ONCE


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (8, 4, 256)])
def test_keys_are_rotated_and_written_where_they_belong(
    kv_dtype: torch.dtype, heads: tuple[int, int, int], device: torch.device
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    num_tokens, num_blocks = 37, 6
    packed = normal(device, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = packed.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    positions = torch.randint(2000, (num_tokens,), device=device)
    angles = torch.rand(2000, head_dim // 2, device=device) * 6.28
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_tokens]
    slots[::5] = -1
    is_quantized = kv_dtype in LARGEST_ELEMENT
    cache = torch.zeros(num_blocks, 2, num_kv_heads, BLOCK_SIZE, head_dim, device=device).to(kv_dtype)
    scales = torch.zeros(cache.shape[:4], device=device) if is_quantized else None
    with poisoned_allocations():
        rotated = ops.rotary_and_write_kv(
            query, key, value, positions, table, cache, slots, kv_scales=scales, impl="triton"
        )
    assert oracles.relative_error(rotated, oracles.rotate(query, positions, table)) < ROUNDED_ONCE
    stored = oracles.float64(cache.float())
    if scales is not None:
        stored = stored * oracles.float64(scales)[..., None]
    expected = torch.zeros_like(stored)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, BLOCK_SIZE)
            expected[block, 0, :, offset] = oracles.rotate(key, positions, table)[token]
            expected[block, 1, :, offset] = oracles.float64(value[token])
    assert oracles.relative_error(stored, expected) < EIGHT_BITS.get(kv_dtype, ROUNDED_ONCE)
    assert not stored[expected == 0].any()  # nothing was written beside


class TestSampling:
    SHAPE = (17, 128256)

    def columns(self, device: torch.device, **asked: float) -> dict[str, Tensor]:
        rows = self.SHAPE[0]
        values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | asked
        return {
            name: torch.full(
                (rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32, device=device
            )
            for name, value in values.items()
        } | {
            "seeds": torch.randint(1 << 62, (rows,), device=device),
            "positions": torch.arange(rows, device=device),
        }

    def test_greedy_takes_the_largest(self, device: torch.device) -> None:
        logits = torch.randn(self.SHAPE, device=device)
        tokens = ops.sample(logits, **self.columns(device, temperature=0.0))
        assert torch.equal(tokens.cpu(), logits.cpu().argmax(-1))

    @pytest.mark.parametrize(
        "asked",
        [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 50, "top_p": 0.8, "min_p": 0.001}],
        ids=str,
    )
    def test_is_what_plain_torch_chooses_on_the_cpu(
        self, asked: dict[str, float], device: torch.device
    ) -> None:
        """Noise and filters are defined to the bit but for sums; a token may differ where two are within rounding."""
        logits = torch.randn(self.SHAPE, device=device) * 3
        columns = self.columns(device, **asked)
        tokens = ops.sample(logits, **columns)
        expected = ops.sample(
            logits.cpu(), **{name: column.cpu() for name, column in columns.items()}, impl="torch"
        )
        assert (tokens.cpu() != expected).sum() <= 1

    def test_penalties_are_those_of_plain_torch(self, device: torch.device) -> None:
        logits = torch.randn(self.SHAPE, device=device)
        num_rows, count = self.SHAPE[0], 300
        token_ids = torch.rand(self.SHAPE, device=device).topk(count).indices.flatten()
        penalties = PenaltyColumns(
            rows=torch.arange(num_rows, device=device).repeat_interleave(count),
            token_ids=token_ids,
            output_counts=torch.arange(num_rows * count, device=device) % 3,
            presence=torch.rand(num_rows, device=device),
            frequency=torch.rand(num_rows, device=device),
            repetition=torch.rand(num_rows, device=device) + 0.5,
        )
        rows = torch.arange(num_rows, device=device)
        out = ops.process_logits(logits, rows, penalties=penalties)
        on_cpu = PenaltyColumns(**{name: getattr(penalties, name).cpu() for name in PenaltyColumns.__slots__})
        expected = ops.process_logits(logits.cpu(), rows.cpu(), penalties=on_cpu, impl="torch")
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3, 64, 513])
def test_products_sum_in_float32(num_tokens: int, device: torch.device) -> None:
    x, weight = normal(device, num_tokens, 1000), normal(device, 2 * 520, 1000)
    product = oracles.float64(x) @ oracles.float64(weight).T
    assert oracles.relative_error(ops.linear(x, weight), product) < ROUNDED_ONCE
    assert oracles.relative_error(ops.linear(x, weight, out_dtype=torch.float32), product) < ROUNDED_ONCE
    # the gate and up products are rounded before the activation, and silu before it is multiplied
    gated = ops.gated_linear(x, weight)
    assert oracles.relative_error(gated, oracles.silu_and_mul(product)) < 3 * ROUNDED_ONCE


class TestFewRows:
    """With all tiles that a device's file may name, whatever is stored for this device."""

    @pytest.mark.parametrize(
        ("num_rows", "out_features", "in_features", "dtype"),
        [
            (1, 4096, 4096, BF16),
            (16, 1024, 3072, BF16),
            (5, 333, 1248, BF16),
            (5, 333, 1240, torch.float16),
            (3, 333, 1248, torch.float32),
        ],
    )
    def test_candidates_sum_in_float32(
        self, num_rows: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        x, weight = (torch.randn(n, in_features, device=device).to(dtype) for n in (num_rows, out_features))
        bias = torch.randn(out_features, device=device).to(dtype)
        expected = oracles.float64(x) @ oracles.float64(weight).T + oracles.float64(bias)
        _, *candidates = few_rows.LINEAR.candidates(out_features, in_features, dtype, num_rows)
        for tiles in candidates:
            with poisoned_allocations():
                out = multiply_few_rows(x, weight, bias, torch.float32, None, tiles)
                alone = multiply_few_rows(x[-1:], weight, bias, torch.float32, None, tiles)
            # the tensor cores cut what they add off, at 24 bits or so
            assert oracles.relative_error(out, expected) < 1e-4, tiles
            assert torch.equal(alone[0], out[-1]), f"a row's bits depend on the others: {tiles}"
        rounded = multiply_few_rows(x, weight, bias, dtype, None, candidates[-1])
        assert torch.equal(rounded, out.to(dtype))

    @pytest.mark.parametrize(
        ("num_rows", "num_outputs", "in_features", "dtype", "activation"),
        [
            (1, 14336, 4096, BF16, "silu"),
            (16, 77, 1240, BF16, "gelu_pytorch_tanh"),
            (4, 77, 1248, torch.float32, "silu"),
        ],
    )
    def test_candidates_gate_and_round_once(
        self,
        num_rows: int,
        num_outputs: int,
        in_features: int,
        dtype: torch.dtype,
        activation: str,
        device: torch.device,
    ) -> None:
        x = torch.randn(num_rows, in_features, device=device).to(dtype)
        weight = (torch.randn(2 * num_outputs, in_features, device=device) / in_features**0.5).to(dtype)
        product = oracles.float64(x) @ oracles.float64(weight).T
        expected = oracles.silu_and_mul(product) if activation == "silu" else oracles.gelu_and_mul(product)
        _, *candidates = few_rows.GATED_LINEAR.candidates(*weight.shape, dtype, num_rows)
        for tiles in candidates:
            with poisoned_allocations():
                out = multiply_few_rows(x, weight, None, dtype, activation, tiles, gated=True)
            assert oracles.relative_error(out, expected) < (
                1e-4 if dtype == torch.float32 else ROUNDED_ONCE
            ), tiles


@pytest.mark.parametrize("num_tokens", [1, 5, 200])
def test_experts_are_weighed_and_summed(num_tokens: int, device: torch.device) -> None:
    num_experts, hidden, inner = 8, 264, 200
    x, router = normal(device, num_tokens, hidden), torch.randn(num_tokens, num_experts, device=device)
    w13, w2 = normal(device, num_experts, 2 * inner, hidden), normal(device, num_experts, hidden, inner)
    w13, w2 = w13 / hidden**0.5, w2 / inner**0.5
    with poisoned_allocations():
        out = ops.fused_moe(x, router, w13, w2, choice=ExpertChoice(2), impl="triton")
    expected = mixed(x, router, oracles.float64(w13), oracles.float64(w2))
    assert oracles.relative_error(out, expected) < 2 * ROUNDED_ONCE


class TestQuantizedProducts:
    @pytest.mark.parametrize("num_tokens", [1, 16, 300])
    @pytest.mark.parametrize("format_name", ["Q4_0", "Q4_1", "Q8_0"])
    def test_groups_multiply_as_what_they_stand_for(
        self, format_name: str, num_tokens: int, device: torch.device
    ) -> None:
        """The weights that they stand for are those that they give back as rows."""
        out_features, in_features = 136, 352
        weight = GroupQuantizedWeight(
            out_features, in_features, BF16, BLOCK_FORMATS[format_name], device=device
        )
        original, x = normal(device, out_features, in_features), normal(device, num_tokens, in_features)
        weight.fill_rows(0, original.float())
        held = oracles.float64(weight.rows(torch.arange(out_features, device=device), torch.float32))
        # half a step of 16 or 256 between the extremes of 32 normal numbers, about 4
        assert oracles.relative_error(original, held) < (0.01 if format_name == "Q8_0" else 0.12)
        with poisoned_allocations():
            out = ops.linear(x, weight)
        assert oracles.relative_error(out, oracles.float64(x) @ held.T) < ROUNDED_ONCE

    @pytest.mark.parametrize("num_tokens", [1, 16, 300])
    @pytest.mark.parametrize("element_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
    def test_bytes_multiply_bytes(
        self, element_dtype: torch.dtype, num_tokens: int, device: torch.device
    ) -> None:
        """Inputs and weights are rounded alike, so their errors add up as squares do."""
        out_features, in_features = 136, 352
        weight = ChannelQuantizedWeight(out_features, in_features, BF16, element_dtype, device=device)
        original, x = normal(device, out_features, in_features), normal(device, num_tokens, in_features)
        weight.fill_rows(0, original)
        with poisoned_allocations():
            out = ops.linear(x, weight)
        expected = oracles.float64(x) @ oracles.float64(original).T
        assert oracles.relative_error(out, expected) < 1.5 * EIGHT_BITS[element_dtype]

    @pytest.mark.parametrize("num_tokens", [1, 40, 100, 400])
    @pytest.mark.parametrize("batch_invariant", [True, False])
    @pytest.mark.parametrize("format_name", ["Q4_0", "Q4_1", "Q8_0"])
    def test_experts_in_groups_mix_as_what_they_stand_for(
        self, format_name: str, batch_invariant: bool, num_tokens: int, device: torch.device
    ) -> None:
        """Tiles of 16, 32 and 64 rows, and of 128 where many rows may round their weights."""
        options = {"device": device, "batch_invariant": batch_invariant}
        create = partial(GroupQuantizedExperts, format=BLOCK_FORMATS[format_name], **options)
        w13, w2, _ = random_experts(create, device)
        held = [stacked_rows(stack, device) for stack in (w13, w2)]
        x, router = normal(device, num_tokens, 352), torch.randn(num_tokens, 4, device=device)
        with poisoned_allocations():
            out = ops.fused_moe(x, router, w13, w2, choice=ExpertChoice(2))
        expected = mixed(x, router, *held)
        assert oracles.relative_error(out, expected) < 2 * ROUNDED_ONCE

    @pytest.mark.parametrize("num_tokens", [1, 40, 400])
    @pytest.mark.parametrize("element_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
    def test_experts_in_bytes_mix_bytes(
        self, element_dtype: torch.dtype, num_tokens: int, device: torch.device
    ) -> None:
        create = partial(ChannelQuantizedExperts, element_dtype=element_dtype, device=device)
        w13, w2, originals = random_experts(create, device)
        x, router = normal(device, num_tokens, 352), torch.randn(num_tokens, 4, device=device)
        with poisoned_allocations():
            out = ops.fused_moe(x, router, w13, w2, choice=ExpertChoice(2))
        # inputs and weights of both products; a gate's error counts with its up's
        assert oracles.relative_error(out, mixed(x, router, *originals)) < 3 * EIGHT_BITS[element_dtype]


def random_experts(
    create: Callable[..., ExpertStack], device: torch.device
) -> tuple[ExpertStack, ExpertStack, list[Tensor]]:
    """Four experts of 352 inputs and 160 columns, and their weights before they are rounded."""
    w13 = create(4, 2 * 160, 352, BF16, gated=True)
    w2 = create(4, 352, 160, BF16)
    originals = [normal(device, 4, *stack[0].shape) / stack[0].in_features ** 0.5 for stack in (w13, w2)]
    for stack, original in zip((w13, w2), originals, strict=True):
        for weight, rows in zip(stack, original, strict=True):
            weight.fill_rows(0, rows)
    return w13, w2, [oracles.float64(original) for original in originals]


def stacked_rows(stack: ExpertStack, device: torch.device) -> Tensor:
    every = torch.arange(stack[0].out_features, device=device)
    return torch.stack([oracles.float64(weight.rows(every, torch.float32)) for weight in stack])


def mixed(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The two best experts of each token, in float64 on the CPU."""
    weights, chosen = oracles.float64(router).topk(2)
    weights, inputs = weights.softmax(-1), oracles.float64(x)
    out = torch.zeros(inputs.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            out[token] += weight * (oracles.silu_and_mul(inputs[token] @ w13[expert].T) @ w2[expert].T)
    return out
