"""Answers in blocks are the same however they are cut: into deltas, and into a stream or none, through two APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.frontend.http.anthropic import test_messages as messages
from tests.frontend.http.openai.responses import test_responses as responses
from tests.frontend.requests.test_tools import EOS_ID, TALKATIVE, TOKENIZER
from tests.helpers.fake_engine import FakeEngine, Reply
from tests.helpers.frontend import frontend_core
from tests.helpers.http_api import HttpApi, open_api
from triptych.text.answer_parser import AnswerParser
from triptych.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS
from triptych.types.events import DeltaEvent
from triptych.types.logprobs import TokenLogprobs
from triptych.types.outputs import FinishReason, ToolCallDelta
from triptych_services.frontend.http.anthropic.objects import MessagesFormat
from triptych_services.frontend.http.blocks import Block, BlockAnswer, BlockKind, Stage
from triptych_services.frontend.http.openai.responses.objects import ResponsesFormat
from triptych_services.frontend.requests.tools import AnswerSplit
from triptych_services.frontend.streams.text import AnswerSplitter, join_deltas

TOOLS: Any = {"add": {}, "now": {}}
_JSON = st.dictionaries(st.sampled_from(["a", "größe", 'q"']), st.one_of(st.integers(), st.text(max_size=5)))
_CALLS = st.builds(
    lambda name, arguments: f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>",
    st.sampled_from(sorted(TOOLS)),
    _JSON,
)
_TEXTS = st.sampled_from(
    ["Hello ", "größer", "\n", " ", "<tool", "</tool_call>", "{", "\U0001f642", "One. Two."]
)
ANSWERS = st.builds(
    lambda thoughts, parts: thoughts + "".join(parts),
    st.sampled_from(["", "<think>Hm, \nso</think>\n\n", "<think>"]),
    st.lists(_CALLS | _TEXTS, max_size=8),
)


def blocks_of(pieces: Iterable[str]) -> list[Block]:
    """Return the blocks of an answer that comes in these pieces, each a delta; checks the steps."""
    numbers = count()
    parser = AnswerParser(
        reasoning=REASONING_FORMATS["think"],
        tool_format=TOOL_FORMATS["hermes"],
        tools=TOOLS,
        new_id=lambda: f"id-{next(numbers)}",
    )
    answer = BlockAnswer()
    grown: dict[int, str] = {}
    stages: list[tuple[int, Stage]] = []
    for piece in (*pieces, None):
        if piece is None:
            parser.finish()
        else:
            parser.push(piece)
        parts = parser.take()
        reason = FinishReason.STOP if piece is None else None
        calls = join_deltas(parts.tool_calls)
        delta = DeltaEvent(0, parts.content, (), (), reason, None, parts.reasoning, calls)
        for step in answer.add(delta):
            stages.append((step.block.index, step.stage))
            grown[step.block.index] = grown.get(step.block.index, "") + step.text
    assert grown == {block.index: block.text for block in answer.blocks}
    for (index, stage), (next_index, next_stage) in pairwise([*stages, (len(answer.blocks), Stage.BEGIN)]):
        is_end = stage is Stage.END
        assert (next_index, next_stage is Stage.BEGIN) == (index + is_end, is_end), "one after the other"
    return answer.blocks


@given(text=ANSWERS, data=st.data())
def test_any_cut_into_deltas_gives_the_same_blocks(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    whole = blocks_of([text])
    shapes = [(block.kind, block.text, block.name, block.call_id) for block in whole]
    for pieces in ([text[start:end] for start, end in pairwise([0, *cuts, len(text)])], text):
        blocks = blocks_of(pieces)
        assert [(block.kind, block.text, block.name, block.call_id) for block in blocks] == shapes
    assert all(
        block.kind is not other.kind or block.kind is BlockKind.CALL for block, other in pairwise(whole)
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_log_probabilities_of_reasoning_are_of_no_text(size: int) -> None:
    pieces = ["<think>", "Hm", "</think>", "\n", "Yes", ",", " it is."]
    entries = [TokenLogprobs([number], [-1.0], [piece.encode()], [1]) for number, piece in enumerate(pieces)]
    splitter = AnswerSplitter(
        AnswerSplit(
            REASONING_FORMATS["think"],
            is_reasoning=False,
            tool_format=None,
            tools={},
            max_calls=None,
            sends_reasoning=True,
        ),
        lambda token_id: pieces[token_id].encode(),
    )
    answer, sent = BlockAnswer(), list[TokenLogprobs]()
    for start in range(0, len(pieces), size):
        part = slice(start, start + size)
        is_last = start + size >= len(pieces)
        reason = FinishReason.STOP if is_last else None
        token_ids = list(range(len(pieces)))[part]
        delta = DeltaEvent(0, "".join(pieces[part]), token_ids, tuple(entries[part]), reason)
        for step in answer.add(splitter.split(delta)):
            sent += step.logprobs
    reasoning, text = answer.blocks
    assert (reasoning.text, reasoning.logprobs, text.text) == ("Hm", [], "Yes, it is.")
    assert text.logprobs == sent == entries[3:]


ENDS = {
    FinishReason.STOP: ("completed", None, "end_turn"),
    FinishReason.TOOL_CALLS: ("completed", None, "tool_use"),
    FinishReason.LENGTH: ("incomplete", {"reason": "max_output_tokens"}, "max_tokens"),
    FinishReason.ABORT: ("incomplete", None, "max_tokens"),
    FinishReason.REPETITION: ("incomplete", None, "max_tokens"),
}


@pytest.mark.parametrize("reason", [reason for reason in FinishReason if reason is not FinishReason.UNKNOWN])
def test_every_end_has_its_words(reason: FinishReason) -> None:
    answer = BlockAnswer()
    calls = (ToolCallDelta(0, "c", "now", "{}"),) if reason is FinishReason.TOOL_CALLS else ()
    *_, last = answer.add(DeltaEvent(0, "" if calls else "x", (), (), reason, tool_calls=calls))
    response = ResponsesFormat(
        request_id="r", created_unix_s=0, repeated={}, wants_logprobs=False, namespaces={}
    ).whole(answer)
    message = MessagesFormat(request_id="r").whole(answer)
    ends = (response["status"], response["incomplete_details"], message["stop_reason"])
    assert ends == ENDS[reason]
    assert last.block.is_cut is (response["output"][0]["status"] == "incomplete") is answer.is_cut


@asynccontextmanager
async def open_stack(reply: Reply) -> AsyncIterator[HttpApi]:
    async with (
        FakeEngine(reply, model=TALKATIVE) as engine,
        frontend_core(engine, tokenizer=TOKENIZER) as core,
        open_api(core.generator) as api,
    ):
        yield api


@pytest.mark.thorough
def test_streams_and_whole_answers_of_both_apis_agree() -> None:
    said = [""]

    def reply(request: Any) -> list[int]:
        return [*TOKENIZER.encode(said[0], add_special_tokens=False), EOS_ID]

    async def compare(api: HttpApi, text: str) -> None:
        said[0] = text
        fields: Any = {"tools": [responses.ADD, responses.NOW]}
        response = await responses.create(api, **fields)
        async with api.client.responses.stream(model="tiny", input="Hi", **fields) as stream:
            assert responses.plain(await stream.get_final_response()) == responses.plain(response)
        async with messages.client_of(api) as client:
            fields = {"tools": [messages.ADD, messages.NOW], "max_tokens": 900, "messages": [messages.USER]}
            message = await messages.create(client, **fields)
            async with client.messages.stream(model="tiny", **fields) as helper:
                final = await helper.get_final_message()
        assert messages.plain(final) == messages.plain(message)
        assert final.stop_reason == message.stop_reason
        kinds = {"reasoning": "thinking", "message": "text", "function_call": "tool_use"}
        assert [kinds[item.type] for item in response.output] == [block.type for block in message.content]

    with asyncio.Runner() as runner:
        serving = open_stack(reply)
        api = runner.run(serving.__aenter__())

        @settings(max_examples=12, suppress_health_check=list(HealthCheck))
        @given(text=ANSWERS)
        def check(text: str) -> None:
            runner.run(compare(api, text))

        try:
            check()
        finally:
            runner.run(serving.__aexit__(None, None, None))
