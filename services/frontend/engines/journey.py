"""One choice on its way through engines: what has come of it, and what it takes to go on elsewhere."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from triptych.errors import EngineUnavailable
from triptych.types.identity import Likeness, compare
from triptych.types.kv_transfer import KvSource
from triptych.types.outputs import FinishedRequest, StageTimings
from triptych.types.sampling import SamplingParams
from triptych.types.step import U32, PromptLogprobs
from triptych.types.submit import ModelTerms, RequestNeeds, SubmitRequest
from triptych_services.frontend.engines.prefix_index import RoutedPrompt
from triptych_services.frontend.engines.session import EngineLoss
from triptych_services.frontend.logprobs import BatchLogprobs

if TYPE_CHECKING:
    from triptych.types.facts import ModelFacts
    from triptych_services.frontend.choice import Choice
    from triptych_services.frontend.engines.client import EngineClient
    from triptych_services.frontend.resumption import Keep

_PROBATION = 32
"""Tokens after which the engines that a choice has lost are forgotten: it is not the reason, or not of all."""


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """One client's request, with all that an engine must know to compute its choices."""

    request_id: str
    wanted: ModelTerms
    """The facts that the request was checked against."""
    prompt_token_ids: U32
    sampling: SamplingParams
    """As the engine takes them."""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    deadline: float | None = None
    """On the monotonic clock. None: there is none."""
    whole_output: bool = False
    routed: RoutedPrompt | None = None
    """The prompt as the router looks at it. None: it plays no part."""
    kv_source: KvSource | None = None
    """The place at which its first engine can pull the prompt's blocks. None: there is none."""
    keep: Keep | None = None
    """How it is kept for other frontends. None: not at all."""

    def to_request(self, numbers: Sequence[int], journeys: Sequence[Journey]) -> SubmitRequest:
        """Return the message that has an engine begin some choices, or go on with them.

        Args:
            journeys: [num_choices] of one request, by index, all of them admitted before or none.
        """
        sampling = self.sampling
        if sampling.prompt_logprobs is not None and not journeys[0].awaits_prompt:
            sampling = replace(sampling, prompt_logprobs=None)
        emitted = tuple(np.array(journey.emitted, np.uint32) for journey in journeys)
        is_moved = journeys[0].is_admitted
        cached_tokens = [journey.choice.num_cached_tokens for journey in journeys] if is_moved else []
        return SubmitRequest(
            request_id=self.request_id,
            numbers=np.array(numbers, np.uint32),
            seeds=np.array([journey.seed for journey in journeys], np.uint64),
            prompt_token_ids=self.prompt_token_ids,
            emitted=emitted if any(map(len, emitted)) else (),
            sampling=sampling,
            priority=self.priority,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            deadline_remaining_ms=self._remaining_ms(),
            whole_output=self.whole_output,
            num_engine_deaths=max(journey.num_deaths for journey in journeys),
            is_moved=is_moved,
            kv_source=None if is_moved else self.kv_source,
            cached_tokens=tuple(cached_tokens),
            **({} if self.keep is None else self.keep.renew(len(journeys))),
        )

    def _remaining_ms(self) -> int | None:
        if self.deadline is None:
            return None
        return max(1, round((self.deadline - time.monotonic()) * 1000))


class Travels(Protocol):
    """Owner of the choices that have lost their engine."""

    def on_begun(self) -> None:
        """Note that a choice is at an engine."""

    def on_death(self, journey: Journey, loss: EngineLoss) -> None:
        """Note that an engine has died while a choice, which may be the reason, was computed there."""

    def on_lost(self, journey: Journey, loss: EngineLoss) -> None:
        """Take a choice whose engine is gone."""

    def on_offered(self, journey: Journey) -> None:
        """Move a choice away from its engine, which cannot end it in time, if there is another."""

    def on_answered(self, journey: Journey) -> None:
        """Note that the engine has answered the submission of a choice that was moved to it."""

    def on_refused(self, journey: Journey, error: Exception) -> None:
        """Take a choice back that the engine refuses to which it was moved."""

    def forget(self, journey: Journey) -> None:
        """Note that a choice is not waited for any more."""


