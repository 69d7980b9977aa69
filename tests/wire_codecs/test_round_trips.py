"""Values survive the way through a message; a message that cannot be a table is refused."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.wire_codecs.strategies import (
    CONSTRAINED,
    EVERYTHING,
    attach_requests,
    build,
    events,
    output_batches,
    plans,
    results,
    sampling,
    session_terms,
    submits,
)
from triptych.admin.v1 import admin_pb2
from triptych.config import LogConfig
from triptych.errors import FeatureDisabled, InvalidRequest, ProtocolViolation
from triptych.internal.v1 import engine_core_pb2, sampling_pb2, step_pb2, worker_pb2
from triptych.rpc.session.handshake import SessionTerms
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent, PromptLogprobsEvent
from triptych.types.facts import EngineCounters, EngineStatus, KvGroup, KvKind, KvLayout
from triptych.types.logprobs import Logprob, TokenLogprobs
from triptych.types.outputs import FinishedRequest, FinishReason, OutputBatch, StageTimings, Usage
from triptych.types.sampling import SamplingParams
from triptych.types.step import (
    LogprobColumns,
    NewRow,
    PromptLogprobs,
    RowContent,
    StepPlan,
    StepResult,
    empty_u32,
)
from triptych.v1 import generation_pb2, output_pb2
from triptych.wire import admin, columns, engine_core, generation, kv_transfer, result, step, worker
from triptych.wire import sampling as sampling_codec
from triptych.wire.codec import CODECS, Codec

MADE = list(CODECS.values())  # before any test makes its own
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
U32_MAX = 2**32 - 1


def u32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Equal in value, type and dtype, to the last field. A failure names the class and the field."""
    assert type(left) is type(right), where
    if dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            name = f"{type(left).__name__}.{field.name}"
            assert_same(getattr(left, field.name), getattr(right, field.name), name)
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert left.tobytes() == right.tobytes(), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key, value in left.items():
            assert_same(value, right[key], where)
    elif isinstance(left, (tuple, list)):
        assert len(left) == len(right), where
        for one, other in zip(left, right, strict=True):
            assert_same(one, other, where)
    else:
        assert left == right, where


def encoder_of_all(stop_token_ids: Any) -> generation.EventEncoder:
    options = generation_pb2.ResponseOptions(prompt_token_ids=True, timings=True)
    options.logprobs.with_bytes = options.prompt_logprobs.with_bytes = True
    return generation.EventEncoder(options, stop_token_ids)


def encode(event: Event) -> Any:
    """The messages of an event, of which all that there is has been asked for."""
    stop_reason = event.stop_reason if isinstance(event, DeltaEvent) else None
    return encoder_of_all([stop_reason] if isinstance(stop_reason, int) else []).encode(event)


def over_the_wire(message: Any) -> Any:
    return message if isinstance(message, int) else type(message).FromString(message.SerializeToString())


def session_terms_from_proto(message: Any) -> SessionTerms:
    return SessionTerms.from_proto(message, EVERYTHING)


def to_pair(made: Codec[Any, Any]) -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]:
    strategy = CONSTRAINED[made.cls]() if made.cls in CONSTRAINED else build(made.cls, made.message)
    return strategy, made.encode, made.decode


PAIRS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    **{made.cls.__name__: to_pair(made) for made in MADE if not made.has_keywords},
    "SamplingParams": (sampling, sampling_codec.sampling_to_proto, sampling_codec.sampling_from_proto),
    "Event": (events, lambda event: encode(event)[0], generation.event_from_proto),
    "StepPlan": (plans(), step.plan_to_proto, step.plan_from_proto),
    "StepResult": (results(), result.result_to_proto, result.result_from_proto),
    "OutputBatch": (output_batches(), engine_core.outputs_to_proto, engine_core.outputs_from_proto),
    "SubmitRequest": (submits(), engine_core.submit_to_proto, engine_core.submit_from_proto),
    "AttachRequest": (attach_requests(), engine_core.attach_to_proto, engine_core.attach_from_proto),
    "SessionTerms": (session_terms, SessionTerms.to_proto, session_terms_from_proto),
}
"""Class -> its strategy and its two functions: all codecs that are made from annotations, and those by hand."""


