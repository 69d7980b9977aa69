"""Chat templates within limits: where they are rendered, and what becomes of those that loop or take all memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from tests.helpers.byte_tokenizer import byte_tokenizer
from triptych.errors import InvalidRequest
from triptych_services.frontend.requests import chat_renderer
from triptych_services.frontend.requests.chat_renderer import ChatRenderer, TakesLong
from triptych_services.frontend.requests.parse import write_messages, write_variable
from triptych_services.frontend.requests.raw import RawChat
from triptych_services.frontend.requests.text_model import INLINE_SIZE, TextModel

MESSAGES = [{"role": "user", "content": "Hi ü \U0001f600"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}x"
GROWS = (
    "{% set ns = namespace(text='0123456789abcdef' * 1000) %}"
    "{% for a in range(40) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}x"
)


def renderer(template: str | None = None, **options: float) -> ChatRenderer:
    tokenizer = byte_tokenizer() if template is None else byte_tokenizer(chat_template=template)
    return ChatRenderer(tokenizer, **options)


async def elsewhere(call: Callable[[], str]) -> str:
    return await asyncio.to_thread(call)


async def test_child_renders_what_the_loop_does() -> None:
    loop = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = "{{ bos_token }}" + loop + "{{ tools | tojson }}{{ x }}"
    own = renderer(template)
    arguments = {"tools": ({"b": 1.0, "a": None},), "x": MappingProxyType({"k": [True]})}
    here = own.render(MESSAGES, **{**arguments, "x": {"k": [True]}})
    assert "[user]Hi ü" in here
    assert await elsewhere(lambda: own.render(MESSAGES, **arguments)) == here


@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}{{ [tools, documents, x] }}"]
)
async def test_written_parts_are_rendered_as_others(template: str | None) -> None:
    messages = [*MESSAGES, {"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    own, written = renderer(template), write_messages(messages)
    with pytest.raises(TakesLong):
        own.render(written, tools=[TOOL])
    others: dict[str, Any] = {"documents": [{"text": "D"}], "x": {"k": [True, None, "ü"]}}
    written_others = {name: write_variable(value) for name, value in others.items()}
    rendered = await elsewhere(lambda: own.render(written, tools=[TOOL], **written_others))
    assert rendered == own.render(messages, tools=[TOOL], **others)
    assert ("<tool_response>" in rendered) is (template is None)


async def test_short_conversations_start_no_process() -> None:
    known = set(psutil.Process().children())
    text = TextModel(byte_tokenizer(), {}, Path("unused"))
    await text.encode(RawChat(MESSAGES), "messages", max_model_len=4096)
    assert not set(psutil.Process().children()) - known
    long = [{"role": "user", "content": "a" * (INLINE_SIZE + 1)}]
    await text.encode(RawChat(long), "messages", max_model_len=8192)
    assert len(set(psutil.Process().children()) - known) == 1


async def test_template_that_loops_is_given_up_and_refused() -> None:
    own = renderer(LOOPS, limit_s=0.5)
    with pytest.raises(TakesLong):
        own.render(MESSAGES)
    with pytest.raises(InvalidRequest, match=r"messages: .*longer than the limit of 0.5 s of CPU time"):
        await elsewhere(lambda: own.render(MESSAGES))


async def test_slow_template_is_not_tried_on_the_loop_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own = renderer(LOOPS)
    with pytest.raises(TakesLong):
        own.render(MESSAGES)
    monkeypatch.setattr(own._template, "render", lambda *args, **kwargs: pytest.fail("it was tried again"))
    with pytest.raises(TakesLong):
        own.render(MESSAGES)


async def test_given_up_template_is_rendered_by_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_renderer, "INLINE_LIMIT_S", 0.01)
    slow = "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}done"
    text = TextModel(byte_tokenizer(chat_template=slow), {}, Path("unused"))
    ids = await text.encode(RawChat(MESSAGES), "messages", max_model_len=4096)
    assert text.tokenizer.decode(ids.tolist()) == "done"


async def test_template_that_takes_all_memory_is_refused() -> None:
    own = renderer(GROWS, limit_s=20.0)
    with pytest.raises(InvalidRequest, match="too much memory"):
        await elsewhere(lambda: own.render(MESSAGES))


async def test_thread_without_an_alarm_leaves_it_to_the_child() -> None:
    own = renderer()

    def run_loop() -> None:
        async def render() -> str:
            return own.render(MESSAGES)

        with pytest.raises(TakesLong):
            asyncio.run(render())

    thread = threading.Thread(target=run_loop)
    thread.start()
    await asyncio.to_thread(thread.join)


@pytest.mark.parametrize(
    "expression",
    [
        "'x' * 1000000000",
        "1000000000 * [1]",
        "9 ** (9 ** 9)",
        "'%1000000000d' % 1",
        "'{:1000000000}'.format(1)",
        "'x'.center(1000000000)",
        "('x' * 10000).replace('x', 'y' * 10000)",
        "('x' * 10000).join([1] * 10000)",
        "'x' | center(1000000000)",
        "'a\\nb' | indent(1000000000)",
        "[1] | batch(1000000000, 0) | list",
    ],
)
async def test_single_operation_makes_no_huge_value(expression: str) -> None:
    with pytest.raises(InvalidRequest, match=r"above the limit|is refused"):
        renderer("{{ " + expression + " }}").render(MESSAGES)


async def test_usual_arithmetic_and_formats_work() -> None:
    template = (
        "{{ 3 * 'ab' }}{{ 2 ** 10 }}{{ '%05d' % 7 }}{{ '{:>4}'.format('x') }}{{ 'x' | indent(4) }}{{ 7 % 4 }}"
    )
    assert renderer(template).render(MESSAGES) == "ababab102400007   xx3"


async def test_large_numbers_in_conversations_are_no_sizes() -> None:
    template = "{% macro show(x, text) %}{{ x }}{{ text }}{% endmacro %}{{ show(messages[0].n, messages[0].content) }}"
    messages = [{"role": "user", "content": "100 %1234567 {:12345678}", "n": 10**15}]
    assert renderer(template).render(messages) == "100000000000000" + "0100 %1234567 {:12345678}"
