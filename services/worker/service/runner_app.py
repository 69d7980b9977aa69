"""The part of a worker's process that all ranks have: the thread that computes, its watchdog, state and metrics."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from triptych.config import EngineConfig
from triptych.errors import RankUnavailable, TriptychError, WrongState
from triptych.observe.logging import with_fields
from triptych.observe.metrics import ExpertChoices, WorkerMetrics
from triptych.rpc import collector
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES
from triptych.rpc.server import RpcServer
from triptych.rpc.service_main import STOP_GRACE_S, ServiceApp
from triptych.types.exit_codes import ExitCode
from triptych.types.facts import Phase, WorkerFacts
from triptych_kernels.cpu.library import expert_counts
from triptych_services.worker.context.expert_placement import describe_counts
from triptych_services.worker.context.group_place import GroupPlace
from triptych_services.worker.runner.base import PhaseChange, Runner
from triptych_services.worker.service.runner_thread import RunnerThread
from triptych_services.worker.service.servicer import SERVICE
from triptych_services.worker.service.status import StatusPublisher
from triptych_services.worker.service.watchdog import StepClock, StepHung, Watchdog

log = logging.getLogger(__name__)

# A Python thread that computes would keep the GIL for 5 ms at a time and the wire waiting: with a busy
# thread beside it a step's round trip measured 5.3 ms at the default and 0.7 ms at this.
SWITCH_INTERVAL_S = 0.0005


class RunnerApp(ServiceApp):
    """A process with a runner, and the server that reports its health."""

    section = "worker"
    exit_codes = (
        (StepHung, ExitCode.HUNG),
        (RankUnavailable, ExitCode.HUNG),
        (TriptychError, ExitCode.MISCONFIGURED),
    )

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.server = RpcServer(services=(SERVICE,), limit_bytes=INTERNAL_MESSAGE_BYTES, tls=self.server_tls)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.metrics = WorkerMetrics.create()
        self.status_publisher = StatusPublisher()
        if not config.simulation.enabled:
            self.pages = {"/expert_counts": self._count_experts}
        self.ready: asyncio.Future[WorkerFacts] = asyncio.get_running_loop().create_future()
        """The runner's facts, once it has loaded."""
        self.runner: Runner | None = None
        """The runner, once it has loaded."""
        self._choices_at_start: Mapping[int, Sequence[int]] = {}
        """As of `ExpertCounts`, those that were made to warm up."""
        self._started_at = time.monotonic()

    @classmethod
    def log_name(cls, config: EngineConfig) -> str:
        """Return the service's name in its log, with the rank where there are several."""
        return f"{cls.section}/{config.worker.rank}" if config.parallel.num_ranks > 1 else cls.section

    def start_thread(self, thread: RunnerThread) -> None:
        """Load the model on the thread, and watch it."""
        log.info("loading %s", self.config.model.model)
        thread.start()
        self.background["the runner thread"] = thread.ended
        watchdog = Watchdog(thread.steps, hang_timeout_s=self.config.worker.hang_timeout_s)
        self.start_background("the watchdog", _watch(watchdog))
        self.start_background("the garbage collector", collector.collect_when_idle(_idle_check(thread.steps)))

    def loader(self, place: Future[GroupPlace] | None) -> Callable[[PhaseChange], Runner]:
        """Return the function that loads the runner on its thread.

        Args:
            place: Of several ranks: set when they have met.
        """
        return functools.partial(_load, self.config, place)

    def on_phase(self, phase: str, progress: float) -> None:
        """Publish how far the runner is."""
        self.status_publisher.change(phase=phase, progress=progress)

    def on_loaded(self, runner: Runner) -> None:
        """Note that the runner has loaded."""
        collector.freeze()
        if not self.config.simulation.enabled:
            ExpertChoices(expert_counts)
            self._choices_at_start = expert_counts().by_layer
        self.runner = runner
        self.ready.set_result(runner.facts)

    def _count_experts(self) -> bytes:
        """Return how often each expert was chosen, as `parallel.expert_counts` reads it. Called on any thread."""
        counts = {}
        for layer, own in expert_counts().by_layer.items():
            before = self._choices_at_start.get(layer, [0] * len(own))
            counts[layer] = [count - first for count, first in zip(own, before, strict=True)]
        if self.runner is None or not any(map(any, counts.values())):
            place = self.config.worker.device if self.runner is None else self.runner.facts.device_name
            raise WrongState(
                f"no choice of an expert was counted on {place}: the native kernels of CPUs count those of models with "
                "a mixture, from the first request on"
            )
        facts = self.runner.facts.model
        return describe_counts(facts.name, facts.identity.weights, counts)

    async def turn_ready(self, facts: WorkerFacts) -> None:
        """Publish that this process is ready, with its facts."""
        self.status_publisher.change(phase=Phase.READY, progress=1.0, facts=facts)
        metrics = self.metrics
        metrics.kv_blocks.set(facts.kv.num_blocks)
        metrics.weight_bytes.set(facts.weight_bytes)
        metrics.load_seconds.set(facts.load_s)
        metrics.kernels.labels(facts.kernels).set(1)
        await self.server.set_ready(True)
        log.info(
            "ready",
            extra=with_fields(
                model=facts.model.name,
                dtype=facts.model.dtype,
                device=facts.device_name,
                kernels=facts.kernels,
                kv_blocks=facts.kv.num_blocks,
                max_model_len=facts.model.max_model_len,
                after_s=time.monotonic() - self._started_at,
            ),
        )

    async def stop_thread(self, thread: RunnerThread) -> None:
        """End the thread after the step in hand."""
        if (
            self.ready.done()
        ):  # a thread that loads cannot be interrupted; as a daemon it ends with the process
            await thread.stop(STOP_GRACE_S)

    async def stop(self) -> None:
        if not self.background["the watchdog"].done():  # else nothing can interrupt the step that hangs
            await super().stop()


def _idle_check(steps: StepClock) -> Callable[[], bool]:
    """Return the function that returns whether no step has begun since it was last called."""
    num_before = -1

    def is_idle() -> bool:
        nonlocal num_before
        last, num_before = num_before, steps.num_started
        return steps.serial == 0 and steps.num_started == last

    return is_idle


async def _watch(watchdog: Watchdog) -> None:
    try:
        await watchdog.run()
    except StepHung:
        faulthandler.dump_traceback(sys.stderr)
        raise


def _load(config: EngineConfig, place: Future[GroupPlace] | None, on_phase: PhaseChange) -> Runner:
    """Load the model. Runs on the runner thread, so that the event loop does not wait for the import of torch."""
    from triptych_services.worker.service.startup import load_runner

    return load_runner(config, on_phase, place)
