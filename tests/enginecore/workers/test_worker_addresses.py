from __future__ import annotations

from collections.abc import Iterable

import pytest

from triptych.errors import ConfigError, EngineUnavailable
from triptych_services.enginecore.workers.worker_addresses import WorkerAddresses


class Names:
    """A name service whose answer a test sets; an exception stands for one that does not answer."""

    def __init__(self, *addresses: str) -> None:
        self.answer: Iterable[str] | Exception = addresses

    async def resolve(self, host: str, port: int) -> Iterable[str]:
        assert (host, port) == ("workers", 9)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def choices(addresses: WorkerAddresses, count: int) -> list[str]:
    """Return so many choices, each of which fails."""
    chosen = []
    for _ in range(count):
        chosen.append(await addresses.choose())
        addresses.pass_over()
    return chosen


async def test_one_address_stays_whatever_happens():
    addresses = WorkerAddresses("a:1")
    assert not addresses.is_pool
    assert addresses.answer_s is None
    assert await choices(addresses, 3) == ["a:1"] * 3
    assert await addresses.is_listed("a:1")


async def test_a_round_asks_each_worker_once():
    addresses = WorkerAddresses("a:1,b:2,dns:workers:9", resolve=Names("c:9", "d:9").resolve)
    rounds = await choices(addresses, 12)
    for start in range(0, 12, 4):
        assert sorted(rounds[start : start + 4]) == ["a:1", "b:2", "c:9", "d:9"]


async def test_a_kept_worker_is_chosen_again_until_it_is_passed_over():
    addresses = WorkerAddresses("dns:workers:9", resolve=Names("a:9", "b:9").resolve)
    kept = await addresses.choose()
    addresses.keep()
    assert await addresses.choose() == kept
    addresses.pass_over()
    other, again = await choices(addresses, 2)
    assert {other, again} == {"a:9", "b:9"}
    assert again == kept, "it is tried last"


async def test_a_worker_that_joins_is_found_in_the_next_round():
    names = Names("a:9")
    addresses = WorkerAddresses("dns:workers:9", resolve=names.resolve)
    assert await choices(addresses, 2) == ["a:9", "a:9"]
    names.answer = ["a:9", "b:9"]
    assert await choices(addresses, 1) == ["b:9"]


async def test_a_worker_has_more_time_to_answer_in_each_round():
    addresses = WorkerAddresses("a:1,b:2")
    limits = []
    for _ in range(10):
        await choices(addresses, 1)
        limits.append(addresses.answer_s)
    assert limits == [2, 2, 4, 4, 8, 8, 10, 10, 10, 10]
    await addresses.choose()
    addresses.keep()
    assert addresses.answer_s == 2


@pytest.mark.parametrize("answer", [[], OSError("no name service"), TimeoutError()])
async def test_names_without_addresses_are_no_worker(answer):
    names = Names()
    names.answer = answer
    addresses = WorkerAddresses("dns:workers:9", resolve=names.resolve)
    with pytest.raises(EngineUnavailable, match=r"engine\.worker_address: .*workers"):
        await addresses.choose()


async def test_an_address_leaves_the_pool_by_an_answer_only():
    names = Names("a:9")
    addresses = WorkerAddresses("b:1,dns:workers:9", resolve=names.resolve)
    assert await addresses.is_listed("a:9")
    assert await addresses.is_listed("b:1")
    names.answer = OSError("no name service")
    assert await addresses.is_listed("a:9")
    names.answer = []
    assert not await addresses.is_listed("a:9")
    assert await addresses.is_listed("b:1"), "it is written down"


def test_what_is_no_address_is_named():
    with pytest.raises(ConfigError, match=r"engine\.worker_address: 'worker' is neither"):
        WorkerAddresses("worker")
