"""The language of scenarios: what breaks, when and for how long, under which load. One line of text, and back.

seed=7 engines=2 frontends=2 requests=16: 0.350 kill worker-0 0.400; 0.900 hold frontend-0>enginecore-1 3.000
seed=7 engines=2 frontends=1 requests=48 transfers=1: 0.350 kill worker-0 0.400
seed=7 engines=2 frontends=1 requests=16 groups=1: 0.350 kill worker-0 0.400
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tests.chaos.load import Send, answers_undisturbed, make_load, run_clients, with_stops_that_hit
from tests.chaos.recorder import Answer, Recorder, Request
from tests.chaos.validators import Evidence, Home, Step
from triptych.failpoints import PLACES
from triptych.types.events import Event

PROCESS_FAULTS = ("kill", "kill-at", "term", "change", "stop", "usurp")
CHANGES = ("weights", "numerics", "limits")
"""Differences of a process that takes another's place: other tokens from the start, other tokens, or equal ones."""
LINK_FAULTS = ("cut", "half-cut", "hold", "hold-up", "hold-down")
_SETTLE_S = 90.0
"""More than all times to live: what is not home by then never comes home."""
_POLL_S = 0.1
_MOVE_TIMEOUT_S = 30.0  # of `frontend.move_timeout_s`


@dataclass(frozen=True)
class Fault:
    """Something that breaks, and is mended later.

    | kill | a process, by SIGKILL; started again later |
    | kill-at:PLACE | the same, when it next comes to a place of `triptych.failpoints` |
    | term | a process is stopped as operators do it, by SIGTERM, and started again later |
    | change:WHAT | as term, and what is started is another: of other weights, numerics or limits |
    | term:SECONDS | the same, and it drains for no longer |
    | stop | a process, by SIGSTOP; goes on later |
    | usurp | a process is stopped, another one takes its name and address, and later it goes on |
    | cut | the streams of a link, at once; they may be dialed again |
    | half-cut | the same, but the server is not told |
    | hold, hold-up, hold-down | a partition, of both ways or one; heals later |
    """

    at_s: float
    action: str
    target: str
    """A process, or a link as client>server."""
    for_s: float

    @property
    def change(self) -> str:
        """Return how the process differs that takes this one's place; empty: not at all."""
        action, _, what = self.action.partition(":")
        return what if action == "change" else ""

    @property
    def kills(self) -> bool:
        return self.action.startswith(("kill", "usurp"))

    def __str__(self) -> str:
        return f"{self.at_s:.3f} {self.action} {self.target} {self.for_s:.3f}"

    @staticmethod
    def parse(text: str) -> Fault:
        at_s, action, target, for_s = text.split()
        assert action.partition(":")[0] in (*PROCESS_FAULTS, *LINK_FAULTS), action
        return Fault(float(at_s), action, target, float(for_s))


@dataclass(frozen=True)
class Scenario:
    """A load, and what breaks under it. The seed determines the load."""

    seed: int
    num_engines: int
    num_frontends: int
    num_requests: int
    faults: tuple[Fault, ...] = field(default=())
    has_transfers: bool = False
    """Whether the first engine computes prompts, whose KV blocks arrive at the others as soon as they may."""
    has_groups: bool = False
    """Whether the model has windows and states beside layers that keep every key; in memory only."""

    def __str__(self) -> str:
        head = (
            f"seed={self.seed} engines={self.num_engines} frontends={self.num_frontends} "
            f"requests={self.num_requests}{' transfers=1' if self.has_transfers else ''}"
            f"{' groups=1' if self.has_groups else ''}"
        )
        return f"{head}: {'; '.join(map(str, self.faults))}"

    @property
    def num_engine_deaths(self) -> int:
        """Return how often engine cores die. A request that was at three of them in a row may fail as the reason."""
        return sum(fault.kills and fault.target.startswith("enginecore") for fault in self.faults)

    @property
    def models(self) -> list[str]:
        """Return the changes after which workers give other tokens."""
        return sorted({fault.change for fault in self.faults} - {"", "limits"})

    @property
    def loses_its_model(self) -> bool:
        """Return whether there may be no worker for too long that can go on with what was begun."""
        changed = {fault.target for fault in self.faults if fault.change in self.models}
        is_away = any(fault.for_s > _MOVE_TIMEOUT_S / 3 for fault in self.faults)
        return len(changed) == self.num_engines or (bool(changed) and is_away)

    @property
    def right_errors(self) -> tuple[str, ...]:
        """Return the codes that requests may fail with."""
        codes = []
        if self.num_engine_deaths > 2:
            codes.append("ENGINE_FAILURE")
        if self.loses_its_model:
            codes.append("GENERATION_LOST")
        # Over HTTP a stream is lost that moves to another engine just when its frontend goes.
        targets = [fault.target for fault in self.faults]
        has_frontend = any(target.startswith("frontend") and ">" not in target for target in targets)
        if has_frontend and any("enginecore" in target and ">worker" not in target for target in targets):
            codes.append("NOT_KEPT")
        return tuple(codes)

    @staticmethod
    def parse(text: str) -> Scenario:
        head, _, tail = text.partition(":")
        number_of = {name: int(number) for name, _, number in (word.partition("=") for word in head.split())}
        numbers = [number_of.pop(name) for name in ("seed", "engines", "frontends", "requests")]
        faults = tuple(Fault.parse(part) for part in tail.split(";") if part.strip())
        flags = {f"has_{name}": bool(number) for name, number in number_of.items()}
        return Scenario(*numbers, faults, **flags)


