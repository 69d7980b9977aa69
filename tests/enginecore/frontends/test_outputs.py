"""Tokens and log-probabilities of a step, sorted by frontend and joined over steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.scheduling import make_request
from triptych.errors import QueueFull
from triptych.types.step import LogprobColumns, PromptLogprobs, StepResult
from triptych_services.enginecore.frontends.kept_requests import KeptRequests
from triptych_services.enginecore.frontends.outputs import MAX_STEPS_TOGETHER, SessionOutputs
from triptych_services.enginecore.scheduler.step_results import StepOutput


def new_outputs() -> SessionOutputs:
    return SessionOutputs(KeptRequests(lambda: 0.0))


def u32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def step(sessions: list[int], numbers: list[int], rows: list[int]) -> tuple[StepOutput, StepResult]:
    """Result row r has token 10 + r; rows 1 and 3 asked for logprobs: two candidates, then three."""
    output = StepOutput(
        sessions=np.array(sessions),
        numbers=u32(*numbers),
        token_ids=u32(*(10 + r for r in rows)),
        rows=np.array(rows),
    )
    logprobs = LogprobColumns(
        rows=u32(1, 3),
        offsets=u32(0, 2, 5),
        token_ids=u32(11, 5, 13, 6, 7),
        logprobs=np.array([-0.1, -2.0, -0.3, -1.0, -3.0], dtype=np.float32),
        ranks=u32(1, 4),
    )
    return output, StepResult(step_id=1, token_ids=u32(10, 11, 12, 13), logprobs=logprobs)


def entries(columns: LogprobColumns) -> dict[int, list[int]]:
    """Token place -> candidates."""
    return {
        int(row): columns.token_ids[columns.offsets[i] : columns.offsets[i + 1]].tolist()
        for i, row in enumerate(columns.rows)
    }


def open_session(outputs: SessionOutputs, session: int, *numbers: int) -> None:
    """Open a session with requests that stream their tokens."""
    outputs.open(session)
    for number in numbers:
        outputs.admit(session, [number])
    outputs.take(9)


def test_one_session_gets_columns_of_its_own_batch() -> None:
    outputs = new_outputs()
    open_session(outputs, 1, 7, 8, 9)
    outputs.add_step(*step([1, 1, 1], [7, 8, 9], rows=[0, 1, 3]))  # row 2 was nobody's any more
    batch = outputs.take(9)[1]
    assert batch.token_ids.tolist() == [10, 11, 13]
    assert entries(batch.logprobs) == {1: [11, 5], 2: [13, 6, 7]}
    assert batch.logprobs.ranks.tolist() == [1, 4]


def test_two_sessions_get_what_is_theirs() -> None:
    outputs = new_outputs()
    open_session(outputs, 1, 7, 8)
    open_session(outputs, 2, 1, 2)
    outputs.add_step(*step([1, 2, 1, 2], [7, 1, 8, 2], rows=[0, 1, 2, 3]))
    batches = outputs.take(9)
    assert batches[1].token_ids.tolist() == [10, 12]
    assert batches[1].logprobs is None
    assert batches[2].numbers.tolist() == [1, 2]
    assert entries(batches[2].logprobs) == {0: [11, 5], 1: [13, 6, 7]}


def test_two_steps_join_into_one_batch() -> None:
    outputs = new_outputs()
    open_session(outputs, 1, 7, 8)
    outputs.add_step(*step([1, 1], [7, 8], rows=[1, 3]))
    outputs.add_step(*step([1, 1], [7, 8], rows=[1, 3]))
    batch = outputs.take(9)[1]
    assert batch.numbers.tolist() == [7, 8, 7, 8]
    assert entries(batch.logprobs) == {0: [11, 5], 1: [13, 6, 7], 2: [11, 5], 3: [13, 6, 7]}
    assert outputs.take(9) == {}


def test_batches_are_numbered_and_end_with_the_session() -> None:
    outputs = new_outputs()
    outputs.open(1)
    outputs.admit(1, [4])
    assert outputs.take(9)[1].batch_id == 1
    outputs.refuse(1, 5, QueueFull("full", 1.5))
    batch = outputs.take(9)[1]
    assert (batch.batch_id, batch.failures[0].retry_after_ms) == (2, 1500)
    outputs.close(1)
    outputs.admit(1, [6])
    outputs.add_step(*step([1], [7], rows=[0]))
    assert outputs.take(9) == {}


def test_tokens_that_nobody_looks_at_yet_come_together() -> None:
    outputs = new_outputs()
    outputs.open(1)
    outputs.admit(1, [7], whole_output=True)
    assert outputs.take(9) == {}, "that it is admitted is of no use before the end"
    for _ in range(MAX_STEPS_TOGETHER - 1):
        outputs.add_step(*step([1], [7], rows=[0]))
        assert outputs.take(9) == {}
    outputs.add_step(*step([1], [7], rows=[1]))
    batch = outputs.take(9)[1]
    assert (batch.batch_id, batch.admitted.tolist()) == (1, [7])
    assert batch.numbers.tolist() == [7] * MAX_STEPS_TOGETHER


def test_tokens_of_several_steps_are_grouped_by_request() -> None:
    outputs = new_outputs()
    open_session(outputs, 1, 7, 8)
    for rows in ([0, 3], [2, 0]):
        output, result = step([1, 1], [8, 7], rows)
        outputs.add_step(output, replace(result, logprobs=None))
    batch = outputs.take(9)[1]
    assert batch.numbers.tolist() == [7, 8]
    assert batch.token_counts.tolist() == [2, 2]
    assert batch.token_ids.tolist() == [13, 10, 10, 12]


def several(sessions: list[int], numbers: list[int], counts: list[int]) -> tuple[StepOutput, StepResult]:
    """Return a step like `step` with several tokens per request, in the order of the result's rows."""
    num_tokens = sum(counts)
    output, result = step([], [], rows=list(range(num_tokens)))
    output = replace(output, sessions=np.array(sessions), numbers=u32(*numbers), token_counts=u32(*counts))
    return output, result


