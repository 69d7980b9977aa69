"""Whole models: streams that decode, whole requests, and how long the device idles between steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.models import (
    LLAMA_8B,
    MIXTRAL_HALF,
    QWEN3_06B,
    Mode,
    ModelShape,
    create_random_runner,
    model_config,
    shape_of,
)
from benchmarks.gpu.serving import DecodingStreams, gaps_between, serve
from benchmarks.gpu.timing import Bench, Row, release_memory
from benchmarks.harness.figures import Figure, rate
from services.worker.runner.base import Runner
from services.worker.runner.graph_sizes import decode_buckets

_WARM_UP_STEPS = 4  # CUDA graphs are recorded when their size is first needed
_TRACED_STEPS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A runner and its streams."""

    runner: Runner
    streams: DecodingStreams
    load_s: float


class RunnerCache:
    """Holds one runner at a time: the next needs the memory."""

    def __init__(self) -> None:
        self._key: object = None
        self._loaded: Loaded | None = None

    def get(self, key: object, create: Callable[[], Runner], context: int) -> Loaded:
        """Return the runner of this key; another one is given up first."""
        if self._loaded is None or self._key != key:
            self.clear()
            started_s = time.perf_counter()
            runner = create()
            self._key = key
            self._loaded = Loaded(runner, DecodingStreams(runner, context), time.perf_counter() - started_s)
        return self._loaded

    def clear(self) -> None:
        self._loaded = None
        release_memory()


@dataclass(frozen=True, slots=True, eq=False)
class ModelBench:
    """One model in one mode."""

    bench: Bench
    runners: RunnerCache
    name: str
    config: dict[str, Any]
    mode: Mode = field(default_factory=Mode)

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.config)

    def load(self) -> Loaded:
        bench = self.bench
        create = partial(create_random_runner, self.config, bench.sizes, bench.device, self.mode)
        return self.runners.get((self.name, self.mode), create, bench.sizes.context)

    def decode(self, num_streams: int) -> Figure:
        """Measure tokens per second, a sample for each step."""
        sizes, loaded = self.bench.sizes, self.load()
        loaded.streams.start(num_streams)
        loaded.streams.advance(_WARM_UP_STEPS)
        steps_s = loaded.streams.advance(sizes.decode_steps)
        limit = num_streams / self.least_step_s(num_streams, sizes.context + sizes.decode_steps // 2)
        step_ms, facts = 1e3 * statistics.median(steps_s), loaded.runner.facts
        note = f"{step_ms:.3f} ms a step; {facts.kernels}; loaded in {loaded.load_s:.1f} s"
        return rate("", "tok/s", num_streams, steps_s, limit, note)

    def serve_all(self) -> Figure:
        """Measure tokens in and out per second of a full batch of whole requests.

        Not counted: a step of every number of streams that has a CUDA graph, which records it, and a short batch.
        """
        sizes, loaded = self.bench.sizes, self.load()
        for num_streams in decode_buckets(sizes.streams):
            loaded.streams.start(num_streams)
        serve(loaded.runner, sizes.streams, sizes.context // 8, 4, seed=1)
        served = serve(loaded.runner, sizes.streams, sizes.context, sizes.output_len, seed=2)
        limit = served.num_tokens / self.least_serving_s()
        note = f"{served.seconds:.2f} s, {served.num_steps} steps"
        return rate("", "tok/s in + out", served.num_tokens, [served.seconds], limit, note)

    def idle(self, num_streams: int) -> Figure:
        """Measure the time from the last kernel of a step to the first of the next, as the profiler sees them."""
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
        gaps_us = gaps_between(kernels)
        if len(gaps_us) < _TRACED_STEPS - 1:
            raise ValueError(f"the profiler saw {len(kernels)} kernels and {len(gaps_us)} gaps: too few")
        # of a step's gaps the one between steps is the longest: the host has to read tokens and plan
        largest_us = tuple(sorted(gaps_us)[-(_TRACED_STEPS - 1) :])
        note = f"idle in all {sum(gaps_us) / _TRACED_STEPS:.0f} us a step; traced, so a little slower"
        return Figure("", "us", largest_us, less_is_better=True, note=note)

    def least_step_s(self, num_streams: int, context: int) -> float:
        """Return the seconds to read keys and values, and to read the weights or compute with them."""
        return self._products_s(num_streams) + self._kv_s(num_streams * context)

    def least_serving_s(self) -> float:
        """Return the seconds of all prompts' products, and of each decode."""
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


def model_rows(bench: Bench, runners: RunnerCache) -> Iterator[Row]:
    """Yield each model, so that each is loaded once."""
    sizes = bench.sizes
    streams = f"{sizes.streams} streams"
    for name, whole in (("8B", LLAMA_8B), ("Qwen3-0.6B", QWEN3_06B), ("Mixtral, half", MIXTRAL_HALF)):
        model = ModelBench(bench, runners, name, model_config(whole, sizes))
        for title, num_streams in (("1 stream", 1), (streams, sizes.streams)):
            yield _decode_row("models", model, title, num_streams)
        title = f"models: {name}, {sizes.streams} requests, {sizes.context:,} in, {sizes.output_len} out"
        yield Row(title, model.serve_all)
        if bench.device.type == "cuda":
            yield Row(f"models: {name}, gap between steps, {streams}", partial(model.idle, sizes.streams))


def other_mode_rows(bench: Bench, runners: RunnerCache) -> Iterator[Row]:
    """Yield one model in other modes."""
    forms = ("q4", *(("int8", "fp8") if bench.device.type == "cuda" else ()))
    modes = {
        "no graphs": Mode(enforce_eager=True),
        **{f"weights {form}": Mode(quantization=form) for form in forms},
        "int8 cache": Mode(kv_dtype="int8"),
    }
    for words, mode in modes.items():
        model = ModelBench(bench, runners, "8B", model_config(LLAMA_8B, bench.sizes), mode)
        for title, num_streams in (("1 stream", 1), (f"{bench.sizes.streams} streams", bench.sizes.streams)):
            yield _decode_row("other modes", model, f"{words}, {title}", num_streams)


def _decode_row(section: str, model: ModelBench, title: str, num_streams: int) -> Row:
    context = f"context {model.bench.sizes.context:,}"
    return Row(f"{section}: {model.name}, decode, {title}, {context}", partial(model.decode, num_streams))
