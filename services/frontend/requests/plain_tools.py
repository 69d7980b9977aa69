"""Tools for models whose chat template has no place for them: everything becomes plain text of the conversation.

The wording and the tags are those of Hermes, which many models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

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


def with_plain_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the conversation with its tools in the system message, and calls and their answers as text.

    Neighbouring answers become one turn of the user, since many templates demand that roles alternate.
    """
    turns: list[dict[str, Any]] = []
    if tools:
        described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        turns.append({"role": "system", "content": _PROMPT.format(tools=described)})
    was_answer = False
    for message in messages:
        content, is_answer = message.get("content") or "", message.get("role") == "tool"
        if is_answer:
            content = f"<tool_response>\n{content}\n</tool_response>"
        if is_answer and was_answer:
            turns[-1]["content"] += f"\n{content}"
        elif message.get("role") == "system" and len(turns) == 1 and tools:
            turns[0]["content"] = f"{content}\n\n{turns[0]['content']}"
        elif is_answer:
            turns.append({"role": "user", "content": content})
        elif calls := message.get("tool_calls"):
            texts = [content] if content else []
            texts += [f"<tool_call>\n{_call(call)}\n</tool_call>" for call in calls]
            turns.append({"role": message["role"], "content": "\n".join(texts)})
        else:
            turns.append(dict(message))
        was_answer = is_answer
    return list(turns)


def _call(call: Mapping[str, Any]) -> str:
    return json.dumps(call["function"], ensure_ascii=False)