@pytest.mark.parametrize("name", PAIRS)
def test_a_value_survives_the_wire(name):
    strategy, to_proto, from_proto = PAIRS[name]
    seen = set()

    @quick
    @given(strategy)
    def check(value):
        seen.add(type(value))
        assert_same(from_proto(over_the_wire(to_proto(value))), value, name)

    check()
    assert seen


def test_every_codec_is_tested():
    inside = {"RowContent", "NewRow", "RowError"}  # of plans and results, which are tested
    assert {made.cls.__name__ for made in MADE} - set(PAIRS) == {*inside, "EngineStatus"}
    modules = (admin, sampling_codec, engine_core, generation, kv_transfer, result, step, worker)
    decoders = {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if name.endswith("_from_proto") and not name.startswith("_")
    }
    assert decoders - {from_proto for _, _, from_proto in PAIRS.values()} == {
        admin.log_level_from_proto,
        admin.pause_mode_from_proto,
        admin.sleep_level_from_proto,
        admin.status_from_proto,  # it leaves fields out
        result.vectors_from_proto,  # of results and batches, which are tested
    }


def test_a_difference_names_class_and_field():
    one = StepPlan(1, 0, sample_slots=u32(1))
    with pytest.raises(AssertionError, match=r"^StepPlan\.sample_slots\b"):
        assert_same(one, dataclasses.replace(one, sample_slots=u32(2)))


def test_default_sampling_takes_next_to_no_bytes():
    assert (
        len(sampling_codec.sampling_to_proto(SamplingParams()).SerializeToString()) <= 2
    )  # max_tokens alone


def test_an_empty_step_takes_few_bytes():
    plan = StepPlan(step_id=10_000, last_result_seen=9_999, num_tokens=64)
    assert len(step.plan_to_proto(plan).SerializeToString()) <= 8


FULL = KvLayout(100, 16, 2, 2, 8, "float32", 50)
OF_GROUPS = replace(
    FULL,
    groups=(
        KvGroup(KvKind.FULL, 2, 16, FULL.block_bytes),
        KvGroup(KvKind.WINDOW, 2, 16, FULL.block_bytes, 64),
        KvGroup(KvKind.STATE, 2, 256, 1 << 20),
    ),
    num_state_blocks=9,
    continues_states=True,
)


def test_one_full_group_is_the_message_of_before():
    before = worker_pb2.KvShape(
        num_blocks=100,
        block_size=16,
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        dtype="float32",
        soft_num_blocks=50,
    )
    codec = CODECS[KvLayout, "triptych.internal.v1.KvShape"]
    assert codec.encode(FULL) == before
    assert codec.decode(before) == FULL
    assert codec.decode(over_the_wire(codec.encode(OF_GROUPS))) == OF_GROUPS


def test_a_group_of_an_unknown_kind_is_refused():
    codec = CODECS[KvLayout, "triptych.internal.v1.KvShape"]
    message = codec.encode(OF_GROUPS)
    message.groups[1].kind = 9
    with pytest.raises(ProtocolViolation, match=r"kv\.groups: kind 9 is not known"):
        codec.decode(message)


def test_columns_are_little_endian():
    assert columns.u32_to_bytes(u32(1, 0x01020304)) == bytes.fromhex("0100000004030201")
    column = LogprobColumns(u32(), u32(0), u32(1), np.array([1.0], dtype=np.float32), u32())
    assert result.logprobs_to_proto(column).logprobs == bytes.fromhex("0000803f")


