"""Server-sent events: chunks put together as text, and the response that sends them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.frontend.openai.errors import to_http_error
from services.frontend.openai.in_flight import ClientGone, InFlight
from services.frontend.openai.objects import AnswerFormat, to_json, usage_object
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, PromptLogprobsEvent

DONE = "data: [DONE]\n\n"


async def chunks(
    events: AsyncGenerator[Event],
    format: AnswerFormat,
    *,
    answer_id: str,
    created_unix_s: int,
    num_choices: int,
    include_usage: bool,
) -> AsyncGenerator[str]:
    """The text of the stream, in pieces to be sent at once. The first comes with admission and may be empty.

    Nothing is done twice per chunk: what all chunks share is written once, on admission.
    """
    async with aclosing(events):
        head = tail = ""
        async for event in events:
            match event:
                case DeltaEvent():
                    if event.text or event.logprobs or event.finish_reason is not None:
                        yield f"{head}{format.delta(event)}{tail}"
                case PromptLogprobsEvent():
                    format.add_prompt(event)
                case AdmittedEvent():
                    shared = {
                        "id": answer_id,
                        "object": format.chunk_name,
                        "created": created_unix_s,
                        "model": event.model,
                    }
                    head = f'data: {to_json(shared)[:-1]},"choices":['
                    tail = '],"usage":null}\n\n' if include_usage else "]}\n\n"
                    openings = (format.opening(index) for index in range(num_choices))
                    yield "".join(f"{head}{opening}{tail}" for opening in openings if opening is not None)
                case _:
                    usage = (
                        f'{head}],"usage":{to_json(usage_object(event.usage))}}}\n\n' if include_usage else ""
                    )
                    yield usage + DONE


class EventStream(Response):
    """Sends chunks until they end, its client leaves, or something fails.

    A failure before the first chunk is a plain HTTP error; one after it is an `error` event, and the
    last: no `[DONE]` follows, for the answer is not complete.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[str], *, in_flight: InFlight, request_id: str) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._in_flight = in_flight
        self._request_id = request_id
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._in_flight.run(receive, self._send_all(send))
        except ClientGone:
            return
        except Exception as error:
            if not self._has_started:
                raise
            event = f"data: {to_json(to_http_error(error, self._request_id).body)}\n\n"
            await send({"type": "http.response.body", "body": event.encode(), "more_body": False})

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._chunks):
            async for chunk in self._chunks:
                if not self._has_started:
                    await send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                    self._has_started = True
                await send({"type": "http.response.body", "body": chunk.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
