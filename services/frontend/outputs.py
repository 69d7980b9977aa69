"""A request's outputs: tokens become text as they arrive; what the client has not taken waits, merged."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.frontend.answer_text import AnswerSplitter, visible_tokens
from services.frontend.logprobs import BatchLogprobs, PromptReport
from services.frontend.requests.tools import AnswerSplit
from triptych.errors import EngineUnavailable, GenerationLost
from triptych.text.detokenizer import IncrementalDetokenizer
from triptych.text.stop import StopChecker
from triptych.text.tokenizer import Tokenizer
from triptych.types.events import DeltaEvent, PromptLogprobsEvent
from triptych.types.outputs import FinishedRequest, FinishReason, StageTimings, TokenLogprobs
from triptych.types.sampling import OutputKind, SamplingParams
from triptych.types.step import U32, PromptLogprobs

# After a stop string the engine is asked to end the request. It answers within a turn of its loop, with the counts
# that only it knows. The text is complete by then, so an engine that does not answer delays the end of the stream
# by no more than this; the usage then lacks the cached tokens, and the timings are 0.
ACCOUNT_WAIT_S = 0.25
_CHOICES_NAMED = 8  # in an error's message


class RequestOutputs:
    """All choices of one request. Filled by the engine's batches, emptied by the one client that waits.

    A client that lags costs nothing but the memory of its own output: each choice holds one pending
    delta, into which everything new is merged.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.choices: list[Choice] = []
        self._num_admitted = 0
        self._num_open = 0
        self._is_aborted = False
        self._error: Exception | None = None
        self._report: PromptReport | None = None
        self._ready: deque[Choice] = deque()  # choices with something to take, in order of arrival
        self._news = asyncio.Event()

    def add_choice(
        self,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] | U32,
        echo: str,
        *,
        index: int | None = None,
        min_interval_tokens: int = 0,
        split: AnswerSplit | None = None,
    ) -> Choice:
        """Add a choice, to be submitted now, by default with the next index.

        Args:
            echo: Stands at the head of its text.
            min_interval_tokens: New tokens to gather before they are sent.
            split: How its text is split into parts; None: it stays one text.
        """
        index = len(self.choices) if index is None else index
        report = None if self.choices else self._report
        choice = Choice(
            self, index, sampling, tokenizer, prompt_token_ids, echo, report, min_interval_tokens, split
        )
        self.choices.append(choice)
        self._num_open += 1
        return choice

    def start_over(self) -> None:
        """Forget all choices after an engine has refused them, so that another can be asked."""
        self.close()
        self.choices.clear()
        self._ready.clear()
        self._num_admitted = self._num_open = 0
        self._error = None

    async def wait_admitted(self) -> None:
        """Until the engine has every choice; raises what has ended the request instead."""
        while self._num_admitted < len(self.choices):
            if self._error is not None:
                raise self._error
            await self._wait()
        if self._is_aborted:
            self.abort()

    def abort(self) -> None:
        """End all choices with what they have, at someone's request; those to come will end at once."""
        self._is_aborted = True
        for choice in self.choices:
            choice.end_by_abort()

    def expect_prompt(self, report: PromptReport) -> None:
        """Report the prompt's log-probabilities before any output; called before the first choice is added."""
        self._report = report

    async def next_event(self) -> PromptLogprobsEvent | DeltaEvent | None:
        """Return the next unsent part of the prompt, then of a choice, or None once everything has been taken.

        Raises:
            what has ended the request, after everything that came before it.
        """
        while True:
            report = self._report
            if report is not None and (part := report.take()) is not None:
                return part
            if self._ready and (report is None or report.is_complete):
                return self._ready.popleft().take()
            if self._error is not None:
                raise self._error
            if self._num_open == 0:
                return None
            await self._wait()

    def fail(self, error: Exception) -> None:
        """End the request; the first error counts, and none after the last choice is complete."""
        if self._error is None and any(choice.finish_reason is None for choice in self.choices):
            self._error = error
            self.close()
            self._news.set()

    def fail_by_loss(self, why: str) -> None:
        """End the request because its engine is gone. Called for each choice; only the first call matters."""
        if self._error is not None:
            return
        is_admitted = self._num_admitted == len(self.choices)  # before, the client has seen nothing
        if not is_admitted or not self.num_tokens:
            self.fail(EngineUnavailable(f"{why} before any output of request {self.request_id}; try again"))
            return
        shown = self.choices[:_CHOICES_NAMED]
        counts = ", ".join(f"{choice.num_tokens} of choice {choice.index}" for choice in shown)
        if len(self.choices) > len(shown):
            counts += f", … ({len(self.choices)} choices)"
        self.fail(
            GenerationLost(
                f"{why} after these output tokens of request {self.request_id}: {counts}; to go on from there, "
                "send prompt and output together as a new prompt"
            )
        )

    def close(self) -> None:
        """Abort upstream the choices that still run. Safe at any time, and more than once."""
        for choice in self.choices:
            choice.abort_upstream()

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Return the cached prompt tokens: the minimum over choices, since later ones find the first's blocks."""
        return min((c.num_cached_tokens for c in self.choices if c.num_cached_tokens is not None), default=0)

    @property
    def timings(self) -> StageTimings:
        """Return the timings of the slowest choice."""
        return max(
            (choice.timings for choice in self.choices),
            key=lambda t: t.queued_ns + t.prefill_ns + t.decode_ns,
            default=StageTimings(),
        )

    @property
    def first_token_ns(self) -> int:
        """Time from the engine's acceptance to the first token of any choice; 0 if the engine has not reported it."""
        times = (choice.timings.queued_ns + choice.timings.prefill_ns for choice in self.choices)
        return min((ns for ns in times if ns), default=0)

    @property
    def finish_words(self) -> str:
        """How the choices ended, for logs and metrics: `stop`, or `length+stop`."""
        return "+".join(sorted({c.finish_reason.word for c in self.choices if c.finish_reason is not None}))

    def note_admitted(self) -> None:
        self._num_admitted += 1
        self._news.set()

    def note_prompt(self) -> None:
        self._news.set()

    def note_ready(self, choice: Choice) -> None:
        self._ready.append(choice)
        self._news.set()

    def note_settled(self) -> None:
        self._num_open -= 1
        self._news.set()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


