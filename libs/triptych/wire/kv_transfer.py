"""kv_transfer.proto: endpoints, sources, orders and progress."""

from __future__ import annotations

import numpy as np

from triptych.errors import ProtocolViolation
from triptych.internal.v1 import engine_core_pb2, kv_transfer_pb2
from triptych.types.kv_transfer import (
    LEASE_BYTES,
    EngineRole,
    KvEndpoint,
    KvExport,
    KvOrders,
    KvProgress,
    KvPull,
    KvSource,
    LeaseProgress,
    PullProgress,
)
from triptych.types.row_key import RowKey
from triptych.wire.columns import u32_from_bytes, u32_to_bytes

_HASH_BYTES = 16
_ROLES = {
    EngineRole.BOTH: engine_core_pb2.ENGINE_ROLE_UNSPECIFIED,
    EngineRole.PREFILL: engine_core_pb2.ENGINE_ROLE_PREFILL,
    EngineRole.DECODE: engine_core_pb2.ENGINE_ROLE_DECODE,
}
_FROM_ROLES = {number: role for role, number in _ROLES.items()}


def role_to_proto(role: EngineRole) -> engine_core_pb2.EngineRole:
    return _ROLES[role]


def role_from_proto(role: int) -> EngineRole:
    return _FROM_ROLES.get(role, EngineRole.BOTH)  # type: ignore[call-overload]


def endpoint_to_proto(endpoint: KvEndpoint | None) -> kv_transfer_pb2.KvEndpoint | None:
    if endpoint is None:
        return None
    return kv_transfer_pb2.KvEndpoint(
        address=endpoint.address, layout=endpoint.layout, block_bytes=endpoint.block_bytes
    )


def endpoint_from_proto(message: kv_transfer_pb2.KvEndpoint) -> KvEndpoint:
    return KvEndpoint(message.address, message.layout, message.block_bytes)


def source_to_proto(source: KvSource | None) -> kv_transfer_pb2.KvSource | None:
    if source is None:
        return None
    return kv_transfer_pb2.KvSource(
        endpoint=endpoint_to_proto(source.endpoint), lease=source.lease, ready_in_s=source.ready_in_s
    )


def source_from_proto(message: kv_transfer_pb2.KvSource) -> KvSource:
    checked_lease(message.lease)
    return KvSource(endpoint_from_proto(message.endpoint), message.lease, message.ready_in_s)


def orders_to_proto(orders: KvOrders | None) -> kv_transfer_pb2.KvOrders | None:
    if orders is None:
        return None
    return kv_transfer_pb2.KvOrders(
        exports=[
            kv_transfer_pb2.KvExport(
                lease=export.lease,
                slot=export.row.slot,
                slot_version=export.row.slot_version,
                first_index=export.first_index,
                block_ids=_ids_to_bytes(export.block_ids),
                hashes=b"".join(export.hashes),
            )
            for export in orders.exports
        ],
        released_leases=b"".join(orders.released),
        pulls=[
            kv_transfer_pb2.KvPull(
                pull_id=pull.pull_id,
                address=pull.address,
                lease=pull.lease,
                first_index=pull.first_index,
                block_ids=_ids_to_bytes(pull.block_ids),
                hashes=b"".join(pull.hashes),
            )
            for pull in orders.pulls
        ],
        stopped_pulls=_ids_to_bytes(orders.stopped),
    )


def orders_from_proto(message: kv_transfer_pb2.KvOrders) -> KvOrders:
    """Read orders. Raises ProtocolViolation if columns of one table differ in length."""
    return KvOrders(
        exports=tuple(
            KvExport(
                checked_lease(export.lease),
                RowKey(export.slot, export.slot_version),
                export.first_index,
                *_blocks_from_proto(export.block_ids, export.hashes),
            )
            for export in message.exports
        ),
        released=_split(message.released_leases, LEASE_BYTES, "released_leases"),
        pulls=tuple(
            KvPull(
                pull.pull_id,
                pull.address,
                checked_lease(pull.lease),
                pull.first_index,
                *_blocks_from_proto(pull.block_ids, pull.hashes),
            )
            for pull in message.pulls
        ),
        stopped=tuple(u32_from_bytes(message.stopped_pulls).tolist()),
    )


def progress_to_proto(progress: KvProgress) -> kv_transfer_pb2.KvProgress:
    return kv_transfer_pb2.KvProgress(
        pulls=[
            kv_transfer_pb2.PullProgress(
                pull_id=pull.pull_id,
                num_blocks=pull.num_blocks,
                failure=pull.failure,
                is_spoiled=pull.is_spoiled,
            )
            for pull in progress.pulls
        ],
        leases=[
            kv_transfer_pb2.LeaseProgress(lease=lease.lease, num_blocks=lease.num_blocks)
            for lease in progress.leases
        ],
    )


def progress_from_proto(message: kv_transfer_pb2.KvProgress) -> KvProgress:
    return KvProgress(
        tuple(
            PullProgress(pull.pull_id, pull.num_blocks, pull.failure, pull.is_spoiled)
            for pull in message.pulls
        ),
        tuple(LeaseProgress(lease.lease, lease.num_blocks) for lease in message.leases),
    )


def _blocks_from_proto(block_ids: bytes, hashes: bytes) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
    ids, names = tuple(u32_from_bytes(block_ids).tolist()), _split(hashes, _HASH_BYTES, "hashes")
    if len(ids) != len(names):
        raise ProtocolViolation(f"kv_orders: {len(ids)} blocks have {len(names)} hashes")
    return ids, names


def checked_lease(lease: bytes) -> bytes:
    """Return the name of a lease. Raises ProtocolViolation if it has another length."""
    if len(lease) != LEASE_BYTES:
        raise ProtocolViolation(f"kv lease: {len(lease)} bytes, not {LEASE_BYTES}")
    return lease


def _split(column: bytes, width: int, name: str) -> tuple[bytes, ...]:
    if len(column) % width:
        raise ProtocolViolation(f"{name}: {len(column)} bytes are no multiple of {width}")
    return tuple(column[start : start + width] for start in range(0, len(column), width))


def _ids_to_bytes(ids: tuple[int, ...]) -> bytes:
    return u32_to_bytes(np.array(ids, np.uint32))
