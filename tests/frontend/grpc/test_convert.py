"""Bounds of what messages of GenerationService hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from triptych.types.sampling import MAX_CHOICES
from triptych.v1 import chat_pb2, generation_pb2
from triptych_services.frontend.grpc.convert import to_chat, to_raw_request, unsupported_of_chat

TOOL = {"name": "add", "description": "Adds", "parameters_json": '{"type": "object"}'}
CALL = {"id": "1", "name": "add", "arguments_json": "{}"}


@pytest.mark.parametrize(
    ("field", "what", "limit", "chat_of"),
    [
        (
            "messages[1].tool_calls",
            "calls",
            128,
            lambda count: {"messages": [{}, {"tool_calls": [CALL] * count}]},
        ),
        ("tools", "tools", 128, lambda count: {"tools": [TOOL] * count}),
        ("documents", "documents", 1024, lambda count: {"documents": [{"text": "x"}] * count}),
    ],
)
def test_lists_of_a_conversation_have_limits(
    field: str, what: str, limit: int, chat_of: Callable[[int], dict[str, Any]]
) -> None:
    assert to_chat(chat_pb2.Chat(**chat_of(limit)))[1] == []
    chat, (violation,) = to_chat(chat_pb2.Chat(**chat_of(limit + 1)))
    assert str(violation) == f"chat.{field}: {limit + 1} {what} are above the limit {limit}"
    assert (violation.value, violation.limit) == (str(limit + 1), str(limit))
    assert not chat.tools
    assert not chat.documents


def test_choices_to_go_on_with_have_a_limit() -> None:
    request = generation_pb2.Generation(emitted=[{}] * (MAX_CHOICES + 1))  # type: ignore[list-item]
    (violation,) = to_raw_request("", request, None).violations
    assert str(violation) == f"emitted: {MAX_CHOICES + 1} choices are above the limit {MAX_CHOICES}"


def test_parts_that_are_not_served_are_named_up_to_a_limit() -> None:
    parts = [{"text": "x"}, *[{"image": {"url": "x"}}] * 1000]
    paths = unsupported_of_chat(chat_pb2.Chat(messages=[{"role": "user", "parts": parts}]))  # type: ignore[list-item]
    assert paths == [f"chat.messages[0].parts[{number}].image" for number in range(1, 65)]
