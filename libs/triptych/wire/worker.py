"""worker.proto: a worker's facts."""

from __future__ import annotations

from dataclasses import replace

from triptych.errors import ProtocolViolation
from triptych.internal.v1 import worker_pb2
from triptych.types.adapters import AdapterFacts
from triptych.types.facts import KvGroup, KvLayout, ModelFacts, WorkerFacts
from triptych.types.pooling import GENERATION
from triptych.wire.codec import codec


def _with_stages(facts: WorkerFacts, message: object) -> WorkerFacts:
    """Return the facts of a worker, also of a version without stages: it computes in one."""
    return facts if facts.num_stages else replace(facts, num_stages=1)


def _with_tasks(facts: ModelFacts, message: object) -> ModelFacts:
    """Return the facts of a model, also from a version that knew one task."""
    return facts if facts.tasks else replace(facts, tasks=(GENERATION,))


def _check_kind(message: worker_pb2.KvGroup) -> None:
    if message.kind not in _KINDS:
        raise ProtocolViolation(f"kv.groups: kind {message.kind} is not known; {_KINDS} are")


def _groups_to_proto(layout: KvLayout) -> list[worker_pb2.KvGroup]:
    """Return the groups of a layout, none of one that is as all were before there were groups."""
    return [] if layout.is_plain else [_GROUP.encode(group) for group in layout.groups]


def _with_groups(layout: KvLayout, message: worker_pb2.KvShape) -> KvLayout:
    if not message.groups:
        return layout
    return replace(layout, groups=tuple(_GROUP.decode(group) for group in message.groups))


_KINDS = tuple(number for number in worker_pb2.KvKind.values() if number)
_GROUP = codec(KvGroup, worker_pb2.KvGroup, start=_check_kind)
codec(
    KvLayout,
    worker_pb2.KvShape,
    left_out=("groups",),
    fixed={"groups": _groups_to_proto},
    finish=_with_groups,
)  # for the facts of a worker
_ADAPTER = codec(AdapterFacts, worker_pb2.AdapterFacts)
codec(ModelFacts, worker_pb2.ModelFacts, finish=_with_tasks)  # for the classes that hold facts of a model
_WORKER = codec(WorkerFacts, worker_pb2.WorkerFacts, finish=_with_stages)

worker_facts_to_proto, worker_facts_from_proto = _WORKER.encode, _WORKER.decode
adapter_to_proto, adapter_from_proto = _ADAPTER.encode, _ADAPTER.decode