def test_columns_from_the_wire_are_read_only_views():
    data = u32(1, 2, 3).tobytes()
    column = columns.u32_from_bytes(data)
    assert np.shares_memory(column, np.frombuffer(data, dtype=np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        column[0] = 9


def test_a_stop_token_of_zero_is_told_from_none():
    def travelled(stop_token_id):
        finished = FinishedRequest(1, FinishReason.STOP, stop_token_id, 0, StageTimings())
        message = engine_core.outputs_to_proto(OutputBatch(batch_id=1, finished=(finished,)))
        return engine_core.outputs_from_proto(over_the_wire(message)).finished[0].stop_token_id

    assert travelled(0) == 0
    assert travelled(None) is None


def test_an_event_of_an_unknown_kind_is_none():
    assert generation.event_from_proto(generation_pb2.StreamGenerateResponse(sequence=1)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1]},
        {"logprobs": [0.0]},
        {"ranks": [1, 1]},
        {"num_candidates": 0},
        {"token_bytes": [b""]},
    ],
)
def test_ragged_public_logprobs_are_refused(change):
    columns = {"num_candidates": 2, "token_ids": [1, 2], "logprobs": [-1.0, -2.0], "ranks": [1], **change}
    output = output_pb2.ChoiceOutput(logprobs=output_pb2.Logprobs(**columns))
    with pytest.raises(ProtocolViolation, match="logprobs: "):
        generation.event_from_proto(generation_pb2.StreamGenerateResponse(output=output))


def test_messages_are_numbered_and_stay_below_a_megabyte():
    rivals = tuple(Logprob(2, -2.0, "y" * 12, rank) for rank in range(1, 21))
    row = TokenLogprobs.of(Logprob(1 << 20, -1.0, "x" * 12, 1), rivals)
    event = DeltaEvent(0, "text", list(range(4000)), (row,) * 4000, FinishReason.STOP, "stop")
    encoder = encoder_of_all({})
    encoder.encode(FinishedEvent(Usage(), StageTimings()))
    messages = encoder.encode(event)
    assert [message.sequence for message in messages] == list(range(2, 2 + len(messages)))
    assert max(message.ByteSize() for message in messages) < 1 << 20
    parts = [generation.event_from_proto(message) for message in messages]
    assert [part.text for part in parts] == ["text"] + [""] * (len(parts) - 1)
    assert [token_id for part in parts for token_id in part.token_ids] == event.token_ids
    assert sum(len(part.logprobs) for part in parts) == 4000
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert (parts[-1].finish_reason, parts[-1].stop_reason) == (FinishReason.STOP, "stop")
    answer = generation.WholeAnswer()
    for message in messages:
        answer.add(message)
    assert (
        generation.event_from_proto(
            generation_pb2.StreamGenerateResponse(output=answer.take().choices[0])
        ).logprobs
        == event.logprobs
    )


def test_parts_of_a_prompt_become_one_in_a_whole_answer():
    encoder, answer = encoder_of_all([]), generation.WholeAnswer()
    for first in (1, 3):
        shape = 2, 1
        part = PromptLogprobs(
            first, np.full(shape, first, np.uint32), np.zeros(shape, np.float32), np.ones(2, np.uint32)
        )
        event = PromptLogprobsEvent(part, [b"x"] * 2, b"first" if first == 1 else b"")
        for message in encoder.encode(event):
            answer.add(message)
    prompt = answer.take().prompt_logprobs
    assert (prompt.first_position, prompt.first_token_bytes) == (1, b"first")
    assert (list(prompt.logprobs.token_ids), list(prompt.logprobs.ranks)) == ([1, 1, 3, 3], [1] * 4)


