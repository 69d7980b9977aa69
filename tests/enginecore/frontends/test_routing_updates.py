"""News of an engine's load and of its prefix cache."""

from __future__ import annotations

import math
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest

from tests.helpers.scheduling import BLOCK_SIZE, Clock, make_prompt
from tests.helpers.stack import NaiveRunner, make_config
from triptych.prefix_hash import HASH_BYTES, describe_hash, hash_blocks, root_of_request, why_unknown
from triptych.types.outputs import CacheNews, OutputBatch
from triptych.types.sampling import SamplingParams
from triptych.types.submit import PrefixHash, single_choice
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.frontends import outputs as outputs_module
from triptych_services.enginecore.frontends.routing_updates import INTERVAL_S
from triptych_services.enginecore.kv.cache_changes import CacheChanges


class Stand:
    """An engine with a naive worker, and a clock that the test sets."""

    def __init__(self, num_blocks: int = 200, max_model_len: int = 512, **scheduler: int) -> None:
        self.clock = Clock()
        config = make_config(**scheduler)
        self.engine = EngineCore(config, self.clock)
        self.runner = NaiveRunner(config, num_blocks, max_model_len)
        self.engine.worker_ready(self.runner.facts, after_crash=False)

    def submit(self, session: int, number: int, prompt: list[int], **fields: str) -> None:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        request = single_choice(number, f"{session}-{number}", prompt, sampling, seed=1, **fields)
        self.engine.frontends.submit(session, request)

    def run(self) -> None:
        while self.engine.num_requests:
            plan = self.engine.plan()
            assert plan is not None
            self.clock.now += 0.001
            self.engine.apply(self.runner.execute(plan))

    def news(self, session: int) -> OutputBatch:
        """The news that the session is told next."""
        self.clock.now += 1.5 * INTERVAL_S
        return self.engine.take_outputs()[session]


def hashes_of(prompt: list[int], cache_salt: str = "") -> bytes:
    content = np.array(prompt, "<u4").tobytes()
    return b"".join(hash_blocks(root_of_request(cache_salt), content, BLOCK_SIZE))


def test_what_a_prompt_leaves_is_told_to_everyone() -> None:
    stand, prompt = Stand(), make_prompt(5 * BLOCK_SIZE + 3)
    for session in (1, 2):
        stand.engine.frontends.open_session(session)
    stand.submit(1, 1, prompt, cache_salt="pepper")
    stand.run()
    stand.clock.now += INTERVAL_S
    batches = stand.engine.take_outputs()
    assert sorted(batches) == [1, 2]
    for batch in batches.values():
        assert batch.cache == CacheNews(is_cleared=True, stored=hashes_of(prompt, "pepper"))


def test_a_frontend_that_comes_late_is_told_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_module, "_HASHES_TOGETHER", 2)
    stand, prompt, other = Stand(), make_prompt(5 * BLOCK_SIZE), make_prompt(3 * BLOCK_SIZE, seed=1)
    stand.engine.frontends.open_session(1)
    stand.submit(1, 1, prompt)
    stand.run()
    stand.news(1)
    stand.submit(1, 2, other)
    stand.run()
    first = stand.engine.frontends.open_session(2)
    assert [batch.batch_id for batch in first] == [1, 2, 3]
    assert b"".join(batch.cache.stored for batch in first if batch.cache) == hashes_of(prompt)
    batch = stand.news(2)
    assert batch.batch_id == 4
    assert batch.cache == CacheNews(stored=hashes_of(other))


def test_news_wait_for_their_time_and_for_something_new() -> None:
    stand = Stand()
    stand.engine.frontends.open_session(1)
    first = stand.news(1)
    assert first.load is not None
    assert first.cache == CacheNews(is_cleared=True)
    stand.clock.now += 10 * INTERVAL_S
    assert stand.engine.next_due_at == math.inf
    assert not stand.engine.take_outputs()
    stand.submit(1, 1, make_prompt(40))
    admitted = stand.engine.take_outputs()[1]
    assert admitted.load is not None, "time has passed, and there is something new"
    assert admitted.load.num_prefill_tokens == 40
    stand.submit(1, 2, make_prompt(50))
    assert stand.engine.next_due_at == stand.clock.now + INTERVAL_S
    assert stand.engine.take_outputs()[1].load is None, "the admission waits for nothing, the news do"
    load = stand.news(1).load
    assert load is not None
    assert (load.num_prefill_tokens, load.num_running, load.num_waiting) == (90, 0, 2)


def test_what_is_read_at_its_end_is_told_with_its_step_or_an_interval_later() -> None:
    stand = Stand()
    stand.engine.frontends.open_session(1)
    stand.news(1)
    stand.clock.now += 10 * INTERVAL_S
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    for number in (1, 2):
        request = single_choice(number, f"{number}", make_prompt(40), sampling, seed=1)
        stand.engine.frontends.submit(1, replace(request, whole_output=True))
        plan = stand.engine.plan()
        assert plan is not None
        assert not stand.engine.take_outputs(), "its step is computed"
        assert stand.engine.next_due_at == pytest.approx(stand.clock.now + INTERVAL_S)
        if number == 2:
            batch = stand.news(1)
            assert (batch.admitted.tolist(), batch.finished) == ([2], ())
            assert batch.load is not None, "a long step"
        stand.engine.apply(stand.runner.execute(plan))
        batch = stand.engine.take_outputs()[1]
        assert [end.number for end in batch.finished] == [number]
        if number == 1:
            assert batch.admitted.tolist() == [1]
            assert batch.load is not None, "the frontend has counted it beside the load"
        stand.clock.now += 2 * INTERVAL_S


