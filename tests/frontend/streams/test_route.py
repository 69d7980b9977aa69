"""A choice's way through engines, state by state: what each event makes of it, and what the migrator hears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from tests.helpers.byte_tokenizer import byte_tokenizer
from triptych.errors import EngineFailure, EngineUnavailable, GenerationLost, QueueFull
from triptych.types.events import DeltaEvent, PromptLogprobsEvent
from triptych.types.outputs import FinishedRequest, FinishReason, StageTimings
from triptych.types.sampling import SamplingParams
from triptych.types.step import PromptLogprobs
from triptych.types.submit import RequestHead
from triptych_services.frontend.engines.session import ADMITTED, ChoiceOutput, EngineLoss
from triptych_services.frontend.streams.logprobs import PromptReport
from triptych_services.frontend.streams.outputs import RequestOutputs
from triptych_services.frontend.streams.route import ChoiceRoute, RouteChange, RouteState, Submission

TOKENIZER = byte_tokenizer()
PROMPT = TOKENIZER.encode("Hi")
FINISH = FinishedRequest(1, FinishReason.LENGTH, None, 3, StageTimings(1, 2, 3, 4, 5))
PROMPT_LOGPROBS = PromptLogprobs(
    1, np.array([[PROMPT[1], 65]], np.uint32), np.array([[-1, -1]], np.float32), np.array([1], np.uint32)
)


class Engine:
    """An engine that notes what a route asks of it."""

    welcome = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: list[str] = []

    def stop(self, number: int, sink: object) -> None:
        self.told.append(f"stop {number}")

    def abort(self, number: int, sink: object) -> None:
        self.told.append(f"abort {number}")


class Way:
    """One choice whose request is alive, and a migrator that notes what it hears and moves a choice when told to."""

    def __init__(self, *, reports_prompt: bool = False) -> None:
        self.outputs = RequestOutputs("r")
        sampling = SamplingParams(max_tokens=9, stop=("X",), prompt_logprobs=1 if reports_prompt else None)
        if reports_prompt:
            self.outputs.expect_prompt(PromptReport(np.array(PROMPT, np.uint32), 1, TOKENIZER.token_bytes))
        choice = self.outputs.add_choice(sampling, TOKENIZER, PROMPT, "")
        submission = Submission(RequestHead("r"), None, np.array(PROMPT, np.uint32), sampling)  # type: ignore[arg-type]
        self.route = ChoiceRoute(submission, choice, self._on_change, seed=1)
        self.outputs.send_by([self.route])
        self.engines: list[Engine] = []
        self.heard: list[str] = []
        self.num_unanswered = 0
        """As the migrator counts them."""

    def _on_change(self, route: ChoiceRoute, change: RouteChange) -> None:
        self.heard.append(change.name)
        if change is RouteChange.ANSWERED:
            assert route.engine is self.engines[-1], "the migrator counts by engine"
            self.num_unanswered -= 1
        elif change is RouteChange.RELEASED:
            route.leave_engine()

    def go(self, events: str) -> Way:
        """Let some events happen; what always holds is checked after each."""
        for event in events.split():
            getattr(self, event)()
            self._check()
        return self

    def _check(self) -> None:
        route = self.route
        if route.state in (RouteState.ADMITTED, RouteState.RUNNING):
            assert route.engine is not None
        if route.state in (RouteState.DETACHED, RouteState.ENDED):
            assert route.engine is None
        is_unanswered = route.state is RouteState.MOVING and route.engine is not None
        assert self.num_unanswered == is_unanswered

    def begin(self) -> None:
        """Submit it to the next engine."""
        is_moved = self.route.state is RouteState.MOVING
        engine = Engine(f"engine-{len(self.engines)}")
        self.route.begin(engine, len(self.engines))  # type: ignore[arg-type]
        self.engines.append(engine)
        self.num_unanswered += is_moved

    def admitted(self) -> None:
        self.route.on_output(ADMITTED)

    def cached(self) -> None:
        self.route.on_output(ChoiceOutput(num_cached_tokens=2))

    def prompt(self) -> None:
        self.route.on_output(ChoiceOutput(prompt_logprobs=PROMPT_LOGPROBS))

    def token(self) -> None:
        self.route.on_output(ChoiceOutput(TOKENIZER.encode("a")))

    def stopped(self) -> None:
        """A stop string is complete, which the engine does not know."""
        self.route.on_output(ChoiceOutput(TOKENIZER.encode("X")))

    def guessed(self) -> None:
        self.route.on_output(ChoiceOutput(guesses=(2, 3)))

    def finish(self) -> None:
        self.route.on_output(ChoiceOutput(finish=FINISH))

    def released(self) -> None:
        self.route.on_output(ChoiceOutput(is_released=True))

    def lost(self) -> None:
        self.route.on_end(EngineLoss("it was lost"))

    def died(self) -> None:
        self.route.on_end(EngineLoss("it died", is_death=True))

    def full(self) -> None:
        self.route.on_end(QueueFull("full", 1.0))

    def off(self) -> None:
        self.route.on_end(EngineUnavailable("off"))

    def failed(self) -> None:
        self.route.on_end(EngineFailure("a bug"))

    def cancel(self) -> None:
        """Someone aborts the request by name: it ends with what it has."""
        self.route.end_by_abort()

    def abort(self) -> None:
        self.route.abort()

    def detach(self) -> None:
        self.route.detach()

    @property
    def told(self) -> list[str]:
        """Calls of all engines, in turn."""
        return [told for engine in self.engines for told in engine.told]


WAY_TO = {
    "NEW": "begin",
    "ADMITTED": "begin admitted",
    "RUNNING": "begin admitted token",
    "MOVING, waits": "begin admitted token lost",
    "MOVING, unanswered": "begin admitted token lost begin",
    "DETACHED": "begin admitted detach",
    "ENDED": "begin admitted abort",
}

# The state after an event. `=`: the same one. `!`: an assertion fails. What ends a request with an error ends its way.
NEXT_STATES = """
                    | admitted | cached   | prompt  | token   | finish | lost   | died   | full   | off    | failed | released | detach   | abort | begin
