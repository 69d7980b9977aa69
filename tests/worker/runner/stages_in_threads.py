"""The stages of a model as threads of one process, so that steps overlap as they do between processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from triptych.checkpoint.config_json import read_architecture
from triptych.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from triptych.types.facts import WorkerFacts
from triptych.types.step import StepPlan, StepResult
from triptych_services.worker.attention.create import create_attention
from triptych_services.worker.context.device import resolve_config, use_threads
from triptych_services.worker.context.rank_group import OneRank
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.runner.base import PendingStep, StepRunner, do_nothing
from triptych_services.worker.runner.model_runner import ModelRunner
from triptych_services.worker.runner.pipeline_stage import create_stage
from triptych_services.worker.runner.startup.facts import served_tasks, worker_facts
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache
from triptych_services.worker.runner.startup.pooler import create_pooler

DEADLINE_S = 30.0  # of one message


@dataclass(eq=False)
class ThreadLink:
    """A `StageLink` over queues."""

    into: queue.SimpleQueue[Tensor] = field(default_factory=queue.SimpleQueue)
    out_of: queue.SimpleQueue[Tensor] = field(default_factory=queue.SimpleQueue)
    results: queue.SimpleQueue[StepResult] = field(default_factory=queue.SimpleQueue)
    """The same queue for all stages."""

    def send_states(self, states: Tensor) -> None:
        self.out_of.put(states.clone())

    def receive_states(self, states: Tensor) -> None:
        states.copy_(self.into.get(timeout=DEADLINE_S))

    def send_result(self, result: StepResult) -> None:
        self.results.put(result)

    def expect_result(self) -> ThreadResult:
        return ThreadResult(self.results)


@dataclass(eq=False)
class ThreadResult:
    """An `ExpectedResult`; results are waited for in their order."""

    results: queue.SimpleQueue[StepResult]

    def is_done(self) -> bool:
        return not self.results.empty()

    def wait(self) -> StepResult:
        return self.results.get(timeout=DEADLINE_S)


class StagesInThreads(StepRunner):
    """Runs the first stage on the caller's thread, and each later one on a thread of its own."""

    def __init__(self, runners: list[ModelRunner]) -> None:
        self._first = runners[0]
        self._inboxes: list[queue.SimpleQueue[Callable[[ModelRunner], object] | None]] = []
        self._threads = []
        self.failures: list[Exception] = []
        for runner in runners[1:]:
            inbox: queue.SimpleQueue[Callable[[ModelRunner], object] | None] = queue.SimpleQueue()
            thread = threading.Thread(target=self._follow, args=(runner, inbox), daemon=True)
            thread.start()
            self._inboxes.append(inbox)
            self._threads.append(thread)

    @property
    def facts(self) -> WorkerFacts:
        return self._first.facts

    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> PendingStep:
        self._tell(lambda runner: runner.launch(plan))
        return self._first.launch(plan, on_prepared)

    def reset(self) -> None:
        self._tell(lambda runner: runner.reset())
        self._first.reset()

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        assert not self.failures, self.failures

    def _tell(self, act: Callable[[ModelRunner], object]) -> None:
        for inbox in self._inboxes:
            inbox.put(act)

    def _follow(
        self, runner: ModelRunner, inbox: queue.SimpleQueue[Callable[[ModelRunner], object] | None]
    ) -> None:
        try:
            while (act := inbox.get()) is not None:
                act(runner)
        except Exception as error:
            self.failures.append(error)


def create_stages(
    directory: Path,
    num_stages: int,
    *,
    device: str = "cpu",
    enforce_eager: bool = False,
    num_blocks: int = 40,
    state_interval: int = 8,
) -> list[ModelRunner]:
    """Return the runners of a checkpoint's stages, in float32."""
    links = [ThreadLink() for _ in range(num_stages)]
    cache = CacheConfig(block_size=4, num_blocks=num_blocks, state_interval=state_interval)
    for link, successor in pairwise(links):
        successor.into, successor.results = link.out_of, link.results
    return [
        _create_stage(directory, link, stage, num_stages, device, enforce_eager, cache)
        for stage, link in enumerate(links)
    ]


def _create_stage(
    directory: Path,
    link: ThreadLink,
    stage: int,
    num_stages: int,
    device: str,
    enforce_eager: bool,
    cache: CacheConfig,
) -> ModelRunner:
    engine = EngineConfig(
        model=ModelConfig(model="somewhere/tiny", dtype="float32", quantization="none"),
        cache=cache,
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=48),
        worker=WorkerConfig(device=device, rank=stage, num_threads=1, enforce_eager=enforce_eager),
        parallel=ParallelConfig(pipeline_parallel_size=num_stages),
    )
    use_threads(1)  # the threads of native kernels serve one caller
    config: ResolvedConfig = resolve_config(engine, read_architecture(directory))
    place = torch.device(config.rank.device)
    group = OneRank(stage, num_stages, stages=link if num_stages > 1 else None)
    kv = plan_kv_cache(config, 1 << 30)
    model = load_model(config, open_checkpoint(directory, device=place), group=group)
    runner = ModelRunner(
        model=model,
        kv_caches=allocate_kv_cache(kv.shape, place, kv.places),
        facts=worker_facts(
            config,
            kv,
            boot_id="b",
            fingerprint="f",
            weights="w",
            device_name="",
            weight_bytes=0,
            load_s=0.0,
            served=served_tasks(config.architecture, directory),
        ),
        attention=create_attention(config),
        enforce_eager=enforce_eager,
        group=group,
        stage=create_stage(config, link) if num_stages > 1 else None,
    )
    pooler = create_pooler(config.architecture, directory, model)
    assert pooler is not None
    runner.pool_with(pooler)
    return runner
