"""Very long bodies are read in a child process, with the same results and refusals; what ends it ends nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from starlette.requests import Request
from starlette.types import Message

from tests.helpers.fuzz import BASES, CHAT, Fuzzer
from tests.helpers.http_api import open_api
from tests.helpers.written_chats import read_written
from triptych.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest, QueueFull, TriptychError
from triptych_services.frontend.access.caller import set_tenant
from triptych_services.frontend.http import app
from triptych_services.frontend.http.anthropic import convert as anthropic
from triptych_services.frontend.http.body import ClientGone
from triptych_services.frontend.http.body_reader import BodyReader
from triptych_services.frontend.http.generation_body import AbortRequest
from triptych_services.frontend.http.openai import convert as openai
from triptych_services.frontend.http.openai.pooling import convert as pooling
from triptych_services.frontend.http.openai.responses import convert as responses
from triptych_services.frontend.http.state import InFlight
from triptych_services.frontend.offload import fair_threads
from triptych_services.frontend.requests import long_reader
from triptych_services.frontend.requests.inputs import PooledCall
from triptych_services.frontend.requests.long_reader import LONG_REQUEST, LongReader
from triptych_services.frontend.requests.raw import RawChat, RawRequest
from triptych_services.frontend.scores import Comparison

NAMED = {"label": "test", "deadline_s": None}
PATH_TO_CONVERT: dict[str, Callable[..., Any]] = {
    "/v1/completions": partial(openai.read_completion, **NAMED),
    "/v1/chat/completions": partial(openai.read_chat, **NAMED),
    "/v1/responses": partial(responses.read_response, **NAMED),
    "/v1/messages": partial(anthropic.read_messages, **NAMED),
    "/tokenize": openai.read_tokenize,
    "/detokenize": openai.read_detokenize,
    "/v1/embeddings": partial(pooling.read_embedding, **NAMED),
    "/pooling": partial(pooling.read_pooling, **NAMED),
    "/classify": partial(pooling.read_classification, **NAMED),
    **dict.fromkeys(("/score", "/v1/score"), partial(pooling.read_score, **NAMED)),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), partial(pooling.read_rerank, **NAMED)),
}
LONG = b'{"request_ids": ["a"]}'.ljust(LONG_REQUEST + 1)
STUCK = """
import pathlib, pickle, time

def begin(message):
    def answer(message):
        while b"quick" not in message["data"] and pathlib.Path(__file__).exists():
            time.sleep(0.01)
        return {"data": pickle.dumps(("quick", ()))}
    return {}, answer
"""
"""A process that answers only what is about `quick`."""
STUCK_ONCE = """
import pathlib, pickle, time

def begin(message):
    seen = pathlib.Path(__file__).with_name("seen")
    def answer(message):
        if b"quick" in message["data"]:
            return {"data": pickle.dumps(("quick", ()))}
        if seen.exists():
            return {"data": pickle.dumps(("again", ()))}
        seen.touch()
        while pathlib.Path(__file__).exists():
            time.sleep(0.01)
    return {}, answer
"""
"""A process that answers nothing else until there is a second one."""
MEET = """
import os, pathlib, pickle, time

def begin(message):
    folder = pathlib.Path(__file__).parent
    def answer(message):
        (folder / f"{os.getpid()}.seen").touch()
        while len(list(folder.glob("*.seen"))) < 2 and pathlib.Path(__file__).exists():
            time.sleep(0.01)
        return {"data": pickle.dumps((os.getpid(), ()))}
    return {}, answer
"""
"""Processes that answer once two of them have a body."""
FULL = """
import pickle

def begin(message):
    return {}, lambda message: {"error": "MemoryError", "data": pickle.dumps(MemoryError())}
"""


class Client:
    """A client that sends a body and leaves when it is told."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.has_left = asyncio.Event()

    async def receive(self) -> Message:
        if (body := self._body) is not None:
            self._body = None
            return {"type": "http.request", "body": body}
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    def request(self) -> Request:
        app = SimpleNamespace(state=SimpleNamespace(in_flight=InFlight()))
        headers = [(b"content-type", b"application/json")]
        return Request({"type": "http", "headers": headers, "app": app}, self.receive)


async def read(reader: BodyReader, body: bytes = LONG, kind: Any = AbortRequest, *, tenant: str = "") -> Any:
    set_tenant(tenant)
    return await reader.read(Client(body).request(), kind, dict)