class Ground(Protocol):
    """Tiers that serve, and the means to break them."""

    steps: list[Step]
    vocabulary: range
    """Token ids that prompts are made of."""
    max_tokens: int
    kinds: Sequence[str]
    """Kinds of requests."""
    load_s: float
    """Seconds within which the clients begin."""
    is_exact_time: bool
    rest_s: float
    """Seconds that whoever was away is given to come back and do harm."""

    async def start_all(self) -> None: ...

    async def start(self, name: str) -> None:
        """Start a process that has died."""
        ...

    def kill(self, name: str) -> None: ...

    async def kill_at(self, name: str, place: str, within_s: float) -> None:
        """Kill a process when it comes to a failpoint. Return when that has happened, or after so many seconds."""
        ...

    async def term(self, name: str, drain_s: float = ...) -> None:
        """Let a process drain and end. `drain_s`: By default longer than any answer."""
        ...

    def stop(self, name: str) -> None: ...

    def change(self, name: str, what: str) -> None:
        """Let a process be another when it is started again. `what`: empty: the first one again."""
        ...

    async def usurp(self, name: str) -> Callable[[], None]:
        """Stop a process and start another one in its place. Return what lets the first go on."""
        ...

    def go_on(self, name: str) -> None: ...

    def cut(self, client: str, server: str, *, is_server_told: bool) -> None: ...

    def hold(self, client: str, server: str, *ways: str) -> None: ...

    def heal(self, client: str, server: str) -> None: ...

    def generate(self, request: Request, attempt: int) -> AsyncGenerator[Event, None]: ...

    async def wait_all_ready(self) -> None: ...

    async def homes(self) -> list[Home]: ...


def make_scenario(
    seed: int,
    victims: Sequence[str],
    *,
    last_s: float,
    num_requests: int = 16,
    at_places: bool = False,
    has_changes: bool = False,
) -> Scenario:
    """Return a random scenario. In one of four an engine computes prompts for the others, under twice the load.

    Args:
        victims: Kinds of processes that may be killed. Everything else may happen to all.
        last_s: When the last fault may begin.
        at_places: Whether they are killed at failpoints as well.
        has_changes: Whether in one of four scenarios processes are replaced by others, one after the other.
    """
    random = Random(seed)
    num_engines, num_frontends = random.randint(1, 2), random.randint(1, 2)
    has_transfers = seed % 4 == 3
    if has_transfers:
        num_engines, num_requests = num_engines + 1, 2 * num_requests
    names = {
        "worker": [f"worker-{index}" for index in range(num_engines)],
        "enginecore": [f"enginecore-{index}" for index in range(num_engines)],
        "frontend": [f"frontend-{index}" for index in range(num_frontends)],
    }
    inner = [f"enginecore-{index}>worker-{index}" for index in range(num_engines)]
    outer = [f"{frontend}>{engine}" for frontend in names["frontend"] for engine in names["enginecore"]]
    faults = []
    for _ in range(random.randint(1, 4)):
        action = random.choice(("stop", "term", *LINK_FAULTS, "kill", "kill", "kill"))
        for_s = random.choice((random.uniform(0.05, 1.0), random.uniform(1.0, 6.0)))
        if action == "kill":
            target = random.choice([name for kind in victims for name in names[kind]])
            places = [place for place in PLACES if place.startswith(target.partition("-")[0])]
            if at_places and random.random() < 0.6:
                action = f"kill-at:{random.choice(places)}"
        elif action in ("stop", "term"):
            target = random.choice([name for some in names.values() for name in some])
            if action == "term" and target in names["frontend"]:
                action = f"term:{random.uniform(0, 0.5):.2f}"
        else:
            target = random.choice(random.choice((inner, outer)))
            if target in inner and random.random() < 0.2:
                for_s = random.uniform(10.0, 40.0)
        faults.append(Fault(random.uniform(0, last_s), action, target, for_s))
    if has_changes:
        faults += _make_changes(Random(f"changes of {seed}"), names, last_s)
    ordered = tuple(sorted(faults, key=lambda fault: fault.at_s))
    return Scenario(seed, num_engines, num_frontends, num_requests, ordered, has_transfers)


