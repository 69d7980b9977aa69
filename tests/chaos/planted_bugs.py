"""Bugs as they have been written elsewhere, to be planted into a running stack: each must be found by a validator."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from triptych.client.resumption import ResumableStream
from triptych.text.stop import StopChecker
from triptych.types import identity
from triptych.types.events import FinishedEvent
from triptych.types.identity import Comparison, ModelIdentity
from triptych.types.step import U32, NewRow, RowContent, empty_u32
from triptych.types.submit import SubmitRequest
from triptych_services.enginecore import engine
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.frontends.requests import FrontendRequests
from triptych_services.enginecore.frontends.sessions import FrontendSessions
from triptych_services.enginecore.kv.manager import BlockManager
from triptych_services.enginecore.scheduler import request_states
from triptych_services.enginecore.scheduler.scheduler import Scheduler
from triptych_services.frontend import generate
from triptych_services.frontend.engines import client as engine_client
from triptych_services.frontend.engines import session as engine_session
from triptych_services.frontend.engines.session import ChoiceOutput
from triptych_services.frontend.streams import migrator, route
from triptych_services.frontend.streams.choice import Choice
from triptych_services.worker.sampling.form_output import FormOutput
from triptych_services.worker.service.lease import WorkerLease
from triptych_services.worker.step_orders import StepOrders

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class PlantedBug:
    """A bug, scenarios of which one at least brings it out, and who finds it."""

    name: str
    plant: Plant
    scenarios: tuple[str, ...]
    found_by: str


def _every(count: int) -> Callable[[], bool]:
    """Return a function that says yes each `count` calls."""
    calls = 0

    def is_due() -> bool:
        nonlocal calls
        calls += 1
        return calls % count == 0

    return is_due


def _drop_a_token(patch: pytest.MonkeyPatch) -> None:
    right, is_due = Choice.on_output, _every(50)

    def wrong(self: Choice, output: ChoiceOutput) -> None:
        if output.token_ids and is_due():
            output = output._replace(token_ids=output.token_ids[1:])
        right(self, output)

    patch.setattr(Choice, "on_output", wrong)


def _take_a_repeated_batch(patch: pytest.MonkeyPatch) -> None:
    """The hello names a batch too early, and what comes again is taken for new."""
    right = engine_client.session_hello
    patch.setattr(
        engine_client,
        "session_hello",
        lambda protocol, name, last: right(protocol, name, max(0, last - 3)),
    )

    def take(number: int, last_received: int, what: str) -> bool:
        return False

    patch.setattr(engine_session, "is_repeated", take)


def _resume_too_far_on(patch: pytest.MonkeyPatch) -> None:
    right = FrontendSessions._resume

    def wrong(self: FrontendSessions, name: str, last_batch_seen: int) -> Any:
        session = self._name_to_session.get(name)
        ahead = 0 if session is None else min(2, session.outbox.last_number - last_batch_seen)
        return right(self, name, last_batch_seen + ahead)

    patch.setattr(FrontendSessions, "_resume", wrong)
    patch.setattr(engine_session, "is_repeated", lambda number, last, what: number <= last)


def _skip_the_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerLease, "_check_turn", lambda *_: None)


def _count_usage_twice(patch: pytest.MonkeyPatch) -> None:
    right = generate._record_outputs

    def wrong(request: Any, outputs: Any, record: Any) -> None:
        right(request, outputs, record)
        usage = record.usage
        record.usage = type(usage)(usage.num_prompt_tokens, 2 * usage.num_output_tokens)

    patch.setattr(generate, "_record_outputs", wrong)


def _leak_a_block(patch: pytest.MonkeyPatch) -> None:
    right, is_due = BlockManager.free, _every(5)

    def wrong(self: BlockManager, table: Any) -> None:
        if is_due() and len(table.block_ids) > 1:
            table.block_ids.pop()
        right(self, table)

    patch.setattr(BlockManager, "free", wrong)


def _forget_half_a_stop_string(patch: pytest.MonkeyPatch) -> None:
    right = StopChecker.push

    def wrong(self: StopChecker, text: str, **options: int) -> Any:
        for matcher in self._matchers:
            matcher.num_matched = 0
        return right(self, text, **options)

    patch.setattr(StopChecker, "push", wrong)


def _requeue_with_another_seed(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler.requeue_all

    def wrong(self: Scheduler) -> None:
        for request in self._states.running:
            if request.number % 3 == 1:
                request.seed ^= 1
        right(self)

    patch.setattr(Scheduler, "requeue_all", wrong)


def _take_output_for_prompt(patch: pytest.MonkeyPatch) -> None:
    """After a loss of the worker penalties count what was output as a part of the prompt."""
    right = request_states.NewRow

    def wrong(*, content: RowContent, emitted_token_ids: U32, **fields: Any) -> NewRow:
        known = np.concatenate([content.prompt_token_ids, emitted_token_ids])
        return right(content=RowContent(known, content.sampling), emitted_token_ids=empty_u32(), **fields)

    patch.setattr(request_states, "NewRow", wrong)


def _end_twice(patch: pytest.MonkeyPatch) -> None:
    right = ResumableStream.events

    async def wrong(self: ResumableStream, *call: Any) -> Any:
        async for event in right(self, *call):
            yield event
            if isinstance(event, FinishedEvent):
                yield event

    patch.setattr(ResumableStream, "events", wrong)


def _hold_a_share(patch: pytest.MonkeyPatch) -> None:
    """A choice that its client has left stays in the session's books, where no end that the engine sends finds it."""
    right = engine_session.EngineSession.abort

    def wrong(self: engine_session.EngineSession, number: int, sink: Any) -> None:
        right(self, number, sink)
        self._sinks[-number] = sink

    patch.setattr(engine_session.EngineSession, "abort", wrong)