def test_a_client_gets_nothing_that_it_did_not_ask_for():
    options = generation_pb2.ResponseOptions(token_ids=False)
    encoder = generation.EventEncoder(options)
    (admitted,) = encoder.encode(AdmittedEvent("id", "model", 7, [1, 2, 3]))
    assert (admitted.admitted.num_prompt_tokens, len(admitted.admitted.prompt_token_ids)) == (3, 0)
    (output,) = encoder.encode(DeltaEvent(0, "x", [5], (TokenLogprobs.of(Logprob(5, -1.0, "x", 1)),)))
    assert (len(output.output.token_ids), len(output.output.logprobs.token_bytes)) == (0, 0)
    (finished,) = encoder.encode(FinishedEvent(Usage(3, 1), StageTimings(1, 2, 3)))
    assert not finished.finished.HasField("timings")


@pytest.mark.parametrize(
    ("reason", "stop_reason", "field", "value"),
    [
        (FinishReason.STOP, None, "eos_token_id", 9),
        (
            FinishReason.STOP,
            9,
            "eos_token_id",
            9,
        ),  # a second end-of-sequence token, which the request did not name
        (FinishReason.STOP, 5, "stop_token_id", 5),
        (FinishReason.STOP, "x", "stop_string", "x"),
        (FinishReason.LENGTH, None, "length_limit", output_pb2.LENGTH_LIMIT_MAX_TOKENS),
    ],
)
def test_the_end_of_a_choice_is_told_exactly(reason, stop_reason, field, value):
    encoder = generation.EventEncoder(generation_pb2.ResponseOptions(), [5])
    (message,) = encoder.encode(DeltaEvent(0, "", [8, 9], (), reason, stop_reason))
    assert message.output.WhichOneof("finish_detail") == field
    assert getattr(message.output, field) == value


def test_an_output_that_fills_the_context_says_so():
    encoder = generation.EventEncoder(generation_pb2.ResponseOptions())
    encoder.encode(AdmittedEvent("id", "model", 7, [1], is_limited_by_context=True))
    (message,) = encoder.encode(DeltaEvent(0, "", [8], (), FinishReason.LENGTH))
    assert message.output.length_limit == output_pb2.LENGTH_LIMIT_CONTEXT


def test_every_outcome_that_an_engine_counts_has_a_number():
    counted = dict.fromkeys(EngineCounters().num_finished, 1)
    status = EngineStatus("e", True, "", counters=EngineCounters(num_finished=counted), journal="full")
    assert len(admin.status_to_proto(status, "model").num_finished) == len(counted)


def test_levels_of_the_log_are_those_of_the_config():
    (field,) = (field for field in dataclasses.fields(LogConfig) if field.name == "level")
    assert field.metadata["limits"].choices == admin.LOG_LEVELS
    for level in admin.LOG_LEVELS:
        assert admin.log_level_from_proto(admin.log_level_to_proto(level)) == level


def test_an_engine_s_status_is_told_in_enums():
    counters = EngineCounters(1, 2, 3, 4, 5, 6, 7, {"stop": 3})
    status = EngineStatus("e", True, "", 1, 2, 3, 4, 5, 6, 7, 8, counters, journal="full")
    message = admin.status_to_proto(status, "model")
    assert (message.state, message.journal) == (admin_pb2.ENGINE_STATE_READY, admin_pb2.JOURNAL_STATE_FULL)
    assert [(entry.outcome, entry.count) for entry in message.num_finished] == [(admin_pb2.OUTCOME_STOP, 3)]
    plain = dataclasses.replace(
        status, counters=dataclasses.replace(counters, num_finished={}), journal="off"
    )
    assert admin.status_from_proto(over_the_wire(message)) == ("model", plain)
    for change, state in (
        ({"ready": False}, admin_pb2.ENGINE_STATE_NOT_READY),
        ({"paused": True}, admin_pb2.ENGINE_STATE_PAUSED),
        ({"asleep": True, "paused": True}, admin_pb2.ENGINE_STATE_ASLEEP),
    ):
        assert admin.status_to_proto(dataclasses.replace(status, **change), "").state == state


# Tables that are none


def column_fields(message_class: Any) -> list[str]:
    return [f.name for f in message_class.DESCRIPTOR.fields if f.type == f.TYPE_BYTES]


