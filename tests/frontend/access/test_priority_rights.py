"""Rights of an API key to priorities, and what they leave to the requests of others in the scheduler."""

from __future__ import annotations

from random import Random

import pytest

from tests.helpers.scheduling import Engine, make_prompt, make_request, make_scheduler, request_in
from triptych.config.api_keys import ApiKey
from triptych.errors import PermissionDenied
from triptych.types.submit import RequestHead
from triptych_services.frontend.access.caller import ANYONE, Caller
from triptych_services.frontend.requests.raw import RawRequest

NUM_STEPS = 160
NUM_ROWS = 64
MOST_URGENT = -(1 << 31)


def key(tenant: str, min_priority: int | None = None) -> Caller:
    return Caller.of(ApiKey("a-key", "", tenant, min_priority=min_priority))


def raw(priority: int) -> RawRequest:
    return RawRequest(
        api="http", prompt="Hi", head=RequestHead(priority=priority), paths={"priority": "body.priority"}
    )


@pytest.mark.parametrize(
    ("caller", "allowed", "refused"),
    [
        (key("acme"), [0, 1, 1 << 30], [-1, MOST_URGENT]),
        (key("acme", -5), [-5, 0, 7], [-6]),
        (key("*"), [MOST_URGENT, 0], []),
        (key("*", 0), [0], [-1]),
        (ANYONE, [MOST_URGENT, 0, MOST_URGENT - 1], []),  # what is no int32 is refused by its range
    ],
)
def test_priority_is_a_right_of_the_key(caller: Caller, allowed: list[int], refused: list[int]) -> None:
    for priority in allowed:
        assert caller.own(raw(priority)).head.priority == priority
    for priority in refused:
        most = caller.min_priority
        with pytest.raises(
            PermissionDenied, match=rf"^body\.priority: {priority} is more urgent than {most}, "
        ):
            caller.own(raw(priority))


def most_urgent_of(caller: Caller) -> int:
    """Return the most urgent priority that a caller gets."""
    for priority in (MOST_URGENT, -1):
        try:
            return caller.own(raw(priority)).head.priority
        except PermissionDenied:
            pass
    return 0


def waits_beside(hostile: Caller) -> list[int | None]:
    """Return how many steps each request of one tenant waits beside another that keeps twice the rows' requests alive.

    None: it never began.
    """
    random, engine, numbers = Random(1), Engine(make_scheduler(max_num_seqs=NUM_ROWS, num_blocks=4000)), 0
    flood, sent_at, began_at = set[int](), dict[int, int](), dict[int, int]()

    def add(tenant: str, priority: int, max_tokens: int) -> int:
        nonlocal numbers
        numbers += 1
        prompt = make_prompt(16, seed=numbers)
        engine.add(make_request(numbers, prompt, tenant=tenant, priority=priority, max_tokens=max_tokens))
        return numbers

    for step in range(NUM_STEPS):
        while len(flood) < 2 * NUM_ROWS:
            flood.add(add("hostile", most_urgent_of(hostile), random.randrange(16, 80)))
        if step % 10 == 0:
            sent_at[add("bystander", 0, 8)] = step
        plan = engine.plan()
        assert plan is not None
        for row in plan.new_rows:
            began_at.setdefault(request_in(engine.scheduler, row.slot).number, step)
        engine.finish_step()
        flood = {number for number in flood if engine.scheduler.requests.find(0, number) is not None}
    return [began_at[number] - step if number in began_at else None for number, step in sent_at.items()]


def test_no_key_without_the_right_keeps_another_tenant_waiting() -> None:
    waits = waits_beside(key("hostile"))
    assert len(waits) == 16
    assert max(wait if wait is not None else NUM_STEPS for wait in waits) < 16


@pytest.mark.thorough
def test_a_gateway_may_let_its_requests_go_before_all_others() -> None:
    assert waits_beside(key("*")) == [None] * 16
