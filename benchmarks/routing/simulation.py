"""Engines and a frontend's routing in simulated time: real scheduler, loads and policies; no wire."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.routing.loads import Tokens, Turn, User
from triptych.config import EngineConfig
from triptych.config.step_times import StepTimeModel, StepWork
from triptych.hub import resolve_model
from triptych.launcher.launch import config_from_overrides
from triptych.prefix_hash import describe_hash
from triptych.types.facts import WorkerFacts
from triptych.types.outputs import OutputBatch
from triptych.types.sampling import SamplingParams
from triptych.types.submit import single_choice
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.frontends.routing_updates import INTERVAL_S
from triptych_services.frontend.routing.load import EngineLoad
from triptych_services.frontend.routing.policy import RoutableEngine, RoutingPolicy, create_policy
from triptych_services.frontend.routing.prefix_index import RoutedPrompt, keys_of
from triptych_services.worker.simulation.device import SimulatedDevice
from triptych_services.worker.simulation.runner import SimulatedRunner, create_simulated_runner

STEP_TIMES = StepTimeModel(base_ms=6.0, prefill_token_us=50.0, decode_row_us=20.0, context_token_ns=0.0)
"""The steps of an accelerator that computes 20,000 tokens of prompts a second."""
NUM_BLOCKS = 4001
"""64,000 tokens at each engine."""
MAX_MODEL_LEN = 8192
WIRE_S = 0.001
NOTICED_S = 0.3
"""Seconds until a frontend notices that an engine has died, and sends its requests elsewhere."""
_STEPS_IN_FLIGHT = 2
_SESSION = 1


class Timeline:
    """The clock, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._events, (max(time, self.now), next(self._order), event))

    def run(self) -> None:
        """Let everything happen, until nothing is left."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


class TimedDevice(SimulatedDevice):
    """Says how long a step takes, and does not wait."""

    last_s = 0.0

    def wait(self, work: StepWork, arrived_ns: int) -> int:
        self.last_s = STEP_TIMES.step_ns(work) / 1e9
        return arrived_ns


@dataclass(slots=True, eq=False)
class Request:
    """One turn of a user."""

    user: User
    place: int
    prompt: Tokens
    sent_at: float
    first_at: float | None = None
    output: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    engine: Engine | None = None

    @property
    def turn(self) -> Turn:
        return self.user.turns[self.place]


def create_facts() -> tuple[EngineConfig, WorkerFacts]:
    """Return the config and the facts of all engines."""
    config = config_from_overrides(
        {
            "simulation.enabled": True,
            "num_blocks": NUM_BLOCKS,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
        }
    )
    directory = resolve_model(config.model.model)
    runner = create_simulated_runner(config, directory, boot_id="1", on_phase=lambda phase, progress: None)
    return config, runner.facts


class Engine:
    """An engine with its worker, and what the frontend knows of it."""

    def __init__(self, number: int, config: EngineConfig, facts: WorkerFacts, fleet: Fleet) -> None:
        self.number = number
        self._config, self._facts, self._fleet, self._timeline = config, facts, fleet, fleet.timeline
        self._device = TimedDevice(STEP_TIMES)
        self.busy_s = 0.0
        self.num_sent = 0
        self.is_alive = False
        self._life = 0
        self.start()

    @property
    def num_in_flight(self) -> int:
        return len(self.requests)

    def start(self) -> None:
        """Begin with nothing cached."""
        self._life += 1
        self.is_alive = True
        self._runner = SimulatedRunner(
            facts=self._facts, device=self._device, word_ids=np.arange(*(1000, 2000))
        )
        self.core = EngineCore(self._config, self._timeline)
        self.core.worker_ready(self._facts, after_crash=False)
        self.core.frontends.open_session(_SESSION)
        self.load = EngineLoad(self._timeline)
        self.load.note_hash(describe_hash(self._facts.kv.block_size))
        self.requests: dict[int, Request] = {}
        self._next_number = 1
        self._free_at = 0.0
        self._tick(self._life)

    def die(self) -> list[Request]:
        """End at once, and return the requests that are lost."""
        self._life += 1
        self.is_alive = False
        lost, self.requests = list(self.requests.values()), {}
        return lost

    def send(self, request: Request, prompt: RoutedPrompt) -> None:
        """Submit a request."""
        number = self._next_number
        self._next_number += 1
        self.num_sent += 1
        self.requests[number], request.engine = request, self
        self.load.book([number], prompt.num_tokens, prompt)
        sampling = SamplingParams(max_tokens=request.turn.num_output_tokens, ignore_eos=True)
        submit = single_choice(number, f"{number}", request.prompt, sampling, seed=number)
        life = self._life
        self._timeline.at(self._timeline.now + WIRE_S, lambda: self._take(life, submit))

    def _take(self, life: int, submit: object) -> None:
        if life == self._life:
            self.core.frontends.submit(_SESSION, submit)  # type: ignore[arg-type]
            self._turn()

    def _turn(self) -> None:
        life, now = self._life, self._timeline.now
        while self.core.num_in_flight < _STEPS_IN_FLIGHT and (plan := self.core.plan()) is not None:
            result = self._runner.execute(plan)
            self._free_at = max(self._free_at, now) + self._device.last_s
            self.busy_s += self._device.last_s
            self._timeline.at(self._free_at, lambda result=result: self._apply(life, result))  # type: ignore[misc]
        for batch in self.core.take_outputs().values():
            self._timeline.at(now + WIRE_S, lambda batch=batch: self._deliver(life, batch))  # type: ignore[misc]

    def _apply(self, life: int, result: object) -> None:
        if life == self._life:
            self.core.apply(result)  # type: ignore[arg-type]
            self._turn()

    def _tick(self, life: int) -> None:
        """Look for news while nothing else happens."""
        if life == self._life and not self._fleet.is_over:
            if self.core.next_due_at <= self._timeline.now:
                self._turn()
            self._timeline.at(self._timeline.now + INTERVAL_S, lambda: self._tick(life))

    def _deliver(self, life: int, batch: OutputBatch) -> None:
        if life != self._life:
            return
        self.load.note_batch(batch)
        for number, token in zip(batch.owners.tolist(), batch.token_ids.tolist(), strict=True):
            request = self.requests[number]
            if request.first_at is None:
                request.first_at = self._timeline.now
            request.output.append(token)
        assert not batch.failures, batch.failures
        for finish in batch.finished:
            request = self.requests.pop(finish.number)
            request.num_cached_tokens = finish.num_cached_tokens
            self._fleet.finish(request)


class Oracle:
    """Looks into all engines at the moment of the choice, and counts what is on its way."""

    looks_at_prompts = True

    def choose(self, engines: Sequence[RoutableEngine], prompt: RoutedPrompt | None, num_choices: int) -> int:
        assert prompt is not None
        times = []
        for index, engine in enumerate(engines):
            assert isinstance(engine, Engine)
            scheduler = engine.core.scheduler
            assert scheduler is not None
            cached = set(keys_of(b"".join(scheduler._blocks.pool.snapshot().hash_to_block)))
            keys = prompt.keys(16)
            num_cached = next((place for place, key in enumerate(keys) if key not in cached), len(keys))
            on_the_way = sum(
                len(request.prompt)
                for request in engine.requests.values()
                if request.first_at is None and request.sent_at + WIRE_S > engine._timeline.now
            )
            load = scheduler.measure_load()
            num_tokens = load.num_prefill_tokens + on_the_way + max(prompt.num_tokens - 16 * num_cached, 1)
            times.append(
                (num_tokens * load.prefill_token_s + load.decode_step_s, engine.num_in_flight, index)
            )
        return min(times)[2]


POLICIES = ("prefix", "least_loaded", "round_robin", "random", "oracle")


class Fleet:
    """Engines, one frontend, and the users of a load."""

    def __init__(self, num_engines: int, policy: str, config: EngineConfig, facts: WorkerFacts) -> None:
        self.timeline = Timeline()
        self.is_over = False
        self.engines = [Engine(number, config, facts, self) for number in range(num_engines)]
        self._policy: RoutingPolicy = Oracle() if policy == "oracle" else create_policy(policy, self.timeline)
        self.done: list[Request] = []
        self._num_left = 0

    def run(self, users: Sequence[User], faults: Sequence[tuple[float, int, str]] = ()) -> None:
        """Serve all users. `faults`: Time, number of an engine, and `die` or `start`."""
        self._num_left = sum(len(user.turns) for user in users)
        for user in users:
            self._say(user, 0, np.empty(0, np.uint32))
        for time, number, fault in faults:
            self.timeline.at(time, lambda number=number, fault=fault: self._fail(number, fault))  # type: ignore[misc]
        self.timeline.run()

    def finish(self, request: Request) -> None:
        """Take in an answer, and let its user go on."""
        self.done.append(request)
        self._num_left -= 1
        self.is_over = not self._num_left
        if request.place + 1 < len(request.user.turns):
            said = np.concatenate([request.prompt, np.array(request.output, np.uint32)])
            self._say(request.user, request.place + 1, said)

    def _say(self, user: User, place: int, said: Tokens) -> None:
        turn = user.turns[place]
        prompt = np.concatenate([said, turn.tokens])
        at = self.timeline.now + turn.pause_s
        self.timeline.at(at, lambda: self._send(Request(user, place, prompt, at)))

    def _send(self, request: Request) -> None:
        alive = [engine for engine in self.engines if engine.is_alive]
        prompt = RoutedPrompt(request.prompt)
        alive[self._policy.choose(alive, prompt, 1)].send(request, prompt)

    def _fail(self, number: int, fault: str) -> None:
        engine = self.engines[number]
        if fault == "start":
            engine.start()
            return
        for request in engine.die():
            request.output.clear()
            self.timeline.at(self.timeline.now + NOTICED_S, lambda request=request: self._send(request))  # type: ignore[misc]
