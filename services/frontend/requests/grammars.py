"""Compiles the forms of structured outputs once, to refuse bad ones before they reach an engine: docs/adr/0023."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from services.frontend.fair_threads import FairThreads
from services.frontend.requests.structural_tags import read_structural_tags
from triptych.errors import FeatureDisabled, InvalidRequest
from triptych.text.tokenizer import Tokenizer
from triptych.types.facts import ModelFacts
from triptych.types.structured import MAX_MASK_ITEMS, StructuredOutputs, compiled

COMPILE_LIMIT_S = 5.0
"""The longest that a form may take to compile."""
MAX_KNOWN = 64
"""Forms that are remembered as good."""
_START_LIMIT_S = 60.0  # to import the library and to build the tokenizer, on a machine that is busy
_SCRIPT = Path(__file__).with_name("grammar_process.py")
_ANY_OBJECT = '{"type": "object"}'


class GrammarChecker:
    """Owned by the `TextModel`. Its process starts with the first form, and again after one that it did not survive."""

    def __init__(self, tokenizer: Tokenizer, *, limit_s: float = COMPILE_LIMIT_S) -> None:
        self._tokenizer = tokenizer
        self._limit_s = limit_s
        # One at a time: they go through one process, and a second one would take a core from the models.
        self._threads = FairThreads(1, inline_size=-1, what="structured outputs to be compiled")
        self._known: OrderedDict[tuple[StructuredOutputs, ModelFacts], StructuredOutputs] = OrderedDict()
        """Form and model -> the compiled form; the latest used is last."""
        self._process: _Process | None = None
        """Only the thread uses it."""

    async def compile(self, form: StructuredOutputs, model: ModelFacts, path: str) -> StructuredOutputs:
        """Return a form, whose fields have been checked, as engines take it.

        Args:
            path: Path of the form in the client's words.

        Raises:
            InvalidRequest: It is malformed, cannot be enforced, or takes too long to compile; says why.
            FeatureDisabled: The model's tokenizer does not serve for it.
            QueueFull: Too many forms wait to be compiled.
        """
        key = form, model
        result = self._known.pop(key, None)
        if result is None:
            size = sum(map(len, form.texts))
            result = await self._threads.run(size, self._compile, form, model, path)
        self._known[key] = result
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return result

    def _compile(self, form: StructuredOutputs, model: ModelFacts, path: str) -> StructuredOutputs:
        try:
            message = _to_message(form, self._tokenizer)
        except ValueError as error:
            raise InvalidRequest(path, str(error)) from None
        had_process = self._process is not None and self._process.serves(model)
        if not had_process:
            self._process = None  # ends the one of another model
            self._process = _Process(self._tokenizer, model, path)
        assert self._process is not None
        try:
            answer = self._process.ask(message, self._limit_s)
        except _ProcessEnded as error:
            self._process = None
            if had_process and not error.was_late:  # it may have ended before it saw this form
                return self._compile(form, model, path)
            why = f"takes longer to compile than the limit of {self._limit_s:g} s; make it smaller"
            raise InvalidRequest(path, why if error.was_late else "is too complex to compile") from None
        if "grammar" not in answer:
            raise InvalidRequest(path, f"cannot be enforced: {answer['error']}")
        return compiled(answer["grammar"])


class _ProcessEnded(Exception):
    def __init__(self, was_late: bool) -> None:
        self.was_late = was_late


class _Process:
    """One run of `grammar_process.py`. It ends with this object, or with the frontend."""

    def __init__(self, tokenizer: Tokenizer, model: ModelFacts, path: str) -> None:
        """
        Args:
            path: Path of the form for which it starts.

        Raises:
            FeatureDisabled: It cannot use the tokenizer.
            RuntimeError: It does not start: a bug, or an installation without llguidance.
        """
        self._model = model
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        message = {
            "tokenizer": tokenizer.to_json(),
            "vocab_size": model.vocab_size,
            "eos_token_ids": model.eos_token_ids,
            "max_mask_items": MAX_MASK_ITEMS,
        }
        try:
            answer = self.ask(message, _START_LIMIT_S)
        except _ProcessEnded:
            raise RuntimeError(f"{_SCRIPT} does not start; its log says why") from None
        if answer:
            raise FeatureDisabled(
                path, f"the tokenizer of this model does not serve for it: {answer['error']}"
            )

    def __del__(self) -> None:
        process = self._process
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "asked for"
            with contextlib.suppress(OSError):  # what it did not read
                pipe.close()
        process.wait()

    def serves(self, model: ModelFacts) -> bool:
        """Return whether the process is alive and was started for this model."""
        return self._model == model and self._process.poll() is None

    def ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the answer to a message. Raises _ProcessEnded after the limit, or if the process has crashed."""
        process = self._process
        assert process.stdin is not None, "asked for"
        assert process.stdout is not None, "asked for"
        is_late = threading.Event()

        def kill() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(limit_s, kill)
        timer.start()
        line = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        timer.cancel()
        if not line:
            raise _ProcessEnded(is_late.is_set())
        answer: dict[str, Any] = json.loads(line)
        return answer


def _to_message(form: StructuredOutputs, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a form in the words of `grammar_process.py`.

    Raises:
        ValueError: Its structural tag is not understood; says why.
    """
    if form.structural_tag is not None:
        tags = read_structural_tags(str(form.structural_tag))
        are_special = all(tokenizer.token_id(tag["trigger"]) in tokenizer.special_ids for tag in tags)
        return {"tags": tags, "are_special": are_special}
    if form.json is not None or form.json_object:
        whitespace: dict[str, Any] = {"whitespace_flexible": form.any_whitespace}
        if form.whitespace_pattern is not None:
            whitespace["whitespace_pattern"] = form.whitespace_pattern
        return {"json": _ANY_OBJECT if form.json is None else form.json, "whitespace": whitespace}
    if form.grammar is not None:
        return {form.syntax.value: form.grammar}
    return {"regex": form.regex} if form.regex is not None else {"choice": form.choice}
