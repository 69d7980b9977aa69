"""Prepares requests of `LLM` and `AsyncLLM`: seeds, chat templates, arguments that are not served."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from triptych.client.request import Sampling
from triptych.errors import ConfigError, FeatureDisabled, InvalidRequest
from triptych.types import sampling
from triptych.vllm.sampling_params import SamplingParams

_WHY = {
    "data_parallel_rank": "the frontend chooses the engine",
    "mm_processor_kwargs": "pictures and sounds are not served",
    "stat_loggers": "read get_metrics() or the metrics port",
    "tokenization_kwargs": "give SamplingParams(truncate_prompt_tokens=…), or token ids as the prompt",
    "usage_context": "",
}
_CONTENT_FORMATS = ("auto", "string", "openai")


class Seeds:
    """Draws a seed for each request that names none, so that a program's outputs are the same in each run."""

    def __init__(self, seed: int | None) -> None:
        """
        Args:
            seed: The engine's. None: the server draws them, and they differ.
        """
        self._random = None if seed is None else Random(seed)

    def freeze(self, params: Sampling) -> Sampling:
        """Return parameters as they are now, with a seed. No later change of them counts."""
        if self._random is None:
            return params.frozen() if isinstance(params, SamplingParams) else params
        seed = self._random.getrandbits(64)
        if params is None:
            return {"seed": seed}
        if isinstance(params, sampling.SamplingParams):
            names = sampling.SAMPLING_FIELDS
            values = {name: getattr(params, name) for name in names}
            return sampling.SamplingParams(**{**values, "seed": seed if params.seed is None else params.seed})
        return params if params.get("seed") is not None else {**params, "seed": seed}


def refuse(**given: Any) -> None:
    """Raise FeatureDisabled for arguments that are not served and say something."""
    for name, value in given.items():
        if value:
            raise FeatureDisabled(name, f"{value!r:.80} is not served; {_WHY[name]}")


def read_template(given: str | Path | None) -> str | None:
    """Return the source of a chat template.

    Args:
        given: The source, or a file that has it.

    Raises:
        ConfigError: The file cannot be read.
    """
    if given is None or (isinstance(given, str) and any(mark in given for mark in "{}\n")):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"chat_template {given}: {error.strerror or error}") from None


def to_template_messages(
    conversation: Sequence[Mapping[str, Any]], content_format: str
) -> list[dict[str, Any]]:
    """Return a conversation as chat templates read it: contents as one text, arguments of calls decoded.

    Args:
        content_format: `openai` leaves contents that are lists of parts as they are.
    """
    if content_format not in _CONTENT_FORMATS:
        known = ", ".join(_CONTENT_FORMATS)
        raise InvalidRequest("chat_template_content_format", f"{content_format!r:.40} is none of {known}")
    messages = []
    for message in conversation:
        turn = dict(message)
        content = turn.get("content")
        if content_format != "openai" and isinstance(content, Sequence) and not isinstance(content, str):
            turn["content"] = "\n".join(part["text"] for part in content)
        if turn.get("tool_calls"):
            turn["tool_calls"] = [_decoded(call) for call in turn["tool_calls"]]
        messages.append(turn)
    return messages


def _decoded(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    try:
        function["arguments"] = json.loads(function["arguments"])
    except ValueError as error:
        raise InvalidRequest("messages", f"tool_calls: arguments are no JSON: {error}") from None
    return {**call, "function": function}