def _compare_no_weights(patch: pytest.MonkeyPatch) -> None:
    """Two fine-tunes of one architecture are taken for the same model, wherever models are compared."""
    right = identity.compare

    def wrong(one: ModelIdentity, other: ModelIdentity) -> Comparison:
        return right(replace(one, weights=""), replace(other, weights=""))

    for module in (engine, route, migrator):
        patch.setattr(module, "compare", wrong)


def _go_on_with_any_worker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineCore, "_give_up_output", lambda *_: None)


def _take_output_for_any_model(patch: pytest.MonkeyPatch) -> None:
    """A moved request that arrives late goes on at a worker that it was not chosen for."""
    right = FrontendRequests.submit

    def wrong(self: FrontendRequests, session: int, submit: SubmitRequest) -> None:
        right(self, session, replace(submit, model_digest=""))

    patch.setattr(FrontendRequests, "submit", wrong)


def _begin_forms_anew(patch: pytest.MonkeyPatch) -> None:
    """The matcher of a row that enters with output does not follow it."""
    right, begun = FormOutput.advance, WeakSet[FormOutput]()

    def wrong(self: FormOutput, output: Any) -> None:
        if self not in begun:
            begun.add(self)
            self.num_seen = output.size
        right(self, output)

    patch.setattr(FormOutput, "advance", wrong)


def _begin_pulls_at_once(patch: pytest.MonkeyPatch) -> None:
    """A pull writes to its blocks while steps before it may still use them."""
    right = StepOrders.after

    def wrong(self: StepOrders, step_id: int, name: Hashable, act: Callable[[], None]) -> None:
        right(self, 0 if isinstance(name, int) else step_id, name, act)

    patch.setattr(StepOrders, "after", wrong)


_QUIET = "seed=1 engines=1 frontends=1 requests=16:"
_CUT = f"{_QUIET} 0.300 cut frontend-0>enginecore-0 0; 0.600 cut frontend-0>enginecore-0 0"
_KILL = f"{_QUIET} 0.500 kill worker-0 0.2; 0.900 kill worker-0 0.2"
_TRANSFERS = tuple(f"seed={seed} engines=2 frontends=1 requests=24 transfers=1:" for seed in (3, 6, 8, 1, 2))
"""A pull must meet blocks that a step in flight still uses, which depends on all that the engines do before."""
_USURP = "seed=5 engines=1 frontends=1 requests=4: 0.100 usurp enginecore-0 2.0"
_RELEASE = f"{_QUIET} 0.500 change:numerics worker-0 0.2"
_HELD_MOVE = (
    "seed=151 engines=2 frontends=2 requests=16: 1.612 change:numerics worker-0 0.651; "
    "1.682 half-cut frontend-0>enginecore-0 0.339; 1.805 change:numerics worker-1 0.822; "
    "1.836 hold frontend-0>enginecore-0 4.702"
)
_FINE_TUNE = f"{_QUIET} 0.500 change:weights worker-0 0.2"

PLANTED_BUGS = (
    PlantedBug("drop a token", _drop_a_token, (_QUIET,), "unchanged"),
    PlantedBug("take a repeated batch", _take_a_repeated_batch, (_CUT,), "unchanged"),
    PlantedBug("resume too far on", _resume_too_far_on, (_CUT,), "unchanged"),
    PlantedBug("skip the fence", _skip_the_fence, (_USURP,), "nothing_from_the_fenced"),
    PlantedBug("count usage twice", _count_usage_twice, (_QUIET,), "usage_counted_once"),
    PlantedBug("leak a block", _leak_a_block, (_QUIET,), "all_home"),
    PlantedBug("forget half a stop string", _forget_half_a_stop_string, (_QUIET,), "unchanged"),
    PlantedBug("requeue with another seed", _requeue_with_another_seed, (_KILL,), "unchanged"),
    PlantedBug("take output for prompt", _take_output_for_prompt, (_KILL,), "unchanged"),
    PlantedBug("begin forms anew", _begin_forms_anew, (_KILL,), "forms_hold"),
    PlantedBug("end twice", _end_twice, (_QUIET,), "one_end"),
    PlantedBug("compare no weights", _compare_no_weights, (_FINE_TUNE,), "unchanged"),
    PlantedBug("go on with any worker", _go_on_with_any_worker, (_RELEASE,), "unchanged"),
    PlantedBug("take output for any model", _take_output_for_any_model, (_HELD_MOVE,), "unchanged"),
    PlantedBug("hold a share", _hold_a_share, (_QUIET,), "all_home"),
    PlantedBug("begin pulls at once", _begin_pulls_at_once, _TRANSFERS, "worker-1 ended"),
)
