"""Products of few rows with plain weights, bound by reading them: cuBLAS's beside those of the fastest tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchmarks.gpu_figures.limits import Bench
from benchmarks.gpu_figures.rows import Measured, Row
from benchmarks.gpu_figures.timing import Call, time_calls
from triptych_kernels.ops import gated_linear, linear

if TYPE_CHECKING:
    from triptych_kernels.triton.tuning.tunable import Tunable

_SHORT_S = 0.01  # of rounds, for each of the tiles that are compared


def few_rows_rows(bench: Bench) -> Iterator[Row]:
    """On a CUDA device."""
    # where there is no such compiler these rows are not asked for
    from triptych_kernels.triton.linear.few_rows import FEW_ROWS, GATED_LINEAR, LINEAR

    hidden, inner = bench.sizes.hidden_size, bench.sizes.intermediate_size
    down: _Product = linear, LINEAR, hidden, inner
    gate_up: _Product = gated_linear, GATED_LINEAR, 2 * inner, hidden
    for name, shape in (("down", down), ("gate and up", gate_up)):
        for num_rows in FEW_ROWS:
            title = f"{name}, bf16, {num_rows} rows"
            yield Row("products", f"{title}, cuBLAS", partial(measure_few_rows, bench, shape, num_rows))
            yield Row(
                "products",
                f"{title}, the fastest tiles",
                partial(measure_few_rows, bench, shape, num_rows, with_tiles=True),
            )


_Product = tuple[Callable[..., Tensor], "Tunable[Any]", int, int]
"""The op, its choice of tiles, outputs and inputs."""


def measure_few_rows(bench: Bench, shape: _Product, num_rows: int, *, with_tiles: bool = False) -> Measured:
    """Whatever is stored for this device; the activation included."""
    multiply, tunable, out_features, in_features = shape
    weight_bytes = bench.dtype.itemsize * out_features * in_features
    weights = [bench.normal(out_features, in_features) for _ in range(bench.num_copies(weight_bytes))]
    x = bench.normal(num_rows, in_features)
    calls: Sequence[Call] = [partial(multiply, x, weight, impl="triton") for weight in weights]
    key = out_features, in_features, bench.dtype, num_rows
    config, *candidates = tunable.candidates(*key)  # the default is cuBLAS
    if with_tiles:

        def seconds(candidate: object) -> float:
            with tunable.forced(x.device, key, candidate):
                return time_calls(calls, x.device, round_s=_SHORT_S, warm_up_s=0.002).median

        config = min(candidates, key=seconds)
    with tunable.forced(x.device, key, config):
        return bench.as_bandwidth(bench.time(calls), weight_bytes)
