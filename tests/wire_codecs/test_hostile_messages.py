"""Messages of any content between the tiers are read, or refused by a typed error: drawn from seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message

from tests.helpers.fuzz import Fuzzer
from triptych.errors import TriptychError
from triptych.internal.v1 import engine_core_pb2, kv_transfer_pb2, step_pb2, worker_pb2
from triptych.wire import engine_core, kv_transfer, result, step, worker

NUM_MESSAGES = 1500
SUBMIT = engine_core_pb2.Submit(
    request_id="a",
    numbers=bytes(4),
    seeds=bytes(8),
    prompt_token_ids=bytes(8),
    task=step_pb2.TASK_GENERATE,
    sampling={"max_tokens": 4},
    kv_source={"lease": bytes(16)},
)
READERS: tuple[tuple[Message, Callable[[Any], object]], ...] = (
    (SUBMIT, engine_core.submit_from_proto),
    (engine_core_pb2.Attach(secret=bytes(16)), engine_core.attach_from_proto),
    (engine_core_pb2.ConnectWelcome(), engine_core.welcome_from_proto),
    (engine_core_pb2.OutputBatch(), engine_core.outputs_from_proto),
    (step_pb2.Step(step_id=1, num_tokens=1), step.plan_from_proto),
    (step_pb2.Result(), result.result_from_proto),
    (worker_pb2.WorkerFacts(), worker.worker_facts_from_proto),
    (kv_transfer_pb2.KvOrders(), kv_transfer.orders_from_proto),
    (kv_transfer_pb2.KvProgress(), kv_transfer.progress_from_proto),
)
"""Messages that are right, and what reads their kind."""
of_each_kind = pytest.mark.parametrize(("base", "read"), READERS, ids=lambda each: type(each).__name__)


def read_all(base: Message, read: Callable[[Any], object], seed: int, num_messages: int) -> None:
    fuzzer = Fuzzer(seed)
    num_read = 0
    for number in range(num_messages):
        try:
            message = type(base).FromString(fuzzer.flipped(fuzzer.changed(base).SerializeToString()))
        except DecodeError:
            continue  # refused by the server before it is read
        try:
            read(message)
            num_read += 1
        except TriptychError:
            continue
        except Exception as error:
            raise AssertionError(f"message {number} of seed {seed}: {error!r}: {message}") from error
    assert num_read, "all messages were refused"


@of_each_kind
def test_message_of_any_content_is_read_or_refused(base: Message, read: Callable[[Any], object]) -> None:
    read_all(base, read, 0, 100)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@of_each_kind
def test_many_messages_of_any_content_are_read_or_refused(
    base: Message, read: Callable[[Any], object], seed: int
) -> None:
    read_all(base, read, seed, NUM_MESSAGES)