class Journey:
    """One choice's way through one engine after another; the sink of all its submissions.

        submitted ──► admitted ──► tokens ──► end
            ▲                        │ the engine is lost, or offers it
            └──────── moved ◄────────┘

    Stop strings, text and log-probabilities that were delivered stay in the choice: an engine needs the tokens only.
    Penalties, limits and grammars count from the prompt's end, and random numbers depend on seed and position.
    """

    def __init__(
        self,
        submission: Submission,
        choice: Choice,
        travels: Travels,
        *,
        seed: int,
        emitted: Sequence[int] = (),
    ) -> None:
        """`emitted`: Tokens of the choice that the client has had before."""
        self.submission = submission
        self.choice = choice
        self.seed = seed
        self.emitted: array[int] = array("I", emitted)
        """All output tokens so far."""
        self.engine: EngineClient | None = None
        """The engine that computes it; None while it waits for one."""
        self.facts: ModelFacts | None = None
        """Facts of the engine that computes it, or did last."""
        self.is_admitted = False
        """An engine has taken it, and its client knows."""
        self.num_losses = 0
        """Engines lost since it last went on for a while."""
        self.num_deaths = 0
        """Those of them that died when they had computed something of it, or had not answered its submission."""
        self.most_together = 0
        """Suspected requests that may be at one engine, its own included. 0: it is no suspect (`DeathInquiry`)."""
        self.loss = EngineLoss("")
        """The last one."""
        self.lost_at = 0.0
        self.not_before = 0.0
        """When it may be submitted again. This and the one before are on the monotonic clock, while it waits."""
        self.refused_by: set[EngineClient] = set()
        """Engines not to be asked again now."""
        self.is_unanswered = False
        """It was moved, and its engine has not answered yet."""
        self._travels = travels
        self._was_computed = False
        """Its engine has sent something of it beside its admission."""
        self.number = 0
        """Its name at its engine."""
        self._cleared_at = 0
        self._started_ns = time.monotonic_ns()
        self._first_token_ns: int | None = None

    @property
    def awaits_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to come."""
        return self.choice.awaits_prompt

    def likeness_of(self, facts: ModelFacts) -> Likeness:
        """Return how much of another engine's model is alike to that which has computed the output so far."""
        return (
            Likeness.NOTHING if self.facts is None else compare(self.facts.identity, facts.identity).likeness
        )

    @property
    def needs(self) -> RequestNeeds:
        """The demands on an engine that it goes on at. The choices of a new request go to one engine together."""
        submission = self.submission
        assert submission.sampling.max_tokens is not None, "it is filled in before a submission"
        num_tokens = len(submission.prompt_token_ids) + submission.sampling.max_tokens
        num_choices = 1 if self.is_admitted else submission.sampling.n
        return RequestNeeds(num_tokens, num_choices, submission.priority != 0)

    def begin(self, engine: EngineClient, number: int, *, is_moved: bool = False) -> None:
        """Note that it was submitted to an engine, under this number."""
        facts = None if engine.welcome is None else engine.welcome.model
        if is_moved:
            self.is_unanswered = True
            self._cleared_at = len(self.emitted) + _PROBATION
            is_exact = facts is not None and self.likeness_of(facts) is Likeness.TOKENS
            self.choice.note_moved(is_exact=is_exact or not self.emitted)
        self.choice.engine_names.append(engine.name)
        self.engine, self.number, self.facts = engine, number, facts
        self._travels.on_begun()
        self._was_computed = False

    def stop(self) -> None:
        """End it early at its engine, which then accounts for it."""
        if self.engine is not None:
            self.engine.stop(self.number, self)
        else:
            self._leave_unaccounted()

    def abort(self) -> None:
        """End it at its engine, and hear no more of it. Safe at any time."""
        self.leave_engine()
        self._travels.forget(self)

    def detach(self) -> None:
        """Leave it at its engine, with the choices that were submitted with it, and hear no more of it."""
        self._note_answer()
        self.engine = None
        self._travels.forget(self)

    def leave_engine(self) -> None:
        """End it at its engine, to go on elsewhere or not at all."""
        if self.engine is not None:
            self.engine.abort(self.number, self)
            self._note_answer()
            self.engine = None

    def note_lost(self, loss: EngineLoss) -> None:
        """Count a lost engine."""
        self.loss = loss
        self.num_losses += 1

    def on_admitted(self) -> None:
        self._note_answer()
        self.refused_by.clear()
        if not self.is_admitted:
            self.is_admitted = True
            self.choice.on_admitted()

    def on_first_token(self, num_cached_tokens: int) -> None:
        if self.choice.num_cached_tokens is None:  # else it has had tokens of an engine before
            self.choice.num_cached_tokens = num_cached_tokens

    def on_tokens(
        self,
        token_ids: list[int],
        logprobs: BatchLogprobs | None,
        first_row: int,
        finish: FinishedRequest | None,
    ) -> None:
        self.is_admitted = self._was_computed = True
        if self.is_unanswered:
            self._note_answer()
        if self._first_token_ns is None:
            self._first_token_ns = time.monotonic_ns()
        self.emitted.extend(token_ids)
        if self.num_losses and len(self.emitted) >= self._cleared_at:
            self.num_losses = self.num_deaths = self.most_together = 0
        if finish is not None and self.choice.num_moves:
            finish = self._whole_account(finish)
        self.choice.on_tokens(token_ids, logprobs, first_row, finish)

    def on_prompt_logprobs(self, part: PromptLogprobs) -> None:
        self._was_computed = True
        self.choice.on_prompt_logprobs(part)

    def on_released(self) -> None:
        if self.choice.finish_reason is None:
            self._travels.on_offered(self)

    def on_error(self, error: Exception) -> None:
        is_refusal = self.is_unanswered and self.is_admitted
        is_given_up = self.is_admitted and isinstance(error, EngineUnavailable)
        self._note_answer()
        if is_refusal and self.engine is not None:
            self.refused_by.add(self.engine)
        self.engine = None
        if is_refusal and self.choice.finish_reason is None:
            self._travels.on_refused(self, error)
        elif is_given_up and self.choice.finish_reason is None:
            self._travels.on_lost(self, EngineLoss(str(error)))
        else:
            self.choice.on_error(error)

    def on_engine_lost(self, loss: EngineLoss) -> None:
        is_answered = self.is_admitted and not self.is_unanswered
        if loss.is_death and (self._was_computed or not is_answered):
            self.num_deaths += 1
            self._travels.on_death(self, loss)
        self._note_answer()
        self.engine = None
        if self.choice.finish_reason is not None:
            self._leave_unaccounted()
        else:
            self._travels.on_lost(self, loss)

    def _note_answer(self) -> None:
        if self.is_unanswered:
            self._travels.on_answered(self)
            self.is_unanswered = False

    def _leave_unaccounted(self) -> None:
        """Let the choice end, which is complete, without the counts that only an engine knows."""
        self._travels.forget(self)
        self.choice.settle()

    def _whole_account(self, finish: FinishedRequest) -> FinishedRequest:
        """Return the end with the times of all engines, as they were seen here, and the cached tokens of the first."""
        assert self._first_token_ns is not None, "a token, or the end, has come"
        timings = StageTimings(
            prefill_ns=self._first_token_ns - self._started_ns,
            decode_ns=time.monotonic_ns() - self._first_token_ns,
        )
        num_cached_tokens = self.choice.num_cached_tokens
        if num_cached_tokens is None:  # the first engine is of the version before, and did not say
            num_cached_tokens = finish.num_cached_tokens
        return replace(finish, timings=timings, num_cached_tokens=num_cached_tokens)
