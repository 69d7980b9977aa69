"""Measure the latencies of a server under load, as its clients see them.

With --request-rate requests come at random times that were drawn before (open loop): latencies count from those times,
also of requests that could only be sent later. Without it, --max-concurrency users send one request after the other
(closed loop). Without both, all requests are sent at once.

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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from triptych.cli.access import Frontend, add_address_argument
from triptych.cli.bench.plot import check_plot, write_plot
from triptych.cli.bench.requests import DATASETS, add_dataset_arguments, make_requests
from triptych.cli.sampling_flags import add_sampling_arguments, sampling_of
from triptych.cli.stack import stack_to_measure
from triptych.client.http_client import HttpClient
from triptych.client.load.backends import CHAT, COMPLETIONS, Backend, GrpcBackend, OpenAiBackend
from triptych.client.load.datasets import LoadRequest
from triptych.client.load.run import LoadResult, RequestRecord, draw_arrivals, run_load
from triptych.client.load.statistics import GOAL_NAMES, LATE_S, Distribution, LoadSummary, summarize
from triptych.config.loader import add_config_flags
from triptych.errors import ConfigError, TriptychError

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "ignore_eos")
"""Sampling fields that have a flag."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("server")
    where.add_argument(
        "--backend", choices=("grpc", "openai"), default="grpc", help="how it is called (default: grpc)"
    )
    where.add_argument(
        "--base-url", metavar="URL", help="of an OpenAI server, for --backend openai (default: as --address)"
    )
    where.add_argument(
        "--endpoint",
        choices=(COMPLETIONS, CHAT),
        default=COMPLETIONS,
        help=f"for --backend openai (default: {COMPLETIONS})",
    )
    where.add_argument("--model", default="", help="which of the models served there")
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
    add_address_argument(parser, default=None)
    add_sampling_arguments(parser, _SAMPLING)
    parser.usage = f"{parser.prog} [options] [--SECTION.OPTION VALUE ...]"
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    percentiles, goals_ms = _check(arguments)
    if arguments.plot is not None:
        check_plot(arguments.plot)
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
        )
        if (value := getattr(arguments, name)) is not None and not is_good(value)
    ]
    percentiles: list[float] = []
    for word in arguments.percentiles.split(","):
        try:
            percentiles.append(float(word))
            if not 0 <= percentiles[-1] <= 100:
                raise ValueError
        except ValueError:
            problems.append(f"--percentiles: {word!r} is no number from 0 to 100")
    goals_ms: dict[str, float] = {}
    for word in arguments.goodput:
        name, _, limit = word.partition(":")
        try:
            goals_ms[name] = float(limit)
            if name not in GOAL_NAMES or not goals_ms[name] > 0:
                raise ValueError
        except ValueError:
            problems.append(f"--goodput: {word!r} is not FIGURE:MS with a figure of {', '.join(GOAL_NAMES)}")
    problems += _check_server(arguments)
    if problems:
        raise ConfigError("; ".join(problems))
    return percentiles, goals_ms


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
    async with _open_backend(frontend, arguments) as (backend, vocab_size, count_tokens):
        requests = await make_requests(arguments, generator, vocab_size, count_tokens)
        measured = requests[arguments.num_warmups :]
        await _warm_up(backend, requests[: arguments.num_warmups])
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


@asynccontextmanager
async def _open_backend(
    frontend: Frontend, arguments: argparse.Namespace
) -> AsyncIterator[tuple[Backend, int, Any]]:
    """Give the backend, the size of its vocabulary, and what counts the tokens of a text, if anything can."""
    fixed_length = arguments.dataset_name != "custom"
    sampling = {
        "temperature": 0.0,
        **({"ignore_eos": True} if fixed_length else {}),
        **sampling_of(arguments),
    }
    if arguments.backend == "openai":
        url = arguments.base_url or frontend.base_url
        async with HttpClient(url, api_key=frontend.api_key, tls=frontend.tls) as http:
            model = arguments.model or await _only_model(http)
            yield (
                OpenAiBackend(http, arguments.endpoint, sampling, model),
                arguments.vocab_size or 32_000,
                None,
            )
        return
    async with frontend.open_client() as client:
        models = await client.list_models()
        sizes = [model.vocab_size for model in models if arguments.model in ("", model.name)]
        if not sizes:
            known = ", ".join(model.name for model in models)
            raise ConfigError(f"--model: {arguments.model!r} is not served there; there are {known}")

        async def count_tokens(text: str) -> int:
            return len((await client.tokenize(text, model=arguments.model)).token_ids)

        backend = GrpcBackend(client, sampling, arguments.model)
        yield backend, arguments.vocab_size or sizes[0], count_tokens


async def _only_model(http: HttpClient) -> str:
    """Return the name of the first model that the server lists."""
    answer = await http.get("/v1/models")
    try:
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, TypeError, KeyError, IndexError):
        raise ConfigError(f"--model: {http.base_url} does not say which models it serves; name one") from None


async def _warm_up(backend: Backend, requests: list[LoadRequest]) -> None:
    """Send them all at once; the first error ends the measurement before it begins."""
    result = await run_load(backend, requests, [0.0] * len(requests), None)
    for record in result.records:
        if record.error:
            raise TriptychError(f"warm-up: {record.error}")


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
