"""One choice of a request: its tokens become text, which waits for the client, merged."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from triptych.text.detokenizer import IncrementalDetokenizer
from triptych.text.stop import StopChecker, StopMatch
from triptych.text.tokenizer import Tokenizer
from triptych.types.events import DeltaEvent
from triptych.types.outputs import FinishedRequest, FinishReason, StageTimings, TokenLogprobs
from triptych.types.sampling import OutputKind, SamplingParams
from triptych.types.step import U32, PromptLogprobs
from triptych_services.frontend.answer_text import AnswerSplitter, visible_tokens
from triptych_services.frontend.logprobs import BatchLogprobs, PromptReport
from triptych_services.frontend.pacing import Pace
from triptych_services.frontend.requests.tools import AnswerSplit

# After a stop string the engine is asked to end the request. It answers within a turn of its loop, with the counts
# that only it knows. The text is complete by then, so an engine that does not answer delays the end of the stream
# by no more than this; the timings are 0 then.
ACCOUNT_WAIT_S = 0.25


class ChoiceListener(Protocol):
    """The request that a choice belongs to."""

    pace: Pace | None
    """The pace of all streams; None: output leaves as it comes."""

    def note_admitted(self) -> None:
        """Note that an engine has a choice."""

    def note_moved(self) -> None:
        """Note that a choice has moved to another engine."""

    def note_prompt(self) -> None:
        """Note that there is more of the prompt to report, or all of it."""

    def note_ready(self, choice: Choice) -> None:
        """Note that a choice has something to take."""

    def note_settled(self) -> None:
        """Note that no engine will account for a choice any more."""

    def fail(self, error: Exception) -> None:
        """End the request."""

    def fail_by_loss(self, why: str) -> None:
        """End the request because its engine is gone."""


class _NoListener:
    """The listener of choices that are closed."""

    pace: Pace | None = None

    def note_admitted(self) -> None:
        pass

    def note_moved(self) -> None:
        pass

    def note_prompt(self) -> None:
        pass

    def note_ready(self, choice: Choice) -> None:
        pass

    def note_settled(self) -> None:
        pass

    def fail(self, error: Exception) -> None:
        pass

    def fail_by_loss(self, why: str) -> None:
        pass


_NO_LISTENER: ChoiceListener = _NoListener()


def _do_nothing() -> None:
    pass


class Choice:
    """One choice's output. A journey brings it, from one engine or several (`engines.journey`)."""

    def __init__(
        self,
        listener: ChoiceListener,
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
        """Prompt tokens that the first engine with output of it found in its prefix cache. None: not known yet."""
        self.timings = StageTimings()
        self.finish_reason: FinishReason | None = None
        self.num_moves = 0
        """Times that it has moved to another engine."""
        self.engine_names: list[str] = []
        """Engines that it was submitted to, in turn."""
        self.is_exact = True
        """It goes on as if it had not moved: the engines that it has come to compute the same bits."""
        self.stop_upstream: Callable[[], None] = _do_nothing
        """End it at the engine, which then reports its end. Set at submission, like the next."""
        self.abort_upstream: Callable[[], None] = _do_nothing
        """End it at the engine, unless it has ended there, and hear no more of it."""
        self._listener = listener
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
        self.sent_at = -math.inf
        self.is_held = False
        """This and the one before: see `PacedChoice`."""
        self._is_settled = False  # the engine has accounted for it, or will not
        self._min_new_tokens: float = min_interval_tokens
        if sampling.output_kind is OutputKind.FINAL_ONLY:
            self._min_new_tokens = math.inf
        self._text = [echo] if echo else []
        self._token_ids: list[int] = []
        self._without_text: list[int] = []
        """New tokens that become text when they leave, which is cheaper together. Empty with stop strings, which are
        looked for in the text as it comes."""
        self._logprobs: list[TokenLogprobs] = []
        self._splitter = None if split is None else AnswerSplitter(split, tokenizer.token_bytes)

    @property
    def num_reasoning_tokens(self) -> int:
        """Output tokens that the client has taken and the model thought before it answered."""
        return 0 if self._splitter is None else self._splitter.num_reasoning_tokens

    @property
    def awaits_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to come."""
        return self._report is not None and not self._report.is_complete

    def note_moved(self, *, is_exact: bool) -> None:
        """Note that another engine goes on with it. `is_exact`: With the same bits."""
        self.num_moves += 1
        self.is_exact &= is_exact
        self._listener.note_moved()
        if self._report is not None:
            self._report.may_repeat = True

    def go_on_from(self, emitted: Sequence[int]) -> None:
        """Take the state that these output tokens, which the client has seen, had left behind.

        Raises:
            ValueError: They hold a stop string, so there is nothing to go on with.
        """
        self.num_tokens = len(emitted)
        self._text = []  # it was sent with the first of them
        if self._detokenizer is not None:
            text, match = self._check_stop_strings(
                self._detokenizer, emitted, num_exempt=self._sampling.min_tokens
            )
            if match is not None:
                raise ValueError(f"hold the stop string {match.stop!r}, which has ended the choice")
            if self._splitter is not None:
                self._splitter.skip(text, emitted)

    def end_as_seen(self, num_tokens: int) -> None:
        """Take in that the client has all of it, so many tokens. `stop_early` asks for the engine's counts."""
        self.num_tokens, self.finish_reason = num_tokens, FinishReason.STOP

    def on_admitted(self) -> None:
        if not self._is_admitted:
            self._is_admitted = True
            self._listener.note_admitted()

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
            self._listener.note_prompt()
        if self.finish_reason is None:
            self._add(token_ids, logprobs, first_row, finish)
        if finish is not None:
            self.num_cached_tokens, self.timings = finish.num_cached_tokens, finish.timings
            self.settle()

    def on_prompt_logprobs(self, part: PromptLogprobs) -> None:
        if self.finish_reason is not None:  # it was aborted before its prompt was computed
            return
        if self._report is None:
            raise LookupError(
                "the engine sent log-probabilities of a prompt that were not asked for, or not any more"
            )
        self._report.add(part)
        self._listener.note_prompt()

    def on_error(self, error: Exception) -> None:
        self._listener.fail(error)
        self.settle()

    def on_engine_lost(self, why: str) -> None:
        self._listener.fail_by_loss(why)
        self.settle()

    def end_by_abort(self) -> None:
        """End it with what it has; the engine is asked for its counts."""
        if self.finish_reason is not None:
            return
        if self._report is not None:
            self._report.close(is_computed=False)
        self._add([], None, 0, FinishedRequest(0, FinishReason.ABORT, None, 0, StageTimings()))
        self.stop_early()

    def release(self) -> None:
        """Offer what has come since the last delta to the client, unless it is on offer."""
        self.is_held = False
        if not self.has_pending and (self._token_ids or self.finish_reason is not None):
            self.has_pending = True
            self._listener.note_ready(self)

    def take(self) -> DeltaEvent:
        """The pending delta; called by the one client."""
        self.has_pending = False
        self.sent_at = time.monotonic()
        if self._detokenizer is not None and not self._sampling.stop:
            self._text.append(self._detokenizer.push(self._without_text))
            self._without_text = []
            if self.finish_reason is not None:
                self._text.append(self._detokenizer.flush())
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
            is_named = bool(self._sampling.logprob_token_ids)
            self._logprobs += [
                logprobs.at(first_row + i, token_bytes, is_named=is_named) for i in range(num_kept)
            ]
        if finish is not None and self.finish_reason is None:
            self.finish_reason, self._stop_reason = finish.reason, finish.stop_token_id
        is_due = self.finish_reason is not None or len(self._token_ids) >= self._min_new_tokens
        if is_due and not self.has_pending:
            pace = self._listener.pace
            if pace is None or self.finish_reason is not None or not pace.holds(self):
                self.release()

    def _add_text(self, token_ids: list[int], finish: FinishedRequest | None) -> int:
        """Add the tokens' text; return how many of them belong to the output.

        All do, unless a stop string is complete before the last: then it has ended here and now, whatever
        the engine assumes, and the engine is informed.
        """
        if self._detokenizer is None:
            return len(token_ids)
        visible = visible_tokens(token_ids, finish, self._sampling)
        if not self._sampling.stop:
            self._without_text += visible
            return len(token_ids)
        state = self._detokenizer.state
        # A stop string that is complete within the first min_tokens tokens does not count.
        num_exempt = max(0, self._sampling.min_tokens - self.num_tokens)
        text, match = self._check_stop_strings(
            self._detokenizer, visible, num_exempt=num_exempt, is_last=finish is not None
        )
        self._text.append(text)
        if match is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, match.stop
            if finish is None:
                self.stop_early()
            return min(len(token_ids), self._detokenizer.count_tokens(state, visible, match.end))
        if finish is not None:
            self._text.append(self._stop_checker.flush())
        return len(token_ids)

    def _check_stop_strings(
        self,
        detokenizer: IncrementalDetokenizer,
        token_ids: Sequence[int],
        *,
        num_exempt: int,
        is_last: bool = False,
    ) -> tuple[str, StopMatch | None]:
        """Take in the text of tokens; return what may be shown, and the stop string that ends the output.

        Args:
            num_exempt: The first so many tokens complete no stop string that counts.
            is_last: No tokens follow, so a character that is not complete never will be.
        """
        text = detokenizer.push(token_ids[:num_exempt]) if num_exempt else ""
        num_exempt_characters = len(text)
        text += detokenizer.push(token_ids[num_exempt:] if num_exempt else token_ids)
        if is_last:
            text += detokenizer.flush()
            if num_exempt > len(token_ids):
                num_exempt_characters = len(text)
        return self._stop_checker.push(text, num_exempt=num_exempt_characters)

    def close(self) -> None:
        """Abort it upstream if it still runs, and report no more. Safe at any time, and more than once.

        From then on it refers neither to its request nor to its journey, so all of them are freed when the request
        ends. As circles they would wait for the collector, whose pauses stop all streams.
        """
        abort = self.abort_upstream
        self.stop_upstream = self.abort_upstream = _do_nothing
        abort()
        self._listener = _NO_LISTENER

    def stop_early(self) -> None:
        """End it at the engine, and wait a moment for the engine's counts."""
        self.stop_upstream()
        asyncio.get_running_loop().call_later(ACCOUNT_WAIT_S, self.settle)

    def settle(self) -> None:
        """Note that no engine will account for it any more."""
        if not self._is_settled:
            self._is_settled = True
            self._listener.note_settled()
