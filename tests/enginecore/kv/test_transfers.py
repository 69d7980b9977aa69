"""Prompts computed on one engine and decoded on another: same tokens, whatever becomes of the transfer."""

from __future__ import annotations

from random import Random

import pytest

from tests.helpers.kv_transfers import Transfers, give_lease, give_source, lease_of
from tests.helpers.scheduling import (
    BLOCK_SIZE,
    Clock,
    Engine,
    NaiveWorker,
    find_cached_blocks,
    make_prompt,
    make_request,
    make_scheduler,
    naive_generation,
)
from triptych.types.facts import KvGroup, KvKind, KvLayout
from triptych.types.kv_transfer import KvEndpoint, TransferCounts
from triptych.types.sampling import SamplingParams
from triptych_services.enginecore.kv.remote import LEASE_S
from triptych_services.enginecore.request import Request
from triptych_services.worker.kv_transfer.service import pulled_sizes

PREFILL_SESSION = 9


FULL = KvGroup(KvKind.FULL, 1, 16, 1024)
WINDOW = KvGroup(KvKind.WINDOW, 1, 16, 1024, 40)
LAYOUTS = {
    "plain": (),
    "latent": (FULL,),
    "windows": (FULL, WINDOW, WINDOW),
    "wide": (KvGroup(KvKind.WINDOW, 1, 32, 1024, 64), FULL, FULL),
    "chunks": (FULL, KvGroup(KvKind.CHUNK, 1, 16, 1024, 64)),
    "hybrid": (FULL, WINDOW, KvGroup(KvKind.STATE, 1, 128, 4096)),
    "states": (KvGroup(KvKind.STATE, 1, 128, 4096),),
}
"""Groups of layers. None: one full group, plain; `latent` is one that is not."""
SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 40))]
"""The seeds of random courses, for each layout."""


def make_layout(layout: str, num_blocks: int = 200, num_pages: int = 60) -> KvLayout:
    """Return a cache of such groups, with as many blocks for each of several."""
    groups = LAYOUTS[layout]
    has_states = any(group.kind is KvKind.STATE for group in groups)
    return KvLayout(
        num_blocks * max(len(groups), 1),
        BLOCK_SIZE,
        1,
        1,
        1,
        "float32",
        groups=groups,
        num_state_blocks=num_pages * has_states,
        continues_states=has_states,
    )


def make_transfers(
    num_blocks: int = 200,
    clock: Clock | None = None,
    *,
    at_once: bool = False,
    layout: str = "plain",
    num_pages: int = 60,
    **config: int,
) -> Transfers:
    """Return two engines and their workers.

    Args:
        num_blocks: Blocks, the null block included; of several groups as many for each.
    """
    fields = {"max_num_batched_tokens": 64, "max_num_seqs": 8, **config}
    kv = make_layout(layout, num_blocks, num_pages)
    assert kv.is_plain == (layout == "plain")

    def make_engine() -> Engine:
        scheduler = make_scheduler(kv=kv, max_model_len=512, clock=clock, **fields)
        return Engine(scheduler, NaiveWorker(groups=kv.groups))

    return Transfers(make_engine(), make_engine(), at_once=at_once)


def submit(
    transfers: Transfers, number: int, length: int, *, ready_in_s: float = 0.0, max_tokens: int = 12
) -> Request:
    prompt = make_prompt(length, seed=number)
    transfers.prefill.add(
        give_lease(make_request(number, prompt, session=PREFILL_SESSION, max_tokens=1), number)
    )
    request = give_source(make_request(number, prompt, max_tokens=max_tokens), number, ready_in_s)
    transfers.decode.add(request)
    return request


def expected(number: int, length: int, max_tokens: int = 12) -> list[int]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return naive_generation(make_prompt(length, seed=number), number, sampling, (), 512)[0]


def run(transfers: Transfers, *, carry: bool = True) -> None:
    for _ in range(10_000):
        is_busy = transfers.turn()
        for pull_id in list(transfers.pulls):
            is_busy |= carry and transfers.carry_block(pull_id)
        transfers.report()
        if not is_busy:
            return
    raise AssertionError("not done")


