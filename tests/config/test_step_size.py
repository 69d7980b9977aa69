"""Rows and tokens of a step where the operator leaves them to the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.worker.tiny import tiny_architecture
from triptych.config import EngineConfig, SchedulerConfig
from triptych.config.loader import shared_config
from triptych.config.step_size import next_smaller_step, size_for_device, size_for_worker
from triptych.errors import ConfigError
from triptych.types.facts import KvLayout, ModelFacts, WorkerFacts
from triptych.types.identity import ModelIdentity
from triptych.types.sampling import SamplingParams
from triptych.types.submit import single_choice
from triptych_services.enginecore.engine import EngineCore
from triptych_services.worker.context.resolve import resolve_for_device
from triptych_services.worker.context.resolved_config import DeviceTraits

GB = 10**9


@pytest.mark.parametrize(
    ("device_bytes", "rows", "tokens", "expected"),
    [
        (0, 0, 0, (64, 2048)),
        (24 * GB, 0, 0, (64, 2048)),
        (40 * 1024**3, 0, 0, (256, 8192)),
        (141 * GB, 0, 0, (256, 8192)),
        (141 * GB, 7, 0, (7, 8192)),
        (141 * GB, 0, 100, (100, 100)),
        (0, 0, 5, (5, 5)),
        (0, 5000, 0, (5000, 5000)),
        (141 * GB, 3, 4, (3, 4)),
    ],
)
def test_a_device_s_memory_decides_what_is_not_set(device_bytes, rows, tokens, expected) -> None:
    sized = size_for_device(SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=tokens), device_bytes)
    assert (sized.max_num_seqs, sized.max_num_batched_tokens) == expected


@pytest.mark.parametrize(
    ("tokens", "rows", "is_chunked", "expected"),
    [
        (8192, 256, True, 4096),
        (1025, 256, True, 512),
        (1023, 256, True, None),
        (8192, 4097, True, None),
        (8192, 256, False, 4096),
        (6000, 256, False, None),
    ],
)
def test_a_smaller_step_still_holds_all_rows_and_a_prompt_that_is_not_split(
    tokens: int, rows: int, is_chunked: bool, expected: int | None
) -> None:
    config = SchedulerConfig(
        max_num_seqs=rows, max_num_batched_tokens=tokens, enable_chunked_prefill=is_chunked
    )
    smaller = next_smaller_step(config, max_model_len=4000)
    assert (None if smaller is None else smaller.max_num_batched_tokens) == expected


def test_an_engine_takes_its_worker_s_sizes_for_those_that_are_not_set() -> None:
    for rows, tokens in ((0, 0), (256, 0), (0, 8192)):
        sized = size_for_worker(SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=tokens), 256, 8192)
        assert (sized.max_num_seqs, sized.max_num_batched_tokens) == (256, 8192)


@pytest.mark.parametrize(("device", "device_bytes", "rows"), [("cpu", 0, 64), ("cuda:0", 80 * GB, 256)])
def test_a_worker_has_as_many_rows_as_its_device_takes(device: str, device_bytes: int, rows: int) -> None:
    resolved = resolve_for_device(
        EngineConfig(),
        tiny_architecture(),
        DeviceTraits(
            device=device,
            prefers_bfloat16=True,
            native_kernels=False,
            compute_capability=(9, 0),
            device_bytes=device_bytes,
        ),
    )
    assert resolved.engine.scheduler.max_num_seqs == rows


def facts(rows: int, tokens: int) -> WorkerFacts:
    model = ModelFacts("m", ModelIdentity("0" * 64), 100, 512, (), "float32", "float32", "none")
    kv = KvLayout(1000, 16, 1, 1, 1, "float32")
    return WorkerFacts(
        "b", model, kv, max_num_seqs=rows, max_num_batched_tokens=tokens, max_steps_in_flight=4
    )


def test_an_engine_plans_as_many_rows_as_its_worker_has() -> None:
    engine = EngineCore(EngineConfig())
    engine.worker_ready(facts(200, 1000), after_crash=False)
    engine.frontends.open_session(1)
    for number in range(1, 300):
        prompt = np.arange(5, dtype=np.uint32)
        engine.frontends.submit(1, single_choice(number, str(number), prompt, SamplingParams(), seed=1))
    plan = engine.plan()
    assert plan is not None
    assert len(plan.new_rows) == 200


def test_sizes_that_do_not_fit_each_other_are_refused_when_they_are_known() -> None:
    config = EngineConfig()
    engine = EngineCore(replace(config, scheduler=replace(config.scheduler, max_num_seqs=300)))
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens 200 is below scheduler\.max_num_seqs 300"):
        engine.worker_ready(facts(300, 200), after_crash=False)


def test_device_sizes_are_shared_as_the_last_versions_defaults() -> None:
    shared = shared_config(EngineConfig())
    assert (shared["scheduler.max_num_seqs"], shared["scheduler.max_num_batched_tokens"]) == ("64", "2048")
    explicit = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048))
    assert shared_config(explicit) == shared
