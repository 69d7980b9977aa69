"""The check of native kernels before they are used: their products against plain torch, on small operands.

`machine_files.check_isas` keeps the result in a file, so only the first start on a kind of machine takes the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.cpu.attention import keys_in_words
from triptych_kernels.cpu.compile import AMX_EMULATED
from triptych_kernels.cpu.library import forced_isa, threads_in_use, use_threads
from triptych_kernels.cpu.program import record
from triptych_kernels.cpu.recording import Recording
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.ops import (
    causal_conv,
    choose_keys,
    chosen_attention,
    gated_delta_scan,
    head_linear,
    latent_attention,
    linear,
    paged_attention,
    selective_scan,
    state_space_scan,
)
from triptych_kernels.state_batch import StateBatch
from triptych_kernels.torch.attention import paged_attention as torch_paged_attention
from triptych_kernels.torch.latent_attention import choose_keys as torch_choose_keys
from triptych_kernels.torch.latent_attention import chosen_attention as torch_chosen_attention
from triptych_kernels.torch.latent_attention import latent_attention as torch_latent_attention
from triptych_kernels.weights.coded import CodedRows
from triptych_kernels.weights.coded_weight import CodedWeight
from triptych_kernels.weights.formats import BLOCK_FORMATS, GROUP_SIZE, QuantizedFormat
from triptych_kernels.weights.packed import WIDENED_DTYPES, HeadWeight, PackedWeight, WidenedWeight
from triptych_kernels.weights.quantized import NEVER, QuantizedWeight

_MAY_DIE = ("amx", AMX_EMULATED)
"""Instruction sets that a system may name and not let a process use; their kernels run in a child process first."""

_NUM_ROWS, _OUT_FEATURES, _IN_FEATURES = (
    35,
    40,
    3 * GROUP_SIZE,
)  # more rows than AMX's tiles hold, no whole panels
_INPUT_UNIT, _WEIGHT_UNIT = (
    2.0**-6,
    2.0**-4,
)  # inputs and weights are small multiples of these, exact in every form
_FLOAT_SUMS = 2.0**-18  # error of sums in float32, as a part of the sum of sizes
_Bits = Literal[8, 16]
_QUANTIZED_FORMS: tuple[tuple[str, _Bits, int, _Bits, float], ...] = (
    ("", 16, NEVER, 16, 2.0**-15),
    (" of 8-bit inputs", 8, NEVER, 16, 2.0**-7),
    (" wide", 16, 1, 16, 0.0),
    (" wide in bytes", 8, 1, 8, 2.0**-7),
)
"""Forms of quantized products: name, `input_bits`, `wide_rows`, `wide_bits`, and the `rounding` of `_linear_check`."""
_CODED_FORMATS = {
    "zero points": QuantizedFormat(4, "zero"),
    "5 bits": QuantizedFormat(5, "minimum"),
    "8 bits": QuantizedFormat(8, "none", 0, scale="float32"),
    "MXFP4": QuantizedFormat(4, "none", 32, "fp4", "e8m0"),
    "NVFP4": QuantizedFormat(4, "none", 16, "fp4", "e4m3"),
    "nf4": QuantizedFormat(4, "none", 32, "nf4", "float32"),
    "float8": QuantizedFormat(8, "none", 32, "e4m3", "bfloat16"),
}
_CODED_FORMS: tuple[tuple[str, _Bits, int, float], ...] = (
    ("", 16, NEVER, 2.0**-15),
    (" of 8-bit inputs", 8, NEVER, 2.0**-7),
    (" wide", 16, 1, 2.0**-8),
)
"""Forms of coded products: name, `input_bits`, `wide_rows`, and the `rounding` of `_linear_check`."""
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 4, 2, 64, 16
_QUERY_LENS, _SEQ_LENS = (5, 1), (21, 37)
_MAX_KEYS = 12
_OPTIONS = AttendOptions(_HEAD_DIM**-0.5)


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """A product on given operands, and how far its result may be from that of plain torch."""

    name: str
    """Kernel and form, for the warning."""
    forward: Callable[[Recording], Tensor]
    """Computes the product from inputs that it declares, with rows counted as `rows` and `requests`."""
    expected: Tensor
    """[rows, …]"""
    tolerance: Tensor | float
    """Largest difference that rounding explains, for each element or for all."""


def find_problem(isa: str) -> str:
    """Return what the kernels of one of the built instruction sets do wrong, or an empty string.

    Raises:
        MemoryError: The system has no memory for the check.
    """
    with forced_isa(isa):
        try:
            before = threads_in_use()
            use_threads(1)
            try:
                return next(filter(None, (_problem_of(check, isa) for check in create_checks())), "")
            finally:
                use_threads(before)
        except (
            AttributeError,
            RuntimeError,
            TypeError,
        ) as error:  # the library is of other sources than these files
            return f"the library does not fit: {error}"


def _problem_of(check: Check, isa: str) -> str:
    program = record(lambda recording: [check.forward(recording)])
    counts = {"rows": len(check.expected), "requests": len(_SEQ_LENS)}
    if isa in _MAY_DIE and (ending := program.run_in_child(counts)):
        return f"{check.name} {ending}"
    program.run(counts)
    difference = (program.outputs[0].double() - check.expected).abs().nan_to_num(nan=torch.inf)
    if bool((difference > check.tolerance).any()):
        return f"{check.name} differs from plain torch by up to {float(difference.max()):.3g}"
    return ""


def create_checks() -> Iterator[Check]:
    """Yield the checks, with operands packed for the instruction set in use."""
    random = torch.Generator().manual_seed(0)
    yield from _linear_checks(random)
    yield from _attention_checks(random)
    yield from _state_checks(random)


def _linear_checks(random: torch.Generator) -> Iterator[Check]:
    x = torch.randint(-127, 128, (_NUM_ROWS, _IN_FEATURES), generator=random) * _INPUT_UNIT
    rows = _random_integers(-128, 127, random) * _WEIGHT_UNIT
    for dtype in (torch.float32, torch.bfloat16):
        yield _linear_check(
            str(dtype), PackedWeight(_OUT_FEATURES, _IN_FEATURES, dtype), rows, x.to(dtype), 0.0
        )
    for dtype in WIDENED_DTYPES:
        yield _linear_check(
            f"{dtype} by torch.float32", WidenedWeight(_OUT_FEATURES, _IN_FEATURES, dtype), rows, x, 0.0
        )
    for name, format in BLOCK_FORMATS.items():
        half = 2 ** (format.bits - 1)
        scales = torch.full((_OUT_FEATURES, _IN_FEATURES // GROUP_SIZE), _WEIGHT_UNIT)
        codes = (_random_integers(-half, half - 1, random) + half).byte()
        coded = CodedRows(format, codes, scales, scales * -half if format.is_affine else None)
        for form, input_bits, wide_rows, wide_bits, rounding in _QUANTIZED_FORMS:
            if wide_bits == 8 and format.bits != 4:
                continue  # such products are of weights of 4 bits only
            weight = QuantizedWeight(_OUT_FEATURES, _IN_FEATURES, torch.bfloat16, format)
            weight.input_bits, weight.wide_rows, weight.wide_bits = input_bits, wide_rows, wide_bits
            yield _linear_check(f"{name}{form}", weight, coded, x.bfloat16(), rounding)
    yield from _coded_checks(x.bfloat16(), random)


def _coded_checks(x: Tensor, random: torch.Generator) -> Iterator[Check]:
    for name, format in _CODED_FORMATS.items():
        codes = torch.randint(0, 2**format.bits, (_OUT_FEATURES, _IN_FEATURES), generator=random).byte()
        if format.table == "e4m3":
            codes &= 0xF7  # so that none is NaN
        scales = torch.full((_OUT_FEATURES, _IN_FEATURES // (format.group or _IN_FEATURES)), _WEIGHT_UNIT)
        offsets = {"none": None, "minimum": -16 * scales, "zero": torch.full_like(scales, 7.0)}[format.offset]
        coded = CodedRows(format, codes, scales, offsets)
        for form, input_bits, wide_rows, rounding in _CODED_FORMS:
            weight = CodedWeight(_OUT_FEATURES, _IN_FEATURES, torch.bfloat16, format)
            weight.input_bits, weight.wide_rows = input_bits, wide_rows
            yield _linear_check(f"{name}{form}", weight, coded, x, rounding)


def _random_integers(low: int, high: int, random: torch.Generator) -> Tensor:
    """Return float32 [out_features, in_features]; each group holds the lowest and the highest."""
    integers = torch.randint(low, high + 1, (_OUT_FEATURES, _IN_FEATURES), generator=random).float()
    integers[:, 3::GROUP_SIZE], integers[:, 20::GROUP_SIZE] = low, high
    return integers


def _linear_check(
    name: str, weight: PackedWeight, rows: Tensor | CodedRows, x: Tensor, rounding: float
) -> Check:
    """Return the check of a product.

    Args:
        rows: [out_features, in_features], in float32 or of the weight's format.
        rounding: Largest error of an input that the product rounds, as a part of the row's largest.
    """
    if isinstance(rows, CodedRows):
        assert isinstance(weight, QuantizedWeight), "no other weight keeps codes"
        weight.fill_codes(0, rows)
        rows = rows.dequantize(torch.float32)
    else:
        weight.fill_rows(0, rows)
    sizes = x.double().abs() @ rows.double().abs().T
    rounded = x.double().abs().amax(1, keepdim=True) * rows.double().abs().sum(1)
    return Check(
        f"linear, {name}",
        lambda recording: linear(recording.input(x, count="rows"), weight, out_dtype=torch.float32),
        x.double() @ rows.double().T,
        _FLOAT_SUMS * sizes + rounding * rounded,
    )


def _attention_checks(random: torch.Generator) -> Iterator[Check]:
    starts = torch.tensor([0, *_QUERY_LENS]).cumsum(0).int()
    seq_lens = torch.tensor(_SEQ_LENS).int()
    block_tables = torch.tensor([[3, 5, 0], [4, 1, 2]]).int()
    shape = (6, 2, _NUM_KV_HEADS, _BLOCK_SIZE, _HEAD_DIM)
    query = torch.randn(int(starts[-1]), _NUM_HEADS, _HEAD_DIM, generator=random).bfloat16()
    values = torch.randn(shape, generator=random).bfloat16()
    for cache_dtype, query_dtype, tolerance in (
        (torch.float32, torch.float32, 1e-4),
        (torch.bfloat16, torch.bfloat16, 0.05),  # weights and results are rounded to 2^-9 of themselves
        (torch.int8, torch.bfloat16, 0.05),
    ):
        scales = None
        cache = values.to(cache_dtype)
        if cache_dtype == torch.int8:
            largest = LARGEST_ELEMENT[cache_dtype]
            cache = (values.float() * (largest / 5)).clamp(-largest, largest).round().to(cache_dtype)
            scales = torch.full(shape[:4], 5 / largest)
        operands = (query.to(query_dtype), keys_in_words(cache), block_tables, starts, seq_lens, scales)
        expected = torch_paged_attention(
            query.float(), cache if scales is not None else cache.float(), block_tables, starts, seq_lens,
            _OPTIONS, kv_scales=scales, query_lens_list=_QUERY_LENS, seq_lens_list=_SEQ_LENS,
        )  # fmt: skip
        name = f"attention, {cache_dtype} cache"
        yield Check(name, partial(_attend, *operands), expected.double(), tolerance)
    yield from _latent_checks(random)
    yield from _choice_checks(random)


def _attend(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    scales: Tensor | None,
    recording: Recording,
) -> Tensor:
    return paged_attention(
        recording.input(query, count="rows"),
        cache,
        recording.input(block_tables, count="requests"),
        recording.input(starts, count="requests"),
        recording.input(seq_lens, count="requests"),
        _OPTIONS,
        kv_scales=scales,
    )


def _latent_checks(random: torch.Generator) -> Iterator[Check]:
    """Yield the checks of latent attention, from queries that each head makes of its own inputs."""
    starts = torch.tensor([0, *_QUERY_LENS]).cumsum(0).int()
    seq_lens = torch.tensor(_SEQ_LENS).int()
    block_tables = torch.tensor([[3, 5, 0], [4, 1, 2]]).int()
    width, value_dim = _HEAD_DIM + 16, _HEAD_DIM
    x = torch.randn(int(starts[-1]), _NUM_HEADS, 32, generator=random).bfloat16()
    rows = torch.randn(_NUM_HEADS, width, 32, generator=random).bfloat16() / 16
    cache = torch.randn(6, _BLOCK_SIZE, width, generator=random).bfloat16()
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        weight = HeadWeight(_NUM_HEADS, width, rows.shape[2], dtype)
        for head, own in enumerate(rows):
            weight.fill_head(head, own)
        query = torch.einsum("thi,hoi->tho", x.float(), rows.float())
        expected = torch_latent_attention(
            query, cache.float(), block_tables, starts, seq_lens, _OPTIONS.scale, value_dim,
            query_lens_list=_QUERY_LENS, seq_lens_list=_SEQ_LENS,
        )  # fmt: skip
        operands = (x.to(dtype), weight, cache.to(dtype), block_tables, starts, seq_lens)
        yield Check(
            f"latent attention, {dtype}", partial(_attend_latent, *operands), expected.double(), tolerance
        )


def _attend_latent(
    x: Tensor,
    weight: HeadWeight,
    cache: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    recording: Recording,
) -> Tensor:
    return latent_attention(
        head_linear(recording.input(x, count="rows"), weight),
        cache,
        recording.input(block_tables, count="requests"),
        recording.input(starts, count="requests"),
        recording.input(seq_lens, count="requests"),
        scale=_OPTIONS.scale,
        value_dim=_HEAD_DIM,
    )


def _choice_checks(random: torch.Generator) -> Iterator[Check]:
    """Yield the checks of attention to chosen keys, by scores of small integers, which every form computes alike."""
    starts = torch.tensor([0, *_QUERY_LENS]).cumsum(0).int()
    seq_lens = torch.tensor(_SEQ_LENS).int()
    block_tables = torch.tensor([[3, 5, 0], [4, 1, 2]]).int()
    width, num_tokens = _HEAD_DIM + 16, int(starts[-1])
    index_query = torch.randint(-2, 3, (num_tokens, 3, _HEAD_DIM), generator=random).float()
    weights = torch.randint(-2, 4, (num_tokens, 3), generator=random).float()
    query = torch.randn(num_tokens, _NUM_HEADS, width, generator=random).bfloat16()
    vectors = torch.randn(6, _BLOCK_SIZE, width, generator=random).bfloat16()
    keys = torch.randint(-2, 3, (6, _BLOCK_SIZE, _HEAD_DIM), generator=random).bfloat16()
    cache = torch.cat((vectors, keys), dim=2)
    chosen = torch_choose_keys(
        index_query, weights, keys, block_tables, starts, seq_lens, _MAX_KEYS,
        query_lens_list=_QUERY_LENS, seq_lens_list=_SEQ_LENS,
    )  # fmt: skip
    expected = torch_chosen_attention(
        query.float(), vectors.float().flatten(0, 1), *chosen, _OPTIONS.scale, _HEAD_DIM
    )
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        operands = (
            index_query.to(dtype),
            weights,
            query.to(dtype),
            cache.to(dtype),
            block_tables,
            starts,
            seq_lens,
        )
        name = f"attention to chosen keys, {dtype}"
        yield Check(name, partial(_choose_and_attend, *operands), expected.double(), tolerance)


def _choose_and_attend(
    index_query: Tensor,
    weights: Tensor,
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    recording: Recording,
) -> Tensor:
    slots, counts = choose_keys(
        recording.input(index_query, count="rows"),
        recording.input(weights, count="rows"),
        cache[..., query.shape[2] :],
        recording.input(block_tables, count="requests"),
        recording.input(starts, count="requests"),
        recording.input(seq_lens, count="requests"),
        max_keys=_MAX_KEYS,
    )
    own = recording.input(query, count="rows")
    vectors = cache.flatten(0, 1)[:, : query.shape[2]]
    return chosen_attention(own, vectors, slots, counts, scale=_OPTIONS.scale, value_dim=_HEAD_DIM)


def _state_checks(random: torch.Generator) -> Iterator[Check]:
    """Yield the checks of what has a recurrent state, which its second call finds where the first has left it."""
    heads, groups, key_dim, value_dim, channels = 4, 2, 24, 40, 72

    def positive(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random) / 2

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    keys, values, steps = (groups, key_dim), (heads, value_dim), (heads,)
    states_of_heads = (heads, key_dim, value_dim)
    parameters = positive(heads), drawn(heads)
    for op, sizes, constants, state_shape in (
        (causal_conv, ((channels,),), (drawn(4, channels), drawn(channels)), (3, channels)),
        (gated_delta_scan, (keys, keys, values, steps, steps), parameters, states_of_heads),
        (state_space_scan, (values, steps, keys, keys), (*parameters, drawn(heads)), states_of_heads),
        (
            selective_scan,
            ((channels,), (channels,), (key_dim,), (key_dim,)),
            (positive(key_dim, channels), drawn(channels)),
            (key_dim, channels),
        ),
    ):
        tokens = [drawn(sum(_QUERY_LENS), *size) for size in sizes]
        state = drawn(4, *state_shape)
        for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.05)):
            operands = [each.to(dtype) for each in tokens]
            expected = _advance(
                partial(op, impl="torch"), [each.float() for each in operands], constants, state.clone()
            )
            yield Check(
                f"{op.__name__}, {dtype}",
                partial(_advance, op, operands, constants, state.clone()),
                expected.double(),
                tolerance * max(float(expected.abs().max()), 1.0),
            )


def _advance(
    op: Callable[..., Tensor],
    tokens: Sequence[Tensor],
    constants: Sequence[Tensor],
    state: Tensor,
    recording: Recording | None = None,
) -> Tensor:
    """Return what `op` computes in the second of two equal steps, which goes on where the first has ended.

    Args:
        tokens: Operands with a row for each token.
        recording: That of the steps; None: they are computed at once.
    """
    starts = torch.tensor([0, *_QUERY_LENS]).cumsum(0).int()
    given, left, none = torch.tensor([[0, 1], [2, 3], [0, 0]]).int()
    if recording is not None:
        tokens = [recording.input(each, count="rows") for each in tokens]
        starts, given, left, none = (
            recording.input(each, count="requests") for each in (starts, given, left, none)
        )
    op(*tokens, *constants, state, StateBatch(given, left, starts))
    return op(*tokens, *constants, state, StateBatch(left, none, starts))
