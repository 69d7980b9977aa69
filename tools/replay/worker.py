"""Replays a journal's steps on a worker and compares its tokens with the recorded ones.

Tokens depend on the step's rows and on the machine: in float32 they are equal up to two best logits within 1e-4 of
each other, on as many threads as then; in bfloat16 or on other hardware such near-ties are common. A first
difference there is worth a look at the logits before it is called a bug.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import grpc.aio
import numpy as np

from tools.replay.journal_rows import RowNames, SessionRows
from triptych.config.loader import load_config, shared_config
from triptych.errors import ConfigError, EngineUnavailable, TriptychError
from triptych.internal.v1 import session_pb2, worker_pb2, worker_pb2_grpc
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES, open_channel
from triptych.rpc.session.handshake import WORKER_PROTOCOL, end_of, greet, session_hello
from triptych.rpc.status import from_rpc_error
from triptych.types.facts import KvLayout, WorkerFacts
from triptych.types.journal import Planned, ResultTaken, Submitted, WorkerGone, WorkerReady
from triptych.types.step import StepPlan, StepResult
from triptych.wire.journal import JournalReader
from triptych.wire.result import result_from_proto
from triptych.wire.step import StepEncoder
from triptych.wire.worker import worker_facts_from_proto

_ENGINE_ID = "replay"
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of replaying a journal."""

    num_steps: int
    num_tokens: int
    """Compared."""
    divergence: str
    """Empty: none."""

    def __str__(self) -> str:
        if self.divergence:
            return self.divergence
        return f"{self.num_steps} steps, {self.num_tokens} tokens: no divergence"


async def replay(
    journal: JournalReader, address: str, may_become_ready: Callable[[], bool] = lambda: False
) -> Replay:
    """Run a whole journal against the worker at `address`, or up to the first divergence.

    Args:
        may_become_ready: asked again and again while the worker is not; False ends the wait.

    Raises:
        ConfigError: the file is damaged, or the worker has too few KV blocks for its plans.
        TriptychError: the worker refuses us, or is not there.
    """
    shared = shared_config(load_config(env={}, flags=journal.header.config))
    async with open_channel(address, limit_bytes=INTERNAL_MESSAGE_BYTES) as channel:
        replayer = _Replayer(worker_pb2_grpc.WorkerServiceStub(channel), shared, may_become_ready)
        divergence = ""
        try:
            for event in journal:
                match event.what:
                    case WorkerReady(facts):
                        await replayer.begin(facts)
                    case WorkerGone():
                        await replayer.end()
                    case Submitted(_, request):
                        replayer.names.note_submit(request)
                    case Planned(StepPlan() as plan):
                        await replayer.execute(plan)
                    case ResultTaken(result):
                        replayer.compare(result)
        except _Diverged as found:
            divergence = str(found)
        finally:
            await replayer.end()
    return Replay(replayer.num_steps, replayer.num_tokens, divergence)


class _Diverged(Exception):
    """The message says where, and what was there."""


