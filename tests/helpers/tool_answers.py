"""A frontend over a fake engine that says what a model with tools and reasoning would."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from tests.helpers.byte_tokenizer import EOS, byte_tokenizer
from tests.helpers.fake_engine import MODEL, FakeEngine
from tests.helpers.frontend import frontend_core
from tests.helpers.http_api import HttpApi, open_api
from triptych.text.tokenizer import Tokenizer
from triptych.types.submit import SubmitRequest

# shows the model its tools and its former calls, and opens the reasoning if that is wanted
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}"
    "({{ (tool.function.parameters or {}) | tojson }}) {% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if message.tool_call_id %} answers {{ message.tool_call_id }}{% endif %}{{ '\n' }}{% endfor %}"
    "assistant:{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}-{% elif opens %}<think>{% endif %}"
)
TOKENIZER = byte_tokenizer(chat_template=TEMPLATE)
EOS_ID = TOKENIZER.token_id(EOS) or 0
TALKATIVE = replace(MODEL, max_model_len=4096, eos_token_ids=(EOS_ID,))
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
NOW: Any = {"type": "function", "function": {"name": "now", "description": "The time of day."}}
USER: Any = [{"role": "user", "content": "Hi"}]
BODY: Any = {"model": "tiny", "messages": USER}
ANSWER = (
    "<think>\nHm\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "now"}</tool_call>'
)


def say(text: str) -> Any:
    def reply(request: SubmitRequest) -> Iterable[int]:
        return [*TOKENIZER.encode(text, add_special_tokens=False), EOS_ID]

    return reply


@asynccontextmanager
async def http_api(
    text: str = ANSWER, *, tokenizer: Tokenizer = TOKENIZER, **parsers: str
) -> AsyncIterator[tuple[HttpApi, FakeEngine]]:
    async with (
        FakeEngine(say(text), model=TALKATIVE) as engine,
        frontend_core(engine, tokenizer=tokenizer, **parsers) as core,
        open_api(core.generator) as api,
    ):
        yield api, engine


def prompt_of(engine: FakeEngine) -> str:
    return TOKENIZER.decode(engine.submitted[-1].prompt_token_ids.tolist(), skip_special_tokens=False)


async def chat(api: HttpApi, **fields: Any) -> Any:
    return await api.client.chat.completions.create(model="tiny", **{"messages": USER} | fields)
