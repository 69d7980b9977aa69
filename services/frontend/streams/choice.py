"""One choice of a request: its tokens become text, which waits for the client, merged."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from triptych.text.detokenizer import IncrementalDetokenizer, create_detokenizer
from triptych.text.stop import StopChecker, StopMatch
from triptych.text.tokenizer import Tokenizer
from triptych.types.events import DeltaEvent
from triptych.types.logprobs import LogprobRows
from triptych.types.outputs import FinishedRequest, FinishReason, StageTimings
from triptych.types.sampling import OutputKind, SamplingParams
from triptych.types.step import F32, U32, PromptLogprobs
from triptych_services.frontend.engines.session import ChoiceOutput, EngineLoss
from triptych_services.frontend.requests.tools import AnswerSplit
from triptych_services.frontend.streams.logprobs import PromptReport
from triptych_services.frontend.streams.pacing import Pace
from triptych_services.frontend.streams.text import AnswerSplitter, visible_tokens


class ChoiceListener:
    """The request that a choice belongs to. This one does nothing: it is the listener of choices that are closed."""

    pace: Pace | None = None
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


_NO_LISTENER = ChoiceListener()


class Choice:
    """Turns one choice's tokens into deltas. Its `ChoiceRoute` feeds it from whichever engine computes it."""

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
        self._listener = listener
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._detokenizer = (
            create_detokenizer(
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
        self.is_settled = False
        """Its engine has accounted for it, or will not."""
        self._min_new_tokens: float = min_interval_tokens
        if sampling.output_kind is OutputKind.FINAL_ONLY:
            self._min_new_tokens = math.inf
        self._text = [echo] if echo else []
        self._token_ids: list[int] = []
        self._without_text: list[int] = []
        """New tokens that become text when they leave, which is cheaper together. Empty with stop strings, which are
        looked for in the text as it comes."""
        self._logprobs: list[LogprobRows] = []
        self._vectors: F32 | None = None
        self._splitter = None if split is None else AnswerSplitter(split, tokenizer.token_bytes)

    @property
    def num_reasoning_tokens(self) -> int:
        """Output tokens that the client has taken and the model thought before it answered."""
        return 0 if self._splitter is None else self._splitter.num_reasoning_tokens

    @property
    def awaits_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to come."""
        return self._report is not None and not self._report.is_complete

    def note_moved(self) -> None:
        """Note that another engine computes it from now on."""
        self._listener.note_moved()
        if self._report is not None:
            self._report.may_repeat = True

    def continue_from(self, emitted: Sequence[int]) -> None:
        """Go on behind these output tokens, which the client has seen.

        Raises:
            ValueError: They hold a stop string, so there is nothing to continue.
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
        """Take in that the client has all of it. `num_tokens`: Its length."""
        self.num_tokens, self.finish_reason = num_tokens, FinishReason.STOP

    def on_output(self, output: ChoiceOutput) -> None:
        """Take what an engine has sent. An engine that sends anything has the request."""
        if not self._is_admitted:
            self._is_admitted = True
            self._listener.note_admitted()
        if output.prompt_logprobs is not None:
            self._add_prompt(output.prompt_logprobs)
        finish = output.finish
        if not output.token_ids and finish is None:
            return
        if self._report is not None:
            self._report.close(is_computed=bool(output.token_ids))
            self._report = None
            self._listener.note_prompt()
        if self.finish_reason is None:
            self._vectors = output.vectors
            self._add(output)
        if finish is not None:
            self.num_cached_tokens, self.timings = finish.num_cached_tokens, finish.timings
            self.settle()

    def on_end(self, why: Exception | EngineLoss) -> None:
        """Take the end of a choice that no engine finishes. It ends the request."""
        if isinstance(why, EngineLoss):
            self._listener.fail_by_loss(why.why)
        else:
            self._listener.fail(why)
        self.settle()

    def end_by_abort(self) -> None:
        """End it with what it has, if it has not ended."""
        if self.finish_reason is not None:
            return
        if self._report is not None:
            self._report.close(is_computed=False)
        self._add(ChoiceOutput(finish=FinishedRequest(0, FinishReason.ABORT, None, 0, StageTimings())))

    def _add_prompt(self, part: PromptLogprobs) -> None:
        if self.finish_reason is not None:  # it was aborted before its prompt was computed
            return
        if self._report is None:
            raise LookupError(
                "the engine sent log-probabilities of a prompt that were not asked for, or not any more"
            )
        self._report.add(part)
        self._listener.note_prompt()

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
            logprobs=LogprobRows.joined(self._logprobs) if self._logprobs else (),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            vectors=self._vectors,
        )
        self._text, self._token_ids, self._logprobs = [], [], []
        return event if self._splitter is None else self._splitter.split(event)

    def _add(self, output: ChoiceOutput) -> None:
        """Merge new tokens into the pending delta."""
        token_ids, logprobs, first_row, finish = output[:4]
        if self._sampling.max_tokens == 0:  # the one that the engine computes is not the client's
            token_ids = ()
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
            self._logprobs.append(logprobs.rows(first_row, num_kept, token_bytes, is_named=is_named))
        if finish is not None and self.finish_reason is None:
            self.finish_reason, self._stop_reason = finish.reason, finish.stop_token_id
        is_due = self.finish_reason is not None or len(self._token_ids) >= self._min_new_tokens
        if is_due and not self.has_pending:
            pace = self._listener.pace
            if pace is None or self.finish_reason is not None or not pace.holds(self):
                self.release()

    def _add_text(self, token_ids: Sequence[int], finish: FinishedRequest | None) -> int:
        """Add the tokens' text; return how many of them belong to the output.

        All do, unless a stop string is complete before the last: then it has ended here and now, whatever
        the engine assumes, and the route informs the engine.
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
        """Report no more. Safe at any time, and more than once.

        From then on it does not refer to its request, so both are freed when the request ends. As a circle they would
        wait for the collector, whose pauses stop all streams.
        """
        self._listener = _NO_LISTENER

    def settle(self) -> None:
        """Note that no engine will account for it any more."""
        if not self.is_settled:
            self.is_settled = True
            self._listener.note_settled()
