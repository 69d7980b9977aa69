"""Compiles grammars on a thread of its own, from the moment that a request enters: docs/adr/0023."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.types.structured import MAX_MASK_ITEMS

if TYPE_CHECKING:
    from llguidance import LLMatcher

TOKENIZER_FILE = "tokenizer.json"
MAX_COMPILED = 64
"""Compiled grammars that are kept."""
# The compiler recurses along chains of rules: some thousand of them overflow 8 MiB. This is enough for the longest
# chain in a form of MAX_FORM_BYTES. Only what is touched takes memory.
_STACK_BYTES = 512 << 20


class GrammarError(Exception):
    """A grammar cannot be compiled here; says why."""


class GrammarCompiler:
    """Owned by the process; used by the runner's thread."""

    def __init__(self, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """The tokenizer is read with the first grammar, or by `prepare_after`.

        Args:
            directory: Directory of the checkpoint, which has a tokenizer.json.
            vocab_size: Columns of the logits.
        """
        self._tokenizer_file = directory / TOKENIZER_FILE
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._text_to_prototype: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        """Grammar -> its matcher before the first token; the latest used is last."""
        self._compile: Callable[[str], LLMatcher] | None = None
        """Compiles one grammar; None until the tokenizer is read. Only the thread uses it."""
        self._lock = threading.Lock()
        """Guards what follows."""
        self._waiting: deque[tuple[str, Future[LLMatcher]]] = deque()
        self._has_thread = False

    def prepare_after(self, delay_s: float) -> None:
        """Read the tokenizer later, so that the first grammar need not wait for it.

        It takes up to a second and holds the interpreter's lock: too long while a worker starts, or with rows running.
        """
        timer = threading.Timer(delay_s, self._wake)
        timer.daemon = True
        timer.start()

    def start(self, grammar: str) -> Future[LLMatcher]:
        """Return the grammar's matcher before the first token, or the promise of it. Users make a copy.

        The future raises `GrammarError` if the grammar cannot be compiled.
        """
        prototype = self._text_to_prototype.pop(grammar, None)
        if prototype is None:
            prototype = Future()
            with self._lock:
                self._waiting.append((grammar, prototype))
            self._wake()
            if len(self._text_to_prototype) >= MAX_COMPILED:
                self._text_to_prototype.popitem(last=False)
        self._text_to_prototype[grammar] = prototype
        return prototype

    def _wake(self) -> None:
        """Start the thread, unless it runs."""
        with self._lock:
            needs_thread, self._has_thread = not self._has_thread, True
        if needs_thread:
            _start_deep_thread(self._run)

    def _run(self) -> None:
        """Compile what waits, and end."""
        if self._compile is None:
            self._compile = self._prepare()
        while True:
            with self._lock:
                if not self._waiting:
                    self._has_thread = False
                    return
                grammar, prototype = self._waiting.popleft()
            try:
                prototype.set_result(self._compile(grammar))
            except BaseException as error:  # a panic of the library is no Exception
                is_known = isinstance(error, GrammarError)
                prototype.set_exception(error if is_known else GrammarError(repr(error)))

    def _prepare(self) -> Callable[[str], LLMatcher]:
        try:
            from llguidance import LLMatcher, LLParserLimits, LLTokenizer

            text = self._tokenizer_file.read_text(encoding="utf-8")
            tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except BaseException as error:
            why = f"{self._tokenizer_file} cannot be used for grammars: {error}"

            def refuse(grammar: str) -> LLMatcher:
                raise GrammarError(why)

            return refuse

        limits = LLParserLimits(step_max_items=MAX_MASK_ITEMS)

        def compile_one(grammar: str) -> LLMatcher:
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            if matcher.is_error():
                raise GrammarError(matcher.get_error())
            return matcher

        return compile_one


def _start_deep_thread(run: Callable[[], None]) -> None:
    """Start a thread with a stack for deep recursion."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        threading.Thread(target=run, name="grammars", daemon=True).start()
    finally:
        threading.stack_size(before)
