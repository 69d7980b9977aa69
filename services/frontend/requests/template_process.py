"""Renders chat templates in a process of its own, so that one that loops or takes all memory ends nothing else.

`limited_child.py` runs it for `ChatRenderer`. The messages and their answers:

    {"chat_template": text, "other_templates": {name: text},
     "bos_token": text or null, "eos_token", "unk_token", "pad_token"}        {}    first, once
    {"messages": [...], "arguments": the others of `ChatTemplate.render`}     {"text": prompt} or {"error": why}
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from triptych.errors import InvalidRequest
from triptych.text.chat_template import ChatTemplate

# The stack of `limited_child.py` takes 512 MiB of address space, the interpreter some 100.
_MAX_BYTES = 1536 << 20


def begin(message: dict[str, Any]) -> tuple[dict[str, str], Callable[[dict[str, Any]], dict[str, str]]]:
    """Compile the template of the first message, which the frontend has compiled as well."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    template = ChatTemplate(SimpleNamespace(**message))

    def answer(message: dict[str, Any]) -> dict[str, str]:
        try:
            return {"text": template.render(message["messages"], **message["arguments"])}
        except InvalidRequest as error:
            return {"error": error.violations[0].description}

    return {}, answer