class Choice:
    """One choice's output; the sink of one submission (`engine_session.OutputSink`)."""

    def __init__(
        self,
        outputs: RequestOutputs,
        index: int,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] | U32,
        echo: str,
        report: PromptReport | None = None,
        min_interval_tokens: int = 0,
        split: AnswerSplit | None = None,
    ) -> None:
        """
        Args:
            report: Of the prompt's log-probabilities, where this choice's submission asks for them.
        """
        self.index = index
        self.num_tokens = 0
        """Output tokens so far; up to the one that completed a stop string."""
        self.num_cached_tokens: int | None = None
        self.timings = StageTimings()
        self.finish_reason: FinishReason | None = None
        self.stop_upstream: Callable[[], None] = lambda: None
        """End it at the engine, which then reports its end. Set at submission, like the next."""
        self.abort_upstream: Callable[[], None] = lambda: None
        """End it at the engine, unless it has ended there, and hear no more of it."""
        self._outputs = outputs
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._detokenizer = (
            IncrementalDetokenizer(
                tokenizer,
                prompt_token_ids=prompt_token_ids,
                skip_special_tokens=sampling.skip_special_tokens,
            )
            if sampling.detokenize
            else None
        )
        self._stop_checker = StopChecker(
            sampling.stop, include_stop_str_in_output=sampling.include_stop_str_in_output
        )
        self._stop_reason: int | str | None = None
        self._report = report
        """Set to None once the prompt has been reported."""
        self._is_admitted = False
        self.has_pending = False
        """Whether `next_event` has an event of this choice."""
        self._is_settled = False  # the engine has accounted for it, or will not
        self._min_new_tokens: float = min_interval_tokens
        if sampling.output_kind is OutputKind.FINAL_ONLY:
            self._min_new_tokens = math.inf
        self._text = [echo] if echo else []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._splitter = None if split is None else AnswerSplitter(split)

    def go_on_from(self, emitted: Sequence[int]) -> None:
        """Take the state that these output tokens, which the client has seen, had left behind.

        Raises:
            ValueError: They hold a stop string, so there is nothing to go on with.
        """
        self.num_tokens = len(emitted)
        self._text = []  # it was sent with the first of them
        if self._detokenizer is not None:
            pieces = self._detokenizer.pieces(emitted)
            text, match = self._stop_checker.push(pieces, num_exempt=self._sampling.min_tokens)
            if match is not None:
                raise ValueError(f"hold the stop string {match.stop!r}, which has ended the choice")
            if self._splitter is not None:
                self._splitter.skip(text)

    def on_admitted(self) -> None:
        if not self._is_admitted:
            self._is_admitted = True
            self._outputs.note_admitted()

    def on_tokens(
        self,
        token_ids: list[int],
        logprobs: BatchLogprobs | None,
        first_row: int,
        finish: FinishedRequest | None,
    ) -> None:
        self.on_admitted()  # an engine that answers has the request
        if self._report is not None:
            self._report.close(is_computed=bool(token_ids))
            self._report = None
            self._outputs.note_prompt()
        if self.finish_reason is None:
            self._add(token_ids, logprobs, first_row, finish)
        if finish is not None:
            self.num_cached_tokens, self.timings = finish.num_cached_tokens, finish.timings
            self._settle()

    def on_prompt_logprobs(self, part: PromptLogprobs) -> None:
        if self.finish_reason is not None:  # it was aborted before its prompt was computed
            return
        if self._report is None:
            raise LookupError(
                "the engine sent log-probabilities of a prompt that were not asked for, or not any more"
            )
        self._report.add(part)
        self._outputs.note_prompt()

    def on_error(self, error: Exception) -> None:
        self._outputs.fail(error)
        self._settle()

    def on_engine_lost(self, why: str) -> None:
        self._outputs.fail_by_loss(why)
        self._settle()

    def end_by_abort(self) -> None:
        """End it with what it has; the engine is asked for its counts."""
        if self.finish_reason is not None:
            return
        if self._report is not None:
            self._report.close(is_computed=False)
        self._add([], None, 0, FinishedRequest(0, FinishReason.ABORT, None, 0, StageTimings()))
        self._stop_early()

    def take(self) -> DeltaEvent:
        """The pending delta; called by the one client."""
        self.has_pending = False
        event = DeltaEvent(
            index=self.index,
            text="".join(self._text),
            token_ids=self._token_ids,
            logprobs=tuple(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )
        self._text, self._token_ids, self._logprobs = [], [], []
        return event if self._splitter is None else self._splitter.split(event)

    def _add(
        self,
        token_ids: list[int],
        logprobs: BatchLogprobs | None,
        first_row: int,
        finish: FinishedRequest | None,
    ) -> None:
        """Merge new tokens into the pending delta."""
        if self._sampling.max_tokens == 0:  # the one that the engine computes is not the client's
            token_ids = []
            if finish is not None and finish.reason is FinishReason.STOP:
                finish = replace(finish, reason=FinishReason.LENGTH, stop_token_id=None)
        num_kept = self._add_text(token_ids, finish)
        self.num_tokens += num_kept
        self._token_ids += token_ids[:num_kept]
        if self._sampling.logprobs is not None and num_kept:
            if logprobs is None:
                raise LookupError(f"the engine sent no log-probabilities for {num_kept} tokens")
            token_bytes = self._tokenizer.token_bytes
            self._logprobs += [logprobs.at(first_row + i, token_bytes) for i in range(num_kept)]
        if finish is not None and self.finish_reason is None:
            self.finish_reason, self._stop_reason = finish.reason, finish.stop_token_id
        is_due = self.finish_reason is not None or len(self._token_ids) >= self._min_new_tokens
        if is_due and not self.has_pending:
            self.has_pending = True
            self._outputs.note_ready(self)

    def _add_text(self, token_ids: list[int], finish: FinishedRequest | None) -> int:
        """Add the tokens' text; return how many of them belong to the output.

        All do, unless a stop string is complete before the last: then it has ended here and now, whatever
        the engine assumes, and the engine is informed.
        """
        if self._detokenizer is None:
            return len(token_ids)
        pieces = self._detokenizer.pieces(visible_tokens(token_ids, finish, self._sampling))
        if finish is not None:
            pieces.append(self._detokenizer.flush())
        # A stop string that is complete within the first min_tokens tokens does not count.
        num_exempt = max(0, self._sampling.min_tokens - self.num_tokens)
        text, match = self._stop_checker.push(pieces, num_exempt=num_exempt)
        self._text.append(text)
        if match is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, match.stop
            if finish is None:
                self._stop_early()
            return min(len(token_ids), match.num_pieces)
        if finish is not None:
            self._text.append(self._stop_checker.flush())
        return len(token_ids)

    def _stop_early(self) -> None:
        """End it at the engine, and wait a moment for the engine's counts."""
        self.stop_upstream()
        asyncio.get_running_loop().call_later(ACCOUNT_WAIT_S, self._settle)

    def _settle(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._outputs.note_settled()
