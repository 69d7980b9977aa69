"""Measures native products on this CPU, by form of the weight and number of rows, beside what the machine can do.

Weights are read from memory: as many of them are multiplied in turn as no cache holds. Quantized ones are shown beside
the limit of bfloat16. Their inputs are rounded to 16 bits; `8-bit` ones to 8 bits; `wide` ones are multiplied in
bfloat16 themselves, `wide bytes` ones in bytes. Inputs of `widened` ones are float32, and so are those of floats of 8
bits and of nf4, unless they are bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.harness.command import run
from benchmarks.harness.figures import Figure
from benchmarks.harness.timing import samples_s
from benchmarks.kernels.limits import UNCACHED_BYTES, create_kernel_parser, measure_limits
from triptych_kernels.cpu.program import record
from triptych_kernels.cpu.recording import Recording
from triptych_kernels.ops import linear
from triptych_kernels.weights.coded_weight import CodedWeight
from triptych_kernels.weights.formats import BLOCK_FORMATS, GGUF_FORMATS, PANEL_FORMATS, QuantizedFormat
from triptych_kernels.weights.packed import PackedWeight, WidenedWeight
from triptych_kernels.weights.quantized import NEVER, QuantizedWeight


@dataclass(frozen=True, slots=True)
class Widened:
    """Weights of 16 bits for inputs in float32."""

    stored_dtype: torch.dtype


Form = torch.dtype | Widened | QuantizedFormat

FORMS: dict[str, Form] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bfloat16 widened": Widened(torch.bfloat16),
    "float16 widened": Widened(torch.float16),
    **{name: BLOCK_FORMATS[name] for name in ("Q8_0", "Q4_0", "Q4_1")},
    **{name: GGUF_FORMATS[name] for name in ("Q4_K", "Q6_K", "MXFP4")},
    "4 bits in groups of 128": QuantizedFormat(4, "zero", 128),
    "nf4": QuantizedFormat(4, "none", 64, "nf4", "float32"),
    "fp8": QuantizedFormat(8, "none", 128, "e4m3", "float32"),
}
ROWS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 1024)
WIDE_FROM = 32

Arithmetic = Literal["", "8-bit", "wide", "wide bytes"]
"""The inputs' integers of quantized weights, 16 bits unless it says otherwise, or the arithmetic of many rows."""


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    limits = measure_limits(arguments.threads)
    shape = (arguments.out_features, arguments.in_features)
    for name in arguments.forms or FORMS:
        form = FORMS[name]
        num_bytes = create_weight(form, *shape).num_bytes
        weights = [create_weight(form, *shape) for _ in range(-(-UNCACHED_BYTES // num_bytes))]
        for num_rows in arguments.rows or ROWS:
            for arithmetic in arithmetics(form, num_rows):
                yield from limits.rates(
                    f"{name} {arithmetic}".rstrip() + f", {num_rows} rows",
                    product_s(weights, num_rows, arithmetic, num_rounds=arguments.rounds),
                    num_bytes=num_bytes,
                    operations=2 * num_rows * shape[0] * shape[1],
                    dtype=weights[0].dtype,
                )


def arithmetics(form: Form, num_rows: int) -> tuple[Arithmetic, ...]:
    if not isinstance(form, QuantizedFormat):
        return ("",)
    if not form.has_integers:
        return ("",) if num_rows < WIDE_FROM else ("", "wide")
    if num_rows < WIDE_FROM:
        return ("", "8-bit")
    has_wide_bytes = form in PANEL_FORMATS and form.bits == 4
    return ("", "8-bit", "wide", "wide bytes") if has_wide_bytes else ("", "8-bit", "wide")


def create_weight(form: Form, out_features: int, in_features: int) -> PackedWeight:
    """Return a weight of any numbers; zeros that were never written would all be one page of memory."""
    weight = _empty_weight(form, out_features, in_features)
    weight.data.view(torch.uint8).random_(0, 0x78)  # no float is infinite
    return weight


def _empty_weight(form: Form, out_features: int, in_features: int) -> PackedWeight:
    if isinstance(form, Widened):
        return WidenedWeight(out_features, in_features, form.stored_dtype)
    if isinstance(form, torch.dtype):
        return PackedWeight(out_features, in_features, form)
    create = QuantizedWeight if form in PANEL_FORMATS else CodedWeight
    return create(out_features, in_features, torch.bfloat16, form)


def product_s(
    weights: list[PackedWeight], num_rows: int, arithmetic: Arithmetic, *, num_rounds: int
) -> list[float]:
    """Return the seconds of one product; all of them are one recorded program, so no Python is measured."""
    weights = weights[: max(1, 512 // num_rows)]  # many rows read little and take long
    for weight in weights:
        if isinstance(weight, QuantizedWeight):
            weight.wide_rows = 1 if arithmetic.startswith("wide") else NEVER
            weight.wide_bits = 8 if arithmetic == "wide bytes" else 16
            weight.input_bits = 8 if arithmetic == "8-bit" else 16
    x = torch.randn(num_rows, weights[0].in_features).to(weights[0].dtype)

    def multiply_all(recording: Recording) -> list[Tensor]:
        rows = recording.input(x, count="rows")
        return [linear(rows, weight) for weight in weights][-1:]

    program = record(multiply_all)
    all_s = samples_s(lambda: program.run({"rows": num_rows}), num_rounds)
    return [sample_s / len(weights) for sample_s in all_s]


if __name__ == "__main__":
    parser = create_kernel_parser(__doc__, rounds=20)
    parser.add_argument("--forms", nargs="+", choices=FORMS, help="default: all")
    parser.add_argument("--rows", nargs="+", type=int, help=f"default: {' '.join(map(str, ROWS))}")
    parser.add_argument("--in-features", type=int, default=1536)
    parser.add_argument("--out-features", type=int, default=1536)
    sys.exit(run(parser, measure))
