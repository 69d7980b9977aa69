"""Requests of several choices: admitted together or not at all, with one prompt for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.scheduling import Clock, Engine, make_prompt, make_request, make_scheduler
from triptych.errors import DuplicateRequest, InvalidRequest, QueueFull
from triptych.types.sampling import SamplingParams
from triptych.types.submit import RequestHead, SubmitRequest, single_choice
from triptych.wire.step import StepEncoder
from triptych_services.enginecore.request import Request


def make_choices(
    numbers: Sequence[int],
    prompt: Sequence[int],
    *,
    request_id: str = "group",
    priority: int = 0,
    tenant: str = "",
    session: int = 0,
    emitted: Sequence[Sequence[int]] = (),
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> list[Request]:
    submit = SubmitRequest(
        head=RequestHead(request_id, priority, tenant),
        numbers=np.array(numbers, np.uint32),
        seeds=np.array(numbers, np.uint64),
        prompt_token_ids=np.array(prompt, np.uint32),
        emitted=tuple(np.array(token_ids, np.uint32) for token_ids in emitted),
        sampling=SamplingParams(**{"max_tokens": 4, **(sampling or {})}),
        **fields,
    )
    return Request.choices_of(submit, session=session)


def test_choices_share_prompt_and_sampling_until_they_run() -> None:
    engine = Engine(make_scheduler(max_num_seqs=2))
    choices = make_choices(range(3), make_prompt(20))
    engine.add_choices(*choices)
    assert len({id(choice.token_ids) for choice in choices}) == 1
    plan = engine.plan()
    assert plan is not None
    first, second = plan.new_rows
    assert first.content is second.content
    assert len({id(choice.token_ids) for choice in choices}) == 3  # two copies, and one that waits
    engine.run()
    assert len({tuple(tokens) for tokens in engine.tokens.values()}) == 3  # three seeds


def test_only_the_first_choice_reports_the_prompt() -> None:
    choices = make_choices(range(3), make_prompt(20), sampling={"prompt_logprobs": 1})
    assert [choice.awaits_prompt_logprobs for choice in choices] == [True, False, False]


def test_each_choice_goes_on_behind_what_it_has_emitted() -> None:
    engine = Engine(make_scheduler())
    engine.add_choices(*make_choices([0, 1], make_prompt(9)))
    engine.run()
    again = Engine(make_scheduler())
    emitted = [engine.tokens[0, 0][:1], engine.tokens[0, 1][:3]]
    again.add_choices(*make_choices([0, 1], make_prompt(9), emitted=emitted))
    again.run()
    assert again.tokens[0, 0] == engine.tokens[0, 0][1:]
    assert again.tokens[0, 1] == engine.tokens[0, 1][3:]


def test_choices_are_admitted_together_or_not_at_all() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_waiting=2)
    scheduler.requests.add(make_request(9, [1]))
    with pytest.raises(QueueFull, match="1 choices run or wait"):
        scheduler.requests.add(*make_choices(range(4), [1]))
    assert len(scheduler.snapshot().waiting) == 1
    scheduler.requests.add(*make_choices(range(3), [1]))
    assert len(scheduler.snapshot().waiting) == 4


def test_more_choices_than_ever_fit_are_refused_for_good() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_waiting=2)
    with pytest.raises(InvalidRequest, match="5 choices are above the limit 4") as refusal:
        scheduler.requests.add(*make_choices(range(5), [1]))
    assert refusal.value.violations[0].field == "n"


def test_an_id_may_be_alive_once_in_each_session() -> None:
    scheduler = make_scheduler()
    scheduler.requests.add(*make_choices([0, 1], [1]))
    with pytest.raises(DuplicateRequest):
        scheduler.requests.add(*make_choices([2], [1]))
    scheduler.requests.add(*make_choices([0], [1], session=1))  # another frontend, maybe for the same client
    scheduler.requests.abort(0, 0)
    with pytest.raises(DuplicateRequest):  # the other choice lives
        scheduler.requests.add(*make_choices([2], [1]))
    scheduler.requests.abort(0, 1)
    scheduler.requests.add(*make_choices([2], [1]))
    scheduler.check_integrity()


def test_a_full_queue_of_one_tenant_makes_room_for_another() -> None:
    engine = Engine(make_scheduler(max_num_seqs=2, max_num_waiting=6))
    for number in range(8):
        engine.add(make_request(number, [1], tenant="greedy"))
    assert [end.request.number for end in engine.add_choices(make_request(8, [1], tenant="other"))] == [7]
    with pytest.raises(QueueFull):
        engine.scheduler.requests.add(make_request(9, [1], tenant="greedy"))
    displaced = engine.add_choices(*make_choices([10, 11], [1], tenant="third"))
    assert [end.request.number for end in displaced] == [6, 5]
    assert all(isinstance(end.error, QueueFull) and end.error.retry_after_s > 0 for end in displaced)


def test_no_tenant_displaces_one_that_waits_as_little() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1, max_num_waiting=3))
    for number, tenant in enumerate("aabb"):
        engine.add(make_request(number, [1], tenant=tenant))
    with pytest.raises(QueueFull):  # a and b would be left with fewer than c gets
        engine.scheduler.requests.add(*make_choices([4, 5], [1], tenant="c"))
    with pytest.raises(QueueFull):  # two of a against one of c is fair enough to be left alone
        engine.scheduler.requests.add(*make_choices([4, 5], [1], tenant="a"))
    assert len(engine.add_choices(make_request(6, [1], tenant="c"))) == 1


def test_a_more_urgent_request_displaces_the_least_urgent() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1, max_num_waiting=3))
    for number, priority in enumerate([9, 9, 2, 2]):
        engine.add(make_request(number, [1], priority=priority))
    assert [end.request.number for end in engine.add_choices(make_request(4, [1], priority=-5))] == [1]
    with pytest.raises(QueueFull):
        engine.scheduler.requests.add(make_request(5, [1], priority=9))


def test_choices_leave_together_and_not_while_one_of_them_runs() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1, max_num_waiting=5))
    engine.add_choices(
        *make_choices([0, 1], [1], request_id="first", priority=1, sampling={"max_tokens": 30})
    )
    engine.plan()  # choice 0 runs
    engine.add_choices(*make_choices([2, 3, 4], [1], request_id="second", priority=1))
    engine.add(make_request(5, [1], priority=1))
    displaced = engine.add_choices(*make_choices([6, 7], [1], request_id="urgent"))
    assert [end.request.number for end in displaced] == [5, 4, 3, 2]
    with pytest.raises(QueueFull):  # what is left of the least urgent level has begun
        engine.scheduler.requests.add(*make_choices([8, 9, 10, 11], [1], request_id="more"))


def test_moved_requests_have_a_reserve_and_are_not_displaced() -> None:
    engine = Engine(make_scheduler(max_num_seqs=2, max_num_waiting=1))
    for number in range(3):
        engine.add(make_request(number, [1], emitted=[5], max_tokens=9, is_moved=True))
    for number in range(3, 5):
        engine.add(make_request(number, [1], emitted=[5], max_tokens=9, is_moved=True))
    with pytest.raises(QueueFull):
        engine.scheduler.requests.add(make_request(5, [1], emitted=[5], max_tokens=9, is_moved=True))
    with pytest.raises(QueueFull):
        engine.scheduler.requests.add(make_request(5, [1], priority=-1))


def test_prompts_and_sampling_that_wait_are_bounded_in_bytes() -> None:
    scheduler = make_scheduler(max_waiting_bytes=10_000, max_model_len=64, clock=Clock())
    biases = tuple((token_id, 1.0) for token_id in range(400))
    scheduler.requests.add(
        *make_choices([0, 1, 2], [1], request_id="a", sampling={"logit_bias": biases})
    )  # counted once
    with pytest.raises(QueueFull, match=r"with this one scheduler\.max_waiting_bytes 10000 is exceeded"):
        scheduler.requests.add(*make_choices([3], [1], request_id="b", sampling={"logit_bias": biases}))
    scheduler.requests.add(make_request(4, [1]))
    for number in range(3):
        scheduler.requests.abort(0, number)
    scheduler.requests.add(*make_choices([3], [1], request_id="b", sampling={"logit_bias": biases}))
    scheduler.check_integrity()


@pytest.mark.thorough
def test_a_step_takes_new_rows_up_to_a_number_of_bytes() -> None:
    """Prompts that are cached cost a token of the budget each, and all their ids in the message."""
    length = 64 * 1024
    engine = Engine(
        make_scheduler(
            num_blocks=length // 16 + 400, block_size=16, max_num_seqs=64, max_model_len=length + 64
        )
    )
    prompt = make_prompt(length)
    engine.add(make_request(0, prompt, max_tokens=1))
    engine.run()
    for number in range(1, 65):
        engine.add(make_request(number, prompt, max_tokens=2))
    encoder, sizes = StepEncoder(), []
    while engine.scheduler.has_work:
        while len(engine.plans) < engine.steps_in_flight and (plan := engine.plan()) is not None:
            sizes.append(encoder.encode(plan).ByteSize())
        engine.finish_step()
    num_bytes = 4 * length
    assert max(sizes) <= (8 << 20) + 2 * num_bytes
    assert sum(size > num_bytes for size in sizes) >= 2  # they took more than one step
    assert all(len(engine.tokens[0, number]) == 2 for number in range(1, 65))


def test_what_no_message_can_hold_is_refused_alone() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    sampling = {"allowed_token_ids": tuple(range(7_000_000))}
    with pytest.raises(InvalidRequest, match="above the limit 33554432"):
        scheduler.requests.add(*make_choices([0], [1], sampling=sampling))
    scheduler.requests.add(make_request(1, [1]))


def test_tenants_and_salts_have_scopes_of_their_own_for_guesses() -> None:
    """Names that run into each other included."""
    kinds = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"), ("1 a", ""), ("1", " a")]
    scopes = [scope_of(tenant, salt) for tenant, salt in kinds]
    assert len(set(scopes)) == len(kinds)
    assert scope_of("ab", "c", prompt=make_prompt(30)) == scopes[3]
    assert "" not in scopes


def test_scopes_are_for_workers_that_guess() -> None:
    assert scope_of("a", guesses=False) == ""
    assert scope_of("a", speculation=False) == ""


def scope_of(
    tenant: str,
    salt: str = "",
    *,
    prompt: Sequence[int] = (1, 2),
    guesses: bool = True,
    speculation: bool = True,
) -> str:
    head = RequestHead("r", tenant=tenant, cache_salt=salt)
    sampling = SamplingParams(speculation=speculation)
    submit = replace(single_choice(1, "r", prompt, sampling, seed=1), head=head)
    (request,) = Request.choices_of(submit, session=0, guesses=guesses)
    return request.content.draft_scope