Use = Callable[[str], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Use]:
    """Return a function that sets the script of the child processes. Those that are stuck end with the test."""
    path = tmp_path / "odd_process.py"
    monkeypatch.setattr(long_reader, "_SCRIPT", path)
    yield path.write_text
    path.unlink()


async def until_stuck(folder: Path) -> None:
    """Wait until a process of `STUCK_ONCE` has a body."""
    async with asyncio.timeout(120):  # it has a low priority
        while not (folder / "seen").exists():
            await asyncio.sleep(0.01)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def as_read(value: Any) -> Any:
    """Return a result without the random end of ids, and with conversations as objects."""
    match value:
        case list() | tuple():
            return [as_read(each) for each in value]
        case RawChat():
            return read_written(value)
        case RawRequest():
            request_id = value.head.request_id.replace(value.head.request_id[4:13], "", 1)
            head = dataclasses.replace(value.head, request_id=request_id)
            return dataclasses.replace(value, head=head, prompt=as_read(value.prompt))
        case PooledCall():
            return as_read([value[place] for place in range(len(value))])
        case Comparison():
            pairs = [(value.pairs[place], value.pairs.query_of(place)) for place in range(len(value.pairs))]
            return as_read(value.base), pairs, value.activation, value.top_n, value.returns_documents
    return value


async def outcome(reader: BodyReader, body: bytes, kind: Any, convert: Callable[..., Any]) -> str:
    try:
        return repr(as_read(await reader.read(Client(body).request(), kind, convert)))
    except TriptychError as error:
        return repr((type(error), str(error), vars(error)))


@pytest.fixture(scope="module")
def elsewhere() -> BodyReader:
    """A reader that reads all bodies in a child process."""
    return BodyReader(LongReader(), refuses_unknown=False, long_body=0)


async def test_a_child_reads_what_this_process_reads(elsewhere: BodyReader) -> None:
    here = BodyReader(LongReader(), refuses_unknown=False, long_body=1 << 30)
    fuzzer, path_to_kind = Fuzzer(7), {path: kind for path, kind, _ in BASES}
    requests = [(path, json.dumps(body).encode()) for path, _, body in BASES]
    variables = {"x": {"y": [1, "ü"]}, "enable_thinking": False}
    chat = {**CHAT, "documents": [{"text": "x"}], "chat_template_kwargs": variables}
    requests.append(("/v1/chat/completions", json.dumps(chat).encode()))
    requests += [fuzzer.http_request()[:2] for _ in range(200)]
    for path, body in requests:
        kind, convert = path_to_kind[path], PATH_TO_CONVERT[path]
        expected = await outcome(here, body, kind, convert)
        assert await outcome(elsewhere, body, kind, convert) == expected, (path, body)


