"""Which engine computes a prompt, in seconds, and what becomes of one that another engine is to compute."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tests.helpers.fake_engine import MODEL
from tests.helpers.scheduling import Clock
from triptych.errors import EngineUnavailable, QueueFull
from triptych.prefix_hash import describe_hash, hash_blocks, root_of_request
from triptych.types.kv_transfer import EngineRole, KvEndpoint, KvTail
from triptych.types.outputs import CacheNews, LoadReport, OutputBatch
from triptych.types.submit import EngineWelcome, RequestHead, SubmitRequest
from triptych_services.frontend.engines.prefill import PromptJob, choose_source, prefill_elsewhere
from triptych_services.frontend.engines.session import ADMITTED, EngineLoss
from triptych_services.frontend.routing.load import EngineLoad
from triptych_services.frontend.routing.prefix_index import RoutedPrompt
from triptych_services.frontend.routing.router import Router

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
BUSY = replace(IDLE, num_running=32)
PROMPT = np.random.default_rng(0).integers(0, 300, 8192).astype(np.uint32)


@dataclass(eq=False)
class Engine:
    """An engine as far as prompts are concerned."""

    role: EngineRole
    reported: LoadReport | None = IDLE
    layout: str = "layout"
    block_bytes: int = 1 << 10
    tails: tuple[KvTail, ...] = ()
    is_ready: bool = True
    max_model_len: int = 20_000
    answer: str = "admitted"
    requests: list[SubmitRequest] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)

    def say_takes_streams(self, takes_streams: bool) -> None:
        pass

    def __post_init__(self) -> None:
        self.load = EngineLoad(Clock())
        self.load.note_hash(describe_hash(SIZE))
        if self.reported is not None:
            self.load.note_batch(OutputBatch(1, load=self.reported))
        self.welcome = EngineWelcome(
            engine_id="e",
            ready=True,
            model=replace(MODEL, max_model_len=self.max_model_len),
            role=self.role,
            kv_endpoint=KvEndpoint("w:1", self.layout, self.block_bytes, self.tails),
        )

    def cache(self, num_blocks: int) -> None:
        hashes = list(hash_blocks(root_of_request(""), PROMPT.tobytes(), SIZE))[:num_blocks]
        self.load.note_batch(OutputBatch(2, cache=CacheNews(stored=b"".join(hashes))))

    def submit(self, create, sinks, prompt=None):
        if self.answer == "unready":
            raise EngineUnavailable("not ready")
        self.requests.append(create([7]))
        match self.answer:
            case "admitted":
                sinks[0].on_output(ADMITTED)
            case "full":
                sinks[0].on_end(QueueFull("full", 1.0))
            case "lost":
                sinks[0].on_end(EngineLoss("gone"))
        return [7]

    def abort(self, number: int, sink: object) -> None:
        self.aborted.append(number)


def prefilling(**fields: object) -> Engine:
    return Engine(EngineRole.PREFILL, **fields)  # type: ignore[arg-type]


def decoding(reported: LoadReport | None = BUSY, **fields: object) -> Engine:
    return Engine(EngineRole.DECODE, reported, **fields)  # type: ignore[arg-type]


JOB = PromptJob(RequestHead("r"), PROMPT, routed=RoutedPrompt(PROMPT))


def test_a_long_prompt_goes_elsewhere_where_streams_would_wait_for_it() -> None:
    other, own = prefilling(), decoding()
    chosen = choose_source([own, other], own, JOB)
    assert chosen is not None
    assert chosen[0] is other
    assert chosen[1] == pytest.approx(8192 * 1e-4, rel=0.05)


def test_an_idle_engine_computes_its_prompts_itself() -> None:
    own = decoding(IDLE)
    assert choose_source([own, prefilling()], own, JOB) is None


def test_waiting_prompts_weigh_as_much_as_running_streams() -> None:
    own = decoding(replace(IDLE, num_prefill_tokens=8192))
    assert choose_source([own, prefilling()], own, JOB) is not None
    own = decoding()
    queued = prefilling(reported=replace(IDLE, num_prefill_tokens=40 * 8192))
    assert choose_source([own, queued], own, JOB) is None


@pytest.mark.parametrize("num_tokens", [20, 8192])
def test_short_and_cached_prompts_stay(num_tokens: int) -> None:
    own = decoding(replace(IDLE, num_running=3))
    own.cache(8192 // SIZE if num_tokens == 8192 else 0)
    prompt = PROMPT[:num_tokens]
    assert (
        choose_source(
            [own, prefilling()], own, PromptJob(RequestHead("r"), prompt, routed=RoutedPrompt(prompt))
        )
        is None
    )


def test_blocks_that_take_long_to_come_over_stay() -> None:
    own = decoding(block_bytes=1 << 30)
    assert choose_source([own, prefilling(block_bytes=1 << 30)], own, JOB) is None


@pytest.mark.parametrize(
    ("tails", "transfer_s"),
    [((KvTail(1024, 2 << 30),), 4.3), ((KvTail(1, 2 << 30), KvTail(16384, 1 << 30)), 5.4)],
)
def test_windows_and_states_come_over_whatever_is_cached(
    tails: tuple[KvTail, ...], transfer_s: float
) -> None:
    own, other = decoding(replace(BUSY, num_running=100), tails=tails), prefilling(tails=tails)
    own.cache(256)
    chosen = choose_source([own, other], own, JOB)
    assert chosen is not None
    assert chosen[1] == pytest.approx(transfer_s, rel=0.05)


def test_the_soonest_of_several_is_chosen() -> None:
    own, slow, warm = decoding(), prefilling(reported=replace(IDLE, prefill_token_s=2e-4)), prefilling()
    warm.cache(400)
    assert choose_source([slow, own, prefilling(), warm], own, JOB)[0] is warm  # type: ignore[index]


@pytest.mark.parametrize(
    "other",
    [
        prefilling(layout="other"),
        prefilling(is_ready=False),
        prefilling(max_model_len=8192),
        prefilling(reported=None),
        decoding(IDLE),
        Engine(EngineRole.BOTH),
    ],
)
def test_engines_that_cannot_serve_are_left_out(other: Engine) -> None:
    own = decoding()
    assert choose_source([own, other], own, JOB) is None


def test_only_engines_that_decode_are_served() -> None:
    for role in (EngineRole.BOTH, EngineRole.PREFILL):
        own = Engine(role, BUSY)
        assert choose_source([own, prefilling()], own, JOB) is None


async def test_the_prompt_is_submitted_under_the_lease_that_is_pulled() -> None:
    other, own = prefilling(), decoding()
    prefill = await prefill_elsewhere([own, other], own, JOB)
    assert prefill is not None
    [request] = other.requests
    assert request.kv_lease == prefill.source.lease
    assert request.sampling.max_tokens == 1
    assert prefill.source.endpoint == other.welcome.kv_endpoint
    prefill.abort()
    assert other.aborted == [7]


@pytest.mark.parametrize("answer", ["full", "lost", "unready", "silent"])
async def test_an_engine_that_does_not_take_the_prompt_is_not_waited_for(answer: str) -> None:
    other, own = prefilling(answer=answer), decoding()
    assert await prefill_elsewhere([own, other], own, JOB) is None


def test_an_engine_that_prefills_serves_only_where_there_is_no_other() -> None:
    router, other, own = Router(), prefilling(max_model_len=1000), decoding()
    other.num_in_flight, own.num_in_flight = 0, 9
    router.engines = [other, own]  # type: ignore[list-item]
    wanted = router.find("")
    assert wanted.model == own.welcome.model
    assert router.choose(wanted) is own
    assert router.choose(wanted, tried=[own]) is other
    own.is_ready = False
    router.on_change()
    assert router.choose(router.find("")) is other