def check_all_given_back(transfers: Transfers) -> None:
    for engine in (transfers.prefill, transfers.decode):
        snapshot = engine.scheduler.snapshot()
        assert snapshot.num_used_blocks == 0
        assert not engine.scheduler.has_work


async def test_a_pulled_prompt_is_not_computed_again() -> None:
    transfers = make_transfers()
    request = submit(transfers, 1, 200)
    run(transfers)
    assert transfers.result_of(1)[0] == expected(1, 200)
    assert request.num_cached_tokens == 200 // BLOCK_SIZE * BLOCK_SIZE
    assert transfers.decode.worker.num_tokens_computed == 200 % BLOCK_SIZE + 12 - 1
    num_blocks = 200 // BLOCK_SIZE
    assert transfers.decode.scheduler.transfers.counts == TransferCounts(
        num_in_complete=1, num_in_blocks=num_blocks
    )
    assert transfers.prefill.scheduler.transfers.counts == TransferCounts(
        num_out_complete=1, num_out_blocks=num_blocks
    )
    check_all_given_back(transfers)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_of_a_pulled_prompt_only_the_rest_is_computed(layout: str) -> None:
    transfers = make_transfers(layout=layout)
    for number, length in enumerate((200, 129, 110, 96, 33, 17, 16, 5)):
        request = submit(transfers, number, length)
        run(transfers)
        assert transfers.result_of(number)[0] == expected(number, length)
        unit = 32 if layout == "wide" else BLOCK_SIZE
        brought = (length - 1) // unit * unit
        if layout in ("hybrid", "states") and brought % 128 < BLOCK_SIZE:
            brought = brought // 128 * 128  # no step more for so little
        if layout == "plain":
            brought = min(length // BLOCK_SIZE * BLOCK_SIZE, length - 1)
        assert request.num_cached_tokens == brought
    counts = transfers.decode.scheduler.transfers.counts
    assert counts.num_in_failed == 0
    assert transfers.prefill.scheduler.transfers.counts.num_out_complete == 8
    check_all_given_back(transfers)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_workers_tell_how_many_bytes_a_prompt_brings(layout: str) -> None:
    """Frontends compare the time that these take with that of computing the prompt."""
    transfers = make_transfers(layout=layout)
    submit(transfers, 1, 200)
    run(transfers)
    kv = make_layout(layout)
    endpoint = KvEndpoint("w:1", "layout", *pulled_sizes(kv))
    came = transfers.decode.scheduler.transfers.counts
    num_bytes = (came.num_in_blocks - came.num_in_pages) * kv.block_bytes + came.num_in_pages * kv.page_bytes
    of_chunk = 4 * kv.block_bytes if layout == "chunks" else 0  # it is told whole, and 192 begins one
    assert endpoint.pulled_bytes(192 / BLOCK_SIZE, 192) == num_bytes + of_chunk


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_of_a_longer_prompt_only_what_is_not_here_is_pulled(layout: str) -> None:
    """States come as one page, and windows as what the last position sees."""
    transfers = make_transfers(layout=layout)
    prompt = make_prompt(200, seed=1)
    transfers.decode.add(make_request(5, prompt[:120], max_tokens=1))
    run(transfers)
    submit(transfers, 1, 200)
    run(transfers)
    assert transfers.result_of(1)[0] == expected(1, 200)
    num_rest = (192 - 112) // BLOCK_SIZE
    num_parts = {
        "plain": num_rest,
        "latent": num_rest,
        "windows": num_rest + 2 * 3,
        "wide": 2 * (192 - 96) // BLOCK_SIZE + 2,
        "chunks": num_rest,
        "hybrid": num_rest + 3 + 1,
        "states": 1,
    }
    num_pages = int(layout in ("hybrid", "states"))
    came, left = (engine.scheduler.transfers.counts for engine in (transfers.decode, transfers.prefill))
    assert (came.num_in_blocks, came.num_in_pages) == (num_parts[layout], num_pages)
    assert left.num_out_pages == num_pages
    check_all_given_back(transfers)


async def test_a_prompt_of_whole_blocks_computes_its_last_token_again() -> None:
    transfers = make_transfers()
    submit(transfers, 1, 4 * BLOCK_SIZE)
    run(transfers)
    assert transfers.result_of(1)[0] == expected(1, 4 * BLOCK_SIZE)
    assert transfers.decode.worker.num_tokens_computed == 12
    check_all_given_back(transfers)


async def test_blocks_are_offered_while_later_chunks_are_computed() -> None:
    transfers = make_transfers()
    submit(transfers, 1, 256)
    transfers.turn()
    transfers.turn()
    assert 0 < transfers.num_offered(1) < 256 // BLOCK_SIZE
    transfers.turn()
    assert transfers.carry_block(1)


async def test_others_pass_a_request_that_waits_for_its_blocks() -> None:
    transfers = make_transfers()
    submit(transfers, 1, 200)
    transfers.decode.add(make_request(2, make_prompt(40, seed=2), max_tokens=12))
    run(transfers, carry=False)
    assert transfers.result_of(2)[0] == expected(2, 40)
    assert (0, 1) not in transfers.decode.outcomes


async def test_a_failed_pull_keeps_what_has_arrived_and_computes_the_rest() -> None:
    transfers = make_transfers()
    request = submit(transfers, 1, 200)
    while not transfers.pulls or not transfers.carry_block(1):
        transfers.turn()
    transfers.fail_pull(1, "cut")
    transfers.report()
    run(transfers)
    assert transfers.result_of(1)[0] == expected(1, 200)
    assert request.num_cached_tokens == BLOCK_SIZE
    counts = transfers.decode.scheduler.transfers.counts
    assert counts == TransferCounts(num_in_failed=1, num_in_blocks=1)


async def test_a_spoiled_pull_keeps_nothing() -> None:
    transfers = make_transfers()
    request = submit(transfers, 1, 200)
    while not transfers.pulls or not transfers.carry_block(1):
        transfers.turn()
    transfers.fail_pull(1, "NaN", is_spoiled=True)
    run(transfers)
    assert transfers.result_of(1)[0] == expected(1, 200)
    assert request.num_cached_tokens == 0


async def test_a_late_pull_is_given_up_once_the_rest_could_have_been_computed() -> None:
    clock = Clock()
    transfers = make_transfers(clock=clock)
    submit(transfers, 1, 200, ready_in_s=3.0)
    run(transfers, carry=False)
    assert transfers.decode.scheduler.next_due_at == clock.now + 3.0 + LEASE_S
    clock.now += 3.0 + LEASE_S - 0.1  # nothing is measured, so the lease's time counts
    transfers.decode.scheduler.requests.expire(clock.now)
    assert transfers.pulls
    clock.now += 0.2
    transfers.decode.scheduler.requests.expire(clock.now)
    run(transfers, carry=False)
    assert transfers.result_of(1)[0] == expected(1, 200)
    assert not transfers.pulls


async def test_a_measured_engine_waits_no_longer_than_computing_takes() -> None:
    clock = Clock()
    transfers = make_transfers(clock=clock)
    for number in range(2, 22):
        transfers.decode.add(make_request(number, make_prompt(100, seed=number), max_tokens=2))
        while transfers.decode.scheduler.num_requests:
            clock.now += 0.01
            transfers.turn()
    submit(transfers, 1, 200)
    run(transfers, carry=False)
    clock.now += 0.5
    transfers.decode.scheduler.requests.expire(clock.now)
    run(transfers, carry=False)
    assert transfers.result_of(1)[0] == expected(1, 200)


async def test_a_lease_ends_when_nobody_pulls() -> None:
    clock = Clock()
    transfers = make_transfers(clock=clock)
    submit(transfers, 1, 200)
    run(transfers, carry=False)
    scheduler = transfers.prefill.scheduler
    assert scheduler.snapshot().num_used_blocks == 200 // BLOCK_SIZE
    assert scheduler.next_due_at == clock.now + LEASE_S
    clock.now += LEASE_S - 0.1
    scheduler.requests.expire(clock.now)
    assert scheduler.snapshot().num_used_blocks
    clock.now += 0.2
    scheduler.requests.expire(clock.now)
    assert scheduler.snapshot().num_used_blocks == 0
    assert scheduler.transfers.counts == TransferCounts(num_out_expired=1)
    plan = transfers.plan_prefill()
    assert plan is not None
    assert plan.kv_orders is not None
    assert plan.kv_orders.released == (lease_of(1),)
    assert plan.num_tokens == 0
    transfers.finish_prefill()


async def test_each_pull_renews_the_lease() -> None:
    clock = Clock()
    transfers = make_transfers(clock=clock)
    submit(transfers, 1, 200)
    run(transfers, carry=False)
    for _ in range(4):
        clock.now += LEASE_S - 1
        assert transfers.carry_block(1)
        transfers.report()
        transfers.prefill.scheduler.requests.expire(clock.now)
    assert transfers.prefill.scheduler.snapshot().num_used_blocks == 200 // BLOCK_SIZE


async def test_a_lease_ends_with_an_aborted_prompt() -> None:
    transfers = make_transfers()
    submit(transfers, 1, 300)
    transfers.turn()
    transfers.turn()
    transfers.prefill.scheduler.requests.abort(PREFILL_SESSION, 1)
    assert transfers.prefill.scheduler.snapshot().num_used_blocks == 0
    run(transfers)
    assert transfers.prefill.scheduler.num_in_flight == 0


async def test_an_aborted_request_gives_back_what_it_pulls() -> None:
    transfers = make_transfers()
    submit(transfers, 1, 200)
    while not transfers.pulls or not transfers.carry_block(1):
        transfers.turn()
    transfers.decode.scheduler.requests.abort(0, 1)
    assert transfers.decode.scheduler.snapshot().num_used_blocks == 0
    plan = transfers.plan_decode()
    assert plan is not None
    assert plan.kv_orders is not None
    assert plan.kv_orders.stopped == (1,)


async def test_what_is_cached_already_is_not_pulled() -> None:
    transfers = make_transfers()
    prompt = make_prompt(200, seed=1)
    transfers.decode.add(make_request(5, prompt, max_tokens=1))
    run(transfers)
    request = give_source(make_request(1, prompt, max_tokens=12), 1)
    transfers.decode.add(request)
    run(transfers)
    assert not transfers.pulls
    assert transfers.result_of(1)[0] == expected(1, 200)


async def test_running_requests_take_the_blocks_of_a_pull() -> None:
    transfers = make_transfers(num_blocks=34)
    transfers.decode.add(make_request(2, make_prompt(200, seed=2), max_tokens=300))
    transfers.turn()
    submit(transfers, 1, 300)
    run(transfers, carry=False)
    assert transfers.decode.scheduler.counters.num_preemptions == 0
    assert transfers.result_of(2)[0] == expected(2, 200, 300)
    run(transfers)
    assert transfers.result_of(1)[0] == expected(1, 300)


async def test_what_has_arrived_waits_for_its_row() -> None:
    """Prompts that are pulled later, and outputs that grow, do not evict it."""
    length, max_tokens, num_requests = 160, 24, 40
    transfers = make_transfers(num_blocks=120, max_num_seqs=4)
    requests = [submit(transfers, number, length, max_tokens=max_tokens) for number in range(num_requests)]
    run(transfers)
    for number, request in enumerate(requests):
        assert transfers.result_of(number)[0] == expected(number, length, max_tokens)
        assert request.num_cached_tokens == length - 1, "the last token's logits are computed here"
    assert transfers.decode.worker.num_tokens_computed == num_requests * max_tokens
    check_all_given_back(transfers)


async def test_running_requests_take_what_has_arrived() -> None:
    transfers = make_transfers(num_blocks=34, max_num_seqs=1)
    transfers.decode.add(make_request(2, make_prompt(200, seed=2), max_tokens=300))
    transfers.turn()
    request = submit(transfers, 1, 250)
    while transfers.decode.scheduler.transfers.counts.num_in_blocks < 250 // BLOCK_SIZE:
        assert transfers.turn()
        assert transfers.carry_block(1) or not transfers.pulls or transfers.decode.plans
        transfers.report()
    run(transfers)
    assert transfers.decode.scheduler.counters.num_preemptions == 0
    assert transfers.result_of(2)[0] == expected(2, 200, 300)
    assert transfers.result_of(1)[0] == expected(1, 250)
    assert 0 < request.num_cached_tokens < 250 // BLOCK_SIZE * BLOCK_SIZE, (
        "some of it was taken, from its end"
    )
    check_all_given_back(transfers)


