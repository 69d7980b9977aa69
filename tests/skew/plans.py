"""Orders in which a cluster may be upgraded and rolled back, and those in which it may not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

OLD, NEW = "old", "new"


@dataclass(frozen=True)
class Move:
    """One process is stopped, and started again from another build."""

    process: str
    build: str

    def __str__(self) -> str:
        return f"{self.process} -> {self.build}"


def servers_of(process: str, num_engines: int) -> list[str]:
    """Return the processes that this one dials."""
    kind, _, index = process.partition("-")
    if kind == "enginecore":
        return [f"worker-{index}"]
    return [f"enginecore-{number}" for number in range(num_engines)] if kind == "frontend" else []


def is_legal(builds: Mapping[str, str], num_engines: int) -> bool:
    """Return whether no process is newer than one that it dials."""
    return not any(
        build == NEW and builds[server] == OLD
        for process, build in builds.items()
        for server in servers_of(process, num_engines)
    )


def processes_of(num_engines: int, num_frontends: int) -> list[str]:
    """Return the names of all processes: a worker for each engine core, and frontends that dial all engine cores."""
    numbers = (("worker", num_engines), ("enginecore", num_engines), ("frontend", num_frontends))
    return [f"{kind}-{index}" for kind, number in numbers for index in range(number)]


def make_plan(seed: int, num_engines: int, num_frontends: int) -> list[Move]:
    """Return an upgrade in a random legal order that either ends, or is rolled back from a random point."""
    random, processes = Random(seed), processes_of(num_engines, num_frontends)
    builds = dict.fromkeys(processes, OLD)
    plan: list[Move] = []

    def move_some(target: str, count: int) -> None:
        for _ in range(count):
            legal = [
                process
                for process, build in builds.items()
                if build != target and is_legal({**builds, process: target}, num_engines)
            ]
            if not legal:
                return
            process = random.choice(legal)
            builds[process] = target
            plan.append(Move(process, target))

    if random.random() < 0.5:
        move_some(NEW, len(processes))
    else:
        move_some(NEW, random.randint(1, len(processes)))
        move_some(OLD, len(processes))
    return plan
