"""step.proto: steps, the engine's half, as they travel in a session."""

from __future__ import annotations

from typing import Any, Protocol

from triptych.errors import FeatureDisabled, InvalidRequest, ProtocolViolation
from triptych.internal.v1 import step_pb2
from triptych.types.pooling import PoolingParams
from triptych.types.step import U32, NewRow, RowContent, StepPlan
from triptych.wire import kv_transfer as kv_transfer  # its codecs are part of a plan's
from triptych.wire.codec import codec
from triptych.wire.columns import check_equal_lengths
from triptych.wire.sampling import sampling_from_proto, sampling_to_proto

Step = step_pb2.Step
"""One step of a session as a message, which `StepDecoder` reads."""


def _check_tables(plan: StepPlan, message: object) -> StepPlan:
    check_equal_lengths(chunk_slots=plan.chunk_slots, chunk_lengths=plan.chunk_lengths)
    check_equal_lengths(block_slots=plan.block_slots, block_ids=plan.block_ids)
    if plan.block_groups.size:
        check_equal_lengths(block_groups=plan.block_groups, block_slots=plan.block_slots)
    check_equal_lengths(state_slots=plan.state_slots, state_pages=plan.state_pages)
    check_equal_lengths(sample_slots=plan.sample_slots, sample_limits=plan.sample_limits)
    return plan


_CONTENT = codec(
    RowContent,
    step_pb2.RowContent,
    fixed={"task": lambda content: task_number(content.pooling)},
    apart=("id", "sampling"),
)
_ROW = codec(NewRow, step_pb2.NewRow, apart=("content", "content_id"))
_PLAN = codec(StepPlan, step_pb2.Step, apart=("new_contents", "new_rows"), finish=_check_tables)


class StepEncoder:
    """Turns one session's plans into messages: a content is sent once, for as long as any row holds it.

    Used for the plans of one session in order; `StepDecoder` is its counterpart at the worker.
    """

    def __init__(self) -> None:
        self._held = _HeldContents()
        self._key_to_id: dict[int, int] = {}
        """id() of each content that the worker holds, to its name there."""
        self._next_id = 1

    def encode(self, plan: StepPlan) -> step_pb2.Step:
        new_contents = []
        self._held.leave(plan.removed_slots)
        for row in plan.new_rows:
            content = row.content
            content_id = self._key_to_id.get(id(content))
            if content_id is None:
                content_id, self._next_id = self._next_id, self._next_id + 1
                self._key_to_id[id(content)] = content_id
                new_contents.append(
                    _CONTENT.encode(
                        content,
                        id=content_id,
                        sampling=sampling_to_proto(content.sampling),
                    )
                )
            self._held.enter(row.slot, content_id, content)
        new_rows = [_ROW.encode(row, content_id=self._key_to_id[id(row.content)]) for row in plan.new_rows]
        for content in self._held.drop_unused():
            del self._key_to_id[id(content)]
        return _PLAN.encode(plan, new_contents=new_contents, new_rows=new_rows)


class StepDecoder:
    """Turns one session's messages into plans. Used for the steps of one session in order, each once."""

    def __init__(self) -> None:
        self._held = _HeldContents()

    def decode(self, message: step_pb2.Step) -> StepPlan:
        """Return the plan of the next step.

        Raises:
            ProtocolViolation: columns of one table differ in length, or a row refers to a content that is not here;
                the step has had no effect.
            FeatureDisabled: a content has a task that is not served; the step has had no effect.
        """
        contents = {content.id: _content_from_proto(content) for content in message.new_contents}
        rows = tuple(
            _ROW.decode(row, content=contents.get(row.content_id) or self._held.find(row.content_id))
            for row in message.new_rows
        )
        plan = _PLAN.decode(message, new_rows=rows)
        self._held.leave(plan.removed_slots)
        for row, row_message in zip(rows, message.new_rows, strict=True):
            self._held.enter(row.slot, row_message.content_id, row.content)
        self._held.drop_unused()
        return plan


class _HeldContents:
    """The contents that live rows refer to. Both ends of a session keep one, by the same rules."""

    def __init__(self) -> None:
        self._slot_to_id: dict[int, int] = {}
        self._id_to_content: dict[int, RowContent] = {}
        self._id_to_num_rows: dict[int, int] = {}
        self._unused: set[int] = set()

    def find(self, content_id: int) -> RowContent:
        """Return a content. Raises ProtocolViolation if it is not held."""
        content = self._id_to_content.get(content_id)
        if content is None:
            raise ProtocolViolation(f"new_rows: content {content_id} was not sent, or has been forgotten")
        return content

    def enter(self, slot: int, content_id: int, content: RowContent) -> None:
        """Note that a row of this content is now in the slot."""
        self._id_to_content[content_id] = content
        self._slot_to_id[slot] = content_id
        self._id_to_num_rows[content_id] = self._id_to_num_rows.get(content_id, 0) + 1
        self._unused.discard(content_id)

    def leave(self, slots: U32) -> None:
        """Note that the rows in these slots are gone; their contents stay until `drop_unused`."""
        for slot in slots.tolist():
            content_id = self._slot_to_id.pop(slot, None)
            if content_id is None:
                continue  # no row of this session: the runner refuses the step
            self._id_to_num_rows[content_id] -= 1
            if not self._id_to_num_rows[content_id]:
                self._unused.add(content_id)

    def drop_unused(self) -> list[RowContent]:
        """Forget the contents that no row refers to, and return them."""
        dropped = []
        for content_id in self._unused:
            del self._id_to_num_rows[content_id]
            dropped.append(self._id_to_content.pop(content_id))
        self._unused.clear()
        return dropped


def plan_to_proto(plan: StepPlan) -> step_pb2.Step:
    """Return a plan as a message with the contents of all its rows: for journals, not for a session."""
    return StepEncoder().encode(plan)


def plan_from_proto(message: step_pb2.Step) -> StepPlan:
    """Read a message of `plan_to_proto`. Raises as `StepDecoder.decode` does."""
    return StepDecoder().decode(message)


class _WithTask(Protocol):
    """A message about one request: `Submit` or `RowContent`."""

    task: Any
    pooling: step_pb2.PoolingParams

    def HasField(self, field_name: Any) -> bool: ...


def task_number(pooling: PoolingParams | None) -> int:
    """Return the number of a row's task in a message."""
    return step_pb2.TASK_GENERATE if pooling is None else step_pb2.Task.Value(f"TASK_{pooling.task.name}")


def check_task(message: _WithTask) -> None:
    """Check the purpose of a request's rows.

    Raises:
        FeatureDisabled: This version does not know it.
        ProtocolViolation: How its rows are pooled is missing, or not of this task.
    """
    task = message.task
    if task not in _TASKS:
        raise FeatureDisabled("task", f"{task} is not served; {_TASKS} are")
    pooled_as = message.pooling.task if message.HasField("pooling") else None
    if pooled_as != (None if task == step_pb2.TASK_GENERATE else task):
        raise ProtocolViolation(f"task {task} comes with the pooling of task {pooled_as}")


_TASKS = tuple(number for number in step_pb2.Task.values() if number)


def _content_from_proto(message: step_pb2.RowContent) -> RowContent:
    check_task(message)
    try:
        sampling = sampling_from_proto(message.sampling)
    except InvalidRequest as error:  # the engine has let it pass
        raise ProtocolViolation(f"content {message.id}: {error}") from None
    return _CONTENT.decode(message, sampling=sampling)
