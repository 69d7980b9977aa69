"""Hypothesis strategies for what says how KV blocks go from worker to worker."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from triptych.types.kv_transfer import (
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

u32 = st.integers(0, 2**32 - 1)
words = st.text(st.characters(codec="utf-8"), max_size=12)
leases = st.binary(min_size=16, max_size=16)
roles = st.sampled_from(EngineRole)
endpoints = st.builds(KvEndpoint, address=words, layout=words, block_bytes=st.integers(0, 2**64 - 1))
sources = st.builds(
    KvSource, endpoint=endpoints, lease=leases, ready_in_s=st.floats(allow_nan=False, allow_infinity=False)
)


@st.composite
def _blocks(draw: Any) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
    count = draw(st.integers(0, 4))
    ids = draw(st.lists(u32, min_size=count, max_size=count))
    return tuple(ids), tuple(draw(st.lists(leases, min_size=count, max_size=count)))


@st.composite
def _exports(draw: Any) -> KvExport:
    return KvExport(draw(leases), draw(st.builds(RowKey, u32, u32)), draw(u32), *draw(_blocks()))


@st.composite
def _pulls(draw: Any) -> KvPull:
    return KvPull(draw(u32), draw(words), draw(leases), draw(u32), *draw(_blocks()))


orders = st.builds(
    KvOrders,
    exports=st.lists(_exports(), max_size=2).map(tuple),
    released=st.lists(leases, max_size=2).map(tuple),
    pulls=st.lists(_pulls(), max_size=2).map(tuple),
    stopped=st.lists(u32, max_size=2).map(tuple),
)
progress = st.builds(
    KvProgress,
    pulls=st.lists(
        st.builds(PullProgress, pull_id=u32, num_blocks=u32, failure=words, is_spoiled=st.booleans()),
        max_size=2,
    ).map(tuple),
    leases=st.lists(st.builds(LeaseProgress, lease=leases, num_blocks=u32), max_size=2).map(tuple),
)
