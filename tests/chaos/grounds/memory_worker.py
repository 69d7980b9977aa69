"""Workers in fake time: the naive model, whose rows may have penalties or forms, with the loop's clock as a device."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.scheduling import (
    EOS,
    NaiveWorker,
    WorkerRow,
    prefix_fingerprints,
    sample,
)
from tests.helpers.stack import NaiveRunner
from triptych.errors import EngineFailure
from triptych.types.facts import KvGroup
from triptych.types.step import StepPlan, StepResult
from triptych_services.frontend.requests.grammars import grammar_process
from triptych_services.worker.sampling.form_output import FormOutput
from triptych_services.worker.sampling.grammars import Compilation
from triptych_services.worker.service.watchdog import StepClock

STEP_S = 0.02
TEXT_VOCAB_SIZE = byte_backend().get_vocab_size()
"""Tokens that a form may have. Those without a form are of the naive model's vocabulary, which is a part of it."""


class InlineProcess:
    """The process that compiles forms for a frontend, without a process: it answers at once."""

    is_alive = True

    def __init__(self, script: Path) -> None:
        """`script`: Of no use here: it is `grammar_process`."""
        self._answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the answer to a message, however long it takes."""
        sent: dict[str, Any] = json.loads(json.dumps(message, default=dict))
        if self._answer is not None:
            return self._answer(sent)
        answer, self._answer = grammar_process.begin(sent)
        return answer


class RowForms:
    """The matchers of a worker's rows, by slot. Each begins anew when its row enters."""

    def __init__(self) -> None:
        self._slot_to_form: dict[int, FormOutput] = {}
        self._known: set[str] = set()
        """Grammars that are compiled; the first row with one comes too early."""
        self.late_slots: set[int] = set()
        """Slots of rows that came before their grammars were compiled."""

    def apply(self, plan: StepPlan) -> None:
        """Take in which rows enter and leave."""
        for slot in plan.removed_slots.tolist():
            self._slot_to_form.pop(slot, None)
            self.late_slots.discard(slot)
        for new in plan.new_rows:
            if new.sampling.structured_outputs is None:
                continue
            grammar = new.sampling.structured_outputs.grammar
            assert grammar is not None, "the frontend has compiled it"
            if plan.may_defer_rows and grammar not in self._known:
                self.late_slots.add(new.slot)
            form = FormOutput(_compile(grammar), (EOS, *new.sampling.stop_token_ids), can_keep_first=False)
            form.start(is_missing=False, may_defer=False)
            self._slot_to_form[new.slot] = form
        self._known |= {
            str(new.sampling.structured_outputs.grammar)
            for new in plan.new_rows
            if new.sampling.structured_outputs is not None
        }

    def choose(self, row: WorkerRow, drawn: int) -> int:
        """Return one of the tokens that a row's form allows next; `drawn`, any number, decides which."""
        form = self._slot_to_form[row.new.slot]
        form.advance(np.array(row.tokens[row.new.num_prompt_tokens :], np.int64))
        assert form.error is None, form.error
        words = np.zeros(-(-TEXT_VOCAB_SIZE // 32), np.uint32)
        form.fill(words)
        form.finish_mask(words)
        assert form.error is None, form.error
        flags = np.unpackbits(words.view(np.uint8), bitorder="little", count=TEXT_VOCAB_SIZE)
        allowed = np.flatnonzero(flags)
        return int(allowed[drawn % allowed.size])


@functools.cache
def _compile(grammar: str) -> Compilation:
    compilation = Compilation()
    compilation.set_result(LLMatcher(_tokenizer(), grammar, log_level=0))
    return compilation


@functools.cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer(byte_backend().to_str(), n_vocab=TEXT_VOCAB_SIZE, eos_token=[EOS])


class KeyedWorker(NaiveWorker):
    """The naive worker, where rows with penalties read their prompts' lengths, and rows with forms keep to them."""

    def __init__(self, key: int, groups: Sequence[KvGroup]) -> None:
        """
        Args:
            key: Its model: workers of other keys give other tokens.
            groups: As of `NaiveWorker`.
        """
        super().__init__(groups=groups)
        self._key = key
        self._forms = RowForms()

    def execute(self, plan: StepPlan, *slots: Sequence[int], **named_slots: Sequence[int]) -> StepResult:
        self._forms.apply(plan)
        return super().execute(
            plan, *slots, **{"deferred_slots": tuple(self._forms.late_slots), **named_slots}
        )

    def _draw(self, row: WorkerRow, limit: int, *, is_misled: bool) -> list[int]:
        has_form = row.new.sampling.structured_outputs is not None and not is_misled
        if not has_form and not row.new.sampling.presence_penalty and not self._key:
            return super()._draw(row, limit, is_misled=is_misled)
        fingerprint = prefix_fingerprints(row.tokens)[-1] + self._key
        if row.new.sampling.presence_penalty:
            fingerprint += row.new.num_prompt_tokens
        token_id = sample(row.new.seed, len(row.tokens), fingerprint)
        if has_form:
            token_id = self._forms.choose(row, token_id)
        row.tokens.append(token_id)
        return [token_id]


class InlineRunner:
    """The worker's runner thread without a thread: a step takes its time on the loop."""

    def __init__(
        self,
        runner: NaiveRunner,
        on_step: Callable[[int, int], None],
        key: int = 0,
        *,
        on_result: Callable[[], None] = lambda: None,
        step_s: float = STEP_S,
    ) -> None:
        """
        Args:
            on_step: Called with the session and the id of each step that is computed.
            key: As of `KeyedWorker`.
            on_result: Called when its result is there.
            step_s: Seconds that a step takes.
        """
        self._key = key
        self.steps = StepClock()
        self._on_result = on_result
        self._step_s = step_s
        self._runner = runner
        self._on_step = on_step
        self._current = 0
        self._deliver: Callable[[StepResult | Exception], None] | None = None
        self._plans: deque[tuple[int, StepPlan]] = deque()
        self._news = asyncio.Event()

    def open_session(
        self, deliver: Callable[[StepResult | Exception], None], on_open: Callable[[], None]
    ) -> int:
        self._current += 1
        self._runner.worker = KeyedWorker(self._key, self._runner.facts.kv.groups)
        self._deliver = deliver
        asyncio.get_running_loop().call_soon(on_open)
        return self._current

    def close_session(self, session: int) -> None:
        if session == self._current:
            self._current += 1

    def submit(self, session: int, plan: StepPlan, message: object) -> None:
        self._plans.append((session, plan))
        self._news.set()

    async def run(self) -> None:
        while True:
            self._news.clear()
            while self._plans:
                await asyncio.sleep(self._step_s)
                session, plan = self._plans.popleft()
                if session == self._current and self._deliver is not None:
                    self._compute(session, plan)
            await self._news.wait()

    def _compute(self, session: int, plan: StepPlan) -> None:
        assert self._deliver is not None
        self._on_step(session, plan.step_id)
        try:
            outcome: StepResult | Exception = self._runner.launch(plan).wait()
        except AssertionError:
            raise
        except Exception as error:
            outcome, self._deliver, deliver = EngineFailure(repr(error)), None, self._deliver
            deliver(outcome)
            return
        self._deliver(outcome)
        self._on_result()
