"""The ids of server-sent events, by which a client goes on with a stream that broke: TOKEN:3.17f."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from triptych.errors import InvalidRequest
from triptych_services.frontend.attached import AttachedEvent
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.openai.convert import AnswerOptions
from triptych_services.frontend.openai.objects import AnswerFormat, ChatFormat, CompletionFormat
from triptych_services.frontend.openai.streams import StreamIds, chunks
from triptych_services.frontend.resumption import ResumeToken, SeenChoice

LAST_EVENT_ID_HEADER = "Last-Event-ID"
MAX_CHOICES_WITH_IDS = 32
"""Each id has the position of every choice."""
_FORMATS: Mapping[str, type[ChatFormat] | type[CompletionFormat]] = {
    "chat": ChatFormat,
    "completion": CompletionFormat,
}
_POSITION = re.compile(r"(\d{1,10})(f?)")


def write_answer(
    format: AnswerFormat, options: AnswerOptions, answer_id: str, created_unix_s: int
) -> dict[str, Any]:
    """Return what another frontend must know to send the rest of a streamed answer."""
    name = next(name for name, kind in _FORMATS.items() if type(format) is kind)
    written = asdict(options)
    del written["has_content"]  # it matters to the opening alone, and the version before does not know it
    return {"format": name, "options": written, "id": answer_id, "created": created_unix_s}


def parse_event_id(text: str) -> tuple[ResumeToken, dict[int, SeenChoice]]:
    """Return the token, and what the client has of each choice.

    Raises:
        InvalidRequest: It is no id of an event of ours.
    """
    token, _, positions = text.rpartition(":")
    parsed = ResumeToken.parse(token, LAST_EVENT_ID_HEADER)
    matches = [_POSITION.fullmatch(position) for position in positions.split(".")]
    seen = {
        index: SeenChoice(int(match[1]), bool(match[2]))
        for index, match in enumerate(matches)
        if match is not None
    }
    if len(seen) != len(matches) or len(seen) != parsed.num_choices:
        raise InvalidRequest(LAST_EVENT_ID_HEADER, f"{positions!r:.80} is not the position of every choice")
    return parsed, seen


async def rest_of(
    generator: Generator, token: ResumeToken, seen: Mapping[int, SeenChoice] | None
) -> AsyncGenerator[str]:
    """Yield the text of a stream from where its client is.

    Args:
        seen: What the client has of each choice. None: not even the stream's beginning.
    """
    async with aclosing(generator.attach(token, seen or {}, "http")) as events:
        attached = await anext(events)
        assert isinstance(attached, AttachedEvent), "the first event says how the others are sent"
        answer = attached.state.answer
        options = AnswerOptions(**answer["options"])
        format = _FORMATS[answer["format"]](options)
        token_bytes = generator.text_model.tokenizer.token_bytes
        for index, token_ids in attached.seen_token_ids.items():
            format.skip(index, map(token_bytes, token_ids))
        pieces = chunks(
            events,  # type: ignore[arg-type]  # the first one is taken
            format,
            answer_id=answer["id"],
            created_unix_s=answer["created"],
            options=options,
            ids=StreamIds(options.num_choices, seen),
        )
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
