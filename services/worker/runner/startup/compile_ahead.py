"""Compilation of kernels while weights are read, in parallel, so that no step waits for a compiler."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from triton.runtime import driver

from triptych import host
from triptych.errors import ConfigError
from triptych_kernels.triton.linear.few_rows import FEW_ROWS
from triptych_kernels.triton.tuning.compile_ahead import NotedLaunch, noted_launches
from triptych_services.worker.attention.create import create_attention
from triptych_services.worker.context.device import free_memory
from triptych_services.worker.context.rank_group import RankGroup
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.runner.cuda.streams import CudaStream
from triptych_services.worker.runner.drafting.speculation import max_sampling_places
from triptych_services.worker.runner.model_runner import ModelRunner
from triptych_services.worker.runner.startup.activation_memory import LargestSteps
from triptych_services.worker.runner.startup.facts import worker_facts
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_groups import choose_groups
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache
from triptych_services.worker.runner.startup.warm_up import warm_up

log = logging.getLogger(__name__)

_MAX_THREADS = 16  # other workers may start on the same machine
_NUM_BLOCKS = 4  # of each KV group: as many as the steps of a warm-up use


@contextmanager
def compiled_ahead(config: ResolvedConfig, group: RankGroup, model: CausalLM) -> Iterator[None]:
    """Compile the kernels of steps on a CUDA device while the body runs, and wait for them when it ends.

    A kernel that fails to compile is compiled again at its first launch, which reports the error.

    Args:
        model: May have no weights yet.

    Raises:
        ConfigError: Triton does not work on this machine.
    """
    started = time.perf_counter()
    device = torch.device(config.rank.device)
    _reach_device()
    noted = note_launches(config, group, model, device)
    gc.collect()  # workspaces of attention backends may be in reference cycles, and would count as used memory
    if not noted:
        yield
        return
    threads = ThreadPoolExecutor(
        min(len(noted), host.usable_cores(), _MAX_THREADS),
        "compile",
        initializer=partial(torch.cuda.set_device, device),
    )
    try:
        compilations = [(launch.name, threads.submit(launch.compile)) for launch in noted]
        yield
        waiting_since = time.perf_counter()
        for name, compilation in compilations:
            if (error := compilation.exception()) is not None:
                log.warning("kernel %s did not compile ahead of its first launch: %s", name, error)
    finally:
        threads.shutdown(cancel_futures=True)
    now = time.perf_counter()
    log.info(
        "compiled %d kernels while weights were read: %.1f s, and %.1f s more",
        len(noted),
        waiting_since - started,
        now - waiting_since,
    )


def _reach_device() -> None:
    try:
        driver.active.get_current_device()
    except Exception as error:
        raise ConfigError(
            f"worker.device: cuda, but Triton cannot work here: {error}; it compiles what it reaches the driver "
            "through, which takes a C compiler and Python's headers: install gcc, libc6-dev and python3-dev, or set "
            "worker.device to cpu"
        ) from error


def note_launches(
    config: ResolvedConfig, group: RankGroup, model: CausalLM, device: torch.device
) -> dict[NotedLaunch, None]:
    """Return the launches of steps of all sizes at the full context, and of all kinds of sampling.

    While they are noted, the project's kernels compute nothing. Other operations compute, with undefined values.
    """
    engine = config.engine
    attention = create_attention(config)
    num_blocks = _NUM_BLOCKS * len(choose_groups(config).kinds)
    few = replace(config, engine=replace(engine, cache=replace(engine.cache, num_blocks=num_blocks)))
    kv = plan_kv_cache(few, free_memory(device))
    with noted_launches() as noted:
        try:
            for num_tokens, num_rows in step_sizes(config):
                steps = LargestSteps(
                    model,
                    kv,
                    device,
                    attention=attention,
                    max_num_batched_tokens=num_tokens,
                    max_num_rows=num_rows,
                    max_model_len=engine.model.max_model_len or config.architecture.max_context,
                    rank=config.rank,
                    hidden_size=config.architecture.hidden_size,
                )
                steps.run_prompts()
                steps.run_decodes()
            if config.rank.num_stages > 1:
                return noted  # the kernels of sampling, which a runner of all stages would launch, are compiled later
            runner = ModelRunner(
                model=model,
                kv_caches=allocate_kv_cache(kv.shape, device, kv.places),
                facts=worker_facts(
                    config,
                    kv,
                    boot_id="",
                    fingerprint="",
                    weights="",
                    device_name="",
                    weight_bytes=0,
                    load_s=0.0,
                ),
                attention=attention,
                enforce_eager=True,
                stream=CudaStream(device),
                group=group,
            )
            warm_up(runner)
        except torch.OutOfMemoryError:
            pass  # what was noted is compiled; memory is checked again, with an error, when the weights are loaded
    return noted


def step_sizes(config: ResolvedConfig) -> tuple[tuple[int, int], ...]:
    """Return (tokens, rows) of steps that together launch the kernels of steps of all sizes.

    Tiles of quantized products and of mixtures of experts depend on the number of rows. So do those of plain products
    of few rows. For other kernels a single row is the only special case.
    """
    scheduler = config.engine.scheduler
    longest = (
        scheduler.max_num_batched_tokens,
        max_sampling_places(scheduler.max_num_seqs, config.max_samples_per_row),
    )
    sizes: Sequence[int] = FEW_ROWS
    if config.quantization != "none" or config.architecture.num_experts:
        sizes = [1 << exponent for exponent in range(max(longest).bit_length())]
    return (longest, *((min(size, longest[0]), min(size, longest[1])) for size in sizes))
