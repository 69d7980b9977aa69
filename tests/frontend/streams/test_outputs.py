"""From tokens to deltas: text, stop strings, merging, log-probabilities. No engine, no network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.byte_tokenizer import EOS, byte_tokenizer
from triptych.errors import EngineFailure, EngineUnavailable, GenerationLost, QueueFull
from triptych.types.events import DeltaEvent
from triptych.types.logprobs import Logprob
from triptych.types.outputs import FinishedRequest, FinishReason, StageTimings
from triptych.types.sampling import OutputKind, SamplingParams
from triptych.types.step import LogprobColumns
from triptych.types.submit import RequestHead
from triptych_services.frontend.engines.session import ADMITTED, ChoiceOutput, EngineLoss
from triptych_services.frontend.streams import route as route_module
from triptych_services.frontend.streams.choice import Choice
from triptych_services.frontend.streams.logprobs import BatchLogprobs
from triptych_services.frontend.streams.outputs import RequestOutputs
from triptych_services.frontend.streams.route import ChoiceRoute, RouteChange, Submission

TOKENIZER = byte_tokenizer()
EOS_ID = TOKENIZER.token_id(EOS)
DELTA = OutputKind.DELTA
HEAD = RequestHead("r")


def token_text(token_id: int) -> str:
    return TOKENIZER.token_bytes(token_id).decode()


class Upstream:
    """An engine that notes what a choice asks of it."""

    name, welcome = "e", None

    def __init__(self) -> None:
        self.told: list[str] = []

    def stop(self, number: int, sink: object) -> None:
        self.told.append("stop")

    def abort(self, number: int, sink: object) -> None:
        self.told.append("abort")


def move_nothing(route: ChoiceRoute, change: RouteChange) -> None:
    """End a choice with its engine, as where requests never move."""
    if change is RouteChange.LOST:
        route.choice.on_end(route.loss)


def connect(outputs: RequestOutputs, upstream: Upstream) -> None:
    """Let all choices be computed by an engine."""
    routes = [
        ChoiceRoute(Submission(HEAD, None, (), None), choice, move_nothing, seed=1)  # type: ignore[arg-type]
        for choice in outputs.choices
    ]
    outputs.send_by(routes)
    for number, route in enumerate(routes):
        route.begin(upstream, number)  # type: ignore[arg-type]


def one_choice(
    *, echo: str = "", prompt: Sequence[int] = (), **sampling: Any
) -> tuple[RequestOutputs, ChoiceRoute, Upstream]:
    outputs, upstream = RequestOutputs("r"), Upstream()
    sampling = {"output_kind": DELTA} | sampling
    outputs.add_choice(SamplingParams(**sampling), TOKENIZER, prompt, echo)
    connect(outputs, upstream)
    return outputs, outputs.routes[0], upstream


def end(reason: FinishReason, stop_token_id: int | None = None, cached: int = 0) -> FinishedRequest:
    return FinishedRequest(1, reason, stop_token_id, cached, StageTimings(1, 2, 3))


def feed(
    choice: Choice | ChoiceRoute, token_ids: Sequence[int], finish: FinishedRequest | None = None
) -> None:
    choice.on_output(ChoiceOutput(list(token_ids), finish=finish))


async def rest(outputs: RequestOutputs) -> list[DeltaEvent]:
    """All deltas that are there or come until the end."""
    deltas = []
    async with asyncio.timeout(30):
        while (delta := await outputs.next_event()) is not None:
            deltas.append(delta)
    return deltas


def text_of(deltas: Sequence[DeltaEvent]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: Sequence[DeltaEvent]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def test_a_prompt_reader_gets_every_token_by_itself() -> None:
    outputs, route, _ = one_choice()
    token_ids = TOKENIZER.encode("Hello world")
    deltas = []
    for place, token_id in enumerate(token_ids):
        feed(route, [token_id], end(FinishReason.LENGTH) if place == len(token_ids) - 1 else None)
        deltas.append(await outputs.next_event())
    assert [delta.token_ids for delta in deltas] == [[token_id] for token_id in token_ids]
    assert text_of(deltas) == "Hello world"
    assert [delta.finish_reason for delta in deltas] == [None] * (len(token_ids) - 1) + [FinishReason.LENGTH]
    assert await outputs.next_event() is None


async def test_what_a_lagging_reader_missed_is_one_delta_per_choice() -> None:
    outputs = RequestOutputs("r")
    choices = [outputs.add_choice(SamplingParams(output_kind=DELTA), TOKENIZER, (), "") for _ in range(2)]
    token_ids = TOKENIZER.encode("the quick brown fox")
    for token_id in token_ids:
        for choice in choices:
            feed(choice, [token_id])
    for choice in choices:
        feed(choice, [], end(FinishReason.LENGTH))
    deltas = await rest(outputs)
    assert [(delta.index, delta.text, delta.finish_reason) for delta in deltas] == [
        (0, "the quick brown fox", FinishReason.LENGTH),
        (1, "the quick brown fox", FinishReason.LENGTH),
    ]
    assert deltas[0].token_ids == token_ids


class Receiver:
    """Takes events while it is ready."""

    def __init__(self, *, fails_at: str = "\0") -> None:
        self.on_ready: Callable[[], None] = lambda: None
        self.taken: list[Any] = []
        self.is_ready = True
        self._fails_at = fails_at

    def take(self, event: Any) -> None:
        self.taken.append(event)
        if self._fails_at in event.text:
            raise ZeroDivisionError

    def become_ready(self) -> None:
        self.is_ready = True
        self.on_ready()


async def test_a_receiver_gets_each_token_in_the_turn_that_brings_it() -> None:
    outputs, route, _ = one_choice()
    receiver = Receiver()
    feed(route, TOKENIZER.encode("Hel"))
    delivery = asyncio.create_task(outputs.deliver_to(receiver))
    await asyncio.sleep(0)
    for place, letter in enumerate("lo!"):
        feed(route, TOKENIZER.encode(letter), end(FinishReason.LENGTH) if place == 2 else None)
        assert receiver.taken[-1].text == letter
    await asyncio.wait_for(delivery, 30)
    assert text_of(receiver.taken) == "Hello!"
    assert receiver.taken[-1].finish_reason is FinishReason.LENGTH


async def test_what_a_receiver_does_not_take_is_merged_until_it_is_ready() -> None:
    outputs, route, _ = one_choice()
    receiver = Receiver()
    delivery = asyncio.create_task(outputs.deliver_to(receiver))
    await asyncio.sleep(0)
    receiver.is_ready = False
    for letter in "Hello":
        feed(route, TOKENIZER.encode(letter))
    outputs.fail(EngineFailure("broken"))
    await asyncio.sleep(0.01)
    assert not receiver.taken
    assert not delivery.done(), "the error comes behind the output"
    receiver.become_ready()
    assert text_of(receiver.taken) == "Hello"
    with pytest.raises(EngineFailure):
        await asyncio.wait_for(delivery, 30)


async def test_a_receiver_that_fails_ends_its_own_request() -> None:
    outputs, route, upstream = one_choice()
    receiver = Receiver(fails_at="x")
    delivery = asyncio.create_task(outputs.deliver_to(receiver))
    await asyncio.sleep(0)
    for letter in "axbc":
        feed(route, TOKENIZER.encode(letter))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(delivery, 30)
    assert text_of(receiver.taken) == "ax"
    outputs.close()
    assert upstream.told == ["abort"]


async def test_a_choice_that_was_aborted_before_its_route_is_stopped_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(route_module, "ACCOUNT_WAIT_S", 0.01)
    outputs, upstream = RequestOutputs("r"), Upstream()
    outputs.add_choice(SamplingParams(output_kind=DELTA), TOKENIZER, (), "")
    outputs.abort()
    connect(outputs, upstream)
    await outputs.wait_admitted()
    [delta] = await rest(outputs)
    assert (delta.finish_reason, upstream.told) == (FinishReason.ABORT, ["stop"])


async def test_final_only_output_comes_once_and_whole() -> None:
    outputs, route, _ = one_choice(output_kind=OutputKind.FINAL_ONLY)
    reader = asyncio.create_task(rest(outputs))
    for token_id in TOKENIZER.encode("Hello world"):
        feed(route, [token_id])
        await asyncio.sleep(0)
    feed(route, [], end(FinishReason.LENGTH))
    (delta,) = await reader
    assert (delta.text, delta.finish_reason) == ("Hello world", FinishReason.LENGTH)


@pytest.mark.parametrize("is_included", [False, True])
async def test_a_stop_string_that_spans_tokens_never_leaks(is_included: bool) -> None:
    outputs, route, upstream = one_choice(stop=("wor", "zzz"), include_stop_str_in_output=is_included)
    token_ids = [token_id for letter in "Hello world" for token_id in TOKENIZER.encode(letter)]
    deltas = []
    for place, token_id in enumerate(token_ids, start=1):
        feed(route, [token_id])
        if place <= len("Hello wor"):
            deltas.append(await outputs.next_event())
    assert text_of(deltas) == ("Hello wor" if is_included else "Hello ")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "wor")
    assert len(ids_of(deltas)) == route.choice.num_tokens == len("Hello wor")  # later tokens are ignored
    assert upstream.told == ["stop"]


async def test_the_stop_string_that_completes_first_wins_whatever_the_order() -> None:
    for stop in (("lo w", "ell"), ("ell", "lo w")):
        outputs, route, _ = one_choice(stop=stop)
        feed(route, TOKENIZER.encode("Hello world"))
        delta = await outputs.next_event()
        assert (delta.text, delta.stop_reason) == ("H", "ell")


async def test_half_a_stop_string_is_shown_when_the_output_ends() -> None:
    outputs, route, _ = one_choice(stop=("world peace",))
    feed(route, TOKENIZER.encode("Hello world"))
    assert (await outputs.next_event()).text == "Hello "
    feed(route, [], end(FinishReason.LENGTH))
    last = await outputs.next_event()
    assert (last.text, last.finish_reason) == ("world", FinishReason.LENGTH)


async def test_a_stop_string_beats_the_engine_s_own_end_when_it_completes_before() -> None:
    outputs, route, upstream = one_choice(stop=("ll",))
    spelled = [token_id for letter in "Hello" for token_id in TOKENIZER.encode(letter)]
    feed(route, spelled, end(FinishReason.LENGTH, cached=3))
    (delta,) = await rest(outputs)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("He", FinishReason.STOP, "ll")
    assert delta.token_ids == spelled[:4]
    assert outputs.num_cached_tokens == 3
    assert upstream.told == []  # it has ended already


async def test_stop_strings_do_not_count_within_min_tokens() -> None:
    outputs, route, _ = one_choice(stop=("a",), min_tokens=2)
    feed(route, [TOKENIZER.encode("a")[0]] * 4)
    delta = await outputs.next_event()
    assert (delta.text, delta.token_ids) == ("aa", TOKENIZER.encode("a") * 3)
    assert delta.stop_reason == "a"


async def test_the_stream_ends_with_the_engine_s_account_of_a_stopped_choice() -> None:
    outputs, route, _ = one_choice(stop=("ll",))
    feed(route, TOKENIZER.encode("Hello"))
    assert (await outputs.next_event()).finish_reason is FinishReason.STOP
    waiting = asyncio.create_task(outputs.next_event())
    await asyncio.sleep(0)
    assert not waiting.done()
    feed(route, [], end(FinishReason.ABORT, cached=5))
    assert await waiting is None
    assert (outputs.num_cached_tokens, route.choice.finish_reason) == (5, FinishReason.STOP)
    assert outputs.timings == StageTimings(1, 2, 3)


async def test_an_engine_that_never_accounts_does_not_hold_the_end_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(route_module, "ACCOUNT_WAIT_S", 0.01)
    outputs, route, _ = one_choice(stop=("ll",))
    feed(route, TOKENIZER.encode("Hello"))
    assert len(await rest(outputs)) == 1


async def test_a_stop_string_begun_within_min_tokens_ends_the_output() -> None:
    outputs, route, upstream = one_choice(stop=("bc",), min_tokens=2)
    for token_id in TOKENIZER.encode("abcd"):
        feed(route, [token_id])
    route.on_output(ChoiceOutput([], None, 0, end(FinishReason.ABORT)))
    deltas = await rest(outputs)
    assert (text_of(deltas), deltas[-1].stop_reason, route.choice.num_tokens) == ("a", "bc", 3)
    assert upstream.told == ["stop"]


@pytest.mark.parametrize("is_included", [False, True])
async def test_the_end_of_sequence_token_has_text_only_if_asked_for(is_included: bool) -> None:
    outputs, route, _ = one_choice(include_stop_str_in_output=is_included, skip_special_tokens=False)
    token_ids = [*TOKENIZER.encode("Hello"), EOS_ID]
    feed(route, token_ids, end(FinishReason.STOP))
    deltas = await rest(outputs)
    assert text_of(deltas) == ("Hello" + EOS if is_included else "Hello")
    assert ids_of(deltas) == token_ids


@pytest.mark.parametrize("is_included", [False, True])
async def test_a_stop_token_has_text_only_if_asked_for(is_included: bool) -> None:
    outputs, route, _ = one_choice(
        stop_token_ids=(33,), include_stop_str_in_output=is_included, skip_special_tokens=False
    )
    token_ids = TOKENIZER.encode("Hello")
    feed(route, [*token_ids, 33], end(FinishReason.STOP, stop_token_id=33))
    (delta,) = await rest(outputs)
    assert delta.text == ("Hello" + token_text(33) if is_included else "Hello")
    assert (delta.token_ids, delta.stop_reason) == ([*token_ids, 33], 33)


async def test_special_tokens_are_left_out_unless_asked_for() -> None:
    for skip, expected in ((True, "HelloHello"), (False, f"Hello{EOS}Hello")):
        outputs, route, _ = one_choice(skip_special_tokens=skip, ignore_eos=True)
        hello = TOKENIZER.encode("Hello")
        feed(route, [*hello, EOS_ID, *hello], end(FinishReason.LENGTH))
        assert text_of(await rest(outputs)) == expected


@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), data=st.data())
def test_streamed_text_is_the_unstreamed_text(text: str, data: st.DataObject) -> None:
    token_ids = TOKENIZER.encode(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=6)))

    async def run() -> str:
        outputs, route, _ = one_choice()
        shown = ""
        for start, stop in zip([0, *cuts], [*cuts, len(token_ids)], strict=True):
            feed(route, token_ids[start:stop])
            if route.choice.has_pending:
                delta = await outputs.next_event()
                assert not delta.text.endswith("\ufffd") or "\ufffd" in text
                shown += delta.text
        feed(route, [], end(FinishReason.LENGTH))
        return shown + text_of(await rest(outputs))

    assert asyncio.run(run()) == TOKENIZER.decode(token_ids) == text


async def test_a_character_that_never_completes_shows_at_the_end() -> None:
    outputs, route, _ = one_choice()
    first_byte = TOKENIZER.encode("é")[0]
    feed(route, [first_byte])
    assert (await outputs.next_event()).text == ""
    feed(route, [], end(FinishReason.LENGTH))
    assert (await outputs.next_event()).text == "\ufffd"


async def test_echo_stands_at_the_head_and_the_output_completes_its_last_character() -> None:
    prompt = TOKENIZER.encode("Hé")[:-1]
    outputs, route, _ = one_choice(echo="H", prompt=prompt)
    feed(route, TOKENIZER.encode("é")[1:], end(FinishReason.LENGTH))
    (delta,) = await rest(outputs)
    assert (delta.text, len(delta.token_ids)) == ("Hé", 1)


async def test_without_detokenizing_there_are_ids_alone() -> None:
    outputs, route, _ = one_choice(detokenize=False)
    feed(route, [1, 2], end(FinishReason.LENGTH))
    (delta,) = await rest(outputs)
    assert (delta.text, delta.token_ids) == ("", [1, 2])


def logprob_columns() -> LogprobColumns:
    """Rows 1 and 3 of a batch; each the chosen token and its two best."""
    return LogprobColumns(
        rows=np.array([1, 3], dtype=np.uint32),
        offsets=np.array([0, 3, 6], dtype=np.uint32),
        token_ids=np.array([40, 41, 40, 43, 43, 44], dtype=np.uint32),
        logprobs=np.array([-1.0, -0.5, -1.0, -0.25, -0.25, -2.0], dtype=np.float32),
        ranks=np.array([2, 1], dtype=np.uint32),
    )


async def test_logprobs_carry_text_and_ranks_of_this_request_s_rows() -> None:
    outputs, route, _ = one_choice(logprobs=2)
    route.on_output(ChoiceOutput([43], BatchLogprobs(logprob_columns()), 3))
    entry = (await outputs.next_event()).logprobs[0]
    text = token_text
    assert entry.chosen == Logprob(43, -0.25, text(43), 1)
    assert entry.top == (Logprob(43, -0.25, text(43), 1), Logprob(44, -2.0, text(44), 2))
    route.on_output(ChoiceOutput([40], BatchLogprobs(logprob_columns()), 1))
    assert (await outputs.next_event()).logprobs[0].chosen == Logprob(40, -1.0, text(40), 2)


async def test_logprobs_tell_the_bytes_of_a_part_of_a_character() -> None:
    outputs, route, _ = one_choice(logprobs=2)
    first, second = TOKENIZER.encode("ü")
    columns = replace(
        logprob_columns(), token_ids=np.array([40, 41, 40, first, first, second], dtype=np.uint32)
    )
    route.on_output(ChoiceOutput([first], BatchLogprobs(columns), 3))
    entry = (await outputs.next_event()).logprobs[0]
    assert [(e.text, e.token_bytes, e.utf8) for e in (entry.chosen, entry.top[1])] == [
        ("\ufffd", b"\xc3", b"\xc3"),
        ("\ufffd", b"\xbc", b"\xbc"),
    ]


async def test_logprobs_that_the_engine_forgot_are_an_error_not_a_gap() -> None:
    _, route, _ = one_choice(logprobs=0)
    with pytest.raises(LookupError):
        route.on_output(ChoiceOutput([1], BatchLogprobs(logprob_columns()), 0))


async def test_tokens_after_the_completed_stop_string_have_no_logprobs() -> None:
    outputs, route, _ = one_choice(logprobs=2, stop=(token_text(40),))
    columns = logprob_columns()
    route.on_output(ChoiceOutput([40, 43], BatchLogprobs(columns), 1))  # row 2, of token 43, is not there
    assert len((await outputs.next_event()).logprobs) == 1


async def test_output_before_an_error_is_delivered_before_it() -> None:
    outputs, route, upstream = one_choice()
    feed(route, TOKENIZER.encode("Hello"))
    route.on_end(EngineFailure("broken"))
    assert (await outputs.next_event()).text == "Hello"
    with pytest.raises(EngineFailure, match="broken"):
        await outputs.next_event()
    assert upstream.told == []  # the engine has ended it


async def test_one_refused_choice_ends_the_others() -> None:
    outputs, upstream = RequestOutputs("r"), Upstream()
    for _ in range(3):
        outputs.add_choice(SamplingParams(n=3), TOKENIZER, (), "")
    connect(outputs, upstream)
    outputs.routes[0].on_output(ADMITTED)
    outputs.routes[2].on_end(QueueFull("full", 2.0))
    with pytest.raises(QueueFull):
        await outputs.wait_admitted()
    assert upstream.told == ["abort", "abort"]


async def test_engine_loss_before_any_token_may_be_retried() -> None:
    outputs, route, _ = one_choice()
    route.on_output(ADMITTED)
    route.on_end(EngineLoss("engine e was lost (x)"))
    with pytest.raises(EngineUnavailable, match="engine e was lost"):
        await outputs.next_event()


async def test_engine_loss_after_tokens_names_the_resume_point() -> None:
    outputs, route, _ = one_choice()
    feed(route, [1, 2, 3])
    route.on_end(EngineLoss("engine e was lost (x)"))
    assert (await outputs.next_event()).token_ids == [1, 2, 3]
    with pytest.raises(GenerationLost, match=r"engine e was lost .* 3 of choice 0"):
        await outputs.next_event()


async def test_engine_loss_after_the_end_changes_nothing() -> None:
    outputs, route, _ = one_choice(stop=("ll",))
    feed(route, TOKENIZER.encode("Hello"))
    route.on_end(EngineLoss("gone"))
    assert [delta.finish_reason for delta in await rest(outputs)] == [FinishReason.STOP]


def test_timings_are_those_of_the_slowest_choice_and_guesses_those_of_all() -> None:
    slow, quick = StageTimings(1, 9, 3, 4, 1), StageTimings(2, 3, 4, 5, 6)
    assert StageTimings.of_all([quick, slow]) == StageTimings(1, 9, 3, 9, 7)
    assert StageTimings.of_all([quick]) == quick
    assert StageTimings.of_all([]) == StageTimings()