def test_many_frontends_are_told_less_often() -> None:
    stand = Stand()
    for session in range(1, 101):
        stand.engine.frontends.open_session(session)
    stand.clock.now += 2 * INTERVAL_S
    assert not stand.engine.take_outputs()
    stand.clock.now += 3 * INTERVAL_S
    assert len(stand.engine.take_outputs()) == 100


def test_the_load_is_in_seconds_once_steps_were_measured() -> None:
    stand = Stand(max_num_batched_tokens=64, max_num_seqs=1)
    stand.engine.frontends.open_session(1)
    unmeasured = stand.news(1).load
    assert unmeasured is not None
    assert (unmeasured.prefill_token_s, unmeasured.decode_step_s, unmeasured.num_free_rows) == (0, 0, 1)
    for number in range(8):
        stand.submit(1, number + 1, make_prompt(64, seed=number))
    stand.run()
    load = stand.news(1).load
    assert load is not None
    assert load.prefill_token_s == pytest.approx(0.001 / 64)
    assert load.decode_step_s == pytest.approx(0.001)
    assert load.row_interval_s == pytest.approx(0.004, rel=0.3)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_told_is_what_is_cached(seed: int) -> None:
    """Prompts with common beginnings in a cache that is too small for them; frontends come and go."""
    rng, stand, told = (
        np.random.default_rng(seed),
        Stand(num_blocks=24, max_model_len=200),
        dict[int, set[bytes]](),
    )
    prefixes, num_evicted = [make_prompt(64, seed=number) for number in range(4)], 0

    def note(session: int, batch: OutputBatch) -> None:
        nonlocal num_evicted
        if batch.cache is not None:
            told[session] = set() if batch.cache.is_cleared else told[session]
            told[session] |= split(batch.cache.stored)
            told[session] -= split(batch.cache.evicted)
            num_evicted += len(split(batch.cache.evicted))

    for number in range(1, 200):
        if rng.random() < 0.1 or not told:
            session, told[number] = number, set()
            for batch in stand.engine.frontends.open_session(number):
                note(number, batch)
        prompt = prefixes[rng.integers(4)][: rng.integers(10, 65)] + make_prompt(
            int(rng.integers(1, 60)), number
        )
        stand.submit(session, number, prompt)
        for _ in range(rng.integers(0, 6)):
            if (plan := stand.engine.plan()) is not None:
                stand.engine.apply(stand.runner.execute(plan))
            if rng.random() < 0.3:
                stand.clock.now += INTERVAL_S
                for at, batch in stand.engine.take_outputs().items():
                    note(at, batch)
        if rng.random() < 0.05:
            stand.run()
            stand.engine.reset_prefix_cache()
    stand.run()
    stand.clock.now += 20 * INTERVAL_S
    for at, batch in stand.engine.take_outputs().items():
        note(at, batch)
    scheduler = stand.engine.scheduler
    assert scheduler is not None
    cached = set(scheduler._blocks.pool.snapshot().hash_to_block)
    assert cached
    assert num_evicted > 100
    assert all(known == cached for known in told.values())


def split(column: bytes) -> set[bytes]:
    return {column[first : first + HASH_BYTES] for first in range(0, len(column), HASH_BYTES)}


def test_a_lost_worker_takes_its_cache_with_it() -> None:
    stand = Stand()
    stand.engine.frontends.open_session(1)
    stand.submit(1, 1, make_prompt(64))
    stand.run()
    assert stand.news(1).cache is not None
    stand.engine.worker_lost()
    stand.runner.reset()
    stand.engine.worker_ready(stand.runner.facts, after_crash=False)
    assert stand.engine.frontends.open_session(2) == []
    assert stand.news(1).cache == CacheNews(is_cleared=True)


def test_what_cancels_out_is_not_told() -> None:
    cached = {b"a": 1, b"b": 2}
    changes = CacheChanges(cached)
    assert changes.base() == []
    assert changes.take() == CacheNews(is_cleared=True)
    assert not changes
    changes.note_evicted(b"a")
    changes.note_stored([b"a"])
    changes.note_stored([b"c"])
    changes.note_evicted(b"c")
    assert not changes
    changes.note_evicted(b"b")
    changes.note_stored([b"d"])
    del cached[b"b"]
    cached[b"d"] = 4
    assert sorted(changes.base()) == [b"a", b"b"]
    assert changes.take() == CacheNews(stored=b"d", evicted=b"b")


def test_the_hash_is_blake2b_over_parent_and_tokens() -> None:
    """Written out, so that another implementation finds the same: the chain of the test vector."""
    size = 3
    root = blake2b((4).to_bytes(4, "little") + b"test", digest_size=16).digest()
    first = blake2b(root + np.array([0, 1, 2], "<u4").tobytes(), digest_size=16).digest()
    second = blake2b(first + np.array([3, 4, 5], "<u4").tobytes(), digest_size=16).digest()
    assert describe_hash(size) == PrefixHash("blake2b-16/le32/v1", size, second)
    assert len(second) == HASH_BYTES


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (describe_hash(16), ""),
        (describe_hash(64), ""),
        (PrefixHash("sha256", 16, b""), "'sha256'"),
        (PrefixHash("blake2b-16/le32/v1", 16, describe_hash(32).test_vector), "differs"),
        (PrefixHash("blake2b-16/le32/v1", 0, b""), "differs"),
    ],
)
def test_hashes_of_another_kind_are_known_to_be(told: PrefixHash, why: str) -> None:
    assert why in why_unknown(told)
    assert bool(why) == bool(why_unknown(told))