def row_from_proto(row: step_pb2.NewRow) -> StepPlan:
    content = step_pb2.RowContent(id=row.content_id, task=step_pb2.TASK_GENERATE)
    return step.plan_from_proto(step_pb2.Step(new_contents=[content], new_rows=[row]))


CUT_COLUMNS = [
    (step_pb2.Step, step.plan_from_proto),
    (step_pb2.LogprobColumns, result.logprobs_from_proto),
    (engine_core_pb2.OutputBatch, engine_core.outputs_from_proto),
    (engine_core_pb2.Submit, engine_core.submit_from_proto),
    (step_pb2.NewRow, row_from_proto),
    (
        step_pb2.RowContent,
        lambda content: step.plan_from_proto(step_pb2.Step(new_contents=[content])),
    ),
    (
        engine_core_pb2.FinishedColumns,
        lambda table: engine_core.outputs_from_proto(engine_core_pb2.OutputBatch(finished=table)),
    ),
]


@pytest.mark.parametrize(
    ("message_class", "decode", "name"),
    [
        pytest.param(message_class, decode, name, id=f"{message_class.DESCRIPTOR.name}.{name}")
        for message_class, decode in CUT_COLUMNS
        for name in column_fields(message_class)
        if name
        not in ("reasons", "kv_lease", "resume_secret", "frontend_state")  # one byte each, and no columns
    ],
)
def test_a_column_cut_short_is_refused(message_class, decode, name):
    fields, cut = message_class.DESCRIPTOR.fields_by_name, b"\x01\x02\x03"
    message = message_class(**{name: [cut] if fields[name].is_repeated else cut})
    if "task" in fields:
        message.task = step_pb2.TASK_GENERATE
    with pytest.raises(ProtocolViolation, match="whole"):
        decode(message)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"chunk_slots": u32(1, 2), "chunk_lengths": u32(5)}, "chunk_slots 2, chunk_lengths 1"),
        ({"chunk_lengths": u32(5)}, "chunk_slots 0, chunk_lengths 1"),
        ({"block_slots": u32(1)}, "block_slots 1, block_ids 0"),
        (
            {"block_slots": u32(1, 2), "block_ids": u32(3, 4), "block_groups": u32(1)},
            "block_groups 1, block_slots 2",
        ),
        ({"state_pages": u32(1)}, "state_slots 0, state_pages 1"),
        ({"sample_slots": u32(1)}, "sample_slots 1, sample_limits 0"),
    ],
)
def test_a_ragged_plan_is_refused(fields, named):
    plan = StepPlan(step_id=1, last_result_seen=0, **fields)
    with pytest.raises(ProtocolViolation, match=named):
        step.plan_from_proto(step.plan_to_proto(plan))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"numbers": u32(1, 2), "token_ids": u32(5)}, "numbers 2, token_ids 1"),
        ({"numbers": u32(1, 2), "token_counts": u32(1), "token_ids": u32(5)}, "numbers 2, token_counts 1"),
        ({"numbers": u32(1), "token_counts": u32(2), "token_ids": u32(5)}, "token_counts"),
        ({"numbers": u32(1), "token_counts": u32(1), "token_ids": u32(5, 6)}, "token_counts"),
    ],
)
def test_a_ragged_output_batch_is_refused(fields, named):
    batch = OutputBatch(batch_id=1, **fields)
    with pytest.raises(ProtocolViolation, match=named):
        engine_core.outputs_from_proto(engine_core.outputs_to_proto(batch))


@pytest.mark.parametrize("counts", [(2,), (2, 2), (1, 0), (0, 0, 4)])
def test_counts_of_other_tokens_are_refused(counts):
    message = step_pb2.Result(
        step_id=1, token_ids=u32(1, 2, 3).tobytes(), token_counts=u32(*counts).tobytes()
    )
    with pytest.raises(ProtocolViolation, match="token_counts sum up to"):
        result.result_from_proto(message)


