"""Tools for models whose chat template has no place for them: everything becomes plain text of the conversation.

The wording and the tags are those of Hermes, which many models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from triptych.text.chat_template import ChatTemplate

PLAIN_FORMAT = "hermes"
"""Name of the format in which the model is asked to call."""
_PROMPT = """\
You may call one or more functions to assist with the user query. The functions are described within <tools></tools>:
<tools>
{tools}
</tools>
For each function call, return a JSON object with the function's name and its arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


def render_with_tools(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> str:
    """Return the prompt that a template makes, with tools as plain text if it has no place for them.

    Args:
        arguments: As the others of `ChatTemplate.render`, `tools` among them.

    Raises:
        InvalidRequest: As `ChatTemplate.render`.
    """
    if not template.knows_tools:
        messages = with_plain_tools(messages, arguments["tools"] or ())
    return template.render(messages, **arguments)


def with_plain_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the conversation with its tools in the system message, and calls and their answers as text.

    Neighbouring answers become one turn of the user, since many templates demand that roles alternate.
    """
    turns: list[dict[str, Any]] = []
    answers: list[str] = []
    """Neighbouring answers of tools that are not among the turns yet."""
    if tools:
        systems = list(takewhile(lambda message: message.get("role") == "system", messages))
        described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        texts = [*(message.get("content") or "" for message in systems), _PROMPT.format(tools=described)]
        turns.append({"role": "system", "content": "\n\n".join(texts)})
        messages = messages[len(systems) :]
    for message in messages:
        content, is_answer = message.get("content") or "", message.get("role") == "tool"
        if is_answer:
            answers.append(f"<tool_response>\n{content}\n</tool_response>")
            continue
        if answers:
            turns.append({"role": "user", "content": "\n".join(answers)})
            answers = []
        if calls := message.get("tool_calls"):
            texts = [content] if content else []
            texts += [f"<tool_call>\n{_call(call)}\n</tool_call>" for call in calls]
            turns.append({"role": message["role"], "content": "\n".join(texts)})
        else:
            turns.append(dict(message))
    if answers:
        turns.append({"role": "user", "content": "\n".join(answers)})
    return list(turns)


def _call(call: Mapping[str, Any]) -> str:
    return json.dumps(call["function"], ensure_ascii=False)