async def test_what_has_arrived_does_not_keep_the_first_in_line_out_for_ever() -> None:
    """The one before it in line lacks the blocks that it holds, and nothing runs that would give back any."""
    transfers = make_transfers(num_blocks=34, max_num_seqs=1)
    transfers.decode.add(make_request(2, make_prompt(40, seed=2), max_tokens=100))
    transfers.turn()
    transfers.decode.add(make_request(3, make_prompt(300, seed=3), max_tokens=12))
    submit(transfers, 1, 250)
    run(transfers)
    for number, length, max_tokens in ((2, 40, 100), (3, 300, 12), (1, 250, 12)):
        assert transfers.result_of(number)[0] == expected(number, length, max_tokens)
    assert transfers.decode.scheduler.counters.num_preemptions == 0
    check_all_given_back(transfers)


@pytest.mark.parametrize("end", ["abort", "loss", "deadline"])
async def test_what_has_arrived_is_given_back(end: str) -> None:
    clock = Clock()
    transfers = make_transfers(clock=clock, max_num_seqs=1)
    transfers.decode.add(make_request(2, make_prompt(20, seed=2), max_tokens=400))
    transfers.turn()
    submit(transfers, 1, 200)
    late = give_source(make_request(3, make_prompt(200, seed=1), max_tokens=2, deadline=clock.now + 1), 1)
    transfers.decode.add(late)
    counts = transfers.decode.scheduler.transfers.counts
    while counts.num_in_blocks < 200 // BLOCK_SIZE:
        transfers.turn()
        for pull_id in list(transfers.pulls):
            transfers.carry_block(pull_id)
        transfers.report()
    num_used = transfers.decode.scheduler.snapshot().num_used_blocks
    assert num_used > 200 // BLOCK_SIZE
    match end:
        case "abort":
            transfers.decode.scheduler.requests.abort(0, 1)
            transfers.decode.scheduler.requests.abort(0, 3)
        case "loss":
            transfers.lose_decode_worker()
        case "deadline":
            transfers.decode.scheduler.requests.abort(0, 1)
            clock.now += 2
            transfers.decode.scheduler.requests.expire(clock.now)
    transfers.decode.scheduler.check_integrity()
    assert transfers.decode.scheduler.snapshot().num_used_blocks <= num_used - 200 // BLOCK_SIZE