class _Replayer:
    """The engine's side of one step stream after the other, one step in flight."""

    def __init__(
        self,
        stub: worker_pb2_grpc.WorkerServiceStub,
        shared: Mapping[str, str],
        may_become_ready: Callable[[], bool],
    ) -> None:
        self.names = RowNames()
        self.num_steps = self.num_tokens = 0
        self._stub = stub
        self._shared = shared
        self._may_become_ready = may_become_ready
        self._boot_id = str(uuid.uuid4())
        self._call: grpc.aio.StreamStreamCall | None = None
        self._rows, self._encoder = SessionRows(), StepEncoder()
        self._answers: dict[int, tuple[StepResult, list[int]]] = {}
        """Step id -> what came of it now, and the slot of each of its tokens."""

    async def begin(self, recorded: WorkerFacts) -> None:
        """A session from step 1 on."""
        await self.end()
        self._rows, self._encoder, self._answers = SessionRows(), StepEncoder(), {}
        while True:
            try:
                welcome = await self._say_hello(recorded)
                break
            except EngineUnavailable:
                if not self._may_become_ready():
                    raise
            await asyncio.sleep(_POLL_S)
        _check_cache(worker_facts_from_proto(welcome.facts).kv, recorded.kv)

    async def execute(self, plan: StepPlan) -> None:
        self.names.note_rows(plan.new_rows)
        try:
            response = await self._exchange(worker_pb2.ExecuteRequest(step=self._encoder.encode(plan)))
        except TriptychError as error:
            raise _Diverged(f"step {plan.step_id}: the worker ended the stream: {error}") from None
        self.num_steps += 1
        result = result_from_proto(response.result)
        step = self._rows.take(plan, result)
        self._answers[plan.step_id] = result, np.repeat(step.slots, step.token_counts).tolist()

    def compare(self, recorded: StepResult) -> None:
        """Raises _Diverged at the first slot that has another outcome than then."""
        step_id = recorded.step_id
        if step_id not in self._answers:
            return  # the recorded engine refused it: it answers no step
        now, slots = self._answers.pop(step_id)
        before, after = _slot_to_error(recorded), _slot_to_error(now)
        if differing := [slot for slot in {**before, **after} if before.get(slot) != after.get(slot)]:
            slot = min(differing)
            self._tell(step_id, slot, before.get(slot, "no error"), after.get(slot, "no error"))
        if len(now.token_ids) != len(recorded.token_ids):
            raise _Diverged(
                f"step {step_id}: recorded {len(recorded.token_ids)} tokens, now {len(now.token_ids)}"
            )
        if not np.array_equal(now.token_counts, recorded.token_counts):
            counts = f"recorded {recorded.token_counts.tolist()}, now {now.token_counts.tolist()}"
            raise _Diverged(f"step {step_id}: token_counts: {counts}")
        for place in np.flatnonzero(now.token_ids != recorded.token_ids).tolist():
            self._tell(step_id, slots[place], *(f"token {r.token_ids[place]}" for r in (recorded, now)))
        self.num_tokens += len(slots)

    async def end(self) -> None:
        """Leave the worker, if we are there."""
        if self._call is None:
            return
        call, self._call = self._call, None
        try:
            await call.write(worker_pb2.ExecuteRequest(goodbye=session_pb2.Goodbye()))
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it ended first
        finally:
            call.cancel()

    def _tell(self, step_id: int, slot: int, before: str, after: str) -> NoReturn:
        request = self.names.in_slot(slot)
        raise _Diverged(f"step {step_id}, slot {slot}, request {request}: recorded {before}, now {after}")

    async def _say_hello(self, recorded: WorkerFacts) -> worker_pb2.Welcome:
        hello = worker_pb2.Hello(
            session=session_hello(WORKER_PROTOCOL, "", last_received=0),
            engine_id=_ENGINE_ID,
            boot_id=self._boot_id,
            fingerprint=recorded.model.identity.fingerprint,
            shared_config=self._shared,
            max_steps_in_flight=1,
        )
        self._call = self._stub.Execute()
        try:
            return await greet(self._call, worker_pb2.ExecuteRequest(hello=hello))
        except BaseException as error:
            self._call.cancel()
            self._call = None
            if isinstance(error, grpc.aio.AioRpcError):
                raise from_rpc_error(error) from None
            raise

    async def _exchange(self, request: worker_pb2.ExecuteRequest) -> worker_pb2.ExecuteResponse:
        assert self._call is not None, "a plan before any worker was ready"
        try:
            await self._call.write(request)
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.InvalidStateError:
            response = grpc.aio.EOF
        if response is grpc.aio.EOF:
            raise await end_of(self._call)
        return response


def _check_cache(kv: KvLayout, recorded: KvLayout) -> None:
    """Check that a worker can carry out plans for the cache of another.

    Raises:
        ConfigError: It has too few blocks, or other groups.
    """
    if kv.groups != recorded.groups:
        raise ConfigError(f"kv.groups: this worker has {kv.groups}, the recorded one had {recorded.groups}")
    for what, num, num_recorded in (
        ("KV blocks", kv.num_blocks, recorded.num_blocks),
        ("pages of recurrent state", kv.num_state_blocks, recorded.num_state_blocks),
    ):
        if num < num_recorded:
            raise ConfigError(
                f"cache.num_blocks: this worker has {num} {what}, the recorded one had {num_recorded}, and its plans "
                "may use them all"
            )


def _slot_to_error(result: StepResult) -> dict[int, str]:
    return {row.slot: f"an error: {error.message}" for row, error in result.row_errors.items()}