def _make_changes(random: Random, names: dict[str, list[str]], last_s: float) -> list[Fault]:
    """Return the steps of a rolling change of some processes of one tier, or none."""
    if random.random() >= 0.25:
        return []
    what = random.choice(CHANGES)
    tier = random.choice(("worker", "enginecore")) if what == "limits" else "worker"
    changed = names[tier][: random.randint(1, len(names[tier]))]
    begins_at, pause_s = random.uniform(0, last_s), random.uniform(0.0, 2.0)
    return [
        Fault(begins_at + number * pause_s, f"change:{what}", name, random.uniform(0.05, 1.0))
        for number, name in enumerate(changed)
    ]


async def play(
    ground: Ground, scenario: Scenario, *, on_begin: Callable[[], None] = lambda: None
) -> Evidence:
    """Start the ground, learn the answers, send the load again while things break, and see that all comes home.

    Args:
        on_begin: Called when the answers are known, before anything breaks.
    """
    clock = asyncio.get_running_loop().time
    await ground.start_all()
    requests = make_load(
        scenario.seed,
        scenario.num_requests,
        vocabulary=ground.vocabulary,
        max_tokens=ground.max_tokens,
        kinds=ground.kinds,
    )
    send: Send = ground.generate
    requests = with_stops_that_hit(requests, await answers_undisturbed(requests, send))
    oracle = await answers_undisturbed(requests, send)
    others = [await _answers_after(ground, scenario, what, requests) for what in scenario.models]
    ground.steps.clear()
    on_begin()
    recorder, random = Recorder(clock), Random(scenario.seed)
    faults = [asyncio.create_task(_inflict(ground, fault)) for fault in scenario.faults]
    await run_clients(requests, recorder, send, starts_within_s=ground.load_s, random=random)
    await asyncio.gather(*faults)
    await ground.wait_all_ready()
    await asyncio.sleep(ground.rest_s)
    until = clock() + _SETTLE_S
    homes = await ground.homes()
    while any(any(home.held.values()) for home in homes) and clock() < until:
        await asyncio.sleep(_POLL_S)
        homes = await ground.homes()
    return Evidence(
        requests,
        recorder.history,
        oracle,
        steps=ground.steps,
        homes=homes,
        other_oracles=others,
        may_fail_with=scenario.right_errors,
        is_exact_time=ground.is_exact_time,
    )


async def _answers_after(
    ground: Ground, scenario: Scenario, what: str, requests: Sequence[Request]
) -> dict[str, Answer]:
    """Return the undisturbed answers of workers that are changed."""
    workers = [f"worker-{index}" for index in range(scenario.num_engines)]
    answers = {}
    for change in (what, ""):
        for worker in workers:
            ground.change(worker, change)
            await ground.term(worker)
            await ground.start(worker)
        await ground.wait_all_ready()
        answers[change] = await answers_undisturbed(requests, ground.generate)
    return answers[what]


async def _inflict(ground: Ground, fault: Fault) -> None:
    """Break something and mend it again."""
    await asyncio.sleep(fault.at_s)
    client, _, server = fault.target.partition(">")
    action, _, place = fault.action.partition(":")
    match action:
        case "kill" | "kill-at":
            if place:
                await ground.kill_at(fault.target, place, fault.for_s)
            else:
                ground.kill(fault.target)
            await asyncio.sleep(fault.for_s)
            await ground.start(fault.target)
        case "term":
            await (ground.term(fault.target, float(place)) if place else ground.term(fault.target))
            await asyncio.sleep(fault.for_s)
            await ground.start(fault.target)
        case "change":
            await ground.term(fault.target)
            ground.change(fault.target, place)
            await asyncio.sleep(fault.for_s)
            await ground.start(fault.target)
        case "stop":
            ground.stop(fault.target)
            await asyncio.sleep(fault.for_s)
            ground.go_on(fault.target)
        case "usurp":
            go_on = await ground.usurp(fault.target)
            await asyncio.sleep(fault.for_s)
            go_on()
        case "cut" | "half-cut":
            ground.cut(client, server, is_server_told=action == "cut")
        case _:
            _, _, way = action.partition("-")
            ground.hold(client, server, *((way,) if way else ("up", "down")))
            await asyncio.sleep(fault.for_s)
            ground.heal(client, server)
