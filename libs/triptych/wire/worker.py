"""worker.proto: steps, results and facts between an engine core and a worker."""

from __future__ import annotations

from triptych.errors import ProtocolViolation
from triptych.internal.v1 import worker_pb2
from triptych.types.facts import KvShape, ModelFacts, WorkerFacts
from triptych.types.step import (
    U32,
    LogprobColumns,
    NewRow,
    PromptLogprobs,
    RowContent,
    RowError,
    RowErrorCode,
    RowPromptLogprobs,
    StepPlan,
    StepResult,
    StepTimings,
)
from triptych.wire.columns import (
    check_equal_lengths,
    check_offsets,
    f32_from_bytes,
    f32_to_bytes,
    u32_from_bytes,
    u32_to_bytes,
)
from triptych.wire.common import sampling_from_proto, sampling_to_proto

PROTOCOL_VERSION = 2
Step = worker_pb2.Step
"""One step of a session as it travels; what it means, `StepDecoder` says."""


class StepEncoder:
    """Turns one session's plans into messages: a content is sent once, for as long as any row holds it.

    Used for the plans of one session in order; `StepDecoder` is its counterpart at the worker.
    """

    def __init__(self) -> None:
        self._held = _HeldContents()
        self._key_to_id: dict[int, int] = {}
        """id() of a content that the worker holds -> its name there."""
        self._next_id = 1

    def encode(self, plan: StepPlan) -> worker_pb2.Step:
        new_contents = []
        self._held.leave(plan.removed_slots)
        for row in plan.new_rows:
            content = row.content
            content_id = self._key_to_id.get(id(content))
            if content_id is None:
                content_id, self._next_id = self._next_id, self._next_id + 1
                self._key_to_id[id(content)] = content_id
                new_contents.append(
                    worker_pb2.RowContent(
                        id=content_id,
                        prompt_token_ids=u32_to_bytes(content.prompt_token_ids),
                        sampling=sampling_to_proto(content.sampling),
                    )
                )
            self._held.enter(row.slot, content_id, content)
        new_rows = [_row_to_proto(row, self._key_to_id[id(row.content)]) for row in plan.new_rows]
        for content in self._held.drop_unused():
            del self._key_to_id[id(content)]
        return worker_pb2.Step(
            step_id=plan.step_id,
            last_result_seen=plan.last_result_seen,
            removed_slots=u32_to_bytes(plan.removed_slots),
            new_contents=new_contents,
            new_rows=new_rows,
            chunk_slots=u32_to_bytes(plan.chunk_slots),
            chunk_lengths=u32_to_bytes(plan.chunk_lengths),
            skipped_slots=u32_to_bytes(plan.skipped_slots),
            block_slots=u32_to_bytes(plan.block_slots),
            block_ids=u32_to_bytes(plan.block_ids),
            num_tokens=plan.num_tokens,
        )


class StepDecoder:
    """Turns one session's messages into plans. Used for the steps of one session in order, each once."""

    def __init__(self) -> None:
        self._held = _HeldContents()

    def decode(self, message: worker_pb2.Step) -> StepPlan:
        """The plan of the next step.

        Raises:
            ProtocolViolation: columns of one table differ in length, or a row refers to a content that is not here;
                the step has had no effect.
        """
        contents = {
            content.id: RowContent(
                u32_from_bytes(content.prompt_token_ids), sampling_from_proto(content.sampling)
            )
            for content in message.new_contents
        }
        rows = tuple(
            _row_from_proto(row, contents.get(row.content_id) or self._held.find(row.content_id))
            for row in message.new_rows
        )
        plan = StepPlan(
            step_id=message.step_id,
            last_result_seen=message.last_result_seen,
            removed_slots=u32_from_bytes(message.removed_slots),
            new_rows=rows,
            chunk_slots=u32_from_bytes(message.chunk_slots),
            chunk_lengths=u32_from_bytes(message.chunk_lengths),
            skipped_slots=u32_from_bytes(message.skipped_slots),
            block_slots=u32_from_bytes(message.block_slots),
            block_ids=u32_from_bytes(message.block_ids),
            num_tokens=message.num_tokens,
        )
        check_equal_lengths(chunk_slots=plan.chunk_slots, chunk_lengths=plan.chunk_lengths)
        check_equal_lengths(block_slots=plan.block_slots, block_ids=plan.block_ids)
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
        """Raises ProtocolViolation if it is not held."""
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


