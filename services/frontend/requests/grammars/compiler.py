"""Compiles the forms of structured outputs once, to refuse bad ones before they reach an engine: docs/adr/0023."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

from triptych.errors import FeatureDisabled, InvalidRequest
from triptych.text.tokenizer import Tokenizer
from triptych.types.facts import ModelFacts
from triptych.types.structured import MAX_TRIED_ITEMS, MAX_TRIED_MASK_S, StructuredOutputs, compiled
from triptych_services.frontend.offload.fair_threads import FairThreads
from triptych_services.frontend.offload.limited_process import LimitedProcess, ProcessEnded
from triptych_services.frontend.requests.grammars.answer_forms import AnswerForm
from triptych_services.frontend.requests.grammars.answer_grammars import MARKS
from triptych_services.frontend.requests.grammars.structural_tags import read_structural_tags
from triptych_services.frontend.requests.tools import tool_path

COMPILE_LIMIT_S = 5.0
"""CPU time that a form may take to compile."""
MAX_KNOWN = 64
"""Forms that are remembered as good."""
MAX_REFUSED = 512
"""Forms that are remembered as bad, by their digests."""
MAX_WAITING_FORMS = 64
"""Forms of one tenant that wait."""
_NUM_PROCESSES = 2
_START_LIMIT_S = 15.0  # to import the library and to build the tokenizer takes about 1
_SCRIPT = Path(__file__).with_name("grammar_process.py")
_ANY_OBJECT = '{"type": "object"}'


class CompiledForm(NamedTuple):
    """A form as engines take it."""

    form: StructuredOutputs
    not_enforced: tuple[str, ...]
    """Paths of what the client's schemas ask for and the form does not hold the answer to."""


class _Compiled(NamedTuple):
    form: StructuredOutputs
    not_enforced: tuple[tuple[int, str], ...]
    """Part, and the place in its schema."""


class _RefusedError(Exception):
    def __init__(self, part: int, why: str) -> None:
        self.part, self.why = part, why


_FORM_PART = -1
"""The part of an `AnswerForm` that is its form; the others are the numbers of its tools."""


class GrammarChecker:
    """Owned by the `TextModel`. Its processes start with the first forms, and again where one ended one."""

    def __init__(self, tokenizer: Tokenizer, *, limit_s: float = COMPILE_LIMIT_S) -> None:
        self._tokenizer = tokenizer
        self._limit_s = limit_s
        # Each thread has a process. One payer has one of them, and the other starts when two have forms at once.
        self._threads = FairThreads(
            _NUM_PROCESSES,
            inline_size=-1,
            what="structured outputs to be compiled",
            max_waiting=MAX_WAITING_FORMS,
        )
        self._lock = threading.Lock()
        """Guards what follows, which threads use."""
        self._idle: list[tuple[ModelFacts, LimitedProcess]] = []
        self._good: OrderedDict[bytes, _Compiled] = OrderedDict()
        """Digest of a form and a model -> the compiled form; the latest used is last, as in the next."""
        self._refused: OrderedDict[bytes, _RefusedError] = OrderedDict()
        """Digest of a form and a model -> why it was refused."""

    async def compile(
        self, form: StructuredOutputs | AnswerForm, model: ModelFacts, path_of: Callable[[str], str]
    ) -> CompiledForm:
        """Return a form, whose fields have been checked, as engines take it.

        Args:
            path_of: Gives the paths of "structured_outputs", and of those that `tool_path` asks for, in the client's
                words.

        Raises:
            InvalidRequest: It is malformed, cannot be enforced, or takes too long to compile; says why.
            FeatureDisabled: The model's tokenizer does not serve for it.
            QueueFull: Too many forms wait to be compiled.
        """
        key = hashlib.sha256(repr((form, model)).encode(errors="surrogatepass")).digest()
        result = self._find(key, path_of)
        if result is None:
            size = sum(map(len, form.texts))
            result = await self._threads.run(size, self._compile, form, model, path_of, key)
        lost = (f"{_part_path(part, path_of)}.{place}" for part, place in result.not_enforced)
        return CompiledForm(result.form, tuple(lost))

    def _find(self, key: bytes, path_of: Callable[[str], str]) -> _Compiled | None:
        """Return a form that was compiled before, or None. Raises InvalidRequest if it was refused before."""
        with self._lock:
            if (refusal := self._refused.get(key)) is not None:
                self._refused.move_to_end(key)
                raise InvalidRequest(_part_path(refusal.part, path_of), refusal.why)
            if (result := self._good.get(key)) is not None:
                self._good.move_to_end(key)
            return result

    def _compile(
        self,
        form: StructuredOutputs | AnswerForm,
        model: ModelFacts,
        path_of: Callable[[str], str],
        key: bytes,
    ) -> _Compiled:
        """Compile a form on this thread, unless another call has done so meanwhile."""
        if (found := self._find(key, path_of)) is not None:
            return found
        try:
            result = self._ask(form, model, path_of)
        except _RefusedError as error:
            with self._lock:
                self._refused[key] = error
                if len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise InvalidRequest(_part_path(error.part, path_of), error.why) from None
        with self._lock:
            self._good[key] = result
            if len(self._good) > MAX_KNOWN:
                self._good.popitem(last=False)
        return result

    def _ask(
        self, form: StructuredOutputs | AnswerForm, model: ModelFacts, path_of: Callable[[str], str]
    ) -> _Compiled:
        """Return the grammar of a form.

        Raises:
            _RefusedError: It is refused; says why.
            FeatureDisabled: The model's tokenizer does not serve for it.
        """
        whole = _whole_part(form)
        try:
            message = _to_message(form, self._tokenizer)
        except ValueError as error:
            raise _RefusedError(whole, str(error)) from None
        process, is_new = self._take_process(model, _part_path(whole, path_of))
        try:
            answer = process.ask(message, self._limit_s)
        except ProcessEnded as error:
            del process
            if not is_new and not error.was_late:  # it may have ended before it saw this form
                return self._ask(form, model, path_of)
            why = (
                f"takes longer to compile than the limit of {self._limit_s:g} s of CPU time; make it smaller"
            )
            raise _RefusedError(whole, why if error.was_late else "is too complex to compile") from None
        with self._lock:
            self._idle.append((model, process))
        if "grammar" not in answer:
            raise _RefusedError(answer.get("part", whole), f"cannot be enforced: {answer['error']}")
        return _Compiled(
            compiled(answer["grammar"]), tuple((part, place) for part, place in answer["not_enforced"])
        )

    def _take_process(self, model: ModelFacts, path: str) -> tuple[LimitedProcess, bool]:
        """Return a process for this model that nobody uses, and whether it is new. Those of other models end."""
        with self._lock:
            idle = [process for facts, process in self._idle if facts == model and process.is_alive]
            self._idle = [(model, process) for process in idle[:-1]]
        if idle:
            return idle[-1], False
        return _start_process(self._tokenizer, model, path), True


