"""Whole models: streams that decode alone, whole requests, and how long the device idles between steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_figures.limits import Bench
from benchmarks.gpu_figures.models import (
    LLAMA_8B,
    MIXTRAL_HALF,
    QWEN3_06B,
    Mode,
    ModelShape,
    create_random_runner,
    model_config,
    shape_of,
)
from benchmarks.gpu_figures.rows import Measured, Row
from benchmarks.gpu_figures.serving import DecodingStreams, gaps_between, serve
from benchmarks.gpu_figures.timing import release_memory
from services.worker.runner.base import Runner
from services.worker.runner.graph_sizes import decode_buckets

_WARM_UP_STEPS = 4  # CUDA graphs are recorded when their size is first needed
_TRACED_STEPS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A runner and its streams."""

    runner: Runner
    streams: DecodingStreams
    create_s: float


class Shelf:
    """Holds one runner at a time: the next needs the memory."""

    def __init__(self) -> None:
        self._key: object = None
        self._loaded: Loaded | None = None
        self._key_to_error: dict[object, Exception] = {}

    def get(self, key: object, create: Callable[[], Runner], context: int) -> Loaded:
        """The runner of this key. What failed once fails again at once."""
        if key in self._key_to_error:
            raise self._key_to_error[key]
        if self._loaded is None or self._key != key:
            self.clear()
            started = time.perf_counter()
            try:
                runner = create()
            except Exception as error:
                self._key_to_error[key] = error.with_traceback(None)  # which would keep the weights alive
                raise
            self._key = key
            self._loaded = Loaded(runner, DecodingStreams(runner, context), time.perf_counter() - started)
        return self._loaded

    def clear(self) -> None:
        self._loaded = None
        release_memory()


