"""The largest step and the KV cache share the memory of a device, here one with as much as a test says."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tests.worker.tiny import tiny_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from triptych.errors import ConfigError
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.context.rank_group import OneRank, RankGroup
from triptych_services.worker.context.resolve import resolve_for_device
from triptych_services.worker.context.resolved_config import DeviceTraits, ResolvedConfig
from triptych_services.worker.runner.startup import memory_plan
from triptych_services.worker.runner.startup.facts import worker_facts
from triptych_services.worker.runner.startup.kv_plan import KvPlan
from triptych_services.worker.runner.startup.memory_plan import plan_memory

TOKEN_BYTES = 1 << 20  # of a step's activations
BLOCK_BYTES = 1 << 13
GIB = 1 << 30


class FakeDevice:
    """A device on which a step takes 1 MiB for each of its tokens."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, free_bytes: int, peak_bytes: int | None = None
    ) -> None:
        """
        Args:
            free_bytes: Memory that is free after loading.
            peak_bytes: Memory above which a step fails; None: all that is free.
        """
        self.tried: list[int] = []
        self._peak_bytes = free_bytes if peak_bytes is None else peak_bytes
        monkeypatch.setattr(memory_plan, "free_memory", lambda device: free_bytes)
        monkeypatch.setattr(memory_plan, "LargestSteps", lambda *_, **sizes: sizes)
        monkeypatch.setattr(memory_plan, "measure_activations", self.measure)

    def measure(self, sizes: dict[str, Any], device: torch.device, *, max_graph_tokens: int) -> int:
        num_tokens = sizes["max_num_batched_tokens"]
        self.tried.append(num_tokens)
        if num_tokens * TOKEN_BYTES > self._peak_bytes:
            raise torch.OutOfMemoryError("tried to allocate 7.00 GiB")
        return num_tokens * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class BesideAnother(OneRank):
    """A rank beside one with so much memory, and with as many blocks as this one."""

    free_bytes: int = 0
    passed: list[int] = field(default_factory=list)

    def minimum(self, number: int) -> int:
        self.passed.append(number)
        return min(number, self.free_bytes) if len(self.passed) == 1 else number


def resolve(**scheduler: Any) -> ResolvedConfig:
    """Return the config of a large device."""
    max_model_len = scheduler.pop("max_model_len", 0)
    return resolve_for_device(
        EngineConfig(model=ModelConfig(max_model_len=max_model_len), scheduler=SchedulerConfig(**scheduler)),
        tiny_architecture(),
        DeviceTraits(
            device="cuda:0",
            prefers_bfloat16=True,
            native_kernels=False,
            compute_capability=(9, 0),
            device_bytes=80 * 10**9,
        ),
    )


def plan(config: ResolvedConfig) -> tuple[ResolvedConfig, KvPlan]:
    model: Any = None  # the fake steps do not run it
    return plan_memory(config, OneRank(), model, PagedAttention(), torch.device("cuda:0"))


def test_a_step_that_fits_is_as_it_was_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    device, config = FakeDevice(monkeypatch, 20 * GIB), resolve()
    found, kv = plan(config)
    assert found is config
    assert device.tried == [8192]
    assert kv.activation_bytes == 8 * GIB


def test_a_model_that_guesses_has_its_cache_first(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(monkeypatch, 2 * GIB)
    config = resolve_for_device(
        EngineConfig(cache=CacheConfig(memory_fraction=0.5), scheduler=SchedulerConfig(max_num_seqs=4096)),
        tiny_architecture(max_position_embeddings=1 << 14),
        DeviceTraits(device="cpu"),
    )
    model: Any = None

    def num_bytes(draft_cache_bytes: int, group: RankGroup | None = None) -> int:
        _, kv = plan_memory(
            config, group or OneRank(), model, PagedAttention(), torch.device("cpu"), draft_cache_bytes
        )
        return kv.shape.num_blocks * kv.shape.block_bytes

    assert num_bytes(0) == GIB
    assert num_bytes(GIB) == GIB // 2
    beside_rank_0 = BesideAnother(free_bytes=GIB)
    assert num_bytes(0, beside_rank_0) == GIB // 2, "rank 0 has less, and decides"
    assert beside_rank_0.passed[0] == 2 * GIB
    assert num_bytes(GIB, BesideAnother(free_bytes=2 * GIB)) == GIB // 2


def test_a_step_by_device_that_does_not_fit_gives_way_to_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice(monkeypatch, 3 * GIB)
    with caplog.at_level(logging.WARNING):
        config, kv = plan(resolve())
    assert device.tried == [8192, 4096, 2048]
    assert kv.activation_bytes == 2 * GIB
    scheduler = config.engine.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (256, 2048)
    facts = worker_facts(
        config, kv, boot_id="", fingerprint="", weights="", device_name="", weight_bytes=0, load_s=0.0
    )
    assert facts.max_num_batched_tokens == 2048, "the engine takes what its worker has"
    first, second = (record.getMessage() for record in caplog.records)
    assert (
        "scheduler.max_num_batched_tokens: 8192 tokens of 256 requests do not fit into the 3072 MiB" in first
    )
    assert first.endswith("it was not set, so that 4096 is tried")
    assert second.endswith("it was not set, so that 2048 is tried")


def test_a_step_that_leaves_no_memory_for_the_cache_gives_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, 8 * GIB, peak_bytes=80 * GIB)
    config, kv = plan(resolve())
    assert device.tried == [8192, 4096]
    assert config.engine.scheduler.max_num_batched_tokens == 4096
    assert kv.shape.num_blocks > 1


@pytest.mark.parametrize("num_tokens", [8192, 4096])
def test_a_step_that_was_set_is_refused_if_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    device = FakeDevice(monkeypatch, 3 * GIB)
    with pytest.raises(
        ConfigError, match=rf"scheduler\.max_num_batched_tokens: {num_tokens} tokens .* lower it"
    ):
        plan(resolve(max_num_batched_tokens=num_tokens))
    assert device.tried == [num_tokens]


@pytest.mark.parametrize(
    ("fields", "tried"),
    [
        ({}, [8192, 4096, 2048, 1024, 512]),
        ({"max_num_seqs": 3000}, [8192, 4096]),
        ({"max_num_seqs": 9000}, [9000]),
        ({"enable_chunked_prefill": False, "max_model_len": 60}, [8192, 4096, 2048, 1024, 512]),
    ],
)
def test_the_smallest_step_that_can_serve_is_the_last_that_is_tried(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], tried: list[int]
) -> None:
    device = FakeDevice(monkeypatch, GIB // 4)
    with pytest.raises(ConfigError, match=rf"{tried[-1]} tokens"):
        plan(resolve(**fields))
    assert device.tried == tried


def test_several_ranks_take_no_smaller_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device, config = FakeDevice(monkeypatch, 3 * GIB), resolve()
    shared = replace(config, rank=replace(config.rank, tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="8192 tokens"):
        plan(shared)
    assert device.tried == [8192]


def test_blocks_that_cannot_fit_are_refused_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, 1 << 10)
    with pytest.raises(ConfigError, match="memory_fraction"):
        plan(resolve())
    assert device.tried == []