def _start_process(tokenizer: Tokenizer, model: ModelFacts, path: str) -> LimitedProcess:
    """Start a process that compiles forms.

    Args:
        path: Path of the form for which it starts.

    Raises:
        FeatureDisabled: It cannot use the tokenizer.
        RuntimeError: It does not start: a bug, or an installation without llguidance.
    """
    process = LimitedProcess(_SCRIPT)
    message = {
        "tokenizer": tokenizer.to_json(),
        "vocab_size": model.vocab_size,
        "eos_token_ids": model.eos_token_ids,
        "max_mask_items": MAX_TRIED_ITEMS,
        "max_mask_s": MAX_TRIED_MASK_S,
    }
    try:
        answer = process.ask(message, _START_LIMIT_S)
    except ProcessEnded:
        raise RuntimeError(f"{_SCRIPT} does not start; its log says why") from None
    if answer:
        raise FeatureDisabled(path, f"the tokenizer of this model does not serve for it: {answer['error']}")
    return process


def _whole_part(form: StructuredOutputs | AnswerForm) -> int:
    """Return the part that stands for all of a form."""
    if isinstance(form, StructuredOutputs) or form.form is not None:
        return _FORM_PART
    return form.tools[0].number


def _part_path(part: int, path_of: Callable[[str], str]) -> str:
    """Return the path of a part of a form in the client's words."""
    return path_of("structured_outputs") if part == _FORM_PART else tool_path(part, "parameters", path_of)


def _to_message(form: StructuredOutputs | AnswerForm, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a form in the words of `grammar_process.py`.

    Raises:
        ValueError: Its structural tag is not understood; says why.
    """
    if isinstance(form, AnswerForm):
        marks = (*MARKS, *(form.reasoning or ()))
        token_ids = {mark: tokenizer.token_id(mark) for mark in marks}
        return {
            "answer": {
                "form": None if form.form is None else _to_message(form.form, tokenizer),
                "tools": [astuple(tool) for tool in form.tools],
                "format": form.format,
                "has_text": form.has_text,
                "has_one": form.has_one,
                "reasoning": form.reasoning,
                "is_reasoning": form.is_reasoning,
                "tokens": {mark: token_id for mark, token_id in token_ids.items() if token_id is not None},
            }
        }
    if form.structural_tag is not None:
        tags = read_structural_tags(str(form.structural_tag))
        are_special = all(tokenizer.token_id(tag["trigger"]) in tokenizer.special_ids for tag in tags)
        return {"tags": tags, "are_special": are_special}
    if form.json is not None or form.json_object:
        whitespace: dict[str, Any] = {"whitespace_flexible": form.any_whitespace}
        if form.whitespace_pattern is not None:
            whitespace["whitespace_pattern"] = form.whitespace_pattern
        schema = _ANY_OBJECT if form.json is None else form.json
        return {"json": schema, "whitespace": whitespace, "is_strict": form.strict}
    if form.grammar is not None:
        return {form.syntax.value: form.grammar}
    return {"regex": form.regex} if form.regex is not None else {"choice": form.choice}
