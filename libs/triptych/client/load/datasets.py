"""The requests of a measurement: drawn from a seed, or read from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from triptych.client.prompts import Prompt
from triptych.errors import ConfigError

_MAX_SHOWN = 5  # bad lines that an error names


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send."""

    prompt: Prompt
    max_tokens: int | None
    """New tokens at most; None leaves it to the server."""
    reference: str = ""
    """The answer that a dataset has for it; `max_tokens` may be its length. Empty: none."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens that are drawn evenly from an interval around a mean."""

    mean: int
    spread: float = 0.0
    """The interval is mean * (1 - spread) to mean * (1 + spread)."""

    def draw(self, num: int, generator: np.random.Generator) -> list[int]:
        """Return `num` lengths of at least 1."""
        low, high = (max(1, round(self.mean * (1 + side * self.spread))) for side in (-1, 1))
        lengths: list[int] = generator.integers(low, high, num, endpoint=True).tolist()
        return lengths


def draw_random(
    num: int, inputs: Lengths, outputs: Lengths, vocab_size: int, generator: np.random.Generator
) -> list[LoadRequest]:
    """Return prompts of random token ids, none of which begins as another does."""
    return [
        LoadRequest(generator.integers(0, vocab_size, num_input).tolist(), num_output)
        for num_input, num_output in zip(
            inputs.draw(num, generator), outputs.draw(num, generator), strict=True
        )
    ]


def draw_shared_prefixes(
    num: int,
    prefixes: Sequence[Sequence[int]],
    suffixes: Lengths,
    outputs: Lengths,
    vocab_size: int,
    generator: np.random.Generator,
) -> list[LoadRequest]:
    """Return prompts of random token ids that begin with one of `prefixes` each, in random order."""
    owners = generator.permutation(np.arange(num) % len(prefixes)).tolist()
    own = draw_random(num, suffixes, outputs, vocab_size, generator)
    return [
        LoadRequest([*prefixes[owner], *request.prompt], request.max_tokens)
        for owner, request in zip(owners, own, strict=True)
    ]


def read_prompts(file: Path) -> list[LoadRequest]:
    """Return the requests of a file with one JSON value per line.

    A line is a text, or an object with `prompt` (text or token ids) or `messages`, and perhaps `max_tokens`.

    Raises:
        ConfigError: The file cannot be read, or lines have another form; names them.
    """
    return _read_each(_read_lines(file), _request_of_line, file)


def read_sharegpt(file: Path) -> list[LoadRequest]:
    """Return the first turn of each conversation of a file in ShareGPT's form, with the answer that it had.

    The form is `[{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}]`.
    Conversations of fewer than two turns are left out.

    Raises:
        ConfigError: The file cannot be read, or has another form; says where.
    """
    try:
        entries = json.loads(_read(file))
    except ValueError as error:
        raise ConfigError(f"dataset {file}: is no JSON: {error}") from None
    if not isinstance(entries, list):
        raise ConfigError(f"dataset {file}: expected a list of conversations")
    entries = [
        entry
        for entry in entries
        if not (isinstance(entry, Mapping) and len(entry.get("conversations") or ()) < 2)
    ]
    return _read_each(enumerate(entries), _request_of_conversation, file)


def take(
    requests: Sequence[LoadRequest], num: int, file: Path, generator: np.random.Generator
) -> list[LoadRequest]:
    """Return `num` of a file's requests, in random order and each once.

    Raises:
        ConfigError: There are fewer.
    """
    if len(requests) < num:
        raise ConfigError(
            f"dataset {file}: holds {len(requests)} requests, {num} are needed, warm-up included"
        )
    return [requests[place] for place in generator.permutation(len(requests))[:num].tolist()]


def _request_of_line(value: Any) -> LoadRequest:
    if isinstance(value, str):
        return LoadRequest(value, None)
    prompt = value["messages"] if "messages" in value else value["prompt"]
    if not isinstance(prompt, str):
        kinds = {type(item) for item in prompt} if isinstance(prompt, list) else set()
        if kinds not in ({int}, {dict}):
            raise ValueError("expected text, token ids or messages")
    max_tokens = value.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise ValueError(f"max_tokens: expected a number from 1, not {max_tokens!r:.40}")
    return LoadRequest(prompt, max_tokens)


def _request_of_conversation(entry: Any) -> LoadRequest:
    question, answer = (turn["value"] for turn in entry["conversations"][:2])
    if not isinstance(question, str) or not isinstance(answer, str) or not question:
        raise ValueError("expected texts")
    return LoadRequest(question, None, answer)


def _read_each(
    places: Iterator[tuple[int, Any]] | enumerate[Any], parse: Any, file: Path
) -> list[LoadRequest]:
    requests, problems = [], []
    for place, value in places:
        try:
            if isinstance(value, ValueError):
                raise value
            requests.append(parse(value))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problems.append(f"{place}: {error!r:.100}")
    if problems:
        more = f" and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise ConfigError(f"dataset {file}: bad entries: {'; '.join(problems[:_MAX_SHOWN])}{more}")
    return requests


def _read_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line that is not empty; a value that is no JSON is its error."""
    for number, line in enumerate(_read(file).splitlines(), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                yield number, error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset {file}: {error}") from None