_CODE_TO_PROTO = {
    RowErrorCode.ENGINE_FAILURE: worker_pb2.ROW_ERROR_CODE_ENGINE_FAILURE,
    RowErrorCode.INVALID_REQUEST: worker_pb2.ROW_ERROR_CODE_INVALID_REQUEST,
}
_PROTO_TO_CODE = {number: code for code, number in _CODE_TO_PROTO.items()}


def plan_to_proto(plan: StepPlan) -> worker_pb2.Step:
    """A plan that stands for itself, with the contents of all its rows: for journals, not for a session."""
    return StepEncoder().encode(plan)


def plan_from_proto(message: worker_pb2.Step) -> StepPlan:
    """The inverse of `plan_to_proto`. Raises ProtocolViolation as `StepDecoder.decode` does."""
    return StepDecoder().decode(message)


def result_to_proto(result: StepResult) -> worker_pb2.Result:
    timings = result.timings
    return worker_pb2.Result(
        step_id=result.step_id,
        token_ids=u32_to_bytes(result.token_ids),
        logprobs=None if result.logprobs is None else logprobs_to_proto(result.logprobs),
        row_errors=[
            worker_pb2.RowError(
                slot=error.slot,
                slot_version=error.slot_version,
                message=error.message,
                code=_CODE_TO_PROTO[error.code],
                kv_is_valid=error.kv_is_valid,
            )
            for error in result.row_errors
        ],
        prepare_ns=timings.prepare_ns,
        forward_ns=timings.forward_ns,
        sample_ns=timings.sample_ns,
        idle_ns=timings.idle_ns,
        gap_ns=timings.gap_ns,
        prompt_logprobs=[
            worker_pb2.RowPromptLogprobs(
                slot=row.slot, slot_version=row.slot_version, logprobs=prompt_logprobs_to_proto(row.logprobs)
            )
            for row in result.prompt_logprobs
        ],
    )


def result_from_proto(message: worker_pb2.Result) -> StepResult:
    """Raises ProtocolViolation for more than one token per row, which no engine plans yet."""
    if message.token_counts:
        raise ProtocolViolation("Result.token_counts: several tokens per row and step are not served yet")
    return StepResult(
        step_id=message.step_id,
        token_ids=u32_from_bytes(message.token_ids),
        logprobs=logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None,
        row_errors=tuple(
            RowError(
                error.slot,
                error.slot_version,
                error.message,
                _PROTO_TO_CODE.get(error.code, RowErrorCode.ENGINE_FAILURE),
                error.kv_is_valid,
            )
            for error in message.row_errors
        ),
        timings=StepTimings(
            message.prepare_ns, message.forward_ns, message.sample_ns, message.idle_ns, message.gap_ns
        ),
        prompt_logprobs=tuple(
            RowPromptLogprobs(row.slot, row.slot_version, prompt_logprobs_from_proto(row.logprobs))
            for row in message.prompt_logprobs
        ),
    )


def logprobs_to_proto(columns: LogprobColumns) -> worker_pb2.LogprobColumns:
    return worker_pb2.LogprobColumns(
        rows=u32_to_bytes(columns.rows),
        offsets=u32_to_bytes(columns.offsets),
        token_ids=u32_to_bytes(columns.token_ids),
        logprobs=f32_to_bytes(columns.logprobs),
        ranks=u32_to_bytes(columns.ranks),
    )


def logprobs_from_proto(message: worker_pb2.LogprobColumns) -> LogprobColumns:
    columns = LogprobColumns(
        rows=u32_from_bytes(message.rows),
        offsets=u32_from_bytes(message.offsets),
        token_ids=u32_from_bytes(message.token_ids),
        logprobs=f32_from_bytes(message.logprobs),
        ranks=u32_from_bytes(message.ranks),
    )
    check_equal_lengths(rows=columns.rows, ranks=columns.ranks, offsets_less_one=columns.offsets[1:])
    check_equal_lengths(token_ids=columns.token_ids, logprobs=columns.logprobs)
    check_offsets(columns.offsets, len(columns.token_ids))
    return columns


