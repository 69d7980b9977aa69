"""Compiles grammars on threads of their own, from the moment that a request enters: docs/adr/0023."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.types.structured import MAX_MASK_ITEMS

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

TOKENIZER_FILE = "tokenizer.json"
MAX_COMPILED = 64
"""Compiled grammars that are kept."""
MAX_WAITING = 1024
"""Grammars that are kept while they wait to be compiled."""
_SHORT_CHARS = 8192  # they compile in milliseconds, save those that are made to be slow
_PLAIN = r'[^"\\\x00-\x1F\x7F]'  # what needs no escape in JSON
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_PLAIN}{{1,{longest}}}" for longest in (7, 10, 15, 20, 30)),
    f"{_PLAIN}+",
]
"""Classes of tokens that a mask takes in at once where a form allows all of them. llguidance has 10 and 30 alone; with
less than 30 characters left of a string, most tokens would be looked at one by one, which takes 0.1 to 0.5 ms."""
# The compiler recurses along chains of rules: some thousand of them overflow 8 MiB. This is enough for the longest
# chain in a form of MAX_FORM_BYTES. Only what is touched takes memory.
_STACK_BYTES = 512 << 20


class GrammarError(Exception):
    """A grammar cannot be compiled here; says why."""


class Compilation(Future["LLMatcher"]):
    """A grammar's matcher before the first token, or the promise of it. Users make a copy.

    It raises `GrammarError` if the grammar cannot be compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started_at = time.monotonic()
        self.mask_s: float | None = None
        """CPU time that the next mask is expected to take, in seconds; None before the first. Outputs write it."""


class GrammarCompiler:
    """Owned by the process; used by the runner's thread.

    Short grammars have a thread of their own, since a long one may take seconds.
    """

    def __init__(self, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """The tokenizer is read with the first grammar, or by `prepare_after`.

        Args:
            directory: Directory of the checkpoint, which has a tokenizer.json.
            vocab_size: Columns of the logits.
        """
        self._tokenizer_file = directory / TOKENIZER_FILE
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._text_to_compilation: OrderedDict[str, Compilation] = OrderedDict()
        """Grammars that are compiled or wait for it; the latest used is last."""
        self.tokenizer: LLTokenizer | None = None
        """The model's; None until it is read, and where it cannot be."""
        self._compile: Callable[[str], LLMatcher] | None = None
        """Compiles one grammar; None until the tokenizer is read."""
        self._preparing = threading.Lock()
        """Held while the tokenizer is read."""
        self._short, self._long = _Lane(self._compile_one), _Lane(self._compile_one)

    def prepare_after(self, delay_s: float) -> None:
        """Read the tokenizer later, so that the first grammar need not wait for it.

        It takes up to a second and holds the interpreter's lock: too long while a worker starts, or with rows running.
        """
        timer = threading.Timer(delay_s, self._prepare)
        timer.daemon = True
        timer.start()

    def start(self, grammar: str) -> Compilation:
        """Return the compilation of a grammar, which begins now if it is not known."""
        compilation = self._text_to_compilation.pop(grammar, None)
        if compilation is None:
            compilation = Compilation()
            self._make_room()
            lane = self._short if len(grammar) <= _SHORT_CHARS else self._long
            lane.add(grammar, compilation)
        self._text_to_compilation[grammar] = compilation
        return compilation

    def _make_room(self) -> None:
        """Forget the compiled grammar that was not used for longest, and one that waits only if too many do."""
        known = self._text_to_compilation
        if len(known) < MAX_COMPILED:
            return
        oldest = next((text for text, each in known.items() if each.done()), None)
        if oldest is None and len(known) >= MAX_WAITING:
            oldest = next(iter(known))
        if oldest is not None:
            known.pop(oldest).cancel()

    def _compile_one(self, grammar: str) -> LLMatcher:
        return self._prepare()(grammar)

    def _prepare(self) -> Callable[[str], LLMatcher]:
        """Read the tokenizer, once, and return what compiles a grammar."""
        with self._preparing:
            if self._compile is None:
                self._compile = self._create_compile()
            return self._compile

    def _create_compile(self) -> Callable[[str], LLMatcher]:
        try:
            from llguidance import LLMatcher, LLParserLimits, LLTokenizer

            text = self._tokenizer_file.read_text(encoding="utf-8")
            tokenizer = LLTokenizer(
                text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids, slices=_SLICES
            )
        except BaseException as error:
            why = f"{self._tokenizer_file} cannot be used for grammars: {error}"

            def refuse(grammar: str) -> LLMatcher:
                raise GrammarError(why)

            return refuse

        self.tokenizer = tokenizer
        limits = LLParserLimits(step_max_items=MAX_MASK_ITEMS)

        def compile_one(grammar: str) -> LLMatcher:
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            if matcher.is_error():
                raise GrammarError(matcher.get_error())
            return matcher

        return compile_one


class _Lane:
    """Grammars that wait, and a thread that compiles them one by one while there are some."""

    def __init__(self, compile_one: Callable[[str], LLMatcher]) -> None:
        self._compile_one = compile_one
        self._lock = threading.Lock()
        """Guards what follows."""
        self._waiting: deque[tuple[str, Compilation]] = deque()
        self._has_thread = False

    def add(self, grammar: str, compilation: Compilation) -> None:
        with self._lock:
            self._waiting.append((grammar, compilation))
            needs_thread, self._has_thread = not self._has_thread, True
        if needs_thread:
            _start_deep_thread(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._has_thread = False
                    return
                grammar, compilation = self._waiting.popleft()
            if not compilation.set_running_or_notify_cancel():
                continue
            try:
                compilation.set_result(self._compile_one(grammar))
            except BaseException as error:  # a panic of the library is no Exception
                is_known = isinstance(error, GrammarError)
                compilation.set_exception(error if is_known else GrammarError(repr(error)))


def _start_deep_thread(run: Callable[[], None]) -> None:
    """Start a thread with a stack for deep recursion."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        threading.Thread(target=run, name="grammars", daemon=True).start()
    finally:
        threading.stack_size(before)