@pytest.mark.parametrize("length", [64 + 5, 64 + 20, 128 + 1])
async def test_invalid_kv_is_not_pulled_whole(length: int) -> None:
    """It is noticed with the first token, in a chunk after the one that has computed the last full block."""
    transfers = make_transfers(at_once=True)
    transfers.decode.worker.has_failed = True  # wrong KV would show in wrong tokens
    request = submit(transfers, 1, length)
    while transfers.prefill.scheduler.num_requests:
        transfers.plan_prefill()
        is_last = transfers.prefill.scheduler.snapshot().running[0].num_prompt_tokens <= (
            transfers.prefill.worker.num_tokens_computed + 64
        )
        slots = {"failing_slots": [0]} if is_last else {"spoiled_slots": [0]}
        transfers.finish_prefill(**slots)
        transfers.plan_decode()
        transfers.report()
    while transfers.decode.scheduler.has_work:
        transfers.turn()
        transfers.report()
    assert transfers.result_of(1)[0] == expected(1, length)
    assert request.num_cached_tokens == 0


async def test_a_request_that_fails_on_pulled_blocks_leaves_none_in_the_cache() -> None:
    transfers = make_transfers()
    submit(transfers, 1, 200)
    while not transfers.pulls or not transfers.carry_block(1):
        transfers.turn()
    transfers.fail_pull(1, "cut")  # before anybody has noticed that the block is garbage
    transfers.report()
    while not transfers.decode.plans:
        transfers.plan_decode()
    transfers.decode.finish_step(failing_slots=[0])
    again = make_request(5, make_prompt(200, seed=1), max_tokens=1)
    assert find_cached_blocks(transfers.decode.scheduler, again) == []


