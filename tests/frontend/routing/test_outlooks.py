"""Many engines' loads as columns say what the loads say one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.frontend.routing.test_policy import IDLE, Engine, make_prompt, u32
from tests.helpers.scheduling import Clock
from triptych.prefix_hash import describe_hash
from triptych.types.outputs import CacheNews, LoadReport
from triptych_services.frontend.routing.load import TRUSTED_S
from triptych_services.frontend.routing.outlooks import Outlooks, create_outlooks
from triptych_services.frontend.routing.policy import SoonestFirstToken
from triptych_services.frontend.routing.prefix_index import EXPECTED_S, PrefixIndex, RoutedPrompt

NUM = 23


def draw_load(generator: np.random.Generator) -> LoadReport:
    return replace(
        IDLE,
        num_prefill_tokens=int(generator.integers(0, 3000)),
        num_running=int(generator.integers(0, 9)),
        num_free_rows=int(generator.integers(0, 3)),
        prefill_token_s=float(generator.choice([0.0, 1e-4, 1.1e-4])),
        decode_step_s=float(generator.choice([0.0, 0.01, 0.012])),
        row_interval_s=float(generator.choice([0.0, 0.02])),
    )


def happen(engines: list[Engine], clock: Clock, generator: np.random.Generator, step: int) -> None:
    """Let a few things that may happen to engines happen."""
    prompts = [make_prompt(100 + 16 * (seed % 3), seed) for seed in range(6)]
    for engine in generator.choice(np.array(engines, object), 6):
        match generator.integers(0, 6):
            case 0 | 1:
                engine.tell(draw_load(generator))
            case 2:
                engine.cache(prompts[generator.integers(0, 6)], int(generator.integers(1, 7)))
            case 3:
                numbers = engine.send(prompts[generator.integers(0, 6)], int(generator.integers(1, 3)))
                if generator.random() < 0.5:
                    engine.tell(draw_load(generator), admitted=u32(*numbers))
                elif generator.random() < 0.5:
                    engine.load.cancel(numbers[0])
            case 4:
                engine.tell(cache=CacheNews(is_cleared=True))
            case 5:
                engine.load.note_hash(describe_hash(16) if generator.random() < 0.9 else None)
    clock.now += float(generator.choice([0.0, 0.003, EXPECTED_S * 0.7, TRUSTED_S * 0.6]))


def by_row(outlooks: Outlooks, prompt: RoutedPrompt) -> dict[int, int]:
    return {int(row): count for count, rows in outlooks.count_cached_tokens(prompt) for row in rows}


@pytest.mark.parametrize("seed", range(4))
def test_many_are_as_one_by_one(seed: int) -> None:
    generator, clock = np.random.default_rng(seed), Clock()
    index = PrefixIndex(clock)
    engines = [Engine(clock, draw_load(generator), index=index) for _ in range(NUM - 3)]
    engines += [Engine(clock, draw_load(generator)) for _ in range(3)]
    loads = [engine.load for engine in engines]
    many, one_by_one = create_outlooks(loads), Outlooks(loads)
    assert type(many) is not Outlooks
    num_holders = 0
    for step in range(60):
        happen(engines, clock, generator, step)
        assert many.refresh() == one_by_one.refresh()
        prompt = make_prompt(100, int(generator.integers(0, 6)))
        cached = {row: count for row in range(NUM) if (count := loads[row].count_cached_tokens(prompt))}
        assert by_row(many, prompt) == by_row(one_by_one, prompt) == cached
        num_holders += len(cached)
        costs = [(float(100 - count), [row]) for row, count in cached.items()]
        num_choices = int(generator.integers(1, 4))
        assert many.soonest(100.0, costs, num_choices) == one_by_one.soonest(100.0, costs, num_choices)
        rows = range(NUM)
        assert list(map(many.num_choices, rows)) == list(map(one_by_one.num_choices, rows))
    assert num_holders > 60


def test_one_that_has_told_no_load_is_waited_for() -> None:
    clock = Clock()
    engines = [Engine(clock) for _ in range(NUM - 1)] + [Engine(clock, reported=None)]
    many = create_outlooks([engine.load for engine in engines])
    assert not many.refresh()
    engines[-1].tell(IDLE)
    assert many.refresh()


def test_a_table_that_has_grown_is_read_anew() -> None:
    clock = Clock()
    engines = [Engine(clock) for _ in range(NUM)]
    policy, prompt = SoonestFirstToken(clock), make_prompt(1000)
    assert policy.choose(engines, prompt, 1) in range(NUM)
    for seed in range(1, 30):
        engines[7].cache(make_prompt(1000, seed), 62)
    engines[7].cache(prompt, 40)
    assert policy.choose(engines, prompt, 1) == 7


def test_an_engine_may_get_the_number_of_one_that_has_left() -> None:
    clock = Clock()
    index = PrefixIndex(clock)
    engines = [Engine(clock, index=index) for _ in range(NUM)]
    many, prompt = create_outlooks([engine.load for engine in engines]), make_prompt(100)
    engines[6].cache(prompt, 3)
    assert many.refresh()
    assert by_row(many, prompt) == {6: 48}
    number = engines[6].load.cached.member
    engines[6].load.leave()
    for _ in range(100):  # what it had is taken out
        engines[7].tell(cache=CacheNews(stored=bytes(range(16))))
    clock.now += 2 * EXPECTED_S + 0.1
    engines[1].cache(prompt, 2)
    assert engines[1].load.cached.member == number
    engines[6].cache(prompt, 1)
    assert many.refresh()
    assert by_row(many, prompt) == {1: 32, 6: 16}