@dataclass(frozen=True, slots=True, eq=False)
class ModelBench:
    """One model in one mode."""

    bench: Bench
    shelf: Shelf
    name: str
    config: dict[str, Any]
    mode: Mode = field(default_factory=Mode)

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.config)

    def load(self) -> Loaded:
        bench = self.bench
        create = partial(create_random_runner, self.config, bench.sizes, bench.device, self.mode)
        return self.shelf.get((self.name, self.mode), create, bench.sizes.context)

    def decode(self, num_streams: int) -> Measured:
        """Tokens per second by the median step; the spread is that of the ninth and the first decile."""
        sizes, loaded = self.bench.sizes, self.load()
        loaded.streams.start(num_streams)
        loaded.streams.advance(_WARM_UP_STEPS)
        seconds = loaded.streams.advance(sizes.decode_steps)
        deciles = statistics.quantiles(seconds, n=10, method="inclusive")
        context = sizes.context + _WARM_UP_STEPS + sizes.decode_steps // 2
        step_s = statistics.median(seconds)
        return Measured(
            num_streams / step_s,
            "tok/s",
            num_streams / self.least_step_s(num_streams, context),
            "bytes and arithmetic of a step",
            low=num_streams / deciles[-1],
            high=num_streams / deciles[0],
            note=f"{step_s * 1e3:.3f} ms a step; {loaded.runner.facts.kernels}; loaded in {loaded.create_s:.1f} s",
        )

    def serve_all(self) -> Measured:
        """Tokens in and out per second of a full batch of whole requests. Before it goes, uncounted, what records CUDA
        graphs: a step of every number of streams that has one, and a short batch."""
        sizes, loaded = self.bench.sizes, self.load()
        for num_streams in decode_buckets(sizes.streams):
            loaded.streams.start(num_streams)
        serve(loaded.runner, sizes.streams, sizes.context // 8, 4, seed=1)
        served = serve(loaded.runner, sizes.streams, sizes.context, sizes.output_len, seed=2)
        return Measured(
            served.num_tokens / served.seconds,
            "tok/s in + out",
            served.num_tokens / self.least_serving_s(),
            "bytes and arithmetic",
            note=f"{served.seconds:.2f} s, {served.num_steps} steps",
        )

    def idle(self, num_streams: int) -> Measured:
        """Between the last kernel of a step and the first of the next, as the profiler sees them."""
        loaded = self.load()
        loaded.streams.start(num_streams)
        loaded.streams.advance(_WARM_UP_STEPS)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            loaded.streams.advance(_TRACED_STEPS)
            torch.cuda.synchronize()
        kernels = [
            (event.time_range.start, event.time_range.end)
            for event in trace.events()
            if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        ]
        gaps = gaps_between(kernels)
        if len(gaps) < _TRACED_STEPS - 1:
            raise ValueError(f"the profiler saw {len(kernels)} kernels and {len(gaps)} gaps: too few")
        # of a step's gaps the one between steps is the longest: the host has to read tokens and plan
        largest = sorted(gaps)[-(_TRACED_STEPS - 1) :]
        return Measured(
            statistics.median(largest),
            "us",
            low=largest[0],
            high=largest[-1],
            note=f"idle in all {sum(gaps) / _TRACED_STEPS:.0f} us a step; traced, so a little slower",
        )

    def least_step_s(self, num_streams: int, context: int) -> float:
        """Keys and values are read, then weights; or the arithmetic takes longer than the weights."""
        return self._products_s(num_streams) + self._kv_s(num_streams * context)

    def least_serving_s(self) -> float:
        """Products of all tokens, and what each decode reads."""
        sizes = self.bench.sizes
        prompts = self._products_s(sizes.streams * sizes.context)
        mean_context = sizes.context + sizes.output_len // 2
        return prompts + (sizes.output_len - 1) * self.least_step_s(sizes.streams, mean_context)

    def _products_s(self, num_tokens: int) -> float:
        num_bytes = self.mode.parameter_bytes * self.shape.read_parameters(num_tokens)
        read_s = num_bytes / self.bench.bandwidth
        return max(read_s, 2 * self.shape.used_parameters * num_tokens / self.bench.matrix_rate)

    def _kv_s(self, num_keys: int) -> float:
        element_bytes = self.mode.element_bytes(self.shape.head_dim)
        return element_bytes * self.shape.kv_elements * num_keys / self.bench.bandwidth


def model_rows(bench: Bench, shelf: Shelf) -> Iterator[Row]:
    """By model, so that each is loaded once in each mode; other modes of one of them have a section of their own."""
    sizes, on_cuda = bench.sizes, bench.device.type == "cuda"
    for name, whole in (("8B", LLAMA_8B), ("Qwen3-0.6B", QWEN3_06B), ("Mixtral, half", MIXTRAL_HALF)):
        config = model_config(whole, sizes)
        model = ModelBench(bench, shelf, name, config)
        streams, context = sizes.streams, f"context {sizes.context:,}"
        yield Row("models", f"{name}, decode, 1 stream, {context}", partial(model.decode, 1))
        yield Row("models", f"{name}, decode, {streams} streams, {context}", partial(model.decode, streams))
        title = f"{name}, {streams} requests, {sizes.context:,} in, {sizes.output_len} out"
        yield Row("models", title, model.serve_all)
        if on_cuda:
            yield Row("models", f"{name}, gap between steps, {streams} streams", partial(model.idle, streams))
    model = ModelBench(bench, shelf, "8B", model_config(LLAMA_8B, sizes))
    for words, mode in (
        ("no graphs", Mode(enforce_eager=True)),
        *(
            (f"weights {form}", Mode(quantization=form))
            for form in ("q4", *(("int8", "fp8") if on_cuda else ()))
        ),
        ("int8 cache", Mode(kv_dtype="int8")),
    ):
        other = replace(model, mode=mode)
        for num_streams in (1, sizes.streams):
            streams = "1 stream" if num_streams == 1 else f"{num_streams} streams"
            title = f"8B, decode, {streams}, context {sizes.context:,}, {words}"
            yield Row("other modes", title, partial(other.decode, num_streams))