def test_one_token_per_row_takes_no_counts():
    message = result.result_to_proto(StepResult(1, u32(5, 6, 7)))
    assert not message.token_counts
    assert message.ByteSize() <= 16


@pytest.mark.parametrize(
    "change", [{"token_ids": u32(1, 2, 3)}, {"logprobs": u32(0)}, {"ranks": u32(1)}, {"num_candidates": 0}]
)
def test_ragged_prompt_logprobs_are_refused(change):
    columns = {"token_ids": u32(1, 2, 3, 4), "logprobs": u32(0, 0, 0, 0), "ranks": u32(1, 1)}
    columns = {
        name: column.tobytes() for name, column in {**columns, **change}.items() if name != "num_candidates"
    }
    message = step_pb2.PromptLogprobs(num_candidates=change.get("num_candidates", 2), **columns)
    result.prompt_logprobs_from_proto(step_pb2.PromptLogprobs(num_candidates=1))  # of no position
    with pytest.raises(ProtocolViolation, match=r"prompt_logprobs: \d+ token_ids"):
        result.prompt_logprobs_from_proto(message)


@pytest.mark.parametrize("table", ["row_errors", "prompt_logprobs"])
def test_a_row_twice_in_a_table_is_refused(table):
    message = step_pb2.Result(step_id=1)
    for slot in (1, 2, 1):
        entry = getattr(message, table).add(row=step_pb2.RowKey(slot=slot, slot_version=3))
        if table == "prompt_logprobs":
            entry.logprobs.num_candidates = 1
    with pytest.raises(ProtocolViolation, match=f"{table}: slot 1 with version 3 comes twice"):
        result.result_from_proto(message)


def test_ragged_finished_columns_are_refused():
    table = engine_core_pb2.FinishedColumns(numbers=u32(1, 2).tobytes(), reasons=b"\x01")
    with pytest.raises(ProtocolViolation, match="numbers 2, reasons 1"):
        engine_core.outputs_from_proto(engine_core_pb2.OutputBatch(finished=table))


GOOD = {
    "rows": u32(0, 3),
    "offsets": u32(0, 1, 3),
    "token_ids": u32(7, 8, 9),
    "logprobs": np.array([-1, -2, -3], dtype=np.float32),
    "ranks": u32(1, 1),
}


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": u32(1)},
        {"rows": u32(0)},
        {"logprobs": np.array([-1, -2], dtype=np.float32)},
        {"offsets": u32(0, 1)},
        {"offsets": u32()},
        {"offsets": u32(0, 1, 2)},
        {"offsets": u32(0, 1, 4)},
        {"offsets": u32(1, 2, 3)},
        {"offsets": u32(0, U32_MAX, 3)},
    ],
    ids=str,
)
def test_ragged_logprobs_are_refused(change):
    assert_same(
        result.logprobs_from_proto(result.logprobs_to_proto(LogprobColumns(**GOOD))), LogprobColumns(**GOOD)
    )
    with pytest.raises(ProtocolViolation):
        result.logprobs_from_proto(result.logprobs_to_proto(LogprobColumns(**(GOOD | change))))


# The messages mirror the types


