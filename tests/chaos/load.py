"""Requests of every kind, and the clients that send them: to any of several frontends, again where one refuses."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from random import Random

from tests.chaos.recorder import Answer, Recorder, Request, answers_of
from triptych.client.grpc_client import GenerationClient
from triptych.types.events import Event

RETRY_S = 0.1
LONGEST_S = 240.0
"""A load that takes longer hangs."""
KINDS = ("greedy", "sampled", "choices", "stop", "penalties", "leaving", "slow", "deadline", "form")
HTTP_KINDS = ("http", "http-twice")
"""Over HTTP, by clients that go on with streams; those of the second kind at two places at once."""
FORMS: tuple[Mapping[str, str], ...] = (
    {"regex": "([A-Z]{2,5}:[0-9]{1,4},){2,5}END"},
    {
        "json": json.dumps(
            {
                "type": "array",
                "items": {
                    "anyOf": [
                        {"type": "integer", "minimum": 0, "maximum": 9999},
                        {"type": "string", "pattern": "^[A-Z]{1,9}$"},
                    ]
                },
                "minItems": 3,
                "maxItems": 9,
            }
        )
    },
)
"""Short ones: whatever is drawn, most of them end before their limit."""
Send = Callable[[Request, int], AsyncGenerator[Event, None]]
"""A request and the number of the attempt -> its events, from one of the frontends."""


def make_load(
    seed: int, num_requests: int, *, vocabulary: range, max_tokens: int, kinds: Sequence[str] = KINDS
) -> list[Request]:
    """Return so many requests, of all kinds in turn."""
    random = Random(seed)
    return [
        _make(f"{kind}-{number}", kind, random, vocabulary, max_tokens)
        for number, kind in zip(range(num_requests), itertools.cycle(kinds), strict=False)
    ]


def _make(name: str, kind: str, random: Random, vocabulary: range, max_tokens: int) -> Request:
    own = tuple(random.choice(vocabulary) for _ in range(random.randint(3, 60)))
    prompt = own if random.random() < 0.5 else (*range(vocabulary.start, vocabulary.start + 40), *own)
    sampling: dict[str, object] = {
        "max_tokens": random.randint(max_tokens // 4, max_tokens),
        "temperature": 0.0 if kind == "greedy" else 0.9,
        "seed": random.getrandbits(40),
        "ignore_eos": random.random() < 0.7,
    }
    match kind:
        case "http" | "http-twice":
            sampling["n"] = 2 if kind == "http-twice" else 1
            # They outlast what a frontend gives its calls when it stops.
            sampling |= {"max_tokens": random.randint(2 * max_tokens, 3 * max_tokens), "ignore_eos": True}
            return Request(name, prompt, sampling, http="twice" if kind == "http-twice" else "once")
        case "choices":
            sampling["n"] = 3
        case "stop":
            sampling["ignore_eos"] = True
        case "penalties":
            sampling |= {"presence_penalty": 0.5, "repetition_penalty": 1.2}
        case "form":
            form = random.choice(FORMS)
            sampling |= {"structured_outputs": form, "ignore_eos": False, "max_tokens": max_tokens}
        case "logprobs":
            sampling["logprobs"] = 2
        case "leaving":
            return Request(name, prompt, sampling, leaves_after=random.randint(1, max_tokens // 4))
        case "slow":
            return Request(name, prompt, sampling, pause_s=0.01)
        case "deadline":
            return Request(name, prompt, sampling, timeout_s=random.uniform(0.05, 3.0))
    return Request(name, prompt, sampling)


async def run_clients(
    requests: Sequence[Request],
    recorder: Recorder,
    send: Send,
    *,
    patience_s: float = 60.0,
    starts_within_s: float = 0.0,
    random: Random | None = None,
) -> None:
    """Send all requests, each by a client of its own, until every one has ended.

    Args:
        patience_s: For how long a client tries again while it is refused.
        starts_within_s: The clients begin at random moments of so many seconds.
    """
    random = random or Random(0)
    delays = [random.uniform(0, starts_within_s) for _ in requests]
    clients = (
        _run_client(request, recorder, send, patience_s, delay_s)
        for request, delay_s in zip(requests, delays, strict=True)
    )
    tasks = [asyncio.create_task(client) for client in clients]
    done, hanging = await asyncio.wait(tasks, timeout=LONGEST_S)
    for task in hanging:  # the validators see that there is no end
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    for task in done:
        task.result()


async def _run_client(
    request: Request, recorder: Recorder, send: Send, patience_s: float, delay_s: float
) -> None:
    await asyncio.sleep(delay_s)
    until = asyncio.get_running_loop().time() + patience_s
    for attempt in itertools.count():
        if not await recorder.follow(request, send(request, attempt), asyncio.sleep):
            return
        if asyncio.get_running_loop().time() > until:
            recorder.fail(request.name, f"refused for {patience_s:g} s")
            return
        await asyncio.sleep(RETRY_S)


def sender_to(clients: Sequence[GenerationClient]) -> Send:
    """Return how to send to several frontends: each attempt at a request goes to the next one."""

    def send(request: Request, attempt: int) -> AsyncGenerator[Event, None]:
        client = clients[(hash(request.prompt) + attempt) % len(clients)]
        return client.generate(list(request.prompt), request.sampling, timeout_s=request.timeout_s)

    return send


def with_stops_that_hit(requests: Sequence[Request], answers: Mapping[str, Answer]) -> list[Request]:
    """Return the requests; those that are to have a stop string get one out of the middle of their answer."""
    changed = []
    for request in requests:
        text = answers[request.name].choices[0].text if request.name in answers else ""
        if request.name.startswith("stop"):
            middle = len(text) // 2
            stop = [text[middle : middle + 4], "never said"]
            request = replace(request, sampling={**request.sampling, "stop": stop})
        changed.append(request)
    return changed


async def answers_undisturbed(requests: Sequence[Request], send: Send) -> dict[str, Answer]:
    """Return what each request comes to when its client waits for all of it and nothing breaks."""
    recorder = Recorder(asyncio.get_running_loop().time)
    patient = [Request(request.name, request.prompt, request.sampling) for request in requests]
    await run_clients(patient, recorder, send)
    failed = [seen for seen in recorder.history if seen.what == "failed"]
    assert not failed, failed
    missing = {request.name for request in requests} - recorder.ended
    assert not missing, f"{sorted(missing)} have not ended, though nothing has broken"
    return answers_of(recorder.history)