NEW                 | ADMITTED | ADMITTED | RUNNING | RUNNING | ENDED  | MOVING | MOVING | ENDED  | ENDED  | ENDED  | MOVING   | DETACHED | ENDED | !
ADMITTED            | =        | =        | RUNNING | RUNNING | ENDED  | MOVING | MOVING | ENDED  | MOVING | ENDED  | MOVING   | DETACHED | ENDED | !
RUNNING             | =        | =        |         | =       | ENDED  | MOVING | MOVING | ENDED  | MOVING | ENDED  | MOVING   | DETACHED | ENDED | !
MOVING, waits       | =        | =        |         | =       | ENDED  | =      | =      | =      | =      | =      |          |          | ENDED | =
MOVING, unanswered  | ADMITTED | ADMITTED |         | RUNNING | ENDED  | =      | =      | =      | =      | ENDED  | MOVING   | DETACHED | ENDED | !
DETACHED            | =        | =        | =       | =       | =      | =      | =      | =      | =      | =      | =        | =        | =     | !
ENDED               | =        | =        | =       | =       | =      | =      | =      | =      | =      | =      | =        | =        | =     | !
"""  # noqa: E501 - a table


def cells(table: str) -> list[tuple[str, str, str]]:
    """Return (state, event, expectation) of each cell that is not empty."""
    head, *rows = [[cell.strip() for cell in line.split("|")] for line in table.strip("\n").splitlines()]
    return [
        (row[0], event, cell) for row in rows for event, cell in zip(head[1:], row[1:], strict=True) if cell
    ]


@pytest.mark.parametrize(("before", "event", "after"), cells(NEXT_STATES))
async def test_each_event_leads_to_one_state(before: str, event: str, after: str) -> None:
    way = Way(reports_prompt=event == "prompt").go(WAY_TO[before])
    assert way.route.state.name == before.partition(",")[0]
    if after == "!":
        with pytest.raises(AssertionError):
            way.go(event)
    else:
        way.go(event)
        assert way.route.state.name == (before.partition(",")[0] if after == "=" else after)


class Story(NamedTuple):
    """Some events, and all that came of them."""

    events: str
    state: RouteState
    heard: str
    """Changes that the migrator heard of, in turn."""
    told: Sequence[str] = ()
    """Calls of all engines, in turn."""
    num_deaths: int = 0
    num_moves: int = 0
    is_admitted: bool = True


STORIES = {
    "death before admission counts": Story(
        "begin died", RouteState.MOVING, "BEGUN DIED LOST", num_deaths=1, is_admitted=False
    ),
    "death after admission without a token does not count": Story(
        "begin admitted cached died", RouteState.MOVING, "BEGUN LOST"
    ),
    "death after a token counts": Story(
        "begin admitted token died", RouteState.MOVING, "BEGUN DIED LOST", num_deaths=1
    ),
    "death after a part of the prompt counts": Story(
        "begin admitted prompt died", RouteState.MOVING, "BEGUN DIED LOST", num_deaths=1
    ),
    "a loss that is no death does not count": Story("begin token lost", RouteState.MOVING, "BEGUN LOST"),
    "death while moved and unanswered counts": Story(
        "begin token lost begin died",
        RouteState.MOVING,
        "BEGUN LOST BEGUN DIED ANSWERED LOST",
        num_deaths=1,
        num_moves=1,
    ),
    "death while moved, answered and without a token does not count": Story(
        "begin token lost begin admitted died",
        RouteState.MOVING,
        "BEGUN LOST BEGUN ANSWERED LOST",
        num_moves=1,
    ),
    "death before any admission, twice": Story(
        "begin died begin died",
        RouteState.MOVING,
        "BEGUN DIED LOST BEGUN DIED ANSWERED LOST",
        num_deaths=2,
        num_moves=1,
        is_admitted=False,
    ),
    "the refusal of a move lets it wait": Story(
        "begin token lost begin full", RouteState.MOVING, "BEGUN LOST BEGUN ANSWERED REFUSED", num_moves=1
    ),
    "an engine that cannot take a move refuses it": Story(
        "begin token lost begin off", RouteState.MOVING, "BEGUN LOST BEGUN ANSWERED REFUSED", num_moves=1
    ),
    "another error of a move ends the request": Story(
        "begin token lost begin failed", RouteState.ENDED, "BEGUN LOST BEGUN ANSWERED", num_moves=1
    ),
    "a refusal of a move that no client knows of is the client's": Story(
        "begin lost begin full",
        RouteState.ENDED,
        "BEGUN LOST BEGUN ANSWERED",
        num_moves=1,
        is_admitted=False,
    ),
    "a refusal is the client's": Story("begin full", RouteState.ENDED, "BEGUN", is_admitted=False),
    "what an engine has taken and gives up goes on elsewhere": Story(
        "begin admitted off begin token",
        RouteState.RUNNING,
        "BEGUN LOST BEGUN ANSWERED",
        num_moves=1,
    ),
    "a release leaves the engine": Story(
        "begin token released", RouteState.MOVING, "BEGUN RELEASED", ["abort 0"]
    ),
    "a release in answer to a move": Story(
        "begin token lost begin released",
        RouteState.MOVING,
        "BEGUN LOST BEGUN ANSWERED RELEASED",
        ["abort 1"],
        num_moves=1,
    ),
    "a release of what is complete changes nothing": Story(
        "begin stopped released", RouteState.RUNNING, "BEGUN", ["stop 0"]
    ),
    "a token behind a release is taken": Story(
        "begin token released token begin admitted",
        RouteState.ADMITTED,
        "BEGUN RELEASED BEGUN ANSWERED",
        ["abort 0"],
        num_moves=1,
    ),
    "the end behind a release ends the wait": Story(
        "begin token released finish", RouteState.ENDED, "BEGUN RELEASED LEFT", ["abort 0"]
    ),
    "a stop string waits for the engine's counts": Story(
        "begin token stopped token", RouteState.RUNNING, "BEGUN", ["stop 0"]
    ),
    "the engine's counts end it": Story("begin stopped finish abort", RouteState.ENDED, "BEGUN", ["stop 0"]),
    "death before the counts counts, and nothing moves": Story(
        "begin stopped died", RouteState.ENDED, "BEGUN DIED LEFT", ["stop 0"], num_deaths=1
    ),
    "a stop string behind a release ends the wait": Story(
        "begin token released stopped", RouteState.ENDED, "BEGUN RELEASED LEFT", ["abort 0"]
    ),
    "cancelled in NEW": Story("begin cancel admitted finish", RouteState.ENDED, "BEGUN", ["stop 0"]),
    "cancelled in NEW, then death": Story(
        "begin cancel died",
        RouteState.ENDED,
        "BEGUN DIED LEFT",
        ["stop 0"],
        num_deaths=1,
        is_admitted=False,
    ),
    "cancelled in ADMITTED": Story("begin admitted cancel finish", RouteState.ENDED, "BEGUN", ["stop 0"]),
    "cancelled in ADMITTED, then death": Story(
        "begin admitted cancel died", RouteState.ENDED, "BEGUN LEFT", ["stop 0"]
    ),
    "cancelled in RUNNING, twice": Story(
        "begin token cancel cancel finish", RouteState.ENDED, "BEGUN", ["stop 0"]
    ),
    "cancelled in RUNNING, then given up": Story(
        "begin token cancel off", RouteState.ENDED, "BEGUN", ["stop 0"]
    ),
    "cancelled while it waits": Story("begin token lost cancel", RouteState.ENDED, "BEGUN LOST LEFT"),
    "cancelled while unanswered": Story(
        "begin token lost begin cancel admitted",
        RouteState.ADMITTED,
        "BEGUN LOST BEGUN ANSWERED",
        ["stop 1"],
        num_moves=1,
    ),
    "cancelled while unanswered, then refused": Story(
        "begin token lost begin cancel full",
        RouteState.ENDED,
        "BEGUN LOST BEGUN ANSWERED",
        ["stop 1"],
        num_moves=1,
    ),
    "cancelled after its end": Story("begin token abort cancel", RouteState.ENDED, "BEGUN LEFT", ["abort 0"]),
    "aborted in NEW": Story("begin abort", RouteState.ENDED, "BEGUN LEFT", ["abort 0"], is_admitted=False),
    "aborted before it was submitted": Story("abort", RouteState.ENDED, "LEFT", is_admitted=False),
    "aborted in RUNNING, twice": Story(
        "begin token abort abort", RouteState.ENDED, "BEGUN LEFT", ["abort 0"]
    ),
    "aborted while it waits": Story("begin token lost abort", RouteState.ENDED, "BEGUN LOST LEFT"),
    "aborted while unanswered": Story(
        "begin token lost begin abort",
        RouteState.ENDED,
        "BEGUN LOST BEGUN ANSWERED LEFT",
        ["abort 1"],
        num_moves=1,
    ),
    "the loss of a session in which its request was closed": Story(
        "begin token abort died", RouteState.ENDED, "BEGUN LEFT", ["abort 0"]
    ),
    "detached in NEW": Story("begin detach", RouteState.DETACHED, "BEGUN LEFT", is_admitted=False),
    "detached in RUNNING, then closed": Story("begin token detach abort", RouteState.DETACHED, "BEGUN LEFT"),
    "detached while unanswered": Story(
        "begin token lost begin detach",
        RouteState.DETACHED,
        "BEGUN LOST BEGUN ANSWERED LEFT",
        num_moves=1,
    ),
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
async def test_what_comes_of_a_way(story: Story) -> None:
    way = Way(reports_prompt="prompt" in story.events).go(story.events)
    route = way.route
    assert (route.state, " ".join(way.heard), way.told) == (story.state, story.heard, list(story.told))
    assert (route.num_deaths, route.num_moves, route.is_admitted) == (
        story.num_deaths,
        story.num_moves,
        story.is_admitted,
    )


async def test_a_stream_of_another_frontend_is_admitted_when_it_is_taken_up() -> None:
    way = Way()
    way.engines.append(Engine("engine-0"))
    way.route.take_up(way.engines[0], 0)  # type: ignore[arg-type]
    assert (way.route.state, way.route.is_admitted, way.route.num_moves) == (RouteState.ADMITTED, True, 0)
    way.go("died")
    assert (way.route.num_deaths, way.heard) == (0, ["BEGUN", "LOST"])


async def test_the_last_engine_counts_the_guesses_of_all() -> None:
    way = Way().go("begin guessed token lost")
    assert way.route.guesses == (2, 3)
    timings = way.go("begin token finish").route.choice.timings
    assert (timings.num_accepted_guesses, timings.num_rejected_guesses) == (4, 5)


async def test_engines_that_refuse_are_noted_until_one_takes_it() -> None:
    way = Way().go("begin token lost begin full")
    assert way.route.refused_by == {way.engines[1]}
    way.go("begin admitted")
    assert way.route.refused_by == set()


async def test_the_client_gets_what_came_before_a_loss_that_nothing_follows() -> None:
    way = Way(reports_prompt=True).go("begin prompt token lost")
    way.route.choice.on_end(way.route.loss)  # as the migrator does where nothing moves
    assert way.route.state is RouteState.ENDED
    prompt, delta = await way.outputs.next_event(), await way.outputs.next_event()
    assert isinstance(prompt, PromptLogprobsEvent)
    assert isinstance(delta, DeltaEvent)
    assert delta.token_ids == TOKENIZER.encode("a")
    with pytest.raises(GenerationLost, match="it was lost"):
        await way.outputs.next_event()