def prompt_logprobs_to_proto(entries: PromptLogprobs) -> worker_pb2.PromptLogprobs:
    return worker_pb2.PromptLogprobs(
        first_position=entries.first_position,
        num_candidates=entries.token_ids.shape[1],
        token_ids=u32_to_bytes(entries.token_ids),
        logprobs=f32_to_bytes(entries.logprobs),
        ranks=u32_to_bytes(entries.ranks),
    )


def prompt_logprobs_from_proto(message: worker_pb2.PromptLogprobs) -> PromptLogprobs:
    """Raises ProtocolViolation unless every position has as many candidates."""
    token_ids, logprobs = u32_from_bytes(message.token_ids), f32_from_bytes(message.logprobs)
    ranks = u32_from_bytes(message.ranks)
    shape = len(ranks), message.num_candidates
    if not shape[1] or {len(token_ids), len(logprobs)} != {shape[0] * shape[1]}:
        raise ProtocolViolation(
            f"prompt_logprobs: {len(token_ids)} token_ids and {len(logprobs)} logprobs are not {shape[1]} candidates "
            f"for each of {shape[0]} positions"
        )
    return PromptLogprobs(message.first_position, token_ids.reshape(shape), logprobs.reshape(shape), ranks)


def model_facts_to_proto(facts: ModelFacts) -> worker_pb2.ModelFacts:
    return worker_pb2.ModelFacts(
        name=facts.name,
        fingerprint=facts.fingerprint,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        eos_token_ids=facts.eos_token_ids,
        dtype=facts.dtype,
        kv_dtype=facts.kv_dtype,
        quantization=facts.quantization,
    )


def model_facts_from_proto(message: worker_pb2.ModelFacts) -> ModelFacts:
    return ModelFacts(
        name=message.name,
        fingerprint=message.fingerprint,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        dtype=message.dtype,
        kv_dtype=message.kv_dtype,
        quantization=message.quantization,
    )


def worker_facts_to_proto(facts: WorkerFacts) -> worker_pb2.WorkerFacts:
    kv = facts.kv
    return worker_pb2.WorkerFacts(
        boot_id=facts.boot_id,
        model=model_facts_to_proto(facts.model),
        kv=worker_pb2.KvShape(
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            num_layers=kv.num_layers,
            num_kv_heads=kv.num_kv_heads,
            head_dim=kv.head_dim,
            dtype=kv.dtype,
        ),
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_steps_in_flight=facts.max_steps_in_flight,
        device_name=facts.device_name,
        kernels=facts.kernels,
        weight_bytes=facts.weight_bytes,
        load_s=facts.load_s,
    )


def worker_facts_from_proto(message: worker_pb2.WorkerFacts) -> WorkerFacts:
    kv = message.kv
    return WorkerFacts(
        boot_id=message.boot_id,
        model=model_facts_from_proto(message.model),
        kv=KvShape(
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            num_layers=kv.num_layers,
            num_kv_heads=kv.num_kv_heads,
            head_dim=kv.head_dim,
            dtype=kv.dtype,
        ),
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_steps_in_flight=message.max_steps_in_flight,
        device_name=message.device_name,
        kernels=message.kernels,
        weight_bytes=message.weight_bytes,
        load_s=message.load_s,
    )


def _row_to_proto(row: NewRow, content_id: int) -> worker_pb2.NewRow:
    return worker_pb2.NewRow(
        slot=row.slot,
        slot_version=row.slot_version,
        content_id=content_id,
        emitted_token_ids=u32_to_bytes(row.emitted_token_ids),
        num_computed_tokens=row.num_computed_tokens,
        num_cached_tokens=row.num_cached_tokens,
        block_ids=u32_to_bytes(row.block_ids),
        seed=row.seed,
        prompt_logprobs_start=row.prompt_logprobs_start,
    )


def _row_from_proto(message: worker_pb2.NewRow, content: RowContent) -> NewRow:
    return NewRow(
        slot=message.slot,
        slot_version=message.slot_version,
        content=content,
        emitted_token_ids=u32_from_bytes(message.emitted_token_ids),
        num_computed_tokens=message.num_computed_tokens,
        num_cached_tokens=message.num_cached_tokens,
        block_ids=u32_from_bytes(message.block_ids),
        seed=message.seed,
        prompt_logprobs_start=message.prompt_logprobs_start,
    )
