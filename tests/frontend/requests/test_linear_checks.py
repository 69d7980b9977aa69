"""Checks of clients' texts take time in proportion to their length: a tenant pays for no more than it sends."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from triptych.errors import TriptychError
from triptych.types.structured import MAX_FORM_BYTES, StructuredOutputs
from triptych_services.frontend.http import body as reading
from triptych_services.frontend.http.anthropic.schema import MessagesRequest
from triptych_services.frontend.http.body import MAX_FIELDS, Body, read_body
from triptych_services.frontend.http.openai.responses.schema import ResponsesRequest
from triptych_services.frontend.http.openai.schema import ChatCompletionRequest, CompletionRequest
from triptych_services.frontend.requests.grammars import grammar_process
from triptych_services.frontend.requests.grammars.structural_tags import read_structural_tags
from triptych_services.frontend.requests.json_text import read_json, read_json_in_parts
from triptych_services.frontend.requests.plain_tools import with_plain_tools
from triptych_services.frontend.requests.raw import MAX_MESSAGES
from triptych_services.frontend.requests.sampling import check_sampling
from triptych_services.frontend.requests.turns import Turns

PATTERNS = {
    "line breaks": "\n",
    "letters": "a",
    "brackets": "[",
    "parentheses": "(",
    "lines of spaces": " \n",
    "carriage returns": "\r\n",
    "starts": "start\n",
    "starts in one line": "start ",
    "commas": ",",
    "quotes": '"',
    "backslashes": "\\",
}


def grammar(text: str) -> object:
    return grammar_process._has_start_rule(text)


def form(text: str) -> object:
    fields = ({"grammar": text}, {"regex": text}, {"choice": list(text)}, {"json": text})
    return [
        check_sampling({"structured_outputs": StructuredOutputs(**each)}, vocab_size=1, path=str)
        for each in fields
    ]


def tags(text: str) -> object:
    return read_structural_tags(text)


def triggers(text: str) -> object:
    """As many triggers as sections, none of which fits the last one."""
    words = [f"{text[:1]}{number}" for number in range(len(text) // 64)]
    structures = [{"begin": word, "end": "", "schema": {}} for word in words]
    return read_structural_tags(json.dumps({"triggers": words, "structures": structures}))


def stop(text: str) -> object:
    return check_sampling({"stop": [text] * 4, "bad_words": [text]}, vocab_size=1, path=str)


def body(text: str) -> object:
    return read_json_in_parts(json.dumps({"prompt": text, "list": list(text)}))


def json_text(text: str) -> object:
    return read_json(text)


def turns(text: str) -> object:
    """Pieces of one turn, as APIs send them that know items."""
    built = Turns()
    for start in range(0, len(text), 64):
        built.add("assistant", text[start : start + 64], "input")
        built.add_reasoning(text[start : start + 64], "input")
    for start in range(0, len(text), 64):
        built.add("system", text[start : start + 64], "input")
    return built.messages


def system_turns(text: str) -> object:
    built = Turns()
    for start in range(0, len(text), 64):
        built.add("system", text[start : start + 64], "input")
    return built.messages


def plain_tools(text: str) -> object:
    """Answers of tools that become one turn, behind system messages that become one, too."""
    pieces = [text[start : start + 64] for start in range(0, len(text), 64)]
    tool = {"function": {"name": "f"}}
    return [
        with_plain_tools([{"role": role, "content": piece} for piece in pieces], [tool])
        for role in ("tool", "system")
    ]


CHECKS: dict[Callable[[str], object], int] = {
    grammar: MAX_FORM_BYTES,
    form: MAX_FORM_BYTES,
    tags: MAX_FORM_BYTES,
    triggers: MAX_FORM_BYTES,
    stop: 1 << 20,
    body: 1 << 17,
    json_text: 1 << 20,
    turns: 1 << 20,
    system_turns: 1 << 20,
    plain_tools: 64 * MAX_MESSAGES,
}
"""Check -> the longest text that it may get, or 1 MiB where only the size of bodies bounds it."""


_STEEP = 40
"""Eight times the length takes 64 times as long where each part looks at each, and 8 to 26 times where it does not:
more where a text outgrows the caches, and beside other work."""


def cpu_s(check: Callable[[str], object], text: str) -> float:
    """Return the CPU time that a check takes at best, in seconds: what it says of the text does not matter here."""
    times = []
    for _ in range(3):
        started = time.thread_time()
        with contextlib.suppress(ValueError, TriptychError):
            check(text)
        times.append(time.thread_time() - started)
    return min(times)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_time_grows_with_the_length(check: Callable[[str], object], pattern: str) -> None:
    longest = CHECKS[check]
    lengths = [longest // 64, longest // 8, longest]
    texts = [(PATTERNS[pattern] * length)[:length] for length in lengths]
    before_s = cpu_s(check, texts[0])
    for shorter, longer in pairwise(
        texts
    ):  # the shortest first: a quadratic one fails before it takes minutes
        after_s = cpu_s(check, longer)
        for _ in range(5):
            if after_s < max(0.01, _STEEP * before_s):
                break
            before_s, after_s = cpu_s(check, shorter), cpu_s(check, longer)  # beside less other work, maybe
        else:
            pytest.fail(f"8 times the length took {after_s / before_s:.0f} times as long")
        before_s = after_s


@pytest.mark.parametrize(
    "kind",
    [CompletionRequest, ChatCompletionRequest, MessagesRequest, ResponsesRequest],
    ids=lambda k: k.__name__,
)
def test_few_unknown_names_are_compared_with_the_known(
    kind: type[Body], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    find_close = reading.difflib.get_close_matches
    monkeypatch.setattr(
        reading.difflib,
        "get_close_matches",
        lambda name, *rest, **n: compared.append(name) or find_close(name, *rest, **n),
    )
    names = [f"temperatur{number}" for number in range(MAX_FIELDS)]
    data = json.dumps(dict.fromkeys(names, 1)).encode()
    found, _ = read_body(data, kind, lambda body: body.violations, refuses_unknown=True)
    assert compared == names[:3]
    assert [violation.field for violation in found[:4]] == names[:4]
    assert "did you mean temperature?" in found[2].description
    assert found[3].description == "there is no such field"


def nested(depth: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * depth + "1" + closing * depth


@pytest.mark.parametrize("read", [read_json, read_json_in_parts])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"b":1,"a":', "}]")])
def test_deep_values_are_refused(read: Callable[[str], Any], opening: str, closing: str) -> None:
    levels = 2 if opening.startswith("[{") else 1
    assert read(nested(64 // levels, opening, closing))
    for depth in (64 // levels + 1, 500, 100_000):
        with pytest.raises(ValueError, match="nested deeper than the limit 64"):
            read(nested(depth, opening, closing))
