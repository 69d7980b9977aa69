"""Codecs that are made from annotations: what they refuse at import, and in messages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import pytest

from triptych.errors import ProtocolViolation
from triptych.internal.v1 import engine_core_pb2, kv_transfer_pb2, step_pb2, worker_pb2
from triptych.types.kv_transfer import BlockHash, Lease
from triptych.types.step import F32, U32, RowErrorCode
from triptych.wire.codec import codec, enum_numbers


@dataclass(frozen=True, slots=True)
class Endpoint:
    address: str
    layout: str
    block_bytes: int


def of_fields(**annotations: object) -> type:
    """Return a dataclass `Sample` with these fields."""
    return dataclass(type("Sample", (), {"__annotations__": annotations}))


@pytest.mark.parametrize(
    ("annotations", "message", "named"),
    [
        ({"address": str, "layout": str}, kv_transfer_pb2.KvEndpoint, "block_bytes is in KvEndpoint and not"),
        ({"address": str, "port": int}, kv_transfer_pb2.KvEndpoint, "port is not in KvEndpoint"),
        ({"address": int}, kv_transfer_pb2.KvEndpoint, "address is <class 'int'>, which does not fit"),
        ({"block_bytes": float}, kv_transfer_pb2.KvEndpoint, "block_bytes is <class 'float'>"),
        ({"address": bytes}, kv_transfer_pb2.KvEndpoint, "address is <class 'bytes'>"),
        ({"block_bytes": int | None}, kv_transfer_pb2.KvEndpoint, "block_bytes may be None, and its field"),
        ({"exports": Endpoint}, kv_transfer_pb2.KvOrders, "exports is one <class"),
        ({"exports": tuple[int, ...]}, kv_transfer_pb2.KvOrders, "exports has entries of <class 'int'>"),
        ({"ready_in_s": U32}, kv_transfer_pb2.KvSource, "ready_in_s is "),
        ({"eos_token_ids": tuple[str, ...]}, worker_pb2.ModelFacts, "eos_token_ids has entries of <class 'str'>"),
    ],
)  # fmt: skip
def test_a_field_that_fits_no_rule_is_named(annotations, message, named):
    with pytest.raises(TypeError, match=rf"^(Sample|Endpoint)\.{named}"):
        codec(of_fields(**annotations), message)


def test_a_class_inside_that_needs_keywords_is_refused():
    nested = of_fields(slot=int)
    codec(nested, step_pb2.RowKey, apart=("slot_version",))
    outer = of_fields(row=nested, logprobs=Endpoint)
    with pytest.raises(TypeError, match=r"^Sample\.row is a Sample, which callers encode"):
        codec(outer, step_pb2.RowPromptLogprobs)


def test_options_that_come_too_late_are_refused():
    cls = of_fields(num_tokens=int, num_bytes=int)
    assert codec(cls, kv_transfer_pb2.KvTail) is codec(cls, kv_transfer_pb2.KvTail)
    with pytest.raises(TypeError, match=r"^Sample has a codec: import the module that makes it before"):
        codec(cls, kv_transfer_pb2.KvTail, finish=lambda value, message: value)


def test_fields_of_a_class_without_a_message_are_in_the_outer_one():
    inner = of_fields(layout=str, block_bytes=int)
    outer = of_fields(address=str, rest=inner)
    made = codec(outer, kv_transfer_pb2.KvEndpoint, left_out=("tails",))
    message = made.encode(outer("a:1", inner("x", 7)))
    assert message == kv_transfer_pb2.KvEndpoint(address="a:1", layout="x", block_bytes=7)
    assert made.decode(message) == outer("a:1", inner("x", 7))


def test_fixed_values_and_keywords_reach_the_message():
    cls = of_fields(number=int)
    made = codec(
        cls,
        engine_core_pb2.RequestFailure,
        fixed={"code": "X", "message": lambda value: f"number {value.number}"},
        apart=("field",),
        left_out=("retry_after_ms",),
    )
    message = made.encode(cls(3), field="seed")
    assert (message.number, message.code, message.message, message.field) == (3, "X", "number 3", "seed")
    assert made.decode(message) == cls(3)


def test_bytes_of_another_length_are_refused():
    cls = of_fields(lease=Lease, num_blocks=int)
    made = codec(cls, kv_transfer_pb2.LeaseProgress)
    with pytest.raises(ProtocolViolation, match=r"^lease: 15 bytes, not 16$"):
        made.decode(kv_transfer_pb2.LeaseProgress(lease=bytes(15)))
    several = of_fields(released_leases=tuple[BlockHash, ...])
    made = codec(several, kv_transfer_pb2.KvOrders, left_out=("exports", "pulls", "stopped_pulls"))
    with pytest.raises(ProtocolViolation, match=r"^released_leases: 17 bytes are no multiple of 16"):
        made.decode(kv_transfer_pb2.KvOrders(released_leases=bytes(17)))


def test_a_column_cut_short_is_refused_by_a_made_codec():
    cls = of_fields(logprobs=F32)
    made = codec(cls, step_pb2.LogprobColumns, left_out=("rows", "offsets", "token_ids", "ranks"))
    with pytest.raises(ProtocolViolation, match="3 bytes does not hold whole 4-byte values"):
        made.decode(step_pb2.LogprobColumns(logprobs=bytes(3)))


def test_an_enum_goes_by_the_names_of_its_members():
    to_number, to_member = enum_numbers(RowErrorCode, step_pb2.RowErrorCode.DESCRIPTOR)
    assert to_number[RowErrorCode.NOT_READY] == step_pb2.ROW_ERROR_CODE_NOT_READY
    assert to_member[step_pb2.ROW_ERROR_CODE_INVALID_REQUEST] is RowErrorCode.INVALID_REQUEST

    class Role(Enum):
        ALL = auto()
        DECODE = auto()

    to_number, to_member = enum_numbers(Role, engine_core_pb2.EngineRole.DESCRIPTOR)
    assert (to_number[Role.ALL], to_member[0]) == (0, Role.ALL)


def test_a_member_without_a_number_is_named():
    class Role(Enum):
        ALL = auto()
        ENCODE = auto()

    with pytest.raises(TypeError, match=r"^Role\.ENCODE has no number in EngineRole$"):
        enum_numbers(Role, engine_core_pb2.EngineRole.DESCRIPTOR)


def test_an_option_for_no_field_is_named():
    with pytest.raises(TypeError, match=r"^Sample\.sloot is neither in the class nor in RowKey$"):
        codec(of_fields(slot=int, slot_version=int), step_pb2.RowKey, apart=("sloot",))