async def test_the_choices_of_one_prompt_pull_it_once() -> None:
    transfers = make_transfers()
    prompt = make_prompt(200, seed=1)
    transfers.prefill.add(give_lease(make_request(1, prompt, session=PREFILL_SESSION, max_tokens=1), 1))
    choices = [make_request(number, prompt, max_tokens=12, request_id="r") for number in (1, 2, 3)]
    give_source(choices[0], 1)
    for request in choices[1:]:
        request.content = choices[0].content
    transfers.decode.add_choices(*choices)
    run(transfers)
    for number in (1, 2, 3):
        sampling = SamplingParams(max_tokens=12)
        assert transfers.result_of(number)[0] == naive_generation(prompt, number, sampling, (), 512)[0]
    assert transfers.decode.worker.num_tokens_computed == 3 * (200 % BLOCK_SIZE + 12 - 1)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", SEEDS)
async def test_bytes_that_arrive_at_once_overwrite_nothing_in_use(seed: int, layout: str) -> None:
    """Prompts are pulled beside short requests, whose blocks are given away while their last steps are in flight."""
    random = Random(seed)
    transfers = make_transfers(at_once=True, max_num_seqs=4, layout=layout)
    outputs = dict[int, list[int]]()
    while len(outputs) < 40 or transfers.decode.scheduler.has_work:
        if len(outputs) < 40 and random.random() < 0.4:
            number, length, max_tokens = len(outputs), random.randint(20, 120), random.randint(2, 20)
            outputs[number] = expected(number, length, max_tokens)
            if random.random() < 0.5:
                submit(transfers, number, length, max_tokens=max_tokens)
            else:
                prompt = make_prompt(length, seed=number)
                transfers.decode.add(make_request(number, prompt, max_tokens=max_tokens))
        transfers.turn()
        transfers.report()
    for number, tokens in outputs.items():
        assert transfers.result_of(number)[0] == tokens, number


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", SEEDS)
async def test_random_transfers_and_faults_change_no_token(seed: int, layout: str, at_once: bool) -> None:
    """Few blocks, many prompts, and transfers that fail, stop, are late or lose either worker."""
    random, clock = Random(seed), Clock()
    num_blocks, num_rows = random.choice((40, 60, 120)), random.choice((2, 8))
    transfers = make_transfers(
        num_blocks,
        clock,
        at_once=at_once,
        max_num_seqs=num_rows,
        layout=layout,
        num_pages=random.choice((6, 12, 60)),
    )
    lengths: dict[int, int] = {}
    aborted = set[int]()
    for number in range(1, 25):
        lengths[number] = random.randint(1, 400)
        submit(transfers, number, lengths[number], ready_in_s=random.choice((0.0, 0.5, 20.0)))
        for _ in range(random.randint(0, 8)):
            clock.now += random.choice((0.0, 0.001, 0.05, 1.0))
            for engine in (transfers.prefill, transfers.decode):
                engine.scheduler.requests.expire(clock.now)
            transfers.turn()
            for pull_id in list(transfers.pulls):
                for _ in range(random.randint(0, 8)):
                    transfers.carry_block(pull_id)
                if random.random() < 0.05:
                    transfers.fail_pull(pull_id, "cut")
            if random.random() < 0.7:
                transfers.report()
            match random.randint(0, 60):
                case 0:
                    transfers.lose_prefill_worker()
                case 1:
                    transfers.lose_decode_worker()
                case 2:
                    victim = random.choice(list(lengths))
                    finished = transfers.decode.scheduler.requests.abort(0, victim)
                    if finished is not None:
                        transfers.decode.note(finished)
                        aborted.add(victim)
                case 3:
                    transfers.prefill.scheduler.requests.abort(PREFILL_SESSION, random.choice(list(lengths)))
    while transfers.decode.scheduler.num_requests or transfers.prefill.scheduler.has_work:
        run(transfers)
        clock.now += LEASE_S
        for engine in (transfers.prefill, transfers.decode):
            engine.scheduler.requests.expire(clock.now)
    run(transfers)
    for number, length in lengths.items():
        if number not in aborted:
            assert transfers.result_of(number)[0] == expected(number, length), number
    check_all_given_back(transfers)