def test_sampling_parameters_have_the_same_names_on_both_sides():
    in_proto = {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    in_types = {field.name for field in dataclasses.fields(SamplingParams)}
    assert in_types - in_proto == {"output_kind"}  # stays in the frontend
    assert in_proto <= in_types
    assert set(generation.SAMPLING_PATHS) == in_types - {"output_kind"}
    for path in generation.SAMPLING_PATHS.values():
        message = generation_pb2.Generation.DESCRIPTOR
        for name in path.split("."):
            field = message.fields_by_name[name]
            message = field.message_type


@pytest.mark.parametrize("reason", FinishReason)
def test_finish_reasons_have_the_numbers_of_the_proto(reason):
    if reason is not FinishReason.UNKNOWN:  # for a client, that of a later version
        assert output_pb2.FinishReason.Name(reason.value) == f"FINISH_REASON_{reason.name}"


@pytest.mark.thorough
@settings(max_examples=200)
@given(submits())
def test_a_submission_takes_no_more_than_it_is_counted_for(request):
    assert engine_core.submit_to_proto(request).ByteSize() <= request.num_bytes


@pytest.mark.thorough
@settings(max_examples=200)
@given(plans())
def test_new_rows_take_no_more_than_they_are_counted_for(plan):
    message = step.plan_to_proto(plan)
    contents = {id(row.content): row.content.num_bytes for row in plan.new_rows}
    num_bytes = sum(row.num_bytes for row in plan.new_rows) + sum(contents.values())
    rows_alone = step_pb2.Step(new_rows=message.new_rows, new_contents=message.new_contents)
    assert rows_alone.ByteSize() <= num_bytes


def test_a_content_is_sent_once_for_as_long_as_a_row_holds_it():
    encoder, decoder = step.StepEncoder(), step.StepDecoder()
    content = RowContent(np.arange(1000, dtype=np.uint32), SamplingParams(temperature=0.5))

    def new_row(slot):
        return NewRow(slot, 0, content, empty_u32(), 0, 0, u32(1), seed=slot)

    def travel(step_id, slots=(), removed=()):
        plan = StepPlan(step_id, 0, removed_slots=u32(*removed), new_rows=tuple(map(new_row, slots)))
        message = over_the_wire(encoder.encode(plan))
        assert_same(decoder.decode(message), plan)
        return message.ByteSize() > 4000

    assert travel(1, slots=[0, 1])
    assert not travel(2, slots=[2])
    assert not travel(3, removed=[0, 1])
    assert not travel(4, slots=[0], removed=[2])  # the last one leaves in the step in which another enters
    assert not travel(5, removed=[0])
    assert travel(6, slots=[0])  # both sides have forgotten it


def test_a_row_without_its_content_is_refused_and_the_session_goes_on():
    decoder = step.StepDecoder()
    lost = step_pb2.Step(step_id=1, new_rows=[step_pb2.NewRow(content_id=7)])
    with pytest.raises(ProtocolViolation, match="content 7 was not sent"):
        decoder.decode(lost)
    lost.new_contents.add(id=7, prompt_token_ids=u32(1).tobytes(), task=step_pb2.TASK_GENERATE)
    assert decoder.decode(lost).new_rows[0].token_ids.tolist() == [1]


@pytest.mark.parametrize("task", [step_pb2.TASK_UNSPECIFIED, 7])
def test_a_task_that_is_not_served_is_refused_by_name(task):
    content = step_pb2.RowContent(prompt_token_ids=u32(1).tobytes(), task=task)
    with pytest.raises(FeatureDisabled, match=f"task: {task} is not served"):
        step.plan_from_proto(step_pb2.Step(new_contents=[content]))
    with pytest.raises(FeatureDisabled, match=f"task: {task} is not served"):
        engine_core.submit_from_proto(engine_core_pb2.Submit(task=task))


def test_a_number_out_of_range_is_refused_where_it_arrives():
    sampling = sampling_pb2.SamplingParams(temperature=-1.0)
    with pytest.raises(InvalidRequest, match=r"^sampling: temperature: -1 is below the limit 0"):
        engine_core.submit_from_proto(
            engine_core_pb2.Submit(
                numbers=u32(1).tobytes(), seeds=bytes(8), task=step_pb2.TASK_GENERATE, sampling=sampling
            )
        )
    content = step_pb2.RowContent(id=3, task=step_pb2.TASK_GENERATE, sampling=sampling)
    with pytest.raises(ProtocolViolation, match=r"^content 3: sampling: temperature: -1 "):
        step.plan_from_proto(step_pb2.Step(new_contents=[content]))
