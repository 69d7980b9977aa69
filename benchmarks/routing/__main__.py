"""Compares ways to choose among several engines, on the same loads.

    triptych bench routing                                  in simulated time: policies, and one that sees everything
    triptych bench routing --engines 16 --seconds 60
    triptych bench routing --peers                          over HTTP as well, beside the routers of others

Simulated time: the real scheduler, news, index and policies, with accelerators that compute 20,000 tokens of prompts a
second and hold 64,000, no wire and no other cost. With --faults engines die, start again and join meanwhile.

Over HTTP: one frontend with all engines; or smg, sglang-router and vllm-router (cache_aware, from PyPI, installed under
build/routers) before one frontend per engine. Accelerators are simulated at slowed time (--slowdown), so that machines
with few cores say something of routing; times are those of the engines. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.routing.loads import LOADS, User
from benchmarks.routing.over_http import PEERS
from benchmarks.routing.over_http import measure as measure_over_http
from benchmarks.routing.simulation import POLICIES, Fleet, create_facts


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config, facts = create_facts()
    loads = [load for load in LOADS if load.name in arguments.loads]
    for number in range(arguments.rounds):
        for load in loads:
            users = list(
                load.users(
                    np.random.default_rng(arguments.seed + number), arguments.engines, arguments.seconds
                )
            )
            for policy in arguments.policies:
                fleet = Fleet(arguments.engines, policy, config, facts)
                fleet.run(users, _faults(arguments) if arguments.faults else ())
                yield from _figures(
                    f"{load.name}, {policy}",
                    [
                        request.first_at - request.sent_at
                        for request in fleet.done
                        if request.first_at is not None
                    ],
                    sum(request.num_cached_tokens for request in fleet.done),
                    sum(len(request.prompt) for request in fleet.done),
                    [engine.busy_s for engine in fleet.engines],
                )
            if arguments.peers:
                yield from _measure_peers(load.name, users, arguments)


def _measure_peers(load: str, users: Sequence[User], arguments: argparse.Namespace) -> Iterator[Figure]:
    for contender in arguments.over_http:
        title = f"{load}, over HTTP, {contender}"
        try:
            answers, busy_s = measure_over_http(contender, arguments.engines, users, arguments.slowdown)
        except (RuntimeError, ExceptionGroup) as error:
            yield Figure(title, error=repr(error)[:300])
            continue
        yield from _figures(
            title,
            [answer.first_s for answer in answers],
            sum(answer.num_cached_tokens for answer in answers),
            sum(answer.num_prompt_tokens for answer in answers),
            busy_s,
        )


def _figures(
    title: str, first_s: Sequence[float], num_cached: int, num_tokens: int, busy_s: Sequence[float]
) -> Iterator[Figure]:
    p50, p99 = np.percentile(first_s, [50, 99])
    yield Figure(f"{title}: prompt tokens found cached", "", (num_cached / num_tokens,))
    yield Figure(f"{title}: time to first token, p50", "ms", (1e3 * float(p50),), less_is_better=True)
    yield Figure(f"{title}: time to first token, p99", "ms", (1e3 * float(p99),), less_is_better=True)
    largest = max(busy_s) / float(np.mean(busy_s))
    yield Figure(f"{title}: busiest engine / mean", "", (largest,), less_is_better=True)


def _faults(arguments: argparse.Namespace) -> list[tuple[float, int, str]]:
    """Let one engine join late, and another die at half time and start again."""
    seconds = arguments.seconds
    return [
        (0.0, 0, "die"),
        (seconds / 4, 0, "start"),
        (seconds / 2, 1, "die"),
        (seconds * 5 / 8, 1, "start"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    names = [load.name for load in LOADS]
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--engines", type=int, default=4, help="default: 4")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals (default: 40)")
    parser.add_argument(
        "--loads", nargs="+", choices=names, default=names, metavar="LOAD", help=f"of {names}"
    )
    parser.add_argument(
        "--policies", nargs="*", choices=POLICIES, default=POLICIES, metavar="POLICY",
        help=f"in simulated time, of {', '.join(POLICIES)}; default: all",
    )  # fmt: skip
    parser.add_argument("--faults", action="store_true", help="engines join, die and start again")
    parser.add_argument("--peers", action="store_true", help="measure over HTTP as well")
    contenders = ["prefix", "least_loaded", "round_robin", *PEERS]
    parser.add_argument(
        "--over-http", nargs="+", choices=contenders, default=contenders, metavar="NAME",
        help=f"with --peers, of {', '.join(contenders)}; default: all",
    )  # fmt: skip
    parser.add_argument("--slowdown", type=float, default=3.0, help="of the engines over HTTP (default: 3)")
    parser.add_argument("--seed", type=int, default=1, help="of the loads (default: 1)")
    return run(parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