def test_several_tokens_of_a_request_stay_together() -> None:
    outputs = new_outputs()
    open_session(outputs, 1, 7, 8)
    outputs.add_step(*several([1, 1], [8, 7], counts=[3, 1]))
    batch = outputs.take(9)[1]
    assert batch.numbers.tolist() == [8, 7]
    assert batch.token_counts.tolist() == [3, 1]
    assert batch.token_ids.tolist() == [10, 11, 12, 13]
    assert entries(batch.logprobs) == {1: [11, 5], 3: [13, 6, 7]}


def test_several_tokens_are_sorted_out_by_session() -> None:
    outputs = new_outputs()
    open_session(outputs, 1, 7)
    open_session(outputs, 2, 8)
    outputs.add_step(*several([1, 2], [7, 8], counts=[2, 2]))
    batches = outputs.take(9)
    assert [batches[session].token_ids.tolist() for session in (1, 2)] == [[10, 11], [12, 13]]
    assert [batches[session].token_counts.tolist() for session in (1, 2)] == [[2], [2]]
    assert [entries(batches[session].logprobs) for session in (1, 2)] == [{1: [11, 5]}, {1: [13, 6, 7]}]


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_steps_of_one_token_join_steps_of_several(has_logprobs: bool) -> None:
    outputs = new_outputs()
    open_session(outputs, 1, 7, 8)
    for output, result in (step([1, 1], [7, 8], rows=[1, 3]), several([1, 1], [8, 7], counts=[3, 1])):
        outputs.add_step(output, result if has_logprobs else replace(result, logprobs=None))
    batch = outputs.take(9)[1]
    owners, token_ids = batch.owners.tolist(), batch.token_ids.tolist()
    for number, tokens in {7: [11, 13], 8: [13, 10, 11, 12]}.items():
        assert [token for owner, token in zip(owners, token_ids, strict=True) if owner == number] == tokens
    if has_logprobs:
        assert entries(batch.logprobs) == {0: [11, 5], 1: [13, 6, 7], 3: [11, 5], 5: [13, 6, 7]}
    else:
        assert batch.numbers.tolist() == [7, 8]


