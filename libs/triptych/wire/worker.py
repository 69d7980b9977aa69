"""worker.proto: a worker's facts."""

from __future__ import annotations

from triptych.internal.v1 import worker_pb2
from triptych.types.facts import KvShape, ModelFacts, WorkerFacts
from triptych.types.identity import ModelIdentity
from triptych.wire.kv_transfer import endpoint_from_proto, endpoint_to_proto


def model_facts_to_proto(facts: ModelFacts) -> worker_pb2.ModelFacts:
    return worker_pb2.ModelFacts(
        name=facts.name,
        fingerprint=facts.identity.fingerprint,
        weights=facts.identity.weights,
        adapter=facts.identity.adapter,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        eos_token_ids=facts.eos_token_ids,
        dtype=facts.dtype,
        kv_dtype=facts.kv_dtype,
        quantization=facts.quantization,
        numerics=facts.identity.numerics,
        is_batch_invariant=facts.identity.is_batch_invariant,
    )


def model_facts_from_proto(message: worker_pb2.ModelFacts) -> ModelFacts:
    return ModelFacts(
        name=message.name,
        identity=ModelIdentity(
            fingerprint=message.fingerprint,
            weights=message.weights,
            adapter=message.adapter,
            numerics=message.numerics,
            is_batch_invariant=message.is_batch_invariant,
        ),
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
            soft_num_blocks=kv.soft_num_blocks,
        ),
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_steps_in_flight=facts.max_steps_in_flight,
        max_samples_per_row=facts.max_samples_per_row,
        num_stages=facts.num_stages,
        device_name=facts.device_name,
        kernels=facts.kernels,
        weight_bytes=facts.weight_bytes,
        load_s=facts.load_s,
        kv_endpoint=endpoint_to_proto(facts.kv_endpoint),
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
            soft_num_blocks=kv.soft_num_blocks if kv.HasField("soft_num_blocks") else None,
        ),
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_steps_in_flight=message.max_steps_in_flight,
        max_samples_per_row=message.max_samples_per_row,
        num_stages=message.num_stages or 1,
        device_name=message.device_name,
        kernels=message.kernels,
        weight_bytes=message.weight_bytes,
        load_s=message.load_s,
        kv_endpoint=endpoint_from_proto(message.kv_endpoint) if message.HasField("kv_endpoint") else None,
    )
