"""Answer a file of requests in OpenAI's batch form: one per line in, one answer per line out.

triptych run-batch -i requests.jsonl -o answers.jsonl --base-url http://127.0.0.1:8000
triptych run-batch -i requests.jsonl -o answers.jsonl --model.model PATH     # with a stack of its own

A line in: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": …, "messages": […]}}
A line out: {"id": …, "custom_id": "1", "response": {"status_code": 200, "request_id": …, "body": {…}}, "error": null}

Answers are written as they come. Started again, the command sends only what has no final answer in the output: a
request that was refused for its content is not sent again, one that met a full or a dead server is. Exit code 1: some
requests have failed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from triptych.cli.access import Frontend, add_access_arguments
from triptych.cli.stack import stack_to_use
from triptych.client.batch_file import (
    RETRIED_STATUSES,
    BatchOutput,
    BatchRequest,
    check_input,
    read_requests,
)
from triptych.client.http_client import HttpAnswer, HttpClient, error_text
from triptych.config.loader import add_config_flags
from triptych.errors import ConfigError, EngineUnavailable, GenerationLost, TriptychError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # between two attempts, where the server names no time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input", type=Path, required=True, metavar="FILE", help="the requests")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the answers; see above"
    )
    parser.add_argument(
        "--base-url", metavar="URL", help="of any server with OpenAI's HTTP API (default: a stack of its own)"
    )
    parser.add_argument(
        "--max-concurrency", type=int, default=64, metavar="N", help="requests in flight (default: 64)"
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=3600.0,
        metavar="S",
        help="the longest wait for an answer (default: 3600)",
    )
    parser.add_argument(
        "--retry-s",
        type=float,
        default=600.0,
        metavar="S",
        help="how long a request that meets a full or a dead server is sent again (default: 600)",
    )
    add_access_arguments(parser)
    parser.set_defaults(address=None)
    parser.usage = f"{parser.prog} -i FILE -o FILE [--base-url URL] [options] [--SECTION.OPTION VALUE ...]"
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    for name, low in (("max_concurrency", 1), ("timeout_s", 0.001), ("retry_s", 0)):
        value = getattr(arguments, name)
        if not value >= low:
            raise ConfigError(f"--{name.replace('_', '-')}: {value} is out of range, allowed is >= {low}")
    if arguments.output.resolve() == arguments.input.resolve():
        raise ConfigError(f"--output {arguments.output}: is the input")
    ids = check_input(arguments.input)
    output = BatchOutput(arguments.output)
    try:
        num_left = sum(custom_id not in output.answered for custom_id in ids)
        if num_left < len(ids):
            print(f"{len(ids) - num_left} of {len(ids)} requests are answered already", file=sys.stderr)
        if not num_left:
            return 0
        with stack_to_use(arguments) as frontend:
            num_failed = asyncio.run(_answer_all(frontend, arguments, output, num_left))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise
    finally:
        output.close()
    print(f"{num_left - num_failed} requests answered, {num_failed} failed", file=sys.stderr)
    return 1 if num_failed else 0


async def _answer_all(
    frontend: Frontend, arguments: argparse.Namespace, output: BatchOutput, num_left: int
) -> int:
    """Send what is left and write the answers; returns the number of those that failed."""
    from tqdm import tqdm

    url = arguments.base_url or frontend.base_url
    answered = frozenset(output.answered)
    requests = read_requests(arguments.input, answered)
    num_failed = 0
    async with HttpClient(
        url, api_key=frontend.api_key, tls=frontend.tls, silence_timeout_s=arguments.timeout_s
    ) as client:
        models = await client.get("/v1/models")
        if models.status != 200:  # a wrong URL or key is said once, and not in every line
            raise TriptychError(f"{url}/v1/models answers {error_text(models.status, models.body)}")
        with tqdm(total=num_left, unit="request", disable=None, dynamic_ncols=True) as bar:

            async def work() -> None:
                nonlocal num_failed
                for request in requests:
                    result = await _answer(client, request, arguments.retry_s)
                    num_failed += not output.add(request, result)
                    bar.update(1)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(arguments.max_concurrency, num_left)):
                        group.create_task(work())
            except ExceptionGroup as failed:  # the output cannot be written: all say the same
                raise failed.exceptions[0] from None
    return num_failed


async def _answer(client: HttpClient, request: BatchRequest, retry_s: float) -> HttpAnswer | TriptychError:
    """Return the answer to a request, or why there is none, after as many attempts as the time allows."""
    deadline_s = time.monotonic() + retry_s
    result: HttpAnswer | TriptychError
    for pause_s in _pauses_s():
        try:
            result = await client.post(request.url, request.body)
            if result.status not in RETRIED_STATUSES:
                return result
            pause_s = max(pause_s, _retry_after_s(result))
        except (EngineUnavailable, GenerationLost) as error:
            result = error
        except TriptychError as error:
            return error
        if time.monotonic() + pause_s > deadline_s:
            return result
        await asyncio.sleep(pause_s)
    raise AssertionError("pauses have no end")


def _pauses_s() -> Iterator[float]:
    for attempt in itertools.count():
        yield min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, 10))


def _retry_after_s(answer: HttpAnswer) -> float:
    """Return the time that a refusal names, 0 if it names none."""
    try:
        return max(0.0, float(answer.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0  # a date
