"""A stream goes on at another frontend, exactly where its client is: two frontends, a real engine, a naive worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.helpers.clock import pass_time
from tests.helpers.fake_engine import eventually
from tests.helpers.frontend import FrontendCore, frontend_core, raw_request
from tests.helpers.http_api import HttpApi, open_api
from tests.helpers.stack import EngineStack, NaiveRunner, WorkerStack, make_config
from triptych import errors
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent
from triptych.types.outputs import FinishReason, Usage
from triptych_services.frontend.access.caller import ANYONE, Caller, set_caller
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.streams.migrator import MigrationTerms
from triptych_services.frontend.streams.placement import AttachedEvent
from triptych_services.frontend.streams.resume import ResumeToken, SeenChoice

PROMPT = list(range(20, 40))


@dataclass
class Stand:
    """A worker, an engine and two frontends that know it."""

    runner: NaiveRunner
    engine: EngineStack
    first: FrontendCore
    second: FrontendCore

    def check_idle(self) -> None:
        assert self.engine.loop.num_requests == 0


@asynccontextmanager
async def stand(
    keep_s: float = 10.0, max_samples_per_row: int = 1, resume_ttl_s: float = 10.0
) -> AsyncIterator[Stand]:
    config = make_config()
    runner = NaiveRunner(config, 600, max_samples_per_row=max_samples_per_row)
    worker = WorkerStack(config, runner)
    await worker.start()
    config = make_config(worker.port)
    config = replace(config, engine=replace(config.engine, resume_ttl_s=resume_ttl_s))
    engine = EngineStack(config)
    await engine.start()
    try:
        async with (
            frontend_core(engine, keep_s=keep_s) as first,
            frontend_core(engine, keep_s=keep_s, moves=MigrationTerms()) as second,
        ):
            yield Stand(runner, engine, first, second)
    finally:
        await engine.stop()
        await worker.stop()


def request(**fields: Any) -> RawRequest:
    sampling = {"max_tokens": 40, "seed": 3, "ignore_eos": True, **fields.pop("sampling", {})}
    return raw_request(PROMPT, api="grpc", sampling=sampling, answer={}, **fields)


@dataclass
class Seen:
    """Everything that a client has."""

    token: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    stops: dict[int, Any] = field(default_factory=dict)
    usage: Usage | None = None
    num_deltas: int = 0

    def add(self, event: Event | AttachedEvent) -> None:
        match event:
            case AdmittedEvent():
                self.token = event.resume_token
            case DeltaEvent():
                assert event.index not in self.reasons, "output behind the end"
                self.num_deltas += 1
                self.texts[event.index] = self.texts.get(event.index, "") + event.text
                self.token_ids.setdefault(event.index, []).extend(event.token_ids)
                if event.finish_reason is not None:
                    self.reasons[event.index] = event.finish_reason
                    self.stops[event.index] = event.stop_reason
            case FinishedEvent():
                assert self.usage is None, "a second end"
                self.usage = event.usage

    @property
    def position(self) -> dict[int, SeenChoice]:
        return {i: SeenChoice(len(ids), i in self.reasons) for i, ids in self.token_ids.items()}

    @property
    def outcome(self) -> tuple[object, ...]:
        assert self.usage is not None
        counts = self.usage.num_prompt_tokens, self.usage.num_output_tokens
        return self.texts, self.token_ids, self.reasons, self.stops, counts


async def read(events: AsyncGenerator[Any, None], seen: Seen, until: Callable[[Seen], bool]) -> None:
    async with asyncio.timeout(60):
        async for event in events:
            seen.add(event)
            if until(seen):
                return


def never(_: Seen) -> bool:
    return False


async def unbroken(frontend: FrontendCore, raw: RawRequest) -> Seen:
    seen = Seen()
    async with aclosing(frontend.generator.generate(raw)) as events:
        await read(events, seen, never)
    return seen


SHAPES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.2},
    "three choices": {"n": 3},
    "end of sequence": {"ignore_eos": False, "max_tokens": 200},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_deltas", [0, 1, 5, 1000])
async def test_another_frontend_goes_on_where_the_client_is(shape: str, num_deltas: int) -> None:
    async with stand() as s:
        raw = request(sampling=SHAPES[shape])
        whole = await unbroken(s.first, raw)
        seen = Seen()
        async with aclosing(s.first.generator.generate(raw)) as events:
            await read(events, seen, lambda seen: bool(seen.token) and seen.num_deltas >= num_deltas)
            rest = s.second.generator.attach(ResumeToken.parse(seen.token), seen.position, "grpc")
            seen.usage = None
            async with aclosing(rest):
                await read(rest, seen, never)
            if num_deltas < 1000 and raw.sampling["ignore_eos"]:  # else all of it was on its way before
                with pytest.raises(errors.AttachedElsewhere):
                    await read(events, Seen(), never)
        assert seen.outcome == whole.outcome
        s.check_idle()


async def test_counts_of_guesses_are_taken_along() -> None:
    """They are those of the engine when it is lost by the second frontend, which had only the last tokens."""
    async with stand(keep_s=0.1, max_samples_per_row=5, resume_ttl_s=0.5) as s:
        seen = Seen()
        async with aclosing(s.first.generator.generate(request())) as events:
            await read(events, seen, lambda seen: bool(seen.token) and seen.num_deltas >= 3)
            s.runner.may_step.clear()
            rest = s.second.generator.attach(ResumeToken.parse(seen.token), seen.position, "grpc")
            async with aclosing(rest):
                assert isinstance(await anext(rest), AttachedEvent)
                (request_of,) = s.engine.loop._engine.scheduler.snapshot().running
                counts = request_of.num_accepted_guesses, request_of.num_rejected_guesses
                await s.engine.stop()
                async with asyncio.timeout(60):
                    while not s.second.migrator.num_waiting:
                        await asyncio.sleep(0.01)
                (route,) = s.second.migrator._waiting
                assert route.guesses == counts
                assert sum(counts) > 0
            s.runner.may_step.set()


@pytest.mark.parametrize("num_deltas", range(0, 12, 2))
async def test_stop_strings_are_found_across_the_break(num_deltas: int) -> None:
    async with stand() as s:
        text = (await unbroken(s.first, request())).texts[0]
        raw = request(sampling={"stop": [text[9:13]], "n": 2})
        whole = await unbroken(s.first, raw)
        assert whole.reasons[0] is FinishReason.STOP
        seen = Seen()
        async with aclosing(s.first.generator.generate(raw)) as events:
            await read(events, seen, lambda seen: bool(seen.token) and seen.num_deltas >= num_deltas)
            rest = s.second.generator.attach(ResumeToken.parse(seen.token), seen.position, "grpc")
            async with aclosing(rest):
                await read(rest, seen, never)
        assert seen.outcome == whole.outcome


async def test_the_same_request_under_the_same_id_is_attached_to() -> None:
    async with stand() as s:
        whole = await unbroken(s.first, request())
        raw, before, after = request(request_id="mine"), Seen(), Seen()
        s.runner.may_step.clear()
        async with aclosing(s.first.generator.generate(raw)) as events:
            await read(events, before, lambda seen: bool(seen.token))
            async with aclosing(s.first.generator.generate(request(request_id="mine"))) as again:
                await read(again, after, lambda seen: bool(seen.token))
                s.runner.may_step.set()
                await read(again, after, never)
            with pytest.raises(errors.AttachedElsewhere):
                await read(events, before, never)
            other = request(request_id="other", sampling={"seed": 4})
            assert (await unbroken(s.first, other)).outcome != whole.outcome
        assert after.outcome == whole.outcome
        assert s.first.generator.num_active == 0


async def test_another_request_under_the_same_id_is_a_duplicate() -> None:
    async with stand() as s:
        s.runner.may_step.clear()
        async with aclosing(s.first.generator.generate(request(request_id="mine"))) as events:
            await read(events, Seen(), lambda seen: bool(seen.token))
            with pytest.raises(errors.DuplicateRequest):
                await unbroken(s.first, request(request_id="mine", sampling={"seed": 4}))
        s.runner.may_step.set()


async def test_a_client_that_leaves_ends_its_request_and_cannot_come_back() -> None:
    async with stand() as s:
        s.runner.may_step.clear()
        seen = Seen()
        async with aclosing(s.first.generator.generate(request())) as events:
            await read(events, seen, lambda seen: bool(seen.token))
        s.runner.may_step.set()
        await eventually(lambda: s.engine.loop.num_requests == 0)
        with pytest.raises(errors.NotKept):
            await anext(s.second.generator.attach(ResumeToken.parse(seen.token), {}, "grpc"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"secret": b"x" * 16}, errors.NotKept),
        ({"engine_id": "unknown"}, errors.NotKept),
        ({"num_choices": 2}, errors.NotKept),
        ({"seen": {0: SeenChoice(1000)}}, errors.InvalidRequest),
        ({"seen": {5: SeenChoice(1)}}, errors.InvalidRequest),
        ({"tenant": "other"}, errors.NotKept),
        ({"api": "http"}, errors.InvalidRequest),
    ],
)
async def test_what_does_not_fit_is_refused_and_disturbs_nothing(
    change: dict[str, Any], error: type[errors.TriptychError]
) -> None:
    async with stand() as s:
        whole, seen = await unbroken(s.first, request(tenant="mine")), Seen()
        s.runner.may_step.clear()
        async with aclosing(s.first.generator.generate(request(tenant="mine"))) as events:
            await read(events, seen, lambda seen: bool(seen.token))
            token = ResumeToken.parse(seen.token)
            wrong = ResumeToken(
                change.get("engine_id", token.engine_id),
                change.get("secret", token.secret),
                change.get("num_choices", token.num_choices),
            )
            set_caller(Caller("key", change["tenant"]) if "tenant" in change else ANYONE)
            with pytest.raises(error):
                await anext(
                    s.second.generator.attach(wrong, change.get("seen", {}), change.get("api", "grpc"))
                )
            set_caller(ANYONE)
            s.runner.may_step.set()
            if change.get("api") is None:
                await read(events, seen, never)
                assert seen.outcome == whole.outcome
        await eventually(lambda: s.engine.loop.num_requests == 0)


async def test_a_deadline_counts_on_at_the_other_frontend() -> None:
    async with stand() as s:
        s.runner.may_step.clear()
        seen = Seen()
        async with aclosing(s.first.generator.generate(request(deadline_s=50))) as events:
            await read(events, seen, lambda seen: bool(seen.token))
            rest = s.second.generator.attach(ResumeToken.parse(seen.token), {}, "grpc")
            assert isinstance(await anext(rest), AttachedEvent)
            await pass_time(50)
            with pytest.raises(errors.DeadlineExceeded):
                await read(rest, seen, never)
        s.runner.may_step.set()
        await eventually(lambda: s.engine.loop.num_requests == 0)


# Over HTTP


@dataclass
class Chunks:
    """The events of a stream over HTTP, gathered."""

    last_id: str = ""
    objects: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False

    def text(self, index: int = 0) -> str:
        choices = [
            choice for chunk in self.objects for choice in chunk["choices"] if choice["index"] == index
        ]
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
        )

    @property
    def reasons(self) -> list[str]:
        choices = [choice for chunk in self.objects for choice in chunk["choices"]]
        return sorted(c["finish_reason"] for c in choices if c["finish_reason"])


async def read_lines(lines: AsyncIterator[str], chunks: Chunks, num_events: int = 1 << 30) -> None:
    async with asyncio.timeout(60):
        async for line in lines:
            if line.startswith("id: "):
                chunks.last_id = line[4:]
            elif line == "data: [DONE]":
                chunks.is_done = True
            elif line.startswith("data: "):
                chunks.objects.append(json.loads(line[6:]))
                num_events -= 1
                if not num_events:
                    return


async def stream(api: HttpApi, method: str, path: str, chunks: Chunks, **options: Any) -> None:
    async with api.http.stream(method, path, **options) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        await read_lines(response.aiter_lines(), chunks)


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT, "n": 2}),
    ("/v1/completions", {"prompt": PROMPT, "stop": ["#", "&"]}),
    ("/v1/completions", {"prompt": PROMPT, "return_token_ids": True}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("num_events", [1, 4])
@pytest.mark.parametrize("is_get", [True, False])
async def test_an_event_id_goes_on_over_http(
    path: str, body: dict[str, Any], num_events: int, is_get: bool
) -> None:
    body = {"max_tokens": 30, "seed": 5, "ignore_eos": True, "stream": True, **body}
    body["stream_options"] = {"include_usage": True, "include_event_ids": True}
    async with stand() as s, open_api(s.first.generator) as one, open_api(s.second.generator) as two:
        whole = Chunks()
        await stream(one, "POST", path, whole, json=body)
        assert whole.is_done
        chunks = Chunks()
        async with one.http.stream("POST", path, json=body) as response:
            lines = response.aiter_lines()
            await read_lines(lines, chunks, num_events)  # and go on elsewhere while this one stands
            headers = {"Last-Event-ID": chunks.last_id}
            if is_get:
                token = chunks.last_id.partition(":")[0]
                await stream(two, "GET", f"/v1/streams/{token}", chunks, headers=headers)
            else:
                await stream(two, "POST", path, chunks, json=body, headers=headers)
        assert chunks.is_done
        for index in range(body.get("n", 1)):
            assert chunks.text(index) == whole.text(index)
        assert chunks.reasons == whole.reasons
        assert (
            chunks.objects[-1]["usage"]["completion_tokens"]
            == whole.objects[-1]["usage"]["completion_tokens"]
        )
        assert {chunk["id"] for chunk in chunks.objects} == {chunks.objects[0]["id"]}


@pytest.mark.parametrize("event_id", ["", "x", "AAAA:1", "?:1.2", "x" * 1000])
async def test_an_id_that_is_none_is_refused_by_name(event_id: str) -> None:
    async with stand() as s, open_api(s.first.generator) as api:
        body = {"prompt": PROMPT, "stream": True}
        response = await api.http.post("/v1/completions", json=body, headers={"Last-Event-ID": event_id})
        assert response.status_code == 400
        assert "Last-Event-ID" in response.json()["error"]["message"]
