"""Renders chat templates in a process of its own, so that one that loops or takes all memory ends nothing else.

`limited_child.py` runs it for `ChatRenderer`. The messages and their answers:

    {"chat_template": text, "other_templates": {name: text},
     "bos_token": text or null, "eos_token", "unk_token", "pad_token"}        {}    first, once
    {"data": JSON of {"messages": …, "arguments": the others of
     `ChatTemplate.render`}}                                                  {"data": UTF-8} or {"error": why}
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from triptych.errors import InvalidRequest
from triptych.text.chat_template import ChatTemplate
from triptych_services.frontend.requests.plain_tools import render_with_tools

# The stack of `limited_child.py` takes 512 MiB of address space, the interpreter some 100.
_MAX_BYTES = 1536 << 20


def begin(message: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Compile the template of the first message, which the frontend has compiled as well."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    template = ChatTemplate(SimpleNamespace(**message))

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        try:
            text = render_with_tools(template, **json.loads(message["data"]))
        except InvalidRequest as error:
            return {"error": error.violations[0].description}
        return {"data": text.encode("utf-8", "surrogatepass")}

    return {}, answer
