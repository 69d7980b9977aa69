"""The choice among engines: expected times, bookings, near-equals."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tests.helpers.scheduling import Clock
from triptych.config.process_fields import FrontendConfig
from triptych.prefix_hash import describe_hash, hash_blocks, root_of_request
from triptych.types.outputs import CacheNews, LoadReport, OutputBatch, RequestFailure
from triptych_services.frontend.routing import load as load_module
from triptych_services.frontend.routing.load import TRUSTED_S, EngineLoad, WorkTimes
from triptych_services.frontend.routing.policy import (
    LeastLoaded,
    Random,
    RoundRobin,
    SoonestFirstToken,
    create_policy,
)
from triptych_services.frontend.routing.prefix_index import EXPECTED_S, PrefixIndex, RoutedPrompt

SIZE = 16
IDLE = LoadReport(
    num_prefill_tokens=0,
    num_running=0,
    num_waiting=0,
    num_free_blocks=1000,
    num_free_rows=8,
    prefill_token_s=1e-4,
    decode_step_s=0.01,
    row_interval_s=0.5,
)


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def make_prompt(num_tokens: int, seed: int = 0) -> RoutedPrompt:
    return RoutedPrompt(np.random.default_rng(seed).integers(0, 50_000, num_tokens).astype(np.uint32))


def hashes_of(prompt: RoutedPrompt, num_blocks: int) -> bytes:
    content = prompt._token_ids.tobytes()
    return b"".join(hash_blocks(root_of_request(""), content, SIZE)[:num_blocks])


@dataclass
class Engine:
    """An engine whose batches a test makes."""

    clock: Clock
    reported: LoadReport | None = IDLE
    num_in_flight: int = 0
    num_sent: int = 0
    index: PrefixIndex | None = None
    load: EngineLoad = field(init=False)

    def __post_init__(self) -> None:
        self.load = EngineLoad(self.clock, self.index)
        self.load.note_hash(describe_hash(SIZE))
        if self.reported is not None:
            self.tell(self.reported)

    def tell(self, load: LoadReport | None = None, **fields: object) -> None:
        self.load.note_batch(OutputBatch(1, load=load, **fields))  # type: ignore[arg-type]

    def cache(self, prompt: RoutedPrompt, num_blocks: int) -> None:
        self.tell(cache=CacheNews(stored=hashes_of(prompt, num_blocks)))

    def send(self, prompt: RoutedPrompt, num_choices: int = 1) -> list[int]:
        numbers = list(range(self.num_sent + 1, self.num_sent + 1 + num_choices))
        self.num_sent += num_choices
        self.num_in_flight += num_choices
        self.load.book(numbers, prompt.num_tokens, prompt)
        return numbers


def make_engines(count: int, load: LoadReport | None = IDLE) -> tuple[Clock, list[Engine]]:
    clock = Clock()
    index = PrefixIndex(clock)
    return clock, [Engine(clock, load, index=index) for _ in range(count)]


def test_a_prompt_goes_where_it_is_cached() -> None:
    _, engines = make_engines(4)
    prompt = make_prompt(1000)
    engines[2].cache(prompt, 40)
    assert engines[2].load.count_cached_tokens(prompt) == 640
    for _ in range(20):
        assert SoonestFirstToken().choose(engines, prompt, 1) == 2


def test_a_prompt_cached_whole_still_computes_its_last_token() -> None:
    _, (engine,) = make_engines(1)
    prompt = make_prompt(10 * SIZE)
    engine.cache(prompt, 10)
    assert engine.load.count_cached_tokens(prompt) == 10 * SIZE - 1


def test_waiting_costs_more_than_computing_once_the_queue_is_long() -> None:
    _, (cached, empty) = make_engines(2)
    prompt = make_prompt(1000)
    cached.cache(prompt, 62)  # 992 tokens, 0.1 s
    cached.tell(replace(IDLE, num_prefill_tokens=800))
    assert SoonestFirstToken().choose([cached, empty], prompt, 1) == 0
    cached.tell(replace(IDLE, num_prefill_tokens=1200))
    assert SoonestFirstToken().choose([cached, empty], prompt, 1) == 1


def test_a_burst_sees_itself() -> None:
    """Each prompt is sent before the engine can say anything of the one before."""
    _, engines = make_engines(4)
    policy, counts = SoonestFirstToken(), Counter[int]()
    for seed in range(40):
        prompt = make_prompt(1000, seed)
        index = policy.choose(engines, prompt, 1)
        engines[index].send(prompt)
        counts[index] += 1
    assert sorted(counts.values()) == [10, 10, 10, 10]


def test_a_prompt_that_many_send_is_copied_and_one_that_few_send_is_not() -> None:
    """A copy costs each of those that use it a little; then the emptier engine is the sooner one."""
    _, engines = make_engines(4)
    policy, hot, num_computed, counts = SoonestFirstToken(Clock()), make_prompt(1000), 0, Counter[int]()
    engines[0].cache(hot, 62)
    for seed in range(1, 201):
        rare = make_prompt(1000, seed)
        engines[1].cache(rare, 62)
        assert policy.choose(engines, rare, 1) == 1
        index = policy.choose(engines, hot, 1)
        num_computed += 1000 - engines[index].load.count_cached_tokens(hot)
        (number,) = engines[index].send(hot)
        engines[index].tell(admitted=u32(number))
        counts[index] += 1
        engines[index].tell(replace(IDLE, num_running=counts[index], num_free_rows=100))
    assert num_computed == 3 * 1000 + 197 * 8
    assert max(counts.values()) <= 1.3 * 50


def test_a_burst_of_one_prompt_is_computed_once_at_each_engine() -> None:
    _, engines = make_engines(4)
    policy, prompt, num_computed, counts = SoonestFirstToken(Clock()), make_prompt(1000), 0, Counter[int]()
    for _ in range(80):
        index = policy.choose(engines, prompt, 1)
        num_computed += 1000 - engines[index].load.count_cached_tokens(prompt)
        engines[index].send(prompt)
        counts[index] += 1
    assert num_computed == 4 * 1000 + 76 * 8
    assert max(counts.values()) <= 1.3 * 20


def test_expectations_are_forgotten() -> None:
    clock, (engine,) = make_engines(1)
    prompt = make_prompt(10 * SIZE + 1)
    engine.send(prompt)
    clock.now += EXPECTED_S
    assert engine.load.count_cached_tokens(prompt) == 10 * SIZE
    clock.now += EXPECTED_S + 0.1
    engine.send(make_prompt(40, seed=1))
    clock.now += EXPECTED_S + 0.1
    assert engine.load.count_cached_tokens(prompt) == 0


def test_a_prompt_that_begins_as_no_other_is_not_hashed() -> None:
    _, engines = make_engines(20)
    prompt = make_prompt(1000)
    for seed in range(1, 40):
        engines[0].cache(make_prompt(1000, seed), 60)
    engines[SoonestFirstToken().choose(engines, prompt, 1)].send(prompt)
    assert not prompt.is_hashed(SIZE)
    again = make_prompt(1000)
    chosen = engines[SoonestFirstToken().choose(engines, again, 1)]
    assert chosen.load.count_cached_tokens(again) == 62 * SIZE
    assert prompt.is_hashed(SIZE)


@pytest.mark.parametrize("seed", range(3))
def test_it_does_not_matter_when_prompts_are_hashed(seed: int) -> None:
    generator, (clock, engines) = np.random.default_rng(seed), make_engines(2)
    num_expected = 0
    for _ in range(200):
        choice = int(generator.integers(0, 5))
        tails = [make_prompt(40 + 8 * choice, choice), make_prompt(40 + 8 * choice, choice)]
        tails[0].keys(SIZE)
        if generator.random() < 0.4:
            for engine, prompt in zip(engines, tails, strict=True):
                engine.send(prompt)
        counts = [engine.load.count_cached_tokens(tails[0]) for engine in engines]
        assert counts[0] == counts[1]
        num_expected += counts[0] > 0
        clock.now += float(generator.choice([0.0, 0.3 * EXPECTED_S, 0.8 * EXPECTED_S, 1.5 * EXPECTED_S]))
    assert 20 < num_expected < 180


def test_a_request_counts_once_however_late_the_news_are() -> None:
    clock, (engine,) = make_engines(1)
    prompt, load = make_prompt(500), engine.load
    (number,) = engine.send(prompt)
    assert load.waiting_s(1e-4) == pytest.approx(0.05)
    engine.tell(IDLE)  # made before the request came
    assert load.waiting_s(1e-4) == pytest.approx(0.05)
    engine.tell(admitted=u32(number))
    assert load.waiting_s(1e-4) == pytest.approx(0.05), "the load says nothing of it yet"
    engine.tell(replace(IDLE, num_prefill_tokens=500))
    assert load.waiting_s(1e-4) == pytest.approx(0.05)
    clock.now += 0.02
    assert load.waiting_s(1e-4) == pytest.approx(0.03), "computed meanwhile"
    clock.now += 1.0
    assert load.waiting_s(1e-4) == 0.0


@pytest.mark.parametrize("end", ["refused", "aborted"])
def test_a_request_that_is_never_admitted_counts_no_more(end: str) -> None:
    _, (engine,) = make_engines(1)
    numbers = engine.send(make_prompt(500), num_choices=3)
    assert engine.load.num_choices == 3
    for number in numbers:
        if end == "aborted":
            engine.load.cancel(number)
        else:
            engine.tell(failures=(RequestFailure(number, "QUEUE_FULL", "full"),))
    assert (engine.load.num_choices, engine.load.waiting_s(1e-4)) == (0, 0.0)


def test_a_full_engine_is_waited_for() -> None:
    _, (full, busy) = make_engines(2)
    prompt = make_prompt(320)
    full.cache(prompt, 20)
    full.tell(replace(IDLE, num_running=8, num_free_rows=0))
    busy.tell(replace(IDLE, num_prefill_tokens=4000))
    # 0.5 s for a row there; 0.43 s for the prompts that wait here
    assert SoonestFirstToken().choose([full, busy], prompt, 1) == 1
    busy.tell(replace(IDLE, num_prefill_tokens=6000))
    assert SoonestFirstToken().choose([full, busy], prompt, 1) == 0
    assert full.load.first_token_s(1, 3, WorkTimes(1e-4, 0.01)) == pytest.approx(1.51, abs=0.001)


def test_near_equals_share_and_the_emptier_of_two_wins() -> None:
    _, engines = make_engines(3)
    for engine, num_running in zip(engines, (5, 1, 3), strict=True):
        engine.tell(replace(IDLE, num_running=num_running, num_prefill_tokens=num_running))
    prompt = make_prompt(20)
    counts = Counter(SoonestFirstToken().choose(engines, prompt, 1) for _ in range(3000))
    assert counts[0] == 0, "of any two it is the fuller one"
    assert 0.6 < counts[1] / 3000 < 0.73, "two of three pairs have it"


def test_engines_that_have_measured_nothing_are_taken_for_the_best() -> None:
    _, (measured, new) = make_engines(2)
    new.tell(replace(IDLE, prefill_token_s=0.0, decode_step_s=0.0, row_interval_s=0.0))
    measured.tell(replace(IDLE, num_prefill_tokens=1000))
    assert SoonestFirstToken().choose([measured, new], make_prompt(100), 1) == 1
    new.tell(replace(IDLE, prefill_token_s=0.0, decode_step_s=0.0, num_prefill_tokens=5000))
    assert SoonestFirstToken().choose([measured, new], make_prompt(100), 1) == 0


@pytest.mark.parametrize("measure", ["prefill_token_s", "decode_step_s"])
def test_an_engine_that_was_slow_once_is_tried_again(measure: str) -> None:
    clock, (slow, other) = make_engines(2)
    prompt = make_prompt(100)
    slow.tell(replace(IDLE, **{measure: 0.2}))
    for _ in range(20):
        assert SoonestFirstToken(clock).choose([slow, other], prompt, 1) == 1
    clock.now += TRUSTED_S + 1
    counts = Counter(SoonestFirstToken(clock).choose([slow, other], prompt, 1) for _ in range(200))
    assert 50 < counts[0] < 150, "nothing that was measured lately speaks against it"
    slow.tell(replace(IDLE, **{measure: 0.19}))
    for _ in range(20):
        assert SoonestFirstToken(clock).choose([slow, other], prompt, 1) == 1


def test_an_engine_that_tells_no_load_gets_its_share_by_requests_in_flight() -> None:
    clock, (engine,) = make_engines(1)
    older = Engine(clock, reported=None)
    engine.num_in_flight, older.num_in_flight = 2, 1
    assert SoonestFirstToken().choose([engine, older], make_prompt(100), 1) == 1
    older.send(make_prompt(50))
    assert older.load.num_choices == 0, "nothing would ever take it back"


def test_an_engine_with_another_hash_gets_prompts_all_the_same() -> None:
    _, engines = make_engines(2)
    engines[1].load.note_hash(replace(describe_hash(SIZE), name="sha256"))
    assert "sha256" in engines[1].load.why_no_affinity
    prompt = make_prompt(1000)
    assert engines[1].load.count_cached_tokens(prompt) == 0
    engines[0].tell(replace(IDLE, num_prefill_tokens=2000))
    assert SoonestFirstToken().choose(engines, prompt, 1) == 1
    engines[1].load.note_hash(None)
    assert engines[1].load.why_no_affinity


def test_of_an_engine_that_reports_too_many_blocks_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "_MOST_BLOCKS", 10)
    _, (engine, other) = make_engines(2)
    prompt = make_prompt(16 * 20)
    for each in (engine, other):
        each.cache(prompt, 10)
        assert each.load.count_cached_tokens(prompt) == 160
    for _ in range(2):  # it goes on reporting
        engine.cache(prompt, 11)
        engine.load.note_hash(describe_hash(SIZE))
        assert engine.load.count_cached_tokens(prompt) == len(engine.load.cached) == 0
        assert "more than 10 cached blocks" in engine.load.why_no_affinity
    assert (other.load.count_cached_tokens(prompt), other.load.why_no_affinity) == (160, "")


def test_the_other_policies() -> None:
    _, engines = make_engines(3)
    in_turn = RoundRobin()
    assert [in_turn.choose(engines, None, 1) for _ in range(4)] == [0, 1, 2, 0]
    assert {Random().choose(engines, None, 1) for _ in range(200)} == {0, 1, 2}
    engines[0].num_in_flight = engines[2].num_in_flight = 1
    assert LeastLoaded().choose(engines, None, 1) == 1


def test_each_name_of_the_option_is_a_policy() -> None:
    choices = FrontendConfig.__dataclass_fields__["routing"].metadata["limits"].choices
    assert [type(create_policy(name)) for name in choices] == [
        SoonestFirstToken,
        LeastLoaded,
        RoundRobin,
        Random,
    ]


def test_long_queues_do_not_hide_what_is_cached() -> None:
    """All engines are behind by 2 s: that one of them saves 0.03 s is less than 5%, and still work for nobody."""
    _, engines = make_engines(4, replace(IDLE, num_prefill_tokens=20_000))
    prompt = make_prompt(320)
    engines[1].cache(prompt, 19)
    engines[1].tell(replace(IDLE, num_prefill_tokens=20_300, num_running=8))
    for _ in range(20):
        assert SoonestFirstToken().choose(engines, prompt, 1) == 1
    engines[1].tell(replace(IDLE, num_prefill_tokens=22_000))
    assert SoonestFirstToken().choose(engines, prompt, 1) != 1
