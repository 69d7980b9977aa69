"""kv_transfer.proto: endpoints, sources, orders and progress."""

from __future__ import annotations

from typing import TypeVar

from triptych.errors import ProtocolViolation
from triptych.internal.v1 import kv_transfer_pb2
from triptych.types.kv_transfer import KvExport, KvOrders, KvProgress, KvPull
from triptych.wire.codec import codec

_T = TypeVar("_T", KvExport, KvPull)


def _check_blocks(part: _T, message: object) -> _T:
    num_blocks = len(part.block_ids) + len(part.state_pages)
    if num_blocks != len(part.hashes):
        raise ProtocolViolation(f"kv_orders: {num_blocks} blocks have {len(part.hashes)} hashes")
    return part


codec(KvExport, kv_transfer_pb2.KvExport, finish=_check_blocks)
codec(KvPull, kv_transfer_pb2.KvPull, finish=_check_blocks)
_ORDERS = codec(
    KvOrders, kv_transfer_pb2.KvOrders, names={"released": "released_leases", "stopped": "stopped_pulls"}
)
_PROGRESS = codec(KvProgress, kv_transfer_pb2.KvProgress)

orders_to_proto, orders_from_proto = _ORDERS.encode, _ORDERS.decode
progress_to_proto, progress_from_proto = _PROGRESS.encode, _PROGRESS.decode
