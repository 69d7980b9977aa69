"""worker.proto: a worker's facts."""

from __future__ import annotations

from dataclasses import replace

from triptych.internal.v1 import worker_pb2
from triptych.types.adapters import AdapterFacts
from triptych.types.facts import ModelFacts, WorkerFacts
from triptych.types.pooling import GENERATION
from triptych.wire.codec import codec


def _with_stages(facts: WorkerFacts, message: object) -> WorkerFacts:
    """Return the facts of a worker, also of a version without stages: it computes in one."""
    return facts if facts.num_stages else replace(facts, num_stages=1)


def _with_tasks(facts: ModelFacts, message: object) -> ModelFacts:
    """Return the facts of a model, also from a version that knew one task."""
    return facts if facts.tasks else replace(facts, tasks=(GENERATION,))


_ADAPTER = codec(AdapterFacts, worker_pb2.AdapterFacts)
codec(ModelFacts, worker_pb2.ModelFacts, finish=_with_tasks)  # for the classes that hold facts of a model
_WORKER = codec(WorkerFacts, worker_pb2.WorkerFacts, finish=_with_stages)

worker_facts_to_proto, worker_facts_from_proto = _WORKER.encode, _WORKER.decode
adapter_to_proto, adapter_from_proto = _ADAPTER.encode, _ADAPTER.decode
