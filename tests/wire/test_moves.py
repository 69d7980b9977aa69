"""An engine dies, drains, falls silent or is full: its requests go on elsewhere, and nobody can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.helpers.fake_engine import eventually
from tests.helpers.frontend import FrontendCore, raw_request
from tests.helpers.units import Unit, running_units, wait_until_idle
from triptych.errors import EngineFailure, GenerationLost
from triptych.types.events import DeltaEvent, FinishedEvent, PromptLogprobsEvent
from triptych.types.sampling import OutputKind
from triptych_services.frontend.streams.migrator import MigrationTerms

NUM_TOKENS = 24
PROMPT = [17, 40, 33, 21, 99, 18, 64, 77, 12]
DEADLINE_S = 30.0
SHAPES: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": {"temperature": 0.0, "ignore_eos": True}},
    "sampled, ends by itself": {"sampling": {"temperature": 1.0, "seed": 3}},
    "three choices": {"sampling": {"temperature": 1.0, "seed": 5, "n": 3, "ignore_eos": True}},
    "log-probabilities": {"sampling": {"temperature": 1.0, "seed": 6, "logprobs": 2, "ignore_eos": True}},
    "of the prompt, too": {
        "sampling": {"temperature": 1.0, "seed": 7, "prompt_logprobs": 1, "n": 2, "ignore_eos": True}
    },
    "a stop string": {"sampling": {"temperature": 1.0, "seed": 8, "stop": ["k", "z"], "min_tokens": 9}},
    "not streamed": {"sampling": {"seed": 9, "ignore_eos": True}, "output_kind": OutputKind.FINAL_ONLY},
    "a deadline": {"sampling": {"seed": 10, "ignore_eos": True}, "deadline_s": DEADLINE_S},
}


@dataclass
class Seen:
    """The output of one request, as its client has it."""

    text: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    prompt_positions: list[int] = field(default_factory=list)
    ends: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    finished: FinishedEvent | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids.values()))

    @property
    def output(self) -> tuple[Any, ...]:
        assert self.finished is not None
        usage = self.finished.usage
        counts = usage.num_prompt_tokens, usage.num_output_tokens
        return self.text, self.token_ids, self.logprobs, self.prompt_positions, self.ends, counts


def make_request(shape: dict[str, Any]) -> Any:
    fields = dict(shape)
    sampling = {"max_tokens": NUM_TOKENS, **fields.pop("sampling", {})}
    return raw_request(PROMPT, sampling=sampling, **fields)


async def follow(
    core: FrontendCore,
    shape: dict[str, Any],
    *,
    at: int = -1,
    then: Callable[[], Awaitable[None]] | None = None,
) -> Seen:
    """Read one request to its end; after `at` tokens let something happen."""
    seen = Seen()
    async with asyncio.timeout(DEADLINE_S), aclosing(core.generator.generate(make_request(shape))) as events:
        async for event in events:
            if isinstance(event, DeltaEvent):
                index = event.index
                assert index not in seen.ends, "output after the end"
                seen.text[index] = seen.text.get(index, "") + event.text
                seen.token_ids.setdefault(index, []).extend(event.token_ids)
                seen.logprobs.setdefault(index, []).extend(event.logprobs)
                if event.finish_reason is not None:
                    seen.ends[index] = event.finish_reason, event.stop_reason
            elif isinstance(event, PromptLogprobsEvent):
                first = event.logprobs.first_position
                seen.prompt_positions += range(first, event.logprobs.end)
            elif isinstance(event, FinishedEvent):
                seen.finished = event
            if then is not None and seen.num_tokens >= at:
                await then()
                then = None
    return seen


def busy(units: list[Unit]) -> Unit:
    """Return the engine that has requests."""
    return next(unit for unit in units if unit.num_requests)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
async def test_an_engine_that_dies_at_any_token_changes_nothing(shape: dict[str, Any]) -> None:
    async with running_units() as (units, core):
        expected = await follow(core, shape)
        for at in (0, 1, 2, 7, NUM_TOKENS - 2):
            await wait_until_idle(units)

            async def kill() -> None:
                for unit in units:
                    if unit.num_requests:  # else it has ended before its client has read so far
                        await unit.die()
                        await unit.start_again()

            async def kill_soon() -> None:
                await eventually(lambda: any(unit.num_requests for unit in units))
                await kill()

            if shape.get("output_kind"):  # it shows nothing before its end
                seen, _ = await asyncio.gather(follow(core, shape), kill_soon())
            else:
                seen = await follow(core, shape, at=at, then=kill)
            assert seen.output == expected.output
            assert seen.finished is not None
            assert seen.finished.is_exact
            await eventually(lambda: all(engine.is_ready for engine in core.router.engines))
        await wait_until_idle(units)
        assert core.metric("moves_total", outcome="exact") >= 1
        assert core.metric("moves_total", outcome="failed") == 0
        num_output = core.metric("generation_tokens_total")
        assert num_output == 6 * expected.num_tokens, "each token is counted once"


async def test_many_requests_of_a_dead_engine_go_on() -> None:
    shape: dict[str, Any] = {"sampling": {"temperature": 1.0, "ignore_eos": True, "max_tokens": 40}}

    def numbered(number: int) -> dict[str, Any]:
        return {"sampling": shape["sampling"] | {"seed": number}}

    async with running_units(2, max_num_seqs=32) as (units, core):
        expected = [await follow(core, numbered(number)) for number in range(4)]

        async def kill() -> None:
            await units[0].die()

        seen = await asyncio.gather(
            *(follow(core, numbered(n % 4), at=10, then=kill if n == 0 else None) for n in range(24))
        )
        assert [each.output for each in seen] == [expected[n % 4].output for n in range(24)]
        num_moved = sum(each.finished.num_moves for each in seen if each.finished is not None)
        assert num_moved == core.metric("moves_total", outcome="exact") > 0


async def test_a_lone_engine_that_is_started_again_goes_on() -> None:
    shape = SHAPES["sampled, ends by itself"]
    async with running_units(1) as ((unit,), core):
        expected = await follow(core, shape)

        async def restart() -> None:
            await unit.die()
            await unit.start_again()

        seen = await follow(core, shape, at=5, then=restart)
        assert seen.output == expected.output
        assert seen.finished is not None
        assert (seen.finished.num_moves, seen.finished.is_exact) == (1, True)


async def test_without_an_engine_a_request_fails_in_time() -> None:
    async with running_units(1, moves=MigrationTerms(timeout_s=0.2), resume_ttl_s=0.3) as ((unit,), core):
        with pytest.raises(GenerationLost, match=r"no engine could go on within 0\.2 s \(engine-0: "):
            await follow(core, SHAPES["greedy"], at=3, then=unit.die)
        assert core.metric("moves_total", outcome="failed") == 1


async def test_nothing_moves_where_the_operator_forbids_it() -> None:
    async with running_units(2, moves=MigrationTerms(policy="never"), resume_ttl_s=0.3) as (units, core):

        async def kill() -> None:
            await busy(units).die()

        with pytest.raises(GenerationLost):
            await follow(core, SHAPES["greedy"], at=3, then=kill)


@pytest.mark.parametrize("policy", ["same_numerics", "any"])
async def test_other_numerics_are_asked_only_if_allowed(policy: str) -> None:
    terms = MigrationTerms(policy=policy, timeout_s=DEADLINE_S if policy == "any" else 0.5)
    async with running_units(2, moves=terms, numerics=("avx512", "cuda"), resume_ttl_s=0.3) as (units, core):

        async def kill() -> None:
            await busy(units).die()

        if policy == "any":
            seen = await follow(core, SHAPES["greedy"], at=3, then=kill)
            assert seen.finished is not None
            assert (seen.finished.num_moves, seen.finished.is_exact) == (1, False)
            assert core.metric("moves_total", outcome="inexact") == 1
        else:
            with pytest.raises(
                GenerationLost, match=r"engine-[01]: numerics: (avx512 and cuda|cuda and avx512)"
            ):
                await follow(core, SHAPES["greedy"], at=3, then=kill)


@pytest.mark.parametrize("identity", [{"weights": "a fine-tune"}, {"numerics": "avx512"}])
async def test_a_stream_leaves_a_worker_that_computes_otherwise(identity: dict[str, str]) -> None:
    """A new fine-tune, or a new release, is rolled out under the worker of an engine that goes on."""
    async with running_units(2) as (units, core):
        expected = await follow(core, SHAPES["three choices"])

        async def upgrade() -> None:
            await busy(units).replace_worker(**identity)

        seen = await follow(core, SHAPES["three choices"], at=12, then=upgrade)
        assert seen.output == expected.output
        assert seen.finished is not None
        assert (seen.finished.num_moves, seen.finished.is_exact) == (1, True)


@pytest.mark.parametrize(
    ("policy", "identity", "error"),
    [
        pytest.param(
            "same_numerics",
            {"weights": "a fine-tune"},
            "weights: simulated and a fine-tune",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "same_numerics",
            {"numerics": "avx512"},
            "numerics: simulated and avx512",
            marks=pytest.mark.thorough,
        ),
        ("any", {"weights": "a fine-tune"}, "weights: simulated and a fine-tune"),
        ("any", {"numerics": "avx512"}, ""),
        pytest.param(
            "never", {"numerics": "avx512"}, "numerics: simulated and avx512", marks=pytest.mark.thorough
        ),
    ],
)
async def test_a_lone_worker_that_computes_otherwise(
    policy: str, identity: dict[str, str], error: str
) -> None:
    """Other weights end no answer that they have not begun; other numerics do where the operator allows it."""
    terms = MigrationTerms(policy=policy, timeout_s=2.0 if error else DEADLINE_S)
    async with running_units(1, moves=terms) as ((unit,), core):

        async def upgrade() -> None:
            await unit.replace_worker(**identity)

        if error:
            with pytest.raises(GenerationLost, match=error):
                await follow(core, SHAPES["greedy"], at=5, then=upgrade)
        else:
            seen = await follow(core, SHAPES["greedy"], at=5, then=upgrade)
            assert seen.finished is not None
            assert (seen.finished.num_moves, seen.finished.is_exact) == (1, False)
        await follow(core, SHAPES["greedy"])


async def test_a_request_that_sees_three_engines_die_ends() -> None:
    shape = {"sampling": SHAPES["greedy"]["sampling"] | {"max_tokens": 200}}
    async with running_units(4, step_ms=5) as (units, core):

        async def kill_each() -> None:
            asyncio.create_task(keep_killing())  # noqa: RUF006 # it ends with the request

        num_killed = 0

        async def keep_killing() -> None:
            nonlocal num_killed
            for _ in range(3):
                num_tokens = core.metric("generation_tokens_total")
                await eventually(lambda n=num_tokens: core.metric("generation_tokens_total") > n)
                await busy(units).die()
                num_killed += 1

        with pytest.raises(EngineFailure, match="it is engine number 3 in a row to die"):
            await follow(core, shape, at=3, then=kill_each)
        assert num_killed == 3
        assert core.metric("moves_total", outcome="suspected") == 1
        assert sum(engine.is_ready for engine in core.router.engines) == 1
        await follow(core, SHAPES["greedy"])


@pytest.mark.thorough
async def test_two_engines_that_die_together_take_nothing_along() -> None:
    """Both of a rack die, one after the other, and are back at once."""

    def numbered(number: int) -> dict[str, Any]:
        return {
            "sampling": SHAPES["greedy"]["sampling"] | {"temperature": 1.0, "seed": number, "max_tokens": 220}
        }

    async with running_units(2, step_ms=5, max_num_seqs=32) as (units, core):
        expected = [await follow(core, numbered(number)) for number in range(5)]

        async def kill_both() -> None:
            first = busy(units)  # a busy machine may have sent all to one of them
            (second,) = (unit for unit in units if unit is not first)
            await first.die()
            await eventually(lambda: second.num_requests)
            await second.die()
            for unit in units:
                await unit.start_again()

        killing: list[asyncio.Task[None]] = []

        async def begin() -> None:
            killing.append(asyncio.create_task(kill_both()))

        seen = await asyncio.gather(
            *(follow(core, numbered(n % 5), at=5, then=begin if n == 0 else None) for n in range(15))
        )
        await killing[0]
        assert core.metric("moves_total", outcome="exact") > 0
        assert [each.output for each in seen] == [expected[n % 5].output for n in range(15)]
        assert core.metric("moves_total", outcome="suspected") == 0


async def test_a_request_that_kills_engines_is_found_among_others() -> None:
    def numbered(number: int) -> dict[str, Any]:
        return {
            "sampling": SHAPES["greedy"]["sampling"] | {"temperature": 1.0, "seed": number, "max_tokens": 60}
        }

    async with running_units(2, step_ms=5, max_num_seqs=32) as (units, core):
        expected = [await follow(core, numbered(number)) for number in range(3)]

        num_taken: dict[Any, int] = {}  # tokens that the poison had when it was first seen at an engine

        def has_poison(unit: Unit) -> bool:
            """Return whether an engine has computed the poison for two tokens, of which a frontend has the first."""
            scheduler = None if unit.is_dead else unit.engine.loop._engine.scheduler
            for request in () if scheduler is None else scheduler.snapshot().requests:
                if request.head.request_id == "poison":
                    num_tokens = len(scheduler.requests.output_of(request))
                    return num_tokens - num_taken.setdefault(request, num_tokens) >= 2
            return False

        async def die_of_it() -> None:
            while True:
                for unit in filter(has_poison, units):
                    await unit.die()
                    await unit.start_again()
                await asyncio.sleep(0.001)

        dying = asyncio.create_task(die_of_it())
        others = [asyncio.create_task(follow(core, numbered(n % 3))) for n in range(8)]
        await eventually(lambda: core.metric("generation_tokens_total") > 0)
        with pytest.raises(EngineFailure, match="with no other suspect beside it"):
            await follow(core, numbered(0) | {"request_id": "poison"})
        assert [(await other).output for other in others] == [expected[n % 3].output for n in range(8)]
        assert core.metric("moves_total", outcome="suspected") == 1
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)


async def test_an_engine_that_drains_hands_its_requests_over() -> None:
    shape = {"sampling": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 200}}
    async with running_units(2, drain_s=0.1) as (units, core):
        expected = await follow(core, shape)
        draining: list[asyncio.Task[None]] = []

        async def drain() -> None:
            draining.append(asyncio.create_task(busy(units).engine.loop.operator.drain()))

        seen = await follow(core, shape, at=10, then=drain)
        assert seen.output == expected.output
        assert seen.finished is not None
        assert seen.finished.num_moves == 1
        await asyncio.wait_for(draining[0], DEADLINE_S)
        await wait_until_idle(units)


async def test_a_lone_engine_that_drains_ends_what_it_has() -> None:
    async with running_units(1, drain_s=0.01) as ((unit,), core):
        expected = await follow(core, SHAPES["greedy"])
        draining: list[asyncio.Task[None]] = []

        async def drain() -> None:
            draining.append(asyncio.create_task(unit.engine.loop.operator.drain()))

        seen = await follow(core, SHAPES["greedy"], at=5, then=drain)
        assert seen.output == expected.output
        await asyncio.wait_for(draining[0], DEADLINE_S)


async def test_an_engine_without_its_worker_hands_its_requests_over() -> None:
    shape = {"sampling": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 100}}
    async with running_units(2) as (units, core):
        expected = await follow(core, shape)

        async def lose_worker() -> None:
            await busy(units).worker.stop()

        seen = await follow(core, shape, at=10, then=lose_worker)
        assert seen.output == expected.output
        assert seen.finished is not None
        assert seen.finished.num_moves == 1


async def test_a_full_engine_takes_what_moves() -> None:
    shape = {"sampling": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 60}}
    async with running_units(2, step_ms=4, max_num_seqs=2, max_num_waiting=1) as (units, core):
        expected = await follow(core, shape)
        running = [asyncio.create_task(follow(core, shape)) for _ in range(6)]
        await eventually(lambda: core.metric("request_prompt_tokens_count") == 7)
        await units[0].die()
        seen = await asyncio.gather(*running)
        assert [each.output for each in seen] == [expected.output] * 6
