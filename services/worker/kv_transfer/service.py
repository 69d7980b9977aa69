"""A worker's part in KV transfers: its server, and the transfers of the session that holds it."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

from triptych.config import EngineConfig
from triptych.errors import ConfigError, FeatureDisabled
from triptych.types.facts import KvKind, KvLayout, WorkerFacts
from triptych.types.kv_transfer import KvEndpoint, KvProgress, KvTail
from triptych_services.worker.kv_transfer.base import BlockStore
from triptych_services.worker.kv_transfer.exports import ExportTable
from triptych_services.worker.kv_transfer.frames import PROTOCOL
from triptych_services.worker.kv_transfer.session import KvTransferSession
from triptych_services.worker.kv_transfer.socket_pull import SocketPulls
from triptych_services.worker.kv_transfer.socket_server import BlockServer
from triptych_services.worker.step_orders import StepOrders

_ANY_HOSTS = ("0.0.0.0", "::", "")


class KvTransferService:
    """Owned by the app. All methods are called on the event loop."""

    def __init__(self, config: EngineConfig, facts: WorkerFacts, store: Callable[[], BlockStore]) -> None:
        """Listen for pulls.

        Args:
            config: Options of the process.
            facts: Of the runner, which is ready.
            store: Returns the runner's blocks, which are others after each sleep. Called while a session begins.

        Raises:
            ConfigError: The port is taken.
            FeatureDisabled: The runner's blocks cannot be transferred.
        """
        store()
        self._store = store
        self._layout = layout_of(facts)
        self._session: KvTransferSession | None = None
        self._server = BlockServer(self._exports_now)
        worker = config.worker
        try:
            port = self._server.bind(worker.host, worker.kv_transfer_port)
        except OSError as error:
            raise ConfigError(
                f"worker.kv_transfer_port: {worker.host}:{worker.kv_transfer_port} cannot be bound: {error}"
            ) from None
        host = socket.gethostname() if worker.host in _ANY_HOSTS else worker.host
        self.endpoint = KvEndpoint(
            worker.kv_transfer_address or f"{host}:{port}",
            self._layout.hex(),
            *pulled_sizes(facts.kv),
        )

    def open_session(
        self, on_progress: Callable[[KvProgress], None], step_orders: StepOrders
    ) -> KvTransferSession:
        """Begin the transfers of a session. Those of the one before must have been closed."""
        self._session = KvTransferSession(self._store(), SocketPulls(self._layout), on_progress, step_orders)
        return self._session

    def close(self) -> None:
        """Serve no blocks any more."""
        self._server.close()

    def _exports_now(self) -> tuple[bytes, ExportTable] | None:
        session = self._session
        return None if session is None else (self._layout, session.exports)


def pulled_sizes(kv: KvLayout) -> tuple[int, tuple[KvTail, ...]]:
    """Return `block_bytes` and `tails` of a `KvEndpoint`."""
    block_bytes, by_length = 0, Counter[int]()
    for group in kv.groups:
        if group.kind is KvKind.FULL:
            block_bytes += group.block_bytes * kv.block_size // group.block_size
        elif group.kind is KvKind.STATE:
            by_length[1] += group.block_bytes
        else:
            num_blocks = -(-(group.window - 1) // group.block_size)  # a query sees itself, too
            by_length[group.window] += num_blocks * group.block_bytes
    return block_bytes, tuple(KvTail(*tail) for tail in sorted(by_length.items()))


def layout_of(facts: WorkerFacts) -> bytes:
    """Return a hash of all that the bytes of a block depend on beside its tokens."""
    kv, model = asdict(facts.kv), asdict(facts.model)
    for name in ("num_blocks", "soft_num_blocks", "num_state_blocks"):
        del kv[name]
    if facts.kv.is_one_full_group:
        del kv["groups"]  # they say no more
    for name in ("name", "max_model_len", "eos_token_ids"):
        del model[name]
    parts = {"protocol": PROTOCOL.decode(), "kv": kv, "model": model, "kernels": facts.kernels}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()


def check_kv_transfer(config: EngineConfig) -> None:
    """Refuse by name what transfers do not serve yet.

    Raises:
        FeatureDisabled
    """
    if not config.worker.kv_transfer:
        return
    parallel = config.parallel
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise FeatureDisabled("worker.kv_transfer", "workers of several ranks do not serve their blocks yet")
    if config.tls.certificate:
        raise FeatureDisabled(
            "worker.kv_transfer",
            "its connections are not encrypted, and tls.certificate is set; unset one of them",
        )
