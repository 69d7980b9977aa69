"""Measure the latencies of a server under load, as its clients see them.

With --request-rate requests come at random times that were drawn before (open loop): latencies count from those times,
also of requests that could only be sent later. Without it, --max-concurrency users send one request after the other
(closed loop). Without both, all requests are sent at once.

With --sweep the capacity is found by closed loops, of --max-concurrency users or of 8, 16, 32 … until two doublings
bring less than 5% more requests/s; or --request-rate gives it. Then an open loop runs for --sweep-s at each of
the shares of it. Ctrl-C ends a sweep with the table of what was measured. A point at which this command itself was late
(p99 above 10 ms) is marked with ! as not valid.

Datasets:
  random             token ids of --input-len, no two beginning alike
  prefix_repetition  token ids: one of --num-prefixes of --prefix-len, then --input-len of their own
  sharegpt           first turns of a JSON file of ShareGPT's form; answers as long as the file's, or --output-len
  custom             a file with one JSON value per line: text, or {"prompt": …} or {"messages": …}, "max_tokens"

TTFT: due to first output. TPOT: first to last output, per token after the first. ITL: between two arrivals of output,
which may be of several tokens. E2EL: due to last output.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from triptych.cli.access import Frontend
from triptych.cli.bench.plot import check_plot, write_plot, write_sweep_plot
from triptych.cli.bench.requests import DATASETS, add_dataset_arguments, make_requests
from triptych.cli.bench.server import add_server_arguments, open_backend, warm_up
from triptych.cli.bench.sweep import DEFAULT_SHARES, Sweep
from triptych.cli.stack import stack_to_measure
from triptych.client.load.backends import CHAT, COMPLETIONS
from triptych.client.load.run import LoadResult, RequestRecord, draw_arrivals, run_load
from triptych.client.load.statistics import GOAL_NAMES, LATE_S, Distribution, LoadSummary, summarize
from triptych.config.loader import add_config_flags
from triptych.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, metavar="R", help="requests per second (default: none, see above)"
    )
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="of arrivals; 1: Poisson, less: bursts, more: evener (default: 1)",
    )
    load.add_argument("--max-concurrency", type=int, metavar="N", help="requests in flight at most")
    load.add_argument("--num-warmups", type=int, default=1, metavar="N", help="sent before (default: 1)")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and times (default: 0)")
    load.add_argument(
        "--sweep",
        nargs="?",
        const=DEFAULT_SHARES,
        metavar="P,P,…",
        help=f"find the capacity, and measure at these percents of it (default: {DEFAULT_SHARES})",
    )
    load.add_argument(
        "--sweep-s", type=float, default=20.0, metavar="S", help="time of each point (default: 20)"
    )
    add_dataset_arguments(parser)
    report = parser.add_argument_group("report")
    report.add_argument(
        "--percentiles", default="90,95,99", metavar="P,P,…", help="to report (default: 90,95,99)"
    )
    report.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="FIGURE:MS",
        help="count requests within all of these limits, as in `ttft:500 tpot:50 e2el:3000`",
    )
    report.add_argument("--json", action="store_true", help="one JSON object instead of text")
    report.add_argument("--plot", type=Path, metavar="FILE.svg", help="write a plot; needs triptych[bench]")
    parser.usage = f"{parser.prog} [options] [--SECTION.OPTION VALUE ...]"
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    percentiles, goals_ms = _check(arguments)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    if arguments.sweep is not None:
        return _run_sweep(arguments, goals_ms)
    with stack_to_measure(arguments) as frontend:
        result = asyncio.run(_measure(frontend, arguments))
    summary = summarize(result, percentiles, goals_ms)
    if arguments.plot is not None:
        write_plot(arguments.plot, result)
    if arguments.json:
        names = (
            "backend",
            "dataset_name",
            "num_prompts",
            "request_rate",
            "burstiness",
            "max_concurrency",
            "seed",
        )
        load = {name: getattr(arguments, name) for name in names}
        print(json.dumps({"load": load, "goals_ms": goals_ms, **dataclasses.asdict(summary)}))
    else:
        print(_report(summary, goals_ms))
    return 0 if summary.num_completed else 1


def _run_sweep(arguments: argparse.Namespace, goals_ms: dict[str, float]) -> int:
    sweep = Sweep(arguments, arguments.sweep, goals_ms)
    code = 0
    with stack_to_measure(arguments) as frontend:
        try:
            asyncio.run(sweep.run(frontend))
        except KeyboardInterrupt:
            code = 130  # as the command has always ended by it
    if arguments.plot is not None:
        write_sweep_plot(arguments.plot, sweep.points)
    print(json.dumps(sweep.as_json()) if arguments.json else sweep.as_text())
    return code


def _check(arguments: argparse.Namespace) -> tuple[list[float], dict[str, float]]:
    """Return percentiles and goals; raises ConfigError for all that is out of range at once."""
    problems = [
        f"--{name.replace('_', '-')}: {value} is out of range, allowed is {bound}"
        for name, bound, is_good in (
            ("request_rate", "> 0", lambda value: value > 0),
            ("burstiness", "> 0", lambda value: 0 < value < math.inf),
            ("max_concurrency", ">= 1", lambda value: value >= 1),
            ("num_warmups", ">= 0", lambda value: value >= 0),
            ("num_prompts", ">= 1", lambda value: value >= 1),
            ("input_len", ">= 1", lambda value: value >= 1),
            ("output_len", ">= 1", lambda value: value >= 1),
            ("range_ratio", "0 to 1", lambda value: 0 <= value <= 1),
            ("num_prefixes", ">= 1", lambda value: value >= 1),
            ("prefix_len", ">= 1", lambda value: value >= 1),
            ("vocab_size", ">= 1", lambda value: value >= 1),
            ("sweep_s", "0.1 to 3600", lambda value: 0.1 <= value <= 3600),
        )
        if (value := getattr(arguments, name)) is not None and not is_good(value)
    ]
    percentiles = _read_numbers("--percentiles", arguments.percentiles, (0, 100), problems)
    goals_ms = _read_goals(arguments.goodput, problems)
    if arguments.sweep is not None:
        arguments.sweep = _read_numbers("--sweep", arguments.sweep, (1, 1000), problems)
        if DATASETS[arguments.dataset_name].reads_file:
            problems.append(
                f"--sweep: sends more requests than dataset {arguments.dataset_name} has; "
                "takes random or prefix_repetition"
            )
    problems += _check_server(arguments)
    if problems:
        raise ConfigError("; ".join(problems))
    return percentiles, goals_ms


def _read_numbers(option: str, text: str, bounds: tuple[float, float], problems: list[str]) -> list[float]:
    numbers: list[float] = []
    for word in text.split(","):
        try:
            numbers.append(float(word))
            if not bounds[0] <= numbers[-1] <= bounds[1]:
                raise ValueError
        except ValueError:
            problems.append(f"{option}: {word!r} is no number from {bounds[0]} to {bounds[1]}")
    return numbers


def _read_goals(words: list[str], problems: list[str]) -> dict[str, float]:
    goals_ms: dict[str, float] = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            goals_ms[name] = float(limit)
            if name not in GOAL_NAMES or not goals_ms[name] > 0:
                raise ValueError
        except ValueError:
            problems.append(f"--goodput: {word!r} is not FIGURE:MS with a figure of {', '.join(GOAL_NAMES)}")
    return goals_ms


def _check_server(arguments: argparse.Namespace) -> list[str]:
    problems = []
    if arguments.backend == "grpc":
        if arguments.base_url:
            problems.append("--base-url: is for --backend openai; gRPC has --address")
        if arguments.endpoint != COMPLETIONS:
            problems.append("--endpoint: is for --backend openai")
    elif arguments.address:
        if arguments.base_url:
            arguments.address = None  # the environment's, or given in vain
        else:
            problems.append("--address: is for --backend grpc; HTTP has --base-url")
    reads_file = DATASETS[arguments.dataset_name].reads_file
    if reads_file != (arguments.dataset_path is not None):
        problems.append(
            f"--dataset-path: {'is needed by' if reads_file else 'is none of'} dataset {arguments.dataset_name}"
        )
    if not reads_file and arguments.endpoint == CHAT:
        problems.append(f"--endpoint {CHAT}: takes text, and dataset {arguments.dataset_name} is token ids")
    return problems


async def _measure(frontend: Frontend, arguments: argparse.Namespace) -> LoadResult:
    generator = np.random.default_rng(arguments.seed)
    async with open_backend(frontend, arguments) as (backend, vocab_size, count_tokens):
        requests = await make_requests(arguments, generator, vocab_size, count_tokens)
        measured = requests[arguments.num_warmups :]
        await warm_up(backend, requests[: arguments.num_warmups])
        rate = arguments.request_rate or math.inf
        is_open = arguments.request_rate is not None or arguments.max_concurrency is None
        arrivals_s = draw_arrivals(len(measured), rate, arguments.burstiness, generator) if is_open else None
        with _Progress(len(measured)) as progress:
            return await run_load(
                backend,
                measured,
                None if arrivals_s is None else arrivals_s.tolist(),
                arguments.max_concurrency,
                progress.add,
            )


class _Progress:
    """Counts answers on a terminal, and says nothing elsewhere."""

    def __init__(self, num_requests: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=num_requests, unit="request", disable=None, dynamic_ncols=True)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *unused: object) -> None:
        self._bar.close()

    def add(self, record: RequestRecord) -> None:
        self._bar.update(1)


def _report(summary: LoadSummary, goals_ms: dict[str, float]) -> str:
    lines = [
        f"requests    {summary.num_completed} answered, {summary.num_failed} failed, in {summary.duration_s:.2f} s; "
        f"at most {summary.max_in_flight} in flight",
        f"tokens      {summary.num_input_tokens} in, {summary.num_output_tokens} out",
        f"rates       {summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.1f} output tokens/s, "
        f"{summary.total_tokens_per_s:.1f} tokens/s in all",
    ]
    if summary.goodput_per_s is not None:
        goals = ", ".join(f"{name} {limit:g} ms" for name, limit in goals_ms.items())
        lines.append(f"goodput     {summary.goodput_per_s:.2f} requests/s within {goals}")
    names = list(summary.ttft_ms.percentiles)
    lines.append(f"{'ms':<8}{'mean':>10}{'median':>10}" + "".join(f"{name:>10}" for name in names))
    lines += [_row(name.upper(), getattr(summary, f"{name}_ms")) for name in ("ttft", "tpot", "itl", "e2el")]
    if summary.num_late:
        lines.append(
            f"late        {summary.num_late} requests were sent more than {LATE_S * 1e3:.0f} ms after their time "
            f"(up to {summary.late_ms.max:.0f} ms); latencies count from that time"
        )
    lines += [f"failed      {count} x {message}" for message, count in summary.errors.items()]
    return "\n".join(lines)


def _row(name: str, figure: Distribution) -> str:
    values = (figure.mean, figure.median, *figure.percentiles.values())
    return f"{name:<8}" + "".join(f"{value:10.1f}" for value in values)