def test_a_streaming_request_takes_other_tokens_along() -> None:
    outputs = new_outputs()
    outputs.open(1)
    outputs.admit(1, [7], whole_output=True)
    outputs.admit(1, [8])
    outputs.take(9)
    outputs.add_step(*step([1, 1], [7, 8], rows=[0, 2]))
    assert outputs.take(9)[1].numbers.tolist() == [7, 8]
    outputs.refuse(1, 8, QueueFull("full", 1.5))
    outputs.take(9)
    outputs.add_step(*step([1], [7], rows=[0]))
    assert outputs.take(9) == {}


def test_prompt_logprobs_go_to_their_session_at_once() -> None:
    outputs = new_outputs()
    outputs.open(1)
    outputs.admit(1, [7], whole_output=True)
    outputs.take(9)
    part = PromptLogprobs(1, u32(4, 5).reshape(1, 2), np.zeros((1, 2), np.float32), u32(1))
    mine, other = (make_request(number, [1, 2], session=session) for number, session in ((7, 1), (7, 2)))
    nothing = replace(step([], [], rows=[])[0], prompt_logprobs=((mine, part), (other, part)))
    outputs.add_step(nothing, StepResult(step_id=1, token_ids=u32()))
    (batch,) = outputs.take(9).values()
    assert [(entry.number, entry.logprobs) for entry in batch.prompt_logprobs] == [(7, part)]
    assert not batch.token_ids.size
    assert outputs.take(9) == {}


def test_room_after_a_full_queue_is_reported_at_once() -> None:
    outputs = new_outputs()
    outputs.open(1)
    outputs.admit(1, [4])
    assert outputs.take(0)[1].num_free_places == 0
    assert outputs.take(0) == {}
    assert outputs.take(3)[1].num_free_places == 3
    assert outputs.take(5) == {}


def test_logprobs_of_many_steps_do_not_pile_up() -> None:
    outputs = new_outputs()
    outputs.open(1)
    outputs.admit(1, list(range(1000)), whole_output=True)
    outputs.take(9)
    num_rows = np.arange(1000)
    columns = LogprobColumns(
        rows=num_rows.astype(np.uint32),
        offsets=np.arange(0, 21 * 1001, 21, dtype=np.uint32),
        token_ids=np.zeros(21_000, np.uint32),
        logprobs=np.zeros(21_000, np.float32),
        ranks=np.ones(1000, np.uint32),
    )
    step = StepOutput(
        np.ones(1000, np.int64), num_rows.astype(np.uint32), num_rows.astype(np.uint32), num_rows
    )
    sizes = []
    for step_id in range(16):
        outputs.add_step(step, StepResult(step_id, num_rows.astype(np.uint32), logprobs=columns))
        sizes += [batch.num_bytes for batch in outputs.take(9).values()]
    assert len(sizes) == 2
    assert max(sizes) < 2 << 20


def test_a_first_token_comes_with_what_was_cached() -> None:
    outputs = new_outputs()
    open_session(outputs, 1, 7, 8)
    output, result = step([1, 1], [7, 8], rows=[0, 2])
    request = make_request(8, session=1, prompt=[1, 2, 3])
    request.num_cached_tokens = 2
    outputs.add_step(replace(output, first=(request,)), result)
    batch = outputs.take(9)[1]
    assert (batch.first_numbers.tolist(), batch.first_cached_tokens.tolist()) == ([8], [2])
    outputs.add_step(*step([1, 1], [7, 8], rows=[0, 2]))
    assert not len(outputs.take(9)[1].first_numbers)
