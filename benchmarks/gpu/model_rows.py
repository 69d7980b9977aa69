"""Whole models: streams that decode, whole requests, and how long the device idles between steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.models import (
    LLAMA_8B,
    QWEN3_06B,
    create_random_runner,
    kv_elements,
    model_config,
    num_multiplied_parameters,
)
from benchmarks.gpu.serving import DecodingStreams, gaps_between, serve
from benchmarks.gpu.timing import Bench, Row, release_memory
from benchmarks.harness.figures import Figure, rate
from triptych_services.worker.runner.graph_sizes import decode_buckets

_WARM_UP_STEPS = 4  # CUDA graphs are recorded when their size is first needed
_TRACED_STEPS = 16
_ELEMENT_BYTES = 2  # bfloat16, weights as well as keys and values


class LoadedModel:
    """Holds the streams of one model at a time: the next needs the memory."""

    def __init__(self) -> None:
        self._config: dict[str, Any] | None = None
        self._streams: DecodingStreams | None = None

    def streams(self, bench: Bench, config: dict[str, Any]) -> DecodingStreams:
        """Return the streams of this model; another one is given up first."""
        if self._streams is None or self._config != config:
            self.clear()
            runner = create_random_runner(config, bench.sizes, bench.device)
            self._config, self._streams = config, DecodingStreams(runner, bench.sizes.context)
        return self._streams

    def clear(self) -> None:
        self._streams = None
        release_memory()


@dataclass(frozen=True, slots=True, eq=False)
class ModelBench:
    """Measures one model."""

    bench: Bench
    loaded: LoadedModel
    config: dict[str, Any]

    def decode(self, num_streams: int) -> Figure:
        """Measure tokens per second, a sample for each step."""
        sizes, streams = self.bench.sizes, self._start(num_streams)
        steps_s = streams.advance(sizes.decode_steps)
        limit = num_streams / self.least_step_s(num_streams, sizes.context + sizes.decode_steps // 2)
        step_ms, facts = 1e3 * statistics.median(steps_s), streams.runner.facts
        note = f"{step_ms:.3f} ms a step; {facts.kernels}"
        return rate("", "tok/s", num_streams, steps_s, limit, note)

    def serve_all(self) -> Figure:
        """Measure tokens in and out per second of a full batch of whole requests.

        Not counted: a step of every number of streams that has a CUDA graph, which records it, and a short batch.
        """
        sizes, streams = self.bench.sizes, self.loaded.streams(self.bench, self.config)
        for num_streams in decode_buckets(sizes.streams):
            streams.start(num_streams)
        serve(streams.runner, sizes.streams, sizes.context // 8, 4, seed=1)
        seconds, num_steps = serve(streams.runner, sizes.streams, sizes.context, sizes.output_len, seed=2)
        num_tokens = sizes.streams * (sizes.context + sizes.output_len)
        limit = num_tokens / self.least_serving_s()
        note = f"{seconds:.2f} s, {num_steps} steps"
        return rate("", "tok/s in + out", num_tokens, [seconds], limit, note)

    def idle(self, num_streams: int) -> Figure:
        """Measure the time from the last kernel of a step to the first of the next, as the profiler sees them."""
        streams = self._start(num_streams)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            streams.advance(_TRACED_STEPS)
            torch.cuda.synchronize()
        kernels = [
            (event.time_range.start, event.time_range.end)
            for event in trace.events()
            if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        ]
        gaps_us = gaps_between(kernels)
        if len(gaps_us) < _TRACED_STEPS - 1:
            raise ValueError(f"the profiler saw {len(kernels)} kernels and {len(gaps_us)} gaps: too few")
        # of a step's gaps the one between steps is the longest: the host has to read tokens and plan
        largest_us = tuple(sorted(gaps_us)[-(_TRACED_STEPS - 1) :])
        note = f"idle in all {sum(gaps_us) / _TRACED_STEPS:.0f} us a step; traced, so a little slower"
        return Figure("", "us", largest_us, less_is_better=True, note=note)

    def least_step_s(self, num_streams: int, context: int) -> float:
        """Return the seconds to read keys and values, and to read the weights or compute with them."""
        kv_bytes = _ELEMENT_BYTES * kv_elements(self.config) * num_streams * context
        return self._least_products_s(num_streams) + kv_bytes / self.bench.bandwidth

    def least_serving_s(self) -> float:
        """Return the seconds of all prompts' products, and of each decode."""
        sizes = self.bench.sizes
        prompts_s = self._least_products_s(sizes.streams * sizes.context)
        mean_context = sizes.context + sizes.output_len // 2
        return prompts_s + (sizes.output_len - 1) * self.least_step_s(sizes.streams, mean_context)

    def _least_products_s(self, num_tokens: int) -> float:
        num_parameters = num_multiplied_parameters(self.config)
        read_s = _ELEMENT_BYTES * num_parameters / self.bench.bandwidth
        return max(read_s, 2 * num_parameters * num_tokens / self.bench.matrix_rate)

    def _start(self, num_streams: int) -> DecodingStreams:
        """Return the model's streams; `num_streams` of them decode."""
        streams = self.loaded.streams(self.bench, self.config)
        streams.start(num_streams)
        streams.advance(_WARM_UP_STEPS)
        return streams


def model_rows(bench: Bench, loaded: LoadedModel) -> Iterator[Row]:
    """Yield the rows of each model together, so that it is loaded once."""
    sizes = bench.sizes
    full = f"{sizes.streams} streams"
    for name, config in (("8B", LLAMA_8B), ("Qwen3-0.6B", QWEN3_06B)):
        model = ModelBench(bench, loaded, model_config(config, sizes))
        for title, num_streams in (("1 stream", 1), (full, sizes.streams)):
            title = f"models: {name}, decode, {title}, context {sizes.context:,}"
            yield Row(title, partial(model.decode, num_streams))
        title = f"models: {name}, {sizes.streams} requests, {sizes.context:,} in, {sizes.output_len} out"
        yield Row(title, model.serve_all)
        if bench.device.type == "cuda":
            yield Row(f"models: {name}, gap between steps, {full}", partial(model.idle, sizes.streams))
