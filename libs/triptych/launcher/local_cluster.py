"""A whole stack on this machine: the three services as supervised child processes."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TypeAlias

from triptych.config import EngineConfig
from triptych.config.loader import to_flags
from triptych.errors import ConfigError, EngineUnavailable
from triptych.launcher.process import (
    USAGE_EXIT_CODE,
    Deaths,
    Exit,
    ServiceProcess,
    child_environment,
)
from triptych.launcher.readiness import Progress, ReadinessProbe
from triptych.observe.logging import message_of
from triptych.rpc.tls import create_client_tls
from triptych.types.exit_codes import ExitCode
from triptych.types.facts import Phase

log = logging.getLogger(__name__)

_POLL_S = 0.02  # while something is expected to happen
_WATCH_S = 0.1  # while everything runs; where the system tells of an end at once, it is not waited for
_FAILED_GRACE_S = 5.0  # the others' time to leave when one has failed: their work is lost anyhow
_STOP_MARGIN_S = 5.0  # on top of the longest drain
_SHOWN_LINES = 10
_GROUP_END_S = 0.5  # for ranks to end by themselves when one of them has, before they are killed
_EXIT_CODE_TO_WEIGHT = {USAGE_EXIT_CODE: 0, int(ExitCode.HUNG): 2, int(ExitCode.OK): 3}
"""Exit code -> weight; 1 for all others. Of a group of ranks that ended, the lowest weight is reported."""

SERVICE_MODULES = {
    "worker": "triptych_services.worker",
    "enginecore": "triptych_services.enginecore",
    "frontend": "triptych_services.frontend",
}
"""Name to module, in the order of starting; each needs the address of the one before it."""
_LEAF = {"worker": "worker", "enginecore": "engine", "frontend": "frontend"}

OnProgress: TypeAlias = Callable[[Progress], None]


@dataclass(slots=True)
class _Service:
    """One supervised service, of one process or, where several ranks are a worker, of more. Owned by the supervisor
    thread."""

    name: str
    module: str
    num_processes: int = 1
    processes: list[ServiceProcess] = field(default_factory=list)
    """Those that run, by rank. All have been started and die together."""
    num_bound: int = 0
    ports: dict[str, int] = field(default_factory=dict)
    """As the first process has first bound; a restart takes the same."""
    start_at: float = 0.0
    deaths: Deaths = field(default_factory=Deaths)

    @property
    def is_bound(self) -> bool:
        """Whether all of its processes have bound their ports."""
        return self.num_bound == self.num_processes

    def name_of(self, rank: int) -> str:
        """Return the name of one of its processes."""
        return f"{self.name}/{rank}" if self.num_processes > 1 else self.name


class LocalCluster:
    """Worker, engine core and frontend, in this order, each with the address of the one before it.

    A supervisor thread starts them, watches them and starts again the one that died, on the ports that it had. They
    import their modules at the same time; each runs when the address that it needs is known. All of them get
    SIGTERM from the kernel should this process die. Fixed or free (0) ports alike.

    Every method may be called from any thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_log_line: Callable[[str], None] = lambda line: None,
        modules: Mapping[str, str] = SERVICE_MODULES,
    ) -> None:
        """
        Args:
            config: what all three services get, as flags.
            on_log_line: called with every line that a service prints, on a thread of its own.
            modules: what to run for each service.
        """
        if config.parallel.num_ranks > 1:  # any number of stacks fit on a machine
            parallel = replace(config.parallel, rendezvous_address="127.0.0.1:0")
            config = replace(config, parallel=parallel)
        self._config = config
        self._on_log_line = on_log_line
        self._services = tuple(
            _Service(name, module, config.parallel.num_ranks if name == "worker" else 1)
            for name, module in modules.items()
        )
        self._env = child_environment()
        self._thread = threading.Thread(target=self._supervise, name="triptych-cluster", daemon=True)
        self._stop_requested = threading.Event()
        self._woken, self._waker = socket.socketpair()
        self._kill_requested = False  # no Event: a signal handler must not wait for its lock
        self._all_bound = threading.Event()
        self._ended = threading.Event()
        self._grace_s = max(config.frontend.drain_s, config.engine.drain_s) + _STOP_MARGIN_S
        self.failure: Exception | None = None
        """Why the supervisor gave up; the services are gone then."""

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def config(self) -> EngineConfig:
        """The config with the ports and addresses that are known by now."""
        config = self._config
        for service in self._services:
            leaf, ports = _LEAF[service.name], dict(service.ports)
            if rendezvous := ports.pop("rendezvous_port", None):
                parallel = replace(config.parallel, rendezvous_address=f"127.0.0.1:{rendezvous}")
                config = replace(config, parallel=parallel)
            config = replace(config, **{leaf: replace(getattr(config, leaf), **ports)})
        return replace(
            config,
            engine=replace(
                config.engine,
                engine_id=config.engine.engine_id or "engine-0",
                worker_address=dial_address(config.worker.host, config.worker.port),
            ),
            frontend=replace(
                config.frontend, engine_addresses=dial_address(config.engine.host, config.engine.port)
            ),
        )

    @property
    def address(self) -> str:
        """Address of the frontend's public gRPC server, host:port; valid once bound."""
        frontend = self.config.frontend
        return dial_address(frontend.host, frontend.port)

    @property
    def admin_address(self) -> str:
        """The frontend's address for the operator's calls, host:port; valid once bound."""
        frontend = self.config.frontend
        return dial_address(frontend.admin_host, frontend.admin_port)

    @property
    def engine_address(self) -> str:
        """Address of the engine core, host:port; valid once bound."""
        return dial_address(self.config.engine.host, self.config.engine.port)

    @property
    def http_address(self) -> str:
        """Address of the frontend's HTTP server, host:port; valid once bound, if it serves HTTP."""
        frontend = self.config.frontend
        return dial_address(frontend.host, frontend.http_port)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the services that have been started, by name; of several ranks `worker/0`, `worker/1`, …"""
        return {
            service.name_of(rank): process.pid
            for service in self._services
            for rank, process in enumerate(service.processes)
        }

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def check(self) -> None:
        """Raises what made the supervisor give up, if it did; EngineUnavailable if it was stopped."""
        if self._ended.is_set():
            raise self.failure or EngineUnavailable("the local cluster has been stopped")

    def wait_bound(self, timeout_s: float, on_progress: OnProgress = lambda progress: None) -> None:
        """Return once every service has bound its ports; `on_progress` is called again and again until then.

        Raises:
            ConfigError: a service refused its config or found a port taken.
            EngineUnavailable: a service cannot be kept alive, or is not there after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._all_bound.wait(_POLL_S):
            self.check()
            on_progress(Progress(Phase.STARTING))
            if time.monotonic() > deadline:
                waited_for = ", ".join(s.name for s in self._services if not s.is_bound)
                raise EngineUnavailable(
                    f"not started after {timeout_s:g} s: {waited_for}{self._last_lines()}"
                )

    def wait_ready(self, timeout_s: float, on_progress: OnProgress = lambda progress: None) -> None:
        """Return once the frontend takes requests; `on_progress` is called again and again until then.

        Raises:
            ConfigError, EngineUnavailable: as `wait_bound`.
        """
        deadline = time.monotonic() + timeout_s
        self.wait_bound(timeout_s, on_progress)
        config = self.config
        tls = create_client_tls(config.tls)
        with ReadinessProbe(self.address, config.engine.worker_address, tls) as probe:
            while not probe.is_ready():
                self.check()
                if time.monotonic() > deadline:
                    raise EngineUnavailable(
                        f"not ready after {timeout_s:g} s: {probe.progress()}{self._last_lines()}"
                    )
                on_progress(probe.progress())

    def wait(self) -> None:
        """Return when `stop` has been called and done; raises what made the supervisor give up."""
        while not self._ended.wait(1.0):
            pass
        if self.failure is not None:
            raise self.failure

    def stop(self, grace_s: float | None = None) -> None:
        """Let the services drain and leave: frontend, then engine core, then worker; kill what is left.

        Args:
            grace_s: time for all three together; None: the longest `drain_s` and a little more.
        """
        if grace_s is not None:
            self._grace_s = grace_s
        self._stop_requested.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()

    def kill(self) -> None:
        """Cut a stop short: end all services now. Returns at once; safe in a signal handler."""
        self._kill_requested = True
        self._wake()

    def _wake(self) -> None:
        """Let the supervisor look at what is requested; safe in a signal handler."""
        with contextlib.suppress(OSError):  # it has ended
            self._waker.send(b"\0")

    def _supervise(self) -> None:
        grace_s: float | None = None
        try:
            while not self._kill_requested and not self._stop_requested.is_set():
                for upstream, service in zip((None, *self._services[:-1]), self._services, strict=True):
                    self._advance(service, upstream)
                if all(service.is_bound for service in self._services):
                    self._all_bound.set()
                self._sleep()
        except Exception as error:  # bugs included: the waiting thread must learn of it
            self.failure = error
            grace_s = _FAILED_GRACE_S
        finally:
            self._end_all(self._grace_s if grace_s is None else grace_s)
            self._woken.close()
            self._waker.close()
            self._ended.set()

    def _sleep(self) -> None:
        """Wait until a process ends, something is requested or may be due."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        timeout_s = _WATCH_S if all(service.is_bound for service in self._services) else _POLL_S
        for service in self._services:
            for process in service.processes:
                if process.sentinel is not None:
                    poll.register(process.sentinel, select.POLLIN)
        poll.poll(timeout_s * 1000.0)

    def _advance(self, service: _Service, upstream: _Service | None) -> None:
        """Do what is due for a service: start it, note its ports, or handle its death."""
        processes, rank = service.processes, service.num_bound
        if any(process.poll() is not None for process in processes):
            self._handle_death(service, self._end_rest(processes))
            return
        if not processes and time.monotonic() >= service.start_at:
            processes.append(self._create(service))  # it imports while it waits for its flags
        if rank == service.num_processes or not processes or (upstream is not None and not upstream.ports):
            return
        # the ranks behind the first, which they dial, are started when it has bound
        if rank == len(processes):
            processes += [self._create(service) for _ in range(rank, service.num_processes)]
        for number, process in enumerate(processes):
            if not process.has_begun:
                process.begin(self._flags(service, number))
        if (ports := processes[rank].read_ports()) is not None:
            service.num_bound += 1
            if rank == 0:
                service.ports = ports

    def _create(self, service: _Service) -> ServiceProcess:
        return ServiceProcess(service.module, self._env, self._on_log_line)

    def _flags(self, service: _Service, rank: int) -> list[str]:
        config = self.config
        if service.num_processes == 1:
            return to_flags(config)
        return [*to_flags(rank_config_of(config, rank)), f"--worker.rank={rank}"]

    def _end_rest(self, processes: Sequence[ServiceProcess]) -> tuple[int, ServiceProcess, Exit]:
        """End a service of which a process has died, and return the rank, process and exit that say why."""
        deadline = time.monotonic() + _GROUP_END_S
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
            time.sleep(_POLL_S)
        exits = [(rank, process, exit) for rank, process in enumerate(processes) if (exit := process.poll())]
        # a rank that has lost another one says little
        return min(exits, key=lambda found: _EXIT_CODE_TO_WEIGHT.get(found[2].code, 1))

    def _handle_death(self, service: _Service, died: tuple[int, ServiceProcess, Exit]) -> None:
        rank, process, exit = died
        what = f"{service.name_of(rank)} (process {process.pid}) {exit}"
        if exit.code == USAGE_EXIT_CODE:  # it would say the same again
            said = [line for line in process.tail if line.strip()]
            words = message_of(said[-1]).removeprefix(f"{service.module}: ") if said else what
            raise ConfigError(f"{service.name_of(rank)}: {words}")
        now = time.monotonic()
        backoff_s = service.deaths.note(now)
        if backoff_s is None:
            raise EngineUnavailable(f"{what}; {service.deaths.why_too_many}{_quote(process)}")
        log.warning("%s; %s%s", what, service.deaths.describe(backoff_s), _quote(process))
        service.processes, service.num_bound, service.start_at = [], 0, now + backoff_s

    def _end_all(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        running = [service for service in reversed(self._services) if service.processes]
        for service in running:
            for process in service.processes:
                process.terminate()
            while (
                any(process.poll() is None for process in service.processes)
                and time.monotonic() < deadline
                and not self._kill_requested
            ):
                time.sleep(_POLL_S)
        for service in running:
            for rank, process in enumerate(service.processes):
                if process.poll() is None:
                    log.warning(
                        "%s (process %d) did not leave in time and is killed",
                        service.name_of(rank),
                        process.pid,
                    )
                    process.kill()
        for service in running:
            for process in service.processes:
                while process.poll() is None:
                    time.sleep(_POLL_S)

    def _last_lines(self) -> str:
        for service in self._services:
            if not service.is_bound and service.processes:
                return _quote(service.processes[-1])
        return ""


def dial_address(host: str, port: int) -> str:
    """Return the address at which a server of this machine bound to `host` can be reached."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1" if host != "::" else "::1"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def rank_config_of(config: EngineConfig, rank: int) -> EngineConfig:
    """Return the config of one of several ranks on this machine.

    Only rank 0 is dialed from outside; the others take any free ports. On a machine with GPUs each has its own.
    """
    worker = replace(config.worker, rank=rank, local_rank=rank)
    if rank == 0:
        return replace(config, worker=worker)
    return replace(config, worker=replace(worker, port=0, metrics_port=0))


def _quote(process: ServiceProcess) -> str:
    lines = [line for line in process.tail if line.strip()][-_SHOWN_LINES:]
    return (
        "".join(["; its last lines:", *(f"\n    {line}" for line in lines)]) if lines else "; it said nothing"
    )