async def test_the_body_of_every_route_can_be_read_there(
    elsewhere: BodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_api() as here:
        monkeypatch.setattr(app, "BodyReader", lambda _, refuses_unknown: elsewhere)
        async with open_api() as there:
            for path, _, body in BASES:
                content = json.dumps(body).replace('"model": "embedded"', '"model": ""')
                expected, answer = await here.post(path, content), await there.post(path, content)
                assert answer.status_code == expected.status_code, (path, answer.text)
                assert answer.is_success or answer.json() == expected.json()


async def test_bodies_up_to_the_limit_start_no_process() -> None:
    before = children()
    assert await read(BodyReader(LongReader()), LONG[:LONG_REQUEST])
    assert not children() - before


async def test_unknown_fields_are_reported_here(
    elsewhere: BodyReader, caplog: pytest.LogCaptureFixture
) -> None:
    await read(elsewhere, b'{"odd": 1}')
    assert "left out the field 'odd'" in caplog.text


async def test_a_bug_there_is_a_bug_here(elsewhere: BodyReader) -> None:
    request = Client(LONG).request()
    with pytest.raises(TypeError) as caught:
        await elsewhere.read(request, AbortRequest, partial(openai.read_chat, label="", deadline_s=0.0, x=1))
    assert "in _answer" in caught.value.__notes__[0]


async def test_a_body_whose_process_was_killed_is_read_again(use: Use, tmp_path: Path) -> None:
    use(STUCK_ONCE)
    before, reader = children(), BodyReader(LongReader())
    assert await read(reader, b'{"quick": 1}'.ljust(LONG_REQUEST + 1)) == "quick"
    (child,) = children() - before
    reading = asyncio.create_task(read(reader))
    await until_stuck(tmp_path)
    child.kill()
    assert await reading == "again"


async def test_processes_of_two_tenants_are_kept(use: Use) -> None:
    use(MEET)
    reader = BodyReader(LongReader())
    pids = {*await asyncio.gather(*(read(reader, tenant=each) for each in ("one", "two")))}
    assert len(pids) == 2
    assert {*await asyncio.gather(*(read(reader, tenant=each) for each in ("one", "two")))} <= pids


async def test_a_process_that_ends_twice_is_an_error_to_retry(use: Use) -> None:
    script = "import os\ndef begin(message):\n    return {}, lambda message: os._exit(1)\n"
    use(script)
    with pytest.raises(EngineUnavailable, match="ended before it had read this one; try again"):
        await read(BodyReader(LongReader()))


async def test_a_process_that_is_stuck_ends(use: Use) -> None:
    use(STUCK)
    with pytest.raises(
        InvalidRequest, match=r"bytes of the request take more time to read than the limit of 0\.01 s"
    ):
        await read(BodyReader(LongReader(limit_s=0.01)))


async def test_a_body_that_takes_all_memory_is_refused(use: Use) -> None:
    use(FULL)
    with pytest.raises(
        InvalidRequest, match="the request takes more memory to read than there is; make it shorter"
    ):
        await read(BodyReader(LongReader()))


async def test_a_deadline_holds_while_a_body_is_read(use: Use, tmp_path: Path) -> None:
    use(STUCK_ONCE)
    reader = BodyReader(LongReader())
    with pytest.raises(DeadlineExceeded, match=r"the deadline of 0\.01 s has passed"):
        await reader.read(Client(LONG).request(), AbortRequest, dict, deadline_s=0.01)
    await until_stuck(tmp_path)


class SlowReader(LongReader):
    """Reads in this process, after 50 ms, whatever the deadline is."""

    async def read(self, size: int, read: Callable[[], Any], **_: Any) -> Any:
        await asyncio.sleep(0.05)
        return read()


async def test_the_time_in_which_a_body_is_read_is_part_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = BodyReader(SlowReader(), long_body=0)
    monkeypatch.setattr(app, "BodyReader", lambda _, refuses_unknown: slow)
    bases = {path: json.dumps(body) for path, _, body in BASES if "token" not in path}
    async with open_api() as api:

        async def ask(path: str, seconds: float) -> Any:
            return await api.post(path, bases[path], **{"X-Request-Timeout-S": str(seconds)})

        answers = await asyncio.gather(*(ask(path, 0.04) for path in bases))
        for path, answer in zip(bases, answers, strict=True):
            assert answer.status_code == 504, (path, answer.text)
            assert "the deadline of 0.04 s has passed" in answer.text
        assert not api.generator.requests
        await asyncio.gather(*(ask(path, 100) for path in bases))
        left = [raw.deadline_s for raw in api.generator.requests]
        assert len(left) >= len(bases)
        assert all(0 < seconds <= 99.95 for seconds in left)


async def test_the_time_in_which_a_body_comes_is_part_of_its_time() -> None:
    class SlowClient(Client):
        async def receive(self) -> Message:
            await asyncio.sleep(0.05)
            return await super().receive()

    before = children()
    with pytest.raises(DeadlineExceeded, match=r"the deadline of 0\.04 s has passed"):
        await BodyReader(LongReader()).read(SlowClient(LONG).request(), AbortRequest, dict, deadline_s=0.04)
    assert not children() - before


async def test_a_client_that_leaves_waits_no_longer(use: Use, tmp_path: Path) -> None:
    use(STUCK_ONCE)
    client = Client(LONG)
    reading = asyncio.create_task(BodyReader(LongReader()).read(client.request(), AbortRequest, dict))
    await until_stuck(tmp_path)
    client.has_left.set()
    with pytest.raises(ClientGone):
        await reading


async def test_tenants_wait_behind_themselves_within_bounds(
    use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(STUCK)
    monkeypatch.setattr(fair_threads, "MAX_WAITING_SIZE", 3 * len(LONG))
    reader = BodyReader(LongReader())
    stuck = [asyncio.create_task(read(reader, tenant="many")) for _ in range(4)]  # one runs, three wait
    await asyncio.sleep(0)
    with pytest.raises(
        QueueFull, match=r"3 very long requests wait already, \d+ characters in all; the limits are"
    ):
        await asyncio.create_task(read(reader, tenant="many"))
    quick = asyncio.create_task(read(reader, b'{"quick": 1}'.ljust(len(LONG)), tenant="one"))
    assert await quick == "quick"
    assert not any(each.done() for each in stuck)
    for each in stuck:
        each.cancel()
